"""Sinks without a database or broker: what is refused, what becomes a message, and what is delivered when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    KafkaTopic,
    minutes,
    seconds,
)
from millpy.clock import SystemClock
from millpy.errors import (
    GraphError,
    MillError,
    SchemaError,
    SegmentChecksumError,
    SinkUnavailableError,
)
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, DeadLetter, Grant, OutboxRows, OutboxState, ResultRows, StatementRows
from millpy.model.time import INSTANT_MIN
from millpy.runtime.outbox_drain import DrainContext, OutboxDrain
from millpy.runtime.poison_filter import rows_of, without_rows
from millpy.sinks import SendBound, Sink, SinkMessages, SinkSetup
from millpy.sinks.kafka.connection import KafkaConnection
from millpy.sinks.messages import decode, joined
from millpy.sinks.outbox import key_bytes
from millpy.sinks.statement import places_of, typed_query
from millpy.sources.kafka.client import Cluster
from millpy.store.protocol import SinkReport
from millpy.testing import GraphDriver, ManualSource

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
SQL = "INSERT INTO app.t VALUES (%(device)s)"


class Level(Enum):
    HIGH = "high"


class Place(msgspec.Struct):
    hall: str


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: float = 1.0
    text: str | None = None
    raw: bytes = b"\x00\xff"
    level: Level = Level.HIGH
    price: Decimal = Decimal("1.50")
    day: date = date(2026, 1, 2)
    tags: list[str] = []
    place: Place | None = None
    id: UUID = UUID(int=7)
    good: bool = True


def readings(name: str = "plant", generation: int = 1) -> tuple[Graph, Any]:
    graph = Graph(name, generation=generation)
    event_time = EventTime("at", max_disorder=seconds(0))
    return graph, graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)


def reading(device: str, **more: Any) -> Reading:
    return Reading(device, NOON, **more)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("", "is not a statement"),
        ("COMMIT", "begins with 'COMMIT'"),
        ("-- INSERT\n/* SELECT */ rollback", "begins with 'rollback'"),
        ("INSERT INTO t VALUES (%s)", "'%s' in the statement"),
        ("SELECT 100 % 3", "'% ' in the statement"),
        ("SELECT %(nothing)s", "has no field 'nothing'"),
        ("SELECT %(place.nothing)s", "has no 'nothing'"),
        ("SELECT " + "%(device)s, " * 1_001 + "1", "1,001 places"),
        ("SELECT '" + "x" * 100_000 + "'", "characters is too long"),
    ],
)
def test_a_statement_that_cannot_run_is_refused_when_the_graph_is_built(statement: str, said: str) -> None:
    _, stream = readings()
    with pytest.raises((GraphError, SchemaError), match=said.replace("(", r"\(")):
        stream.to_sql(statement, key="device", name="out")


def test_each_place_of_a_statement_has_the_type_of_its_field() -> None:
    statement = "/* 5 %% */ insert into t values (%(a)s, %(b)s, %(a)s)"
    assert places_of(statement) == ("a", "b", "a")
    assert typed_query(statement, ["text", "decimal", "text"]) == (
        "/* 5 % */ insert into t values (($1::text), ($2::numeric), ($3::text))"
    )


def test_values_of_all_types_are_written_as_postgresql_reads_them() -> None:
    graph, stream = readings()
    fields = (
        "device",
        "at",
        "value",
        "text",
        "raw",
        "level",
        "price",
        "day",
        "tags",
        "place",
        "place.hall",
        "id",
        "good",
    )
    places = ", ".join(f"%({field})s" for field in fields)
    stream.to_sql(f"SELECT app.f({places})", key=("device", "good"), name="out")
    driver = GraphDriver(graph)
    driver.feed("readings", [reading("a'; DROP TABLE x", tags=["\u00e4"], place=Place("north"), good=False)])
    assert driver.sent("out") == [
        ("a'; DROP TABLE x", "2026-11-20T12:00:00+00:00", "1.0", None, "\\x00ff", "high", "1.50", "2026-01-02",
         '["ä"]', '{"hall":"north"}', "north", str(UUID(int=7)), "f")
    ]  # fmt: skip
    driver.check_accounting()


def test_sinks_refuse_what_they_cannot_send() -> None:
    graph, stream = readings()
    windows = stream.key_by("device").window(
        FixedWindows(minutes(1)),
        name="w",
        trigger=AfterWatermark(early=AfterCount(1)),
        accumulation=Accumulation.RETRACTING,
    )
    panes = windows.aggregate(n=Count())
    for build, said in (
        (lambda: panes.to_sql("SELECT %(n)s", key="device", name="out"), "may be retracted"),
        (lambda: stream.to_sink(Sink, key="device", name="out"), "is the class Sink"),
        (lambda: stream.to_sink("kafka", key="device", name="out"), "is not a Sink"),
        (lambda: stream.to_kafka("t", key="text", name="out"), "may be None"),
        (lambda: stream.to_kafka("t", key="device", name="out", value="value"), "cannot be the value"),
        (lambda: stream.to_kafka("t", key="device", name="out", headers="nothing"), "has no field"),
        (lambda: stream.to_kafka("t", key="device", name="out", compression="zip"), "unknown compression"),
        (lambda: stream.to_kafka("", key="device", name="out"), "cannot be named"),
        (lambda: stream.to_kafka("t", key="device", name="Out"), "not a plain name"),
        (lambda: stream.to_kafka("t", key="device", name="out", intervals=0), "intervals=0 of 'out' is not a number"),
        (lambda: KafkaTopic("t", transaction_timeout_s=0), "not between 1 and 900"),
        (lambda: KafkaTopic("t", message_bytes_max=0), "lets no message pass"),
        (lambda: SendBound(records=0), "lets no message pass"),
    ):
        with pytest.raises(MillError, match=said):
            build()
    assert [node.name for node in graph.nodes] == ["readings", "w"]


def test_messages_have_key_value_headers_and_a_number_without_gaps() -> None:
    graph, stream = readings()
    small = KafkaTopic("t", value="text", headers=("level", "text"), message_bytes_max=200)
    stream.to_sink(small, key="device", name="out", intervals=1)
    driver = GraphDriver(graph)
    driver.feed("readings", [reading("a", text="x"), reading("a"), reading("b", text="y" * 200)])
    driver.crash()
    driver.feed("readings", [reading("b", text="z")])
    assert driver.sent("out") == [(b"a", b"x"), (b"a", None), (b"b", b"z")]
    (letter,) = driver.dead_letters()
    assert (letter.reason, letter.computation, letter.stream, letter.key) == ("refused", "out", "readings", b'"b"')
    assert "the limit is 80" in letter.detail
    driver.check_accounting()


def test_a_generation_beside_the_current_one_sends_nothing() -> None:
    sent, state = [], None
    for generation in (1, 2):
        graph, stream = readings(generation=generation)
        stream.to_sql(SQL, key="device", name="to_app")
        stream.to_kafka("t", key="device", name="to_topic")
        driver = GraphDriver(graph, state=state)
        state = driver._state
        driver.feed("readings", [reading("a")])
        driver.check_accounting()
        sent.append((len(driver.sent("to_app")), len(driver.sent("to_topic"))))
    assert sent == [(1, 1), (1, 0)]  # the statement of the first; both sinks have one name


def test_keys_are_text_bytes_or_json() -> None:
    keys = ["ä", b"\x00", 5, UUID(int=1), ("a", 5)]
    assert list(map(key_bytes, keys)) == ["ä".encode(), b"\x00", b"5", str(UUID(int=1)).encode(), b'["a",5]']


MESSAGES = st.lists(
    st.tuples(
        st.binary(max_size=20),
        st.none() | st.binary(max_size=2_000),
        st.integers(-(2**60), 2**60),
        st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=2),
    ),
    min_size=1,
    max_size=20,
)


def messages_of(drawn: list[Any], position: int = 0) -> SinkMessages:
    return SinkMessages(position, *map(list, zip(*drawn, strict=True)))


@settings(max_examples=40, deadline=None)
@given(MESSAGES, st.integers(0, 2**60), st.data())
def test_a_row_of_an_outbox_holds_its_messages_and_notices_damage(
    drawn: list[Any], position: int, data: st.DataObject
) -> None:
    messages = messages_of(drawn, position)
    rows = messages.encode()
    assert decode(rows) == messages
    assert (rows.position, rows.records, rows.end) == (position, len(drawn), messages.end)
    assert sum(messages.sizes()) == messages.size
    cut = data.draw(st.integers(0, len(messages)))
    parts = [part for part in (messages.part(0, cut), messages.part(cut, len(messages))) if len(part)]
    assert joined(parts) == messages
    place = data.draw(st.integers(0, len(rows.payload) - 1))
    damaged = bytearray(rows.payload)
    damaged[place] ^= 1
    with pytest.raises(SegmentChecksumError):
        decode(replace(rows, payload=bytes(damaged)))


class Shelf(Sink):
    """Keeps what it gets; fails at first, after it has taken some of it."""

    def __init__(self, bound: SendBound, *, remembers: bool, fails: int) -> None:
        self.bound = bound  # type: ignore[misc]
        self.remembers, self.fails = remembers, fails
        self.got: list[bytes | None] = []
        self.known = 0
        self.sends: list[int] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "place"}

    def connect(self, setup: SinkSetup) -> Any:
        return self

    async def open(self) -> int | None:
        return self.known if self.remembers else None

    async def send(self, messages: SinkMessages) -> None:
        await asyncio.sleep(0)
        self.sends.append(len(messages))
        if self.fails:
            self.fails -= 1
            if not self.remembers:
                self.got += messages.values[: len(messages) // 2]
            raise SinkUnavailableError("away")
        self.got += messages.values
        self.known = messages.end

    async def close(self) -> None:
        return


class Outbox:
    """The part of a store that a drain needs."""

    def __init__(self) -> None:
        self.rows: list[OutboxRows] = []
        self.reads = 0

    async def read_outbox(self, grant: Grant, position: int, bytes_max: int) -> list[OutboxRows]:
        self.reads += 1
        await asyncio.sleep(0)
        return [row for row in self.rows if row.end > position][:3]

    async def record_delivered(self, reports: Sequence[SinkReport]) -> None:
        return


class QuickClock(SystemClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("seed", range(4))
async def test_a_drain_delivers_everything_in_order_through_failures_and_takeovers(seed: int, remembers: bool) -> None:
    rng, outbox = random.Random(seed), Outbox()
    bound = SendBound(records=rng.choice([1, 3, 50]), bytes=rng.choice([1, 40, 10_000]))
    sink = Shelf(bound, remembers=remembers, fails=4)
    limits = Limits(outbox_records_max=20, outbox_bytes_max=10_000)
    woken = asyncio.Event()
    context = DrainContext(outbox, limits, QuickClock(), rng, woken.set, lambda: None)  # type: ignore[arg-type]
    setup = SinkSetup("g", "s", 0, 1, 1, QuickClock())
    drain = OutboxDrain(context, Grant(1, 1), sink, setup, OutboxState())
    number, sequencer = 0, 1
    for _ in range(60):
        made = SinkMessages(number, [], [], [])
        for _ in range(rng.randrange(1, 6)):
            made.keys.append(b"k")
            made.values.append(b"%d" % number)
            made.event_times.append(0)
            number += 1
        outbox.rows.append(made.encode())
        if rng.random() < 0.8:  # else the commit's outcome is not known, and the head is read back
            drain.committed(outbox.rows[-1])
        else:
            sequencer += 1
            size = sum(len(row.payload) for row in outbox.rows if row.end > drain.waiting.delivered)
            drain.regrant(Grant(1, sequencer), OutboxState(number, drain.waiting.delivered, size))
        assert drain.is_full or drain.waiting.head - drain.waiting.delivered <= limits.outbox_records_max
        if (report := drain.due_report()) is not None and rng.random() < 0.7:
            drain.recorded(report)
            outbox.rows = [row for row in outbox.rows if row.end > report.delivered]
        if rng.random() < 0.1:  # another worker takes over from what is recorded
            await drain.close()
            at = drain._recorded
            drain = OutboxDrain(context, Grant(1, sequencer), sink, setup, OutboxState(number, at, 1))
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
    for _ in range(5_000):
        if (report := drain.due_report()) is not None:
            drain.recorded(report)
        await asyncio.sleep(0)
    assert drain.waiting.delivered == number
    await drain.close()
    drain.raise_failed()
    expected = [b"%d" % i for i in range(number)]
    assert max(sink.sends) <= bound.records
    if remembers:
        assert sink.got == expected
    else:
        assert sorted(set(sink.got), key=int) == expected  # type: ignore[arg-type]
    assert drain.waiting.size <= 0 or not drain.is_full


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_sink_that_knows_of_more_than_was_committed_is_not_overwritten(meanwhile: bool) -> None:
    """Not even when the messages that are committed afterwards are more, also before the sink has told."""
    sink = Shelf(SendBound(), remembers=True, fails=0)
    sink.known = 5
    outbox = Outbox()
    context = DrainContext(outbox, Limits(), QuickClock(), random.Random(1), lambda: None, lambda: None)  # type: ignore[arg-type]
    drain = OutboxDrain(context, Grant(1, 1), sink, SinkSetup("g", "s", 0, 1, 1, QuickClock()), OutboxState(3, 3, 0))
    for moment in range(100):
        if moment == (0 if meanwhile else 50):
            assert drain.is_full, "it takes no input, so that the next owner finds the same"
            outbox.rows = [SinkMessages(3, [b"k"] * 4, [b"v"] * 4, [0] * 4).encode()]
            drain.committed(outbox.rows[0])
        await asyncio.sleep(0)
    await drain.close()
    assert "only 3 are committed" in drain.connection.why
    assert sink.got == []


@pytest.mark.parametrize("by_another", [False, True], ids=["by this owner", "by another owner meanwhile"])
async def test_what_was_sent_since_the_takeover_is_known_when_the_connection_breaks(by_another: bool) -> None:
    sink, outbox = Shelf(SendBound(), remembers=True, fails=0), Outbox()
    context = DrainContext(outbox, Limits(), QuickClock(), random.Random(1), lambda: None, lambda: None)  # type: ignore[arg-type]
    drain = OutboxDrain(context, Grant(1, 1), sink, SinkSetup("g", "s", 0, 1, 1, QuickClock()), OutboxState())

    async def commit(position: int) -> None:
        outbox.rows.append(SinkMessages(position, [b"k"] * 2, [b"%d" % position] * 2, [0] * 2).encode())
        drain.committed(outbox.rows[-1])
        for _ in range(50):
            if (report := drain.due_report()) is not None:
                drain.recorded(report)
            await asyncio.sleep(0)

    if by_another:
        sink.known = 2
        drain.regrant(Grant(1, 4), OutboxState(2, 2, 0))
    else:
        await commit(0)
    sink.fails = 1
    await commit(2)
    await drain.close()

    assert sink.got == ([] if by_another else [b"0"] * 2) + [b"2"] * 2
    assert drain.connection.is_connected


async def test_kafka_gets_the_partition_of_its_own_clients_and_no_timestamp_of_the_future() -> None:
    setup = SinkSetup("g", "s", 0, 1, 1, SystemClock(), secret="x")
    connection = KafkaConnection(KafkaTopic("t"), setup, Cluster("localhost:1"))
    connection._count = 7
    # The value of org.apache.kafka.common.utils.Utils.murmur2 in its own test.
    assert connection._partition_of(b"foobar") == (-790332482 & 0x7FFFFFFF) % 7
    assert connection.id.startswith("millpy.g.s.1.")
    assert "x" not in connection.id.split(".")


def test_a_run_of_a_statement_can_be_left_out_like_a_row() -> None:
    rows = ResultRows(1, [[1, 2]], 2, True)
    checkpoint = Checkpoint(
        Grant(1, 1),
        1,
        INSTANT_MIN,
        INSTANT_MIN,
        results=[rows],
        statements=[StatementRows("out", [("a",), ("b",), (None,)])],
    )
    assert rows_of([checkpoint]) == 5
    (cut,) = without_rows([checkpoint], 5, {1: "no", 3: "bad"}, {1: "sums"})
    assert cut.statements == [StatementRows("out", [("a",), (None,)])]
    assert [(letter.computation, letter.payload) for letter in cut.dead_letters if isinstance(letter, DeadLetter)] == [
        ("sums", b"[2]"),
        ("out", b'["b"]'),
    ]
    (nothing,) = without_rows([checkpoint], 0, {}, {})
    assert (list(nothing.results), list(nothing.statements)) == ([], [])


class Odd(Shelf):
    """Its client does something odd first: what it raises, or what its `open` returns."""

    def __init__(self, odd: BaseException | object) -> None:
        super().__init__(SendBound(), remembers=False, fails=0)
        self.odd: list[Any] = [odd]

    async def open(self) -> int | None:
        if self.odd and not isinstance(self.odd[0], BaseException):
            return self.odd.pop()  # type: ignore[no-any-return]
        return None

    async def send(self, messages: SinkMessages) -> None:
        if self.odd:
            raise self.odd.pop()
        await super().send(messages)


@pytest.mark.parametrize(
    "odd",
    [
        asyncio.CancelledError("its task has ended"),
        SinkUnavailableError("busy", retry_after_s="3"),  # type: ignore[arg-type]
        True,
        -1,
        "3",
    ],
)
async def test_a_drain_outlives_what_the_client_of_a_sink_does(odd: BaseException | object) -> None:
    sink, outbox = Odd(odd), Outbox()
    outbox.rows.append(SinkMessages(0, [b"k"], [b"0"], [0]).encode())
    context = DrainContext(outbox, Limits(), QuickClock(), random.Random(1), lambda: None, lambda: None)  # type: ignore[arg-type]
    drain = OutboxDrain(context, Grant(1, 1), sink, SinkSetup("g", "s", 0, 1, 1, QuickClock()), OutboxState(1, 0, 1))
    for _ in range(1_000):
        if (report := drain.due_report()) is not None:
            drain.recorded(report)
        await asyncio.sleep(0)
    assert (sink.got, drain.waiting.delivered) == ([b"0"], 1)
    await drain.close()
    drain.raise_failed()
