"""`lax`: numbers and booleans that JSON writes as text, read like the cells of CSV."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from millpy.errors import GraphError
from millpy.graph.graph import Graph
from millpy.ingest.decode import Decoder
from millpy.ingest.local_times import TimeReader
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import EventTime
from millpy.model.record import RecordType
from millpy.model.time import Instant, seconds
from millpy.sources.files.source import File


class Inner(msgspec.Struct):
    x: float


class Reading(msgspec.Struct):
    n: int | None = None
    f: float = 0.0
    ok: bool = False
    text: str = ""


class Nested(msgspec.Struct):
    at: datetime | None = None
    inner: Inner | None = None
    many: list[int] = []


def judged(struct: type[msgspec.Struct], lax: tuple[str, ...], *payloads: bytes) -> tuple[list[Any], list[str]]:
    record_type = RecordType(struct)
    decoded = Decoder(record_type, lax=lax).decode(SourceBatch("json", Instant(0), payloads=payloads))
    objects = decoded.objects if decoded.batch is None else record_type.objects_of(decoded.batch)
    assert objects is not None
    return objects, [refused.reason for refused in decoded.refused]


VALUES = [
    (b'{"n":"12"}', Reading(n=12)),
    (b'{"n":"-7","f":"21.5","ok":"true","text":"5"}', Reading(-7, 21.5, True, "5")),
    (b'{"n":"1e3","f":"1e3"}', Reading(1000, 1000.0)),
    (b'{"n":"12.0"}', Reading(12)),
    (b'{"n":12.0}', Reading(12)),
    (b'{"n":"9007199254740993.0"}', Reading(2**53 + 1)),
    (b'{"n":"9223372036854775807"}', Reading(2**63 - 1)),
    (b'{"n":""}', Reading()),
    (b'{"n":null,"ok":1}', Reading(ok=True)),
    (b'{"n":"null","ok":"0"}', Reading()),
    (b'{"ok":"FALSE"}', Reading()),
    (b'{"n":"12","f":3,"ok":true}', Reading(12, 3.0, True)),
]
REFUSED = [
    (b'{"n":"12.5"}', "undecodable"),
    (b'{"n":"9223372036854775808"}', "refused"),
    (b'{"n":" 1"}', "undecodable"),
    (b'{"n":"0x1"}', "undecodable"),
    (b'{"n":"+1"}', "undecodable"),
    (b'{"f":""}', "undecodable"),
    (b'{"f":"1,5"}', "undecodable"),
    (b'{"f":"nan"}', "refused"),
    (b'{"ok":"yes"}', "undecodable"),
    (b'{"text":5}', "undecodable"),
    (b'["1"]', "undecodable"),
]


@pytest.mark.parametrize("records", [1, 100])
def test_text_of_numbers_and_booleans_is_read(records: int) -> None:
    for payload, expected in VALUES:
        assert judged(Reading, RecordType(Reading).fields, *[payload] * records) == ([expected] * records, [])
    mixed = [payload for payload, _ in VALUES] * records
    assert judged(Reading, RecordType(Reading).fields, *mixed) == ([expected for _, expected in VALUES] * records, [])


@pytest.mark.parametrize("records", [1, 100])
def test_other_text_becomes_a_dead_letter(records: int) -> None:
    for payload, reason in REFUSED:
        assert judged(Reading, RecordType(Reading).fields, *[payload] * records) == ([], [reason] * records)


def test_blocks_that_write_all_numbers_as_text_are_read_by_columns() -> None:
    record_type = RecordType(Reading)
    payloads = [b'{"n":"%d","f":"2.5","ok":"true","text":"a"}' % n for n in range(100)]

    decoded = Decoder(record_type, lax=record_type.fields).decode(SourceBatch("json", Instant(0), payloads=payloads))

    assert decoded.batch is not None
    assert record_type.objects_of(decoded.batch) == [Reading(n, 2.5, True, "a") for n in range(100)]


def test_only_the_named_fields_are_lax() -> None:
    assert judged(Reading, ("n",), b'{"n":"1","f":2.0}') == ([Reading(1, 2.0)], [])
    assert judged(Reading, ("n",), b'{"n":"1","f":"2.0"}') == ([], ["undecodable"])


def test_nested_fields_are_lax_with_the_field_that_holds_them_and_numbers_are_no_times() -> None:
    lax = RecordType(Nested).fields

    assert judged(Nested, lax, b'{"inner":{"x":"1.5"},"many":["1",2]}') == ([Nested(None, Inner(1.5), [1, 2])], [])
    for time in (b"5", b'"5"'):
        assert judged(Nested, lax, b'{"at":%s}' % time) == ([], ["undecodable"])


class Meter(msgspec.Struct):
    at: datetime
    reading: Decimal = Decimal(0)
    steps: list[Decimal] = []
    count: int = 0
    share: float = 0.0


DIGITS = "12345678901234567890.123456789012345678"
METER = b'{"at":"2026-11-26 12:00","reading":%b,"steps":[0.1,%b],"count":7,"share":0.1}'
TIMES = TimeReader("%Y-%m-%d %H:%M", "UTC")
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


@pytest.mark.parametrize("lax", [(), ("reading",), ("reading", "steps", "count", "share")])
@pytest.mark.parametrize("times", [None, TIMES])
def test_decimals_keep_all_digits_beside_a_time_with_a_format_and_lax_fields(
    lax: tuple[str, ...], times: TimeReader | None
) -> None:
    text = METER % (DIGITS.encode(), DIGITS.encode())
    text = text if times else text.replace(b"2026-11-26 12:00", b"2026-11-26T12:00:00Z")
    decoder = Decoder(RecordType(Meter), time_field="at", times=times, lax=lax)

    decoded = decoder.decode(SourceBatch("json", Instant(0), payloads=[text]))

    assert decoded.objects == [Meter(NOON, Decimal(DIGITS), [Decimal("0.1"), Decimal(DIGITS)], 7, 0.1)]


@pytest.mark.parametrize(
    ("number", "whole"),
    [(b"9007199254740993.0", 2**53 + 1), (b"9.007199254740993e15", 2**53 + 1), (b"-9223372036854775808.0", -(2**63))],
)
def test_lax_integers_with_a_fraction_of_zeros_are_exact(number: bytes, whole: int) -> None:
    for text in (number, b'"%b"' % number):
        assert judged(Reading, ("n",), b'{"n":%b}' % text) == ([Reading(n=whole)], [])


def test_lax_integers_inside_a_list_are_exact_and_numbers_in_text_stay() -> None:
    class Whole(msgspec.Struct):
        many: list[int] = []
        notes: dict[str, float | str] = {}

    text = b'{"many":[9007199254740993.0,1.0,"2",-9.007199254740993e15],"notes":{"a":"9007199254740993.0","b":-0.0}}'
    [record], _ = judged(Whole, RecordType(Whole).fields, text)
    assert record.many == [2**53 + 1, 1, 2, -(2**53) - 1]
    assert repr(record.notes["b"]) == "-0.0"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"1.5", "undecodable"),
        (b"9223372036854775808.0", "refused"),
        (b"1e400", "undecodable"),
        (b"true", "undecodable"),
        (b"[1]", "undecodable"),
    ],
)
def test_other_values_of_a_lax_integer_become_dead_letters(value: bytes, reason: str) -> None:
    assert judged(Reading, ("n",), b'{"n":%b}' % value) == ([], [reason])


@pytest.mark.parametrize("lax", ["n", ("m",), ["n"], 1])
def test_wrong_lax_is_refused_when_the_graph_is_built(lax: Any) -> None:
    with pytest.raises(GraphError, match="does not name fields"):
        Graph("g").inject(
            "r", File("r.ndjson"), schema=Reading, event_time=EventTime("n", unit="s", max_disorder=seconds(1)), lax=lax
        )


def test_lax_is_a_setting_of_the_source() -> None:
    described = []
    for lax in (False, True, ("f", "n")):
        graph = Graph("g")
        event_time = EventTime("n", unit="s", max_disorder=seconds(1))
        graph.inject("r", File("r.ndjson"), schema=Reading, event_time=event_time, lax=lax)
        [node] = graph.injectors()
        described.append((node.identity(), node.settings().get("lax")))

    assert [lax for _, lax in described] == [None, True, ["n", "f"]]
    assert described[0][0] == described[1][0] == described[2][0]
