"""Turns at 0.5, 1 and 3 times every limit together, through a takeover: nothing stops, and results equal a recount.

The work is the same each time: a number of records, keys, panes, timers of one key, bytes of state, callback seconds,
bytes over the link. What is generated are the limits: what there is, divided by how often it goes over the limit. A
short form runs with all tests, in which each limit meets each factor; `make sizes` plays more combinations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from millpy.embedded import EmbeddedPostgres
from millpy.testing.crash_test.database import url_through_proxy
from millpy.testing.proxy import PostgresProxy
from tests.crash.checks import differences
from tests.crash.harness import Worker
from tests.crash.sizes import WHOLE, Feed

GRAPH = Path(__file__).with_name("grid_graph.py")
FACTORS = (0.5, 1.0, 3.0)
KEYS, EACH, TEXT_BYTES, TIMERS, CALL_S = 40, 2, 1_000, 40, 0.01
RECORDS, STATE_BYTES, CALLS_S = KEYS * EACH, KEYS * EACH * TEXT_BYTES, KEYS * EACH * CALL_S
LINK_BYTES_PER_S = 300_000
DIMENSIONS = ("records", "keys", "panes", "timers", "state", "calls", "link")
WINDOWS = ("fixed", "sliding", "session")


@dataclass(frozen=True)
class Case:
    """How many times as much there is as a limit allows, by limit; and when the worker is killed."""

    windows: str
    times: tuple[float, ...]
    killed_at: str

    def __str__(self) -> str:
        factors = ",".join(f"{name}*{factor:g}" for name, factor in zip(DIMENSIONS, self.times, strict=True))
        return f"{self.windows},{factors},{self.killed_at}"

    def settings(self) -> dict[str, float]:
        """Limits of the workers."""
        of = dict(zip(DIMENSIONS, self.times, strict=True))
        return {
            "bundle_records_max": int(RECORDS / of["records"]),
            "state_preload_rows_max": int(KEYS / of["keys"]),
            "turn_panes_max": int(KEYS / of["panes"]),
            "turn_timers_max": int(TIMERS / of["timers"]),
            "state_cache_bytes_max": int(STATE_BYTES / of["state"]),
            "fold_bytes": int(STATE_BYTES / of["state"] / 2),
            "unfolded_bytes_max": int(STATE_BYTES / of["state"]),
            "watchdog_s": CALLS_S / of["calls"] + 0.5,
            "step_s_max": CALLS_S / of["calls"] / 4,
            "fold_every_s": 0.5,
        }

    @property
    def bytes_per_s(self) -> int:
        """Return the rate of the link."""
        return int(LINK_BYTES_PER_S / dict(zip(DIMENSIONS, self.times, strict=True))["link"])


def cases() -> Iterator[Case]:
    """Three in which each limit meets each factor; more of them at random, each the same in every run."""
    moments = ("records are taken", "windows leave")
    for place in range(3):
        times = tuple(FACTORS[(place + number) % 3] for number in range(len(DIMENSIONS)))
        yield Case(WINDOWS[place], times, moments[place % 2])
    for seed in range(27 if WHOLE else 0):
        rng = random.Random(seed)
        yield Case(rng.choice(WINDOWS), tuple(rng.choice(FACTORS) for _ in DIMENSIONS), rng.choice(moments))


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_worker_never_stops_and_results_equal_a_recount(
    tmp_path: Path, database_url: str, postgres: EmbeddedPostgres, case: Case
) -> None:
    feed = Feed(tmp_path / "feed.ndjson", keys=KEYS, each=EACH, text_bytes=TEXT_BYTES).write()
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    environment = {"SIZES_WINDOWS": case.windows, "GRID_CALL_S": str(CALL_S), "GRID_TIMERS": str(TIMERS)}
    with PostgresProxy(str(parts["host"]), int(str(parts["port"])), bytes_per_s=case.bytes_per_s) as proxy:
        name = str(conninfo.conninfo_to_dict(database_url)["dbname"])
        url = url_through_proxy(postgres.tcp_url(name), proxy.port)

        def worker() -> Worker:
            return Worker(tmp_path, url, feed.path, graph=GRAPH, environment=environment, **case.settings())

        with worker() as first:
            began = {"records are taken": BUNDLES, "windows leave": LEFT}[case.killed_at]
            first.await_while_running(lambda: count(database_url, began) > 0, case.killed_at, 120)
            first.kill()
        with worker() as second:
            second.await_finished(within_s=180)

    assert feed.faults(database_url, windows=2 if case.windows == "sliding" else 1) == []
    wanted = {(f"d{key}", f"t{timer}"): (feed.total(key),) for key in range(KEYS) for timer in range(timers(key))}
    with psycopg.connect(database_url, autocommit=True) as connection:
        rows = connection.execute("SELECT device, timer, max(total), count(*) FROM sizes.told GROUP BY 1, 2").fetchall()
        (dead_letters,) = connection.execute("SELECT count(*) FROM mill.dead_letters").fetchone() or (None,)
    assert differences("told", {row[:2]: row[2:3] for row in rows}, wanted) == []
    assert {row[3] for row in rows} == {1}
    assert dead_letters == 0


def timers(key: int) -> int:
    """How many a key sets."""
    return TIMERS if key == 0 else 1


BUNDLES = "SELECT sum(bundle) FROM mill.intervals"
LEFT = "SELECT count(*) FROM sizes.windows"


def count(url: str, query: str) -> int:
    """Return the count of a query; 0 before its table exists."""
    with psycopg.connect(url, autocommit=True) as connection:
        try:
            ((found,),) = connection.execute(query.encode()).fetchall()
        except psycopg.errors.UndefinedTable:
            return 0
    return int(found or 0)
