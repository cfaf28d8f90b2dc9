from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec
import pytest

from millpy.ingest.decode import Decoder, DecodeResult
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.text_columns import CsvColumns, JsonColumns, takes
from millpy.model.record import RecordType
from millpy.model.time import Instant


class Reading(msgspec.Struct):
    device: str
    at: datetime
    temperature: float
    count: int = 0
    note: str | None = None


TYPE = RecordType(Reading)


def lines(count: int) -> list[bytes]:
    text = b'{"device":"d%d","at":"2026-01-01T00:00:00Z","temperature":%d,"count":0}'
    return [text % (i, i) for i in range(count)]


def decode(payloads: list[bytes], record_type: RecordType = TYPE, **how: object) -> DecodeResult:
    return Decoder(record_type, time_field="at").decode(SourceBatch("json", Instant(0), payloads=payloads, **how))


def test_large_batch_of_plain_json_becomes_columns() -> None:
    decoded = decode(lines(500))

    assert decoded.objects is None
    assert decoded.batch is not None and decoded.batch.schema == TYPE.schema
    assert JsonColumns(TYPE).columns(b"\n".join(lines(500)), 500) == decoded.batch


def test_few_records_become_objects() -> None:
    decoded = decode(lines(3))

    assert decoded.batch is None
    assert decoded.objects == [Reading(f"d{i}", datetime(2026, 1, 1, tzinfo=UTC), float(i)) for i in range(3)]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"{", "undecodable"),
        (b"", "undecodable"),
        (b'{"device":"d"}', "undecodable"),
        (b'{"device":"d","at":"2026-01-01T00:00:00Z","temperature":"warm"}', "undecodable"),
        (b'{"device":"d","at":"2026-01-01T00:00:00Z","temperature":NaN}', "undecodable"),
        (b'{"device":"\xff","at":"2026-01-01T00:00:00Z","temperature":1}', "undecodable"),
        (b'{"device":"a\\u0000","at":"2026-01-01T00:00:00Z","temperature":1}', "refused"),
        (b'{"device":"d","at":"2026-01-01T00:00:00Z","temperature":1,"count":9223372036854775808}', "refused"),
        (b'{"device":"d","at":"2026-01-01T00:00:00","temperature":1}', "event_time"),
        (lines(1)[0].replace(b"}", b',"z":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "undecodable"),
        (lines(1)[0].replace(b"}", b',"z":' + b'{"z":' * 50_000 + b"0" + b"}" * 50_001), "undecodable"),
    ],
)
@pytest.mark.parametrize("others", [0, 200])
def test_invalid_payload_is_dead_lettered_alone(payload: bytes, reason: str, others: int) -> None:
    payloads = lines(others)
    payloads.insert(others // 2, payload)

    decoded = decode(payloads)

    assert [(r.row, r.reason) for r in decoded.refused] == [(others // 2, reason)]
    assert decoded.payload(others // 2) == payload
    assert len(decoded.rows) == others


def test_payloads_with_newlines_stay_one_record_each() -> None:
    payloads = lines(100)
    payloads[7] = payloads[7].replace(b",", b",\n")

    decoded = decode(payloads)

    assert decoded.rows.tolist() == list(range(100))


@pytest.mark.parametrize("row", [0, 99])
def test_newline_at_the_end_of_a_payload_is_no_record(row: int) -> None:
    payloads = lines(100)
    payloads[row] += b"\n"

    assert decode(payloads).batch == decode(lines(100)).batch
    assert decode([*payloads, b""]).batch == decode(lines(100)).batch


def test_two_lines_in_a_payload_are_not_two_records_if_the_last_payload_is_empty() -> None:
    payloads = lines(100)
    two_lines = b"\n".join(payloads[7:9])

    decoded = decode([*payloads[:7], two_lines, *payloads[9:], b""])

    assert [(row.row, row.reason) for row in decoded.refused] == [(7, "undecodable"), (99, "undecodable")]
    assert len(decoded.rows) == 98


def test_one_bad_record_does_not_disable_columns_for_the_others() -> None:
    payloads = lines(10_000)
    payloads[5] = b"{"

    decoded = decode(payloads)

    assert decoded.batch is not None
    assert decoded.batch.num_rows == 9_999
    assert decoded.rows.tolist() == [i for i in range(10_000) if i != 5]


@pytest.mark.parametrize("count", [3, 300])
def test_oversized_record_is_dead_lettered_unread(count: int) -> None:
    payloads = [*lines(count), b'{"device":"' + b"x" * 2000 + b'"}']

    decoded = Decoder(TYPE, record_bytes_max=1000).decode(SourceBatch("json", Instant(0), block=b"\n".join(payloads)))

    assert [(r.row, r.reason) for r in decoded.refused] == [(count, "oversize")]
    assert len(decoded.rows) == count


def test_blank_lines_of_a_file_are_not_records() -> None:
    block = b"\n".join([*lines(100), b"", b"  ", *lines(2)]) + b"\n"

    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), block=block))

    assert len(decoded.rows) == 102
    assert decoded.rows[-1] == 103
    assert decoded.refused == []


@pytest.mark.parametrize("count", [1, 100])
def test_times_with_zones_become_utc_in_bundles_of_any_size(count: int) -> None:
    payloads = [b'{"device":"d","at":"2026-01-01T02:00:00+02:00","temperature":1}'] * count

    decoded = decode(payloads)

    found = decoded.objects or TYPE.objects_of(decoded.batch)
    assert {(r.at, r.at.utcoffset().total_seconds()) for r in found} == {(datetime(2026, 1, 1, tzinfo=UTC), 0.0)}


@pytest.mark.parametrize("date", ["2026-01-01", "2026-01"])
def test_a_date_is_no_time_even_if_a_time_follows_by_the_same_name(date: str) -> None:
    class Nested(msgspec.Struct):
        at: datetime
        values: list[int] = []

    payload = b'{"at":"%s","at":"2026-01-01T00:00:00Z"}' % date.encode()

    assert [row.reason for row in decode([payload], RecordType(Nested)).refused] == ["undecodable"]


def test_a_name_that_comes_twice_has_to_be_valid_twice_beside_a_time_with_hours_of_offset() -> None:
    class Nested(msgspec.Struct):
        at: datetime
        values: list[int] = []

    once = b'{"at":"2026-01-01 02:00:00+02","values":[1]}'
    twice = b'{"at":"2026-01-01 02:00:00+02","values":"none","values":[1]}'
    decoded = decode([once, twice], RecordType(Nested))

    assert decoded.objects == [Nested(datetime(2026, 1, 1, tzinfo=UTC), [1])]
    assert [(row.row, row.reason) for row in decoded.refused] == [(1, "undecodable")]


def test_classes_with_custom_rules_never_use_the_fast_path() -> None:
    class Renamed(msgspec.Struct, rename="camel"):
        some_x: int

    class Tagged(msgspec.Struct, tag=True):
        x: int

    class Bounded(msgspec.Struct):
        x: Annotated[int, msgspec.Meta(ge=0)]

    class Optionally(msgspec.Struct):
        x: Annotated[int, msgspec.Meta(ge=0)] | None = None

    class Nested(msgspec.Struct):
        x: list[int]

    class Hooked(msgspec.Struct):
        x: int

        def __post_init__(self) -> None:
            raise LookupError("no")

    assert not any(takes(RecordType(kind)) for kind in (Renamed, Tagged, Bounded, Optionally, Nested, Hooked))
    assert takes(TYPE)
    decoded = decode([b'{"x":1}'], RecordType(Hooked))
    assert decoded.refused[0].detail == "LookupError: no"


def test_default_that_is_not_none_is_applied_in_large_batches_too() -> None:
    decoded = decode([b'{"device":"d","at":"2026-01-01T00:00:00Z","temperature":1}'] * 100)

    assert {(o.count, o.note) for o in decoded.objects or TYPE.objects_of(decoded.batch)} == {(0, None)}


def test_csv_reads_empty_fields_as_none_or_default() -> None:
    header = ("device", "at", "temperature", "count", "note", "extra")
    rows = [b"d,2026-01-01T00:00:00Z,1.5,,,x", b"d,2026-01-01T00:00:00Z,1.5,7,n,x", b"d,2026-01-01T00:00:00Z,,7,n,x"]

    decoded = Decoder(TYPE).decode(SourceBatch("csv", Instant(0), block=b"\n".join(rows), header=header))

    assert [(o.count, o.note) for o in decoded.objects or []] == [(0, None), (7, "n")]
    assert [r.row for r in decoded.refused] == [2]


@pytest.mark.parametrize("count", [1, 100])
def test_csv_field_longer_than_pythons_limit_is_decoded_in_batches_of_any_size(count: int) -> None:
    header = ("device", "at", "temperature", "count", "note")
    rows = [b"d,2026-01-01T00:00:00Z,1.5,3," + b"x" * 200_000, *[b"d,2026-01-01T00:00:00Z,1.5,3,n"] * (count - 1)]

    decoded = Decoder(TYPE).decode(SourceBatch("csv", Instant(0), block=b"\n".join(rows), header=header))

    assert decoded.refused == []
    assert len(decoded.rows) == count


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        ("1.0", 1),
        ("1e3", 1_000),
        ("9007199254740993.0", 2**53 + 1),
        ("9223372036854775807.0", 2**63 - 1),
        ("0e9999999999", 0),
        ("1.5", None),
        ("1.00000000000000000001", None),
        ("1e-400", None),
        ("1e9999999999", None),
        ("1e99999999999999999999", None),
        ("9223372036854775808.0", None),
    ],
)
def test_integer_with_a_fraction_in_csv_is_exact_or_rejected(cell: str, count: int | None) -> None:
    line = f"d,2026-01-01T00:00:00Z,1.5,{cell}".encode()

    decoded = Decoder(TYPE).decode(
        SourceBatch("csv", Instant(0), payloads=[line], header=("device", "at", "temperature", "count"))
    )

    assert [o.count for o in decoded.objects or []] == ([] if count is None else [count])


