"""Reading some rows does not read the tables that they are in, whatever the planner knows of these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

from millpy.admin.corrections import corrections
from millpy.admin.dead_letters import DEAD_LETTERS, LATE_RECORDS, RecordFilter
from millpy.admin.events import COUNTED_MAX, list_events
from millpy.admin.queries import Admin
from millpy.admin.state import stored, stored_page
from millpy.api import dead_letters, events, live
from millpy.api.answers import find_page
from millpy.api.new_events import NewEvents
from millpy.embedded import EmbeddedPostgres
from millpy.store.postgres.arrays import Bigints, Booleans, Byteas, Jsonbs, Texts, register_arrays
from millpy.store.postgres.statements import statement
from millpy.store.postgres.store import PostgresStore
from tests.conformance.large_tables import PAGES_OF, ROWS, ROWS_OF, fill, rows_read
from tests.conformance.store_builders import Owner, a_graph
from tests.databases import fresh_database

FEW = 3_000
PAGES_FEW = 300
Reader = Callable[[Admin], object]


@pytest.fixture(scope="module")
def large(postgres: EmbeddedPostgres) -> Iterator[str]:
    """The URL of a database with large tables, whose intervals have an owner."""
    with filled(postgres, analyzed=True) as url:
        yield url


@pytest.fixture(scope="module")
def unanalyzed(postgres: EmbeddedPostgres) -> Iterator[str]:
    """The same before autovacuum has come: the planner knows nothing but the sizes of the tables."""
    with filled(postgres, analyzed=False) as url:
        yield url


@pytest.fixture(params=["large", "unanalyzed"])
def any_large(request: pytest.FixtureRequest) -> str:
    """The URL of one after the other."""
    found: str = request.getfixturevalue(request.param)
    return found


@contextmanager
def filled(postgres: EmbeddedPostgres, *, analyzed: bool) -> Iterator[str]:
    with fresh_database(postgres) as name:
        asyncio.run(owned(url := postgres.url(name)))
        with psycopg.connect(url, autocommit=True) as connection:
            fill(connection, analyzed=analyzed)
        yield url


async def owned(url: str) -> None:
    async with PostgresStore(url) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register(3_600)
        await owner.claim()


def the_events(admin: Admin, **chosen: Any) -> object:
    return events.find_events(admin, "factory", (), 50, **chosen)


def the_page(name: str, admin: Admin) -> object:
    return find_page(admin, dead_letters.VIEWS[name][0], "factory", (), 50)


READERS: Mapping[str, Reader] = {
    "a page of events": the_events,
    "events of a rare kind": partial(the_events, kind="drain_requested"),
    "events of a frequent kind": partial(the_events, kind="source_connected"),
    "events of a time": partial(the_events, start="2026-01-01T00:00:00Z", end="2026-01-01T01:00:00Z"),
    "dead letters": lambda admin: DEAD_LETTERS.rows(admin, RecordFilter(graph="factory"), 50),
    "a dead letter": lambda admin: DEAD_LETTERS.rows(admin, RecordFilter(ids=(7,)), 1),
    "causes": lambda admin: DEAD_LETTERS.only_counted(admin, RecordFilter()),
    "late records": lambda admin: LATE_RECORDS.rows(admin, RecordFilter(), 50),
    "newest corrections": lambda admin: corrections(admin, "factory", "", 50),
    "state of a key": lambda admin: stored(admin, "factory", "sums", "k7", 50),
    "windows by key": lambda admin: stored_page(admin, "windows", "factory", "sums", None, (), 50),
    "explanation": lambda admin: admin.explain_watermark("factory.alarms"),
    **{
        f"a page of {name}": partial(the_page, name)
        for name in ("dead-letters", "late-records", "causes", "corrections")
    },
}
VIEWS = (
    *(f"millpy.{view} LIMIT 10" for view in ("audits", "corrections", "dead_letters", "events", "late_records")),
    "millpy.events WHERE event_id = 7",
    "millpy.events ORDER BY at DESC LIMIT 20",
    "millpy.events WHERE graph = 'factory' AND kind = 'claimed'",
    "millpy.dead_letters WHERE dead_letter_id = 7",
    "millpy.dead_letters WHERE graph = 'factory' ORDER BY dead_letter_id DESC LIMIT 10",
    "millpy.late_records WHERE late_record_id = 7",
    "millpy.corrections WHERE correction_id = 7",
    "factory.sums_1m_status WHERE device = 'k7' LIMIT 10",
)
LOOKS: Mapping[str, Reader] = {
    "workers": Admin.workers,
    "accounting": Admin.accounting,
    "watermarks": Admin.watermarks,
    "sources": Admin.sources,
    "refused results": Admin.refused_results,
    "live progress": lambda admin: admin.ask(live.PROGRESS),
    "live sources": lambda admin: admin.ask(live.SOURCES),
    "live accounts": lambda admin: admin.ask(live.ACCOUNTS),
    "new events": lambda admin: NewEvents().read(admin, 100),
}
"""What the API reads every few seconds, and `millpy status --watch`."""


def read_of(url: str, reader: Reader, *, function: str = ROWS_OF) -> dict[str, int]:
    """Return how many rows (or pages) of each table a reader reads."""
    with Admin(url).together() as admin:

        def ask(query: str) -> list[tuple[Any, ...]]:
            return [tuple(row.values()) for row in admin.ask(query)]

        return rows_read(ask, partial(reader, admin), function=function)


def many(read: Mapping[str, int]) -> dict[str, int]:
    return {table: count for table, count in read.items() if count > FEW}


@pytest.mark.parametrize("name", READERS)
def test_reader_reads_what_it_shows(large: str, name: str) -> None:
    assert many(read_of(large, READERS[name])) == {}


@pytest.mark.parametrize("query", VIEWS)
def test_row_of_a_view_is_found_by_index(large: str, query: str) -> None:
    assert many(read_of(large, lambda admin: admin.ask(f"SELECT * FROM {query}"))) == {}


@pytest.mark.parametrize("name", LOOKS)
def test_look_reads_no_table_that_grows(any_large: str, name: str) -> None:
    assert many(read_of(any_large, LOOKS[name])) == {}


INTERVALS = Bigints([1, 2, 3, 4, 5])
NONE = {"intervals": INTERVALS, "rows_max": 100}
AGES = {"now_us": 10**15, "kept_s": 10.0, "rows_max": 100}
NOTICE = {
    "intervals": Bigints([3]), "kinds": Texts(["source_connected"]), "counts": Bigints([1]),
    "names": Jsonbs([b'["x"]']),
}  # fmt: skip
MESSAGE = {
    "intervals": Bigints([3]), "bundles": Bigints([1]), "heads": Bigints([ROWS]), "counts": Bigints([1]),
    "digests": Bigints([1]), "payloads": Byteas([b"x"]),
}  # fmt: skip
REPORT = {
    "intervals": Bigints([3]), "sequencers": Bigints([1]), "heads": Bigints([10]), "connected": Booleans([True]),
    "since": Bigints([0]), "reasons": Texts([""]), "attempts": Bigints([0]), "refused_in": Bigints([]),
    "positions": Bigints([]), "keys": Texts([]), "tries": Bigints([]), "refused_since": Bigints([]), "whys": Texts([]),
    "parked": Booleans([]), "records": Byteas([]), "checksums": Bigints([]), "payloads": Byteas([]),
    "accepted_in": Bigints([3]), "accepted": Bigints([1]),
}  # fmt: skip
UNREAD = {
    "stream": "orders", "last": 0, "open": "{}", "rest": "{}", "after": 0, "records_max": 100, "bytes_max": 10_000
}  # fmt: skip
WORK: Mapping[str, Mapping[str, Any]] = {
    "read_requests": {**NONE, "bytes_max": 1_000},
    "read_releases": NONE,
    "forget_dead_letters": {**AGES, "settled_kept_s": 10.0},
    "forget_events": AGES,
    "forget_corrections": AGES,
    "find_unneeded_slots": {},
    "read_backlog": {"graph_id": 1, "without": Texts([])},
    "read_finished": {"graph_id": 1, "without": Texts([])},
    "append_notices": NOTICE,
    "append_outbox": MESSAGE,
    "record_delivered": REPORT,
}
"""Statement -> parameters of what a worker does again and again."""
LONG_READS: Mapping[str, Mapping[str, Any]] = {
    "read_outbox": {"interval": 3, "position": 0, "bytes_max": 1_000},
    "read_injected": UNREAD,
}
"""Before autovacuum has come, these sort all that waits."""
DOCTOR = (
    "look_at_archives", "look_at_clocks", "look_at_dead_letters", "look_at_refused_results", "look_at_rings",
)  # fmt: skip


def read_by(url: str, query: str, parameters: Mapping[str, Any], times: int) -> dict[str, int]:
    """Return the same for the last of some runs of a prepared statement: the server then has a plan for all values."""
    with psycopg.connect(url) as connection:
        register_arrays(connection)

        def work() -> None:
            connection.execute(statement(query), parameters or None, prepare=True)

        for _ in range(times - 1):
            work()
            connection.rollback()
        found = rows_read(lambda text: connection.execute(text.encode()).fetchall(), work)
        connection.rollback()
    return found


@pytest.mark.parametrize("times", [1, 7], ids=["first", "repeated"])
@pytest.mark.parametrize("query", WORK)
def test_worker_reads_what_it_needs(any_large: str, query: str, times: int) -> None:
    assert many(read_by(any_large, query, WORK[query], times)) == {}


@pytest.mark.parametrize("times", [1, 7], ids=["first", "repeated"])
@pytest.mark.parametrize("query", LONG_READS)
def test_worker_reads_a_piece_of_what_waits(large: str, query: str, times: int) -> None:
    assert many(read_by(large, query, LONG_READS[query], times)) == {}


@pytest.mark.parametrize("query", DOCTOR)
def test_doctor_reads_what_it_needs(large: str, query: str) -> None:
    assert many(read_by(large, query, {}, 1)) == {}


@pytest.mark.parametrize("name", ["accounting", "sources", "live sources", "live accounts"])
def test_account_looks_once_for_parked_records(any_large: str, name: str) -> None:
    """Not once for each subscription: a graph may have hundreds, and the database many graphs."""
    assert read_of(any_large, LOOKS[name], function=PAGES_OF)["mill.keyed"] <= PAGES_FEW


def test_devices_count_late_records_and_dead_letters_in_one_read(any_large: str) -> None:
    """Not in one for each computation that has devices as keys."""
    read = read_of(any_large, lambda admin: admin.fleet("factory", 0.0, 20))
    assert max(read["mill.late_records"], read["mill.dead_letters"]) <= ROWS


def test_parked_messages_are_counted_in_one_read(any_large: str) -> None:
    assert read_of(any_large, lambda admin: admin.parked("factory", 50))["mill.refused_messages"] <= ROWS


def test_events_count_the_newest_dead_letters_and_late_records(large: str) -> None:
    read = read_of(large, lambda admin: list_events(admin, "factory", start="", kinds=(), limit=50))
    assert read["mill.dead_letters"] == read["mill.late_records"] == COUNTED_MAX
    assert read["mill.events"] <= FEW
