"""Changes of tables without a server: what snapshots show, positions, values, and what is refused."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg
import pytest

from millpy import ChangeFields, PolledTable, PostgresTable, milliseconds
from millpy.errors import ConfigError, GraphError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.postgres import column_json
from millpy.sources.postgres import table_thread as table_thread_module
from millpy.sources.postgres.change_records import ChangeRecords
from millpy.sources.postgres.pgoutput import UNCHANGED, Begin, Change, PgoutputDecoder, Relation
from millpy.sources.postgres.polled_position import Key
from millpy.sources.postgres.polled_thread import PolledThread
from millpy.sources.postgres.replication import is_readable
from millpy.sources.postgres.table_checks import LogContinuity, look_at_table, publication_name
from millpy.sources.postgres.table_position import CopiedPart, TablePosition
from millpy.sources.postgres.table_reader import database_of
from millpy.sources.postgres.table_thread import TableThread
from millpy.testing.clock import ManualClock

HIGH = 7 << 32
KEY = [("id", "integer", None, "pg_catalog")]


READ = TablePosition(copied=True, lsn=300, commit=200, committed_at=7)


@pytest.mark.parametrize(
    ("begin", "transactions"),
    [
        (200, [(200, 7), (310, 9)]),
        (50, [(100, 3), (200, 7), (310, 9)]),
        (201, [(310, 9)]),  # the slot begins behind the last commit that was read
    ],
)
def test_log_that_was_read_is_followed(begin: int, transactions: list[tuple[int, int]]) -> None:
    log = LogContinuity("orders", READ, begin)

    for lsn, committed_at in transactions:
        log.check_begin(Begin(lsn, committed_at, 1))
    log.check_reached(400)


@pytest.mark.parametrize("begin", [50, 200])
@pytest.mark.parametrize("lsn_and_time", [(200, 8), (250, 7), (310, 9)])
def test_log_without_the_last_commit_that_was_read_is_refused(lsn_and_time: tuple[int, int], begin: int) -> None:
    log = LogContinuity("orders", READ, begin)
    log.check_begin(Begin(100, 3, 1))

    with pytest.raises(ConfigError, match="orders: the log has another transaction at 0/C8"):
        log.check_begin(Begin(*lsn_and_time, 1))


def test_log_that_ends_before_the_last_commit_that_was_read_is_awaited() -> None:
    log = LogContinuity("orders", READ, 50)

    log.check_reached(200)
    with pytest.raises(ConfigError, match="another transaction"):
        log.check_reached(201)


def test_change_that_counts_as_read_comes_from_no_later_commit() -> None:
    log = LogContinuity("orders", READ, 50)

    log.check_read(Begin(200, 7, 1), READ)
    with pytest.raises(ConfigError, match="another transaction at 0/FA"):
        log.check_read(Begin(250, 8, 1), READ)


@pytest.mark.parametrize("epoch", [0, HIGH])
def test_a_snapshot_shows_what_committed_before_it(epoch: int) -> None:
    part = CopiedPart(f"{epoch + 100}:{epoch + 200}:{epoch + 120},{epoch + 150}")

    assert [xid for xid in (99, 100, 120, 149, 150, 199, 200, 300) if part.shows((epoch + xid) & 0xFFFFFFFF)] == [
        99, 100, 149, 199,
    ]  # fmt: skip


def test_a_snapshot_knows_transactions_across_the_wrap_of_their_ids() -> None:
    part = CopiedPart(f"{HIGH - 10}:{HIGH + 10}:{HIGH - 5}")

    assert part.shows((HIGH - 20) & 0xFFFFFFFF)
    assert not part.shows((HIGH - 5) & 0xFFFFFFFF)
    assert part.shows(5)
    assert not part.shows(10)


def test_position_forgets_the_copy_when_no_snapshot_shows_what_follows() -> None:
    position = TablePosition(copied=True, copies=(CopiedPart("1:2:"),), until=50)

    assert position.advance(49, 3, 7).copies == position.copies
    assert position.advance(50, 1, 7) == TablePosition(copied=True, lsn=50, done=1, commit=50, committed_at=7)
    assert position.reach(50) == TablePosition(copied=True, lsn=50)
    assert [position.advance(49, 3, 7).has(*at) for at in ((48, 9), (49, 3), (49, 4), (50, 1))] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        (column_json.number, b"-0.50", -0.5),
        (column_json.number, b"1e+20", 1e20),
        (column_json.number, b"Infinity", "Infinity"),
        (column_json.moment, b"2026-01-02 03:04:05.6+00", "2026-01-02T03:04:05.6+00:00"),
        (column_json.moment, b"infinity", "infinity"),
        (column_json.moment, b"0044-03-15 00:00:00+00 BC", "0044-03-15 00:00:00+00 BC"),
        (column_json.binary, b"\\x00ff", "AP8="),
        (column_json.text, 'ü"\\\n\x01'.encode(), 'ü"\\\n\x01'),
        (column_json.array_of(column_json.number), b"{}", []),
        (column_json.array_of(column_json.number), b"[0:1]={1,NULL}", [1, None]),
        (column_json.array_of(column_json.text), rb'{{"a,}",NULL},{"NULL","\"\\"}}', [["a,}", None], ["NULL", '"\\']]),
        (column_json.array_of(column_json.text, ";"), b"{(1,2);(3,4)}", ["(1,2)", "(3,4)"]),
        (column_json.BY_OID[22], b"-1 2", [-1, 2]),  # int2vector
        (column_json.BY_OID[30], b"", []),  # oidvector
    ],
)
def test_values_become_json(form: column_json.ToJson, text: bytes, wanted: Any) -> None:
    assert json.loads(form(text)) == wanted


def test_text_that_is_not_utf8_is_left_to_the_record() -> None:
    with pytest.raises(UnicodeDecodeError):
        json.loads(column_json.text(b'caf\xe9 "x"'))


def test_unknown_messages_are_faults_and_others_are_ignored() -> None:
    decoder = PgoutputDecoder()
    relation = b"R" + struct.pack(">I", 7) + b"\0t\0d" + struct.pack(">H", 1) + b"\1id\0" + struct.pack(">Ii", 23, -1)
    decoder.decode(relation)

    (deleted,) = decoder.decode(b"D" + struct.pack(">I", 7) + b"K" + struct.pack(">H", 1) + b"t\0\0\0\x0212")
    assert isinstance(deleted, Change)
    assert (deleted.relation.schema, deleted.before, deleted.is_whole) == ("pg_catalog", [b"12"], False)
    assert decoder.decode(b"C") == decoder.decode(b"Yx") == ()
    with pytest.raises(ValueError, match="is not known"):
        decoder.decode(b"?")


def test_a_key_that_is_stored_out_of_line_comes_from_the_key_before_the_change() -> None:
    relation = Relation(7, "public", "t", (("id", 25, True), ("n", 23, False)))
    records = ChangeRecords(None, ChangeFields(), lambda _: column_json.text)
    change = Change(relation, "update", [UNCHANGED, b"2"], [b"long", None], is_whole=False)

    payload, lacking = records.of_change(records.layout(relation.columns), change, 0)

    assert (json.loads(payload), lacking) == ({"id": "long", "n": "2"}, "")


def test_sockets_are_awaited_beyond_a_thousand_open_files() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        high = fcntl.fcntl(ours, fcntl.F_DUPFD, 1_500)
        try:
            assert not is_readable(high, 0.01)
            theirs.send(b"x")
            assert is_readable(high)
        finally:
            os.close(high)


class Stream:
    """A replication stream that has reached a position, and notes the positions that it receives."""

    reached = 900

    def __init__(self) -> None:
        self.told: list[int] = []

    def send_status(self, flushed: int, *, asks: bool) -> None:
        self.told.append(flushed)


def table_thread(position: TablePosition | None = None) -> TableThread:
    setup = SourceSetup(
        graph="g", stream="s", partition="t", limits=Limits(), clock=ManualClock(), ready=asyncio.Event()
    )
    return TableThread(setup, PostgresTable("t"), "", "slot", position, lambda call: call())


def test_a_slot_forgets_nothing_but_what_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_thread_module, "is_readable", lambda number: False)
    thread, stream = table_thread(TablePosition(copied=True, lsn=400)), Stream()
    thread._stream, thread._connection = stream, socket.socket()  # type: ignore[assignment]
    thread._position = TablePosition(copied=True, lsn=800)  # read, and on its way

    with thread._connection:
        thread._send_status()
        thread.committed(1, TablePosition(copied=True, lsn=600))
        thread._send_status()
        thread.committed(1, TablePosition(copied=True, lsn=500))
        thread._send_status()

    assert stream.told == [400, 600, 600]


def test_a_change_is_one_of_the_copy_exactly_if_its_snapshot_shows_it() -> None:
    thread = table_thread()
    position = TablePosition(copied=True, copies=(CopiedPart("100:110:105"),), until=50)
    change = Change(Relation(1, "public", "t", ()), "insert", [b"1"], None, False)

    def left(lsn: int, xid: int) -> Change | None:
        return thread._judged(None, None, position, Begin(lsn, 0, xid), change)  # type: ignore[arg-type]

    assert left(49, 99) is None
    assert left(49, 105) is change, "it was open at the snapshot"
    assert left(49, 110) is change
    assert left(50, 99) is change, "no snapshot shows what commits there, whatever its id"


def test_tables_have_publications_of_different_names() -> None:
    tables = ["a_b.c", "a.b_c", "a_b.c" + "d" * 50, "a.b_c" + "d" * 50]
    names = {publication_name(PostgresTable(table)) for table in tables}

    assert len(names) == 4
    assert "millpy_a_b_c" in names
    assert max(map(len, names)) <= 63


class SlowPolling(PolledThread):
    """Polling of a table that takes a second to tell its greatest value, and rows that commit meanwhile."""

    def __init__(self, clock: ManualClock) -> None:
        setup = SourceSetup(
            graph="g", stream="s", partition="t", limits=Limits(), clock=clock, ready=asyncio.Event(), database="-"
        )
        super().__init__(setup, PolledTable("t", column="n", lag=milliseconds(1750)), "", None, lambda call: call())
        self.clock = clock
        self.read_at: list[float] = []

    def _look_at_table(self, connection: Any) -> Any:
        return None

    def _top(self, connection: Any, facts: Any) -> Key:
        self.clock.advance(1.5)
        return ("10", "a")

    def _read_to(self, connection: Any, facts: Any, records: Any, upto: Key) -> None:
        self.read_at.append(self.clock.monotonic())
        self._stopping.set()

    def _wait(self, seconds: float) -> None:
        self.clock.advance(0.25)


def test_lag_begins_when_a_value_was_seen_not_when_the_look_began() -> None:
    clock = ManualClock()
    thread = SlowPolling(clock)
    begun_at = clock.monotonic()

    thread._read(None)  # type: ignore[arg-type]

    assert thread.read_at == [begun_at + 5.0]  # seen at 1.5, safe at the look that began at 3.5


def test_reason_of_an_outage_is_one_line() -> None:
    refused = psycopg.OperationalError('connection to server on socket "/s" failed\n\tIs the server running locally?\n')

    found = SlowPolling(ManualClock())._translated(refused)

    assert found.message == (
        'the database of t does not answer: connection to server on socket "/s" failed Is the server running locally?'
    )


class Answer:
    """A connection with one answer for a table, and one for its key."""

    def __init__(self, row: tuple[Any, ...] | None, key: Sequence[tuple[Any, ...]] = KEY) -> None:
        self.row, self.key = row, key

    def execute(self, *_: Any) -> Answer:
        return self

    def fetchone(self) -> tuple[Any, ...] | None:
        return self.row

    def fetchall(self) -> Sequence[tuple[Any, ...]]:
        return self.key


FACTS = ("logical", False, False, ["id"], False, ["insert", "update", "delete"], "1/2/3", None, None)


@pytest.mark.parametrize(
    ("place", "value", "error", "said"),
    [
        (0, "replica", ConfigError, "wal_level is replica"),
        (1, True, SourceUnavailableError, "is a standby"),
        (3, None, SourceUnavailableError, "does not have table public.t"),
        (4, True, ConfigError, "lacks the rows that its filter leaves out"),
        (5, ["insert"], ConfigError, "lacks each update and delete of table public.t"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_what_to_do(
    place: int, value: Any, error: type[Exception], said: str
) -> None:
    row = (*FACTS[:place], value, *FACTS[place + 1 :])

    with pytest.raises(error, match=said) as caught:
        look_at_table(Answer(row), PostgresTable("t"))  # type: ignore[arg-type]
    assert caught.value.hint  # type: ignore[attr-defined]


def test_a_table_without_primary_key_is_refused() -> None:
    assert look_at_table(Answer(FACTS), PostgresTable("t")).key_names == ("id",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no primary key"):
        look_at_table(Answer(FACTS, []), PostgresTable("t"))  # type: ignore[arg-type]


class Item(msgspec.Struct):
    id: int
    operation: int = 0


def test_wrong_settings_are_refused() -> None:
    for table in ("", "a.b.c", "x" * 64, 3):
        with pytest.raises(ConfigError, match="needs the name of a table"):
            PostgresTable(table)  # type: ignore[arg-type]
    for operations in ((), ("inserts",), "insert"):
        with pytest.raises(ConfigError, match="unknown value operations="):
            PostgresTable("t", operations=operations)
    with pytest.raises(GraphError, match="before=: Item has no field"):
        PostgresTable("t", fields=ChangeFields(before="old")).validate(RecordType(Item))
    with pytest.raises(GraphError, match="must be str"):
        PostgresTable("t", fields=ChangeFields(operation="operation")).validate(RecordType(Item))


def test_the_database_is_the_given_one_or_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLPY_SOURCE_DATABASE_URL", raising=False)
    assert database_of("t", None, "postgresql://a") == ("postgresql://a", True)
    with pytest.raises(ConfigError, match="has no database"):
        database_of("t", None, "")
    monkeypatch.setenv("MILLPY_SOURCE_DATABASE_URL", "postgresql://localhost/b")
    assert database_of("t", None, "postgresql://a") == ("postgresql://localhost/b", False)
    url = "postgresql://me:secret@localhost/c"
    assert database_of("t", url, "") == (url, False)
    assert "secret" not in repr(PostgresTable("t", database=url))