@pytest.mark.parametrize("cell", ["20260101", "1577836800", "1577836800.5", "-1", "1e3", "123e-5"])
def test_number_in_csv_is_not_a_datetime(cell: str) -> None:
    decoded = Decoder(TYPE).decode(
        SourceBatch("csv", Instant(0), payloads=[f"d,{cell},1.5".encode()], header=("device", "at", "temperature"))
    )

    assert [(r.reason, "is not a time" in r.detail) for r in decoded.refused] == [("undecodable", True)]


@pytest.mark.parametrize("others", [0, 200])
def test_invalid_utf8_is_rejected_anywhere_in_a_record(others: int) -> None:
    unknown = b'{"device":"d","at":"2026-01-01T00:00:00Z","temperature":1,"z":"\xff"}'

    decoded = decode([*lines(others), unknown])

    assert [(r.row, r.reason) for r in decoded.refused] == [(others, "undecodable")]


def test_large_plain_csv_becomes_columns() -> None:
    header = ("device", "at", "temperature", "count", "note")
    rows = [b"d%d,2026-01-01T00:00:00Z,1.5,3," % i for i in range(300)]

    batch = CsvColumns(TYPE, header).columns(b"\n".join(rows), 300)

    assert batch is not None
    assert batch.column("note").null_count == 300


def test_two_values_in_a_line_do_not_shift_rows() -> None:
    assert JsonColumns(TYPE).columns(b'{"device":"a"}{"device":"b"}\n{"device":"c"', 2) is None
