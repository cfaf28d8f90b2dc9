"""SIGKILL of a reader of PostgreSQL, at every failpoint: each record whose transaction commits counts once.

Half of the records waits when the worker starts, for a table as rows to copy. The other half comes after the kill, by
transactions that commit in another order than they began in; every third one rolls back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.crash import test_kafka as kafka
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import is_of_source, trap
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.harness import Worker
from tests.crash.world import Case, World

GRAPH = Path(__file__).parents[1] / "database_graph.py"
RECORDS = 1_000
IN_TRANSACTION = 7
INJECTED, TABLE = "injected", "table"
HOW = {INJECTED: "reading injected records", TABLE: "reading a table"}
SETTINGS = {"bundle_records_max": 20, "fold_bytes": 1_000, "fold_every_s": 0.05}
STATEMENTS = {
    INJECTED: "SELECT millpy.inject('readings', jsonb_build_object('id', %s::int, 'device', %s::text,"
    " 'at_ms', %s::bigint, 'value', %s::int))",
    TABLE: "INSERT INTO public.readings VALUES (%s, %s, %s, %s)",
}
END_SLOTS = """
SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE database = current_database() AND active
"""
DROP_SLOTS = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
WINDOWS = """
SELECT device, (extract(epoch FROM window_start) * 1000)::bigint, n, total, high FROM database_crash.sums
 WHERE device <> 'end'
"""


def cases() -> Iterator[Case]:
    """Each point, with each source."""
    for point in Failpoint:
        for what in (INJECTED, TABLE):
            yield database_case(point, what)


def database_case(point: Failpoint, what: str, graph: Path = GRAPH) -> Case:
    """Return a case with one reader of injected records, or of a table."""
    return Case(f"SIGKILL at {point}, {HOW[what]}", "", partial(_play, point=point, what=what, graph=graph))


def _play(world: World, point: Failpoint, what: str, graph: Path) -> None:
    world.stack.callback(_drop_slots, world.url)
    records = kafka.workload(seed=13)[:RECORDS]
    numbered = [(number, *record) for number, record in enumerate(records)]

    def worker(only: str = "", failpoint: str = "") -> Worker:
        return world.worker(graph=graph, environment={"CRASH_INPUT": what}, only=only, failpoint=failpoint, **SETTINGS)

    if what == TABLE:
        world.connect().execute(
            "CREATE TABLE public.readings (id int PRIMARY KEY, device text, at_ms bigint, value int)"
        )
    else:
        first = worker()
        first.await_while_running(lambda: _is_deployed(world.url), "the stream has a reader")
        first.drain()
        first.await_finished()
    send(world.url, what, numbered[: RECORDS // 2])
    source, rest = ("readings", "sums") if is_of_source(point) else ("", "")
    others = [worker(rest)] if rest else []
    victim = worker(source, trap(point))
    spring(victim, point)
    recovery = world.await_killed(victim)
    again = worker(source)
    recovering = recovery.wait_aside(watched=again)
    send(world.url, what, numbered[RECORDS // 2 :])
    recovering.result()
    send(world.url, what, [(RECORDS, "end", kafka.START_MS + 20 * RECORDS, 0)])
    over = kafka.START_MS + 10 * RECORDS
    again.await_while_running(lambda: kafka.low_watermark(world.url) >= over, "every window is closed", 60)
    for left in (again, *others):
        left.drain()
        left.await_finished()
    world.oracle = partial(_faults, world.url, records)


def send(url: str, what: str, records: Sequence[tuple[int, str, int, int]]) -> None:
    """Commit the records in two sessions at a time; of a pair of transactions, the first one commits last."""
    with psycopg.connect(url) as early, psycopg.connect(url) as late:
        for begin in range(0, len(records), 2 * IN_TRANSACTION):
            for place, session in ((begin, early), (begin + IN_TRANSACTION, late)):
                part = records[place : place + IN_TRANSACTION]
                if begin % 3 == 0:
                    session.cursor().executemany(STATEMENTS[what], part)
                    session.rollback()
                session.cursor().executemany(STATEMENTS[what], part)
            late.commit()
            early.commit()


def _is_deployed(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute("SELECT FROM mill.injection_readers WHERE stream = 'readings'").fetchone() is not None


def _faults(url: str, records: list[kafka.Record]) -> list[Fault]:
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    with psycopg.connect(url, autocommit=True) as connection:
        for device, start, *values in connection.execute(WINDOWS):
            found[device, start] = tuple(values)
        account = accounting_faults(connection)
    return [*differences("sums", found, kafka.oracle(records)), *account]


def _drop_slots(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(END_SLOTS)
        connection.execute(DROP_SLOTS)
