"""Messages become records by a payload format, whole or as dead letters that can be replayed."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from millpy import Cbor, Csv, Decode, EventTime, Files, Format, Gzip, Json, LineProtocol, minutes
from millpy.clock import SystemClock
from millpy.errors import BrokenFileError, GraphError
from millpy.formats import Message
from millpy.ingest.expansion import Expander
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.ingest.protocol import FixedBound, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.checkpoint import DeadLetter, Request
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, Instant
from millpy.sources.kafka.record_columns import columns_of
from millpy.sources.kafka.records import FieldMapping, Payloads
from millpy.sources.mqtt.inbox import MessageQueue
from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.topics import TopicFields, TopicPattern
from millpy.testing.clock import ManualClock

NOW = Instant(1_700_000_000_000_000)


class Reading(msgspec.Struct):
    device: str
    at: int
    temperature: float


TYPE = RecordType(Reading)
GATEWAY = Json(many="readings", envelope={"device": "gw", "at": "at"})
LIMITS = Limits(record_bytes_max=1_000, message_records_max=5)


def intake_of(format: Format, limits: Limits = LIMITS) -> Intake:
    event_time = EventTime("at", unit="s", max_disorder=minutes(1))
    settings = IntakeSettings(stream="readings", record_type=TYPE, event_time=event_time, limits=limits, format=format)
    return Intake(settings, StoredInterval(1, 1), [])


def batch_of(format: Format, *messages: Message) -> SourceBatch:
    found = Expander(format, TYPE, LIMITS).expand(messages, records_max=100, bytes_max=10**6)
    assert found.taken == len(messages)
    return SourceBatch(
        "json", NOW, found.payloads, refused=found.refused, messages=found.messages, describe=found.describe(str)
    )


def request_of(letter: DeadLetter, payload: bytes = b"") -> Request:
    return Request(
        "dead_letters", 1, 1, "readings", "readings", payload or letter.payload, wire=letter.wire,
        position=letter.position,
    )  # fmt: skip


def test_one_bad_reading_leaves_the_others_and_can_be_corrected() -> None:
    intake = intake_of(GATEWAY)
    own = b'{"at":1,"temperature":1},{"temperature":"x"},{"device":"d","temperature":3}'
    payload = b'{"gw":"g","at":9,"readings":[' + own + b"]}"
    result = intake.step(batch_of(GATEWAY, Message(payload)), clock=ClockReading.certain(NOW), quiet=False)
    assert [(r.device, r.at, r.temperature) for r in result.records.objects()] == [("g", 1, 1.0), ("d", 9, 3.0)]
    (letter,) = result.dead_letters
    assert letter.position == "0[1]"
    assert msgspec.json.decode(letter.payload) == {"device": "g", "at": 9, "temperature": "x"}
    assert intake.counts == {"injected": 3, "accepted": 2, "duplicate": 0, "dead_lettered": 1}
    corrected = request_of(letter, letter.payload.replace(b'"x"', b"2"))
    again = intake.replay([corrected], NOW, ClockReading.certain(NOW))
    assert [(r.device, r.temperature) for r in again.records.objects()] == [("g", 2.0)]
    assert again.outcomes[0].dead_letter is None
    assert intake.counts == {"injected": 3, "accepted": 3, "duplicate": 0, "dead_lettered": 0}


def test_a_bad_message_is_replayed_in_its_format_and_counts_all_its_records() -> None:
    intake = intake_of(GATEWAY)
    message = Message(b'{"gw":"g","at":9,"readings":[', "t", ending=b',"device":"from topic"}', arrived_at=5)
    result = intake.step(batch_of(GATEWAY, message), clock=ClockReading.certain(NOW), quiet=False)
    (letter,) = result.dead_letters
    assert (letter.reason, letter.payload) == ("undecodable", message.payload)
    assert intake.counts["injected"] == intake.counts["dead_lettered"] == 1
    fixed = message.payload + b'{"temperature":1},{"temperature":"x"},{"temperature":3},{"temperature":"y"}]}'
    again = intake.replay([request_of(letter, fixed)], NOW, ClockReading.certain(NOW))
    assert [(r.device, r.temperature) for r in again.records.objects()] == [("from topic", 1.0), ("from topic", 3.0)]
    assert again.outcomes[0].dead_letter is None, "another replay of the message would repeat its good records"
    assert [msgspec.json.decode(letter.payload)["temperature"] for letter in again.dead_letters] == ["x", "y"]
    assert [letter.position for letter in again.dead_letters] == ["0[1]", "0[3]"]
    (corrected,) = intake.replay(
        [request_of(again.dead_letters[0], b'{"device":"d","at":9,"temperature":5}')], NOW, ClockReading.certain(NOW)
    ).records.objects()
    assert corrected.temperature == 5.0
    assert intake.counts == {"injected": 4, "accepted": 3, "duplicate": 0, "dead_lettered": 1}
    still_bad = intake.replay([request_of(letter)], NOW, ClockReading.certain(NOW))
    assert still_bad.outcomes[0].dead_letter is not None
    assert still_bad.outcomes[0].dead_letter.wire == letter.wire


@pytest.mark.parametrize(
    ("format", "message", "bad", "good"),
    [
        (
            LineProtocol(precision="s", time="at"),
            b"m,device=a temperature=1 1\nm,device=b temperature=\nm,device=c temperature=3 3",
            b"m,device=b temperature=",
            b"m,device=b temperature=2 2",
        ),
        (
            Csv(delimiter=";", decimal=","),
            b"device;at;temperature\na;1;1,0\nb;2\nc;3;3,0\n",
            b"device;at;temperature\nb;2",
            b"device;at;temperature\nb;2;2,0",
        ),
    ],
)
def test_a_bad_line_is_a_message_of_its_own(format: Format, message: bytes, bad: bytes, good: bytes) -> None:
    intake = intake_of(format)
    result = intake.step(batch_of(format, Message(message)), clock=ClockReading.certain(NOW), quiet=False)
    assert [(r.device, r.at, r.temperature) for r in result.records.objects()] == [("a", 1, 1.0), ("c", 3, 3.0)]
    (letter,) = result.dead_letters
    assert (letter.payload, letter.position) == (bad, "0[1]")
    again = intake.replay([request_of(letter, good)], NOW, ClockReading.certain(NOW))
    assert [(r.device, r.at, r.temperature) for r in again.records.objects()] == [("b", 2, 2.0)]


def test_what_a_message_can_become_is_bounded() -> None:
    def parts(payload: bytes, format: Format = GATEWAY) -> list[tuple[int, str]]:
        found = Expander(format, TYPE, LIMITS).expand([Message(payload)], records_max=3, bytes_max=10**6)
        assert found.taken == 1, "the first message is always taken"
        return [(bad.row, bad.reason) for bad in found.refused]

    def readings(count: int, more: bytes = b"") -> bytes:
        return b'{"gw":"g","readings":[' + b",".join([b'{"temperature":1' + more + b"}"] * count) + b"]}"

    assert parts(readings(5)) == []
    assert parts(readings(6)) == [(0, "oversize")]
    assert parts(b" " * 4_001) == [(0, "oversize")]
    assert parts(b'{"gw":"%s","readings":[{},{},{}]}' % (b"g" * 1_500)) == [(0, "oversize")], "the envelope, repeated"
    bomb = gzip.compress(b"0" * 5_000_000)
    found = Expander(Gzip(Json()), TYPE, Limits()).expand([Message(bomb)], records_max=3, bytes_max=10**6)
    assert "expands to more than" in found.refused[0].detail
    shares = [b"\xd8\x1c\x88" + (b"\xd8\x1d" + msgspec.msgpack.encode(each)) * 8 for each in range(9)]
    laughs = Message(b"\x8a\xd8\x1c\x81\x01" + b"".join(shares))  # each is eight times the one before
    found = Expander(Cbor(), TYPE, Limits()).expand([laughs], records_max=3, bytes_max=10**6)
    assert "too large" in found.refused[0].detail


def test_messages_that_do_not_fit_wait_for_the_next_take() -> None:
    expander = Expander(GATEWAY, TYPE, LIMITS)
    message = Message(b'{"gw":"g","at":1,"readings":[{"temperature":1},{"temperature":2}]}')
    assert expander.expand([message] * 5, records_max=5, bytes_max=10**6).taken == 2
    assert expander.expand([message] * 5, records_max=1, bytes_max=10**6).taken == 1
    assert expander.expand([message] * 5, records_max=9, bytes_max=90).taken == 1
    assert expander.expand([message], records_max=1, bytes_max=9, at_least_one=False).taken == 0


def test_a_slow_function_ends_a_take_in_time() -> None:
    """Thousands of calls in the event loop would hold up the worker until it has lost its lease, again and again."""
    clock = ManualClock()

    def slow(message: Message) -> list[Reading]:
        clock.advance(1.5)
        return [] if message.payload == b"-" else [Reading("a", 1, 1.0)]

    limits = Limits(step_s_max=2.0)
    setup = SourceSetup(graph="g", stream="s", partition="p", limits=limits, clock=clock, ready=asyncio.Event())
    expander = Expander(Decode(slow), TYPE, limits, setup)
    found = expander.expand([Message(b"")] * 9, records_max=9, bytes_max=10**6, deadline=expander.deadline())
    assert found.taken == 2
    queue = MessageQueue(
        topics=re.compile(b"t"), retained=True, arrays=True, readings_max=5, bytes_max=99, digests=True,
        expander=expander,
    )  # fmt: skip
    for redelivered in ([], [0, 1, 2, 3]):  # in one run, and in four
        queue.put(Messages([b"t"] * 4, [b"-"] * 4, [1, 2, 3, 4], redelivered=redelivered))
        assert [len(queue.take(records_max=9, bytes_max=99).packet_ids) for _ in range(2)] == [2, 2]
    payloads = Payloads(FieldMapping(), TYPE, "skip")
    records = [SimpleNamespace(value=b"-", key=None, headers=(), offset=n, timestamp=0) for n in range(4)]
    assert payloads.expand(columns_of(records), "t", expander, FixedBound(9, 99), 1).taken == 2


@pytest.mark.parametrize("bound", [1, 2, 3, 100])
def test_the_queue_of_a_broker_expands_and_acknowledges_whole_messages(bound: int) -> None:
    pattern = TopicPattern.parse("gw/{device}")
    queue = MessageQueue(
        topics=re.compile(rb"gw/[^/]*"), retained=True, arrays=True, readings_max=5, bytes_max=10**6, digests=True,
        complete=TopicFields(pattern, TYPE), expander=Expander(GATEWAY, TYPE, LIMITS),
    )  # fmt: skip
    one = b'{"readings":[{"at":1,"temperature":1}]}'
    two = b'{"readings":[{"at":2,"temperature":2},{"at":3,"temperature":3}]}'
    payloads = [one, two, b"{", b'{"readings":[]}', two, one]
    topics = [b"gw/%d" % number for number in range(len(payloads))]
    queue.put(Messages(topics, payloads, list(range(1, 7)), [], []))
    seen: list[tuple[str, bytes]] = []
    acknowledged: list[int] = []
    counted = 0
    while queue:
        before = queue.received - queue.records
        bundle = queue.take(records_max=bound, bytes_max=10**6, arrived_at=7)
        describe, rows = bundle.describe(), bundle.payloads()
        assert len(rows) == bundle.records <= max(bound, 2)
        assert [bad.row for bad in bundle.bad] == list(bundle.messages)
        assert all(bundle.messages[row].payload == rows[row] == b"{" for row in bundle.messages)
        assert all(message.arrived_at == 7 for message in bundle.messages.values())
        seen += [(describe(row), payload) for row, payload in enumerate(rows)]
        acknowledged += bundle.packet_ids
        counted += queue.received - queue.records - before
        assert len(bundle.digests) == len(bundle.packet_ids)
    assert acknowledged == [1, 2, 3, 4, 5, 6]
    assert counted == len(seen) == 7
    assert queue.bytes == 0
    assert [place for place, _ in seen] == [
        "gw/0 (packet 1)", "gw/1 (packet 2)[0]", "gw/1 (packet 2)[1]", "gw/2 (packet 3)", "gw/4 (packet 5)[0]",
        "gw/4 (packet 5)[1]", "gw/5 (packet 6)",
    ]  # fmt: skip
    assert seen[0][1] == b'{"at":1,"temperature":1,"device":"0"}'


def taken_from(
    path: Path,
    format: Format,
    records_max: int,
    position: bytes | None,
    limits: Limits | None = None,
    bytes_max: int = 10**6,
) -> Iterator[SourceBatch]:
    setup = SourceSetup(
        graph="g", stream="s", partition="files", limits=limits or Limits(), clock=SystemClock(), ready=asyncio.Event(),
        record_type=TYPE, bound=FixedBound(records_max, bytes_max),
    )  # fmt: skip

    async def read() -> list[SourceBatch]:
        injector = Files(path, format=format).connect(setup)
        await injector.open(position)
        found: list[SourceBatch] = []
        try:
            while not found or not found[-1].finished:
                await setup.ready.wait()
                setup.ready.clear()
                if (batch := await injector.take()) is not None:
                    found.append(batch)
        finally:
            await injector.close()
        return found

    yield from asyncio.run(read())


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (
            b"at,device,temperature",
            "no column 'device', 'at', 'temperature'; the columns seem to be separated by commas",
        ),
        (b"at;device;temp", "no column 'temperature'"),
        (b"at;device;temperature;at", "two columns are 'at'"),
        (b"at;device;temperature\xff", "cannot be read"),
    ],
)
def test_header_that_cannot_give_a_record_is_one_defect(tmp_path: Path, header: bytes, says: str) -> None:
    """Not a dead letter for each line."""
    path = tmp_path / "export.csv"
    path.write_bytes(header + b"\r\n" + b"1;a;1,5\r\n" * 1_000)
    with pytest.raises(BrokenFileError, match=re.escape(says)):
        list(taken_from(path, Csv(delimiter=";", decimal=","), 9, None))
    path.write_bytes(b"")
    (empty,) = taken_from(path, Csv(), 9, None)
    assert empty.finished


@pytest.mark.parametrize("bytes_max", [100, 10**6])
def test_what_is_kept_of_a_long_line_is_no_shorter_line(tmp_path: Path, bytes_max: int) -> None:
    """A bundle that is smaller for a while must not cut a valid line either."""
    limits = Limits(record_bytes_max=1_000, bundle_bytes_max=4_000)
    path = tmp_path / "lines.csv"
    long = b"x" * (limits.message_bytes_max + 1_000)
    path.write_bytes(b"device,at,temperature\na,1,1%s\nb,2,2.5%s\nc,3,3\n" % (long, b" " * 2_000))
    found = list(taken_from(path, Csv(), 9, None, limits, bytes_max))
    assert [bad.reason for batch in found for bad in batch.refused] == ["oversize"]
    assert [payload for batch in found for payload in batch.payloads][1:] == [
        b'{"device":"b","at":2,"temperature":2.5}',
        b'{"device":"c","at":3,"temperature":3}',
    ]


def test_a_function_that_cannot_be_repeated_is_refused() -> None:
    async def waits(message: Message) -> list[Any]:
        return []

    async def yields(message: Message) -> Any:
        yield Reading("a", 1, 1.0)

    for function in (waits, yields):
        with pytest.raises(GraphError, match="cannot await"):
            Decode(function)
    found = Expander(Decode(lambda message: {"a", "b"}), TYPE, LIMITS).expand(
        [Message(b"")], records_max=9, bytes_max=99
    )
    assert "returned set" in found.refused[0].detail, "the order of a set is another one after a restart"


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_a_file_is_cut_between_lines_and_resumes_there(tmp_path: Path, ending: bytes) -> None:
    """A line becomes several records, so a position lies where the bundle was full, not where the bytes were."""
    path = tmp_path / "gateway.ndjson"
    line = b'{"gw":"%d","at":1,"readings":[{"temperature":1},{"temperature":2},{"temperature":"x"}]}'
    path.write_bytes(b"\n".join([line % 0, b"", line % 1, b"{", line % 2, line % 3]) + ending)
    whole = [payload for batch in taken_from(path, GATEWAY, 1_000, None) for payload in batch.payloads]
    assert len(whole) == 13
    for bound in (1, 3, 4, 7):
        batches = list(taken_from(path, GATEWAY, bound, None))
        assert [payload for batch in batches for payload in batch.payloads] == whole
        assert all(len(batch.payloads) <= max(3, bound) for batch in batches)
        assert batches[-1].total == len(whole)
        for place, batch in enumerate(batches[:-1]):
            rest = [payload for again in taken_from(path, GATEWAY, bound, batch.position) for payload in again.payloads]
            assert rest == [payload for later in batches[place + 1 :] for payload in later.payloads]
    (last,) = taken_from(path, GATEWAY, 1_000, None)
    assert last.describe(6) == f"{path}:4 (byte {len(line) * 2 + 1})"
    assert last.describe(7) == f"{path}:5 (byte {len(line) * 2 + 3})[0]"


def test_the_header_of_a_file_is_read_again_at_a_position(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_bytes(b"\xef\xbb\xbfat;device;temperature;x\r\n1;a;1,5;-\r\n2;b\r\n3;c;3,5;-\r\n")
    format = Csv(delimiter=";", decimal=",")
    first, *others = list(taken_from(path, format, 1, None))
    assert first.payloads == [b'{"at":1,"device":"a","temperature":1.5}']
    rest = [row for batch in taken_from(path, format, 1, first.position) for row in batch.payloads]
    assert rest == [b"2;b", b'{"at":3,"device":"c","temperature":3.5}']
    assert [row for batch in others for row in batch.payloads] == rest
    path.write_bytes(b"a" * 65_600 + b"\n1\n")
    with pytest.raises(BrokenFileError, match="line 1 has more than 65536 bytes"):
        list(taken_from(path, format, 1, None))
    (message,) = (m for batch in others for m in batch.messages.values())
    assert message.header == b"\xef\xbb\xbfat;device;temperature;x"


@pytest.mark.parametrize(
    ("format", "payload"),
    [
        (Decode(lambda message: 1 / 0), b""),
        (LineProtocol(time="at"), b"m temperature=NaN 1"),
    ],
)
def test_what_json_cannot_hold_is_a_dead_letter_and_no_null(format: Format, payload: bytes) -> None:
    found = Expander(format, TYPE, LIMITS).expand([Message(payload)], records_max=9, bytes_max=9)
    assert [bad.row for bad in found.refused] == [0]
