"""A small graph's life on a database with settings of somebody else's, and the settings that a DBA may have made.

Values are odd on purpose: each would show where a statement of ours leans on a default.
"""

from __future__ import annotations

from dataclasses import replace

import psycopg

from millpy.admin.diagnosis import read_facts
from millpy.admin.queries import Admin
from millpy.clock import SystemClock
from millpy.model.checkpoint import Kind
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph, contents, entries, panes
from tests.conformance.test_foreign_settings import FOREIGN, LATER

MORE = {
    "check_function_bodies": "off",
    "client_connection_check_interval": "1s",
    "commit_delay": "1000",
    "constraint_exclusion": "off",
    "cursor_tuple_fraction": "0",
    "debug_parallel_query": "on",
    "default_statistics_target": "1",
    "default_tablespace": "nowhere",
    "enable_partition_pruning": "off",
    "escape_string_warning": "off",
    "extra_float_digits": "0",
    "force_parallel_mode": "on",
    "geqo_threshold": "2",
    "intervalstyle": "iso_8601",
    "jit": "on",
    "log_min_duration_statement": "0",
    "log_statement": "all",
    "maintenance_work_mem": "1MB",
    "min_parallel_table_scan_size": "0",
    "parallel_setup_cost": "0",
    "temp_tablespaces": "nowhere",
    "track_activities": "off",
    "vacuum_cost_delay": "10ms",
    "xmlbinary": "hex",
    "xmloption": "document",
}
AGAIN = {
    "datestyle": "German",
    "default_transaction_isolation": "repeatable read",
    "plan_cache_mode": "force_generic_plan",
    "statement_timeout": "2ms",
    "timezone": "Pacific/Apia",
}
"""Second values of settings that are in the first list."""
SINGLY = [*FOREIGN.items(), *LATER.items(), *MORE.items(), *AGAIN.items()]


async def live(url: str, graph: str) -> None:
    """Deploy, claim, commit, fold, clean up and read again; then run the queries of users and the doctor."""
    async with PostgresStore(url) as store:
        owner = Owner(store, await store.deploy(replace(a_graph(), name=graph)))
        await owner.register()
        await owner.claim()
        interval = owner.deployment.intervals_of("sums")[0]
        for number in range(2):
            delta = (entries(Kind.STATE, "cell", (f"k{number}", number)),)
            rows = panes(owner.deployment.table_ids["sums_1m"], (f"dev{number}", 1.1, 0), first=True)
            await owner.commit(owner.checkpoint(interval, delta=delta, results=[rows]))
            await owner.fold(interval)
            await store.turn_rings(epoch_s=0.0, epoch_bytes=1)
        assert len(contents((await owner.opened(interval)).recovered)) == 2
    assert graph in Admin(url).graphs()
    assert read_facts(url, SystemClock()).revision is not None


def known_settings(connection: psycopg.Connection) -> set[str]:
    """Which settings this version has."""
    return {name for (name,) in connection.execute("SELECT name FROM pg_settings").fetchall()}
