"""The columnar decoder accepts and refuses exactly what msgspec does, record by record."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.ingest.decode import Decoder, _OneByOne
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.text_columns import CsvColumns, JsonColumns
from millpy.ingest.timestamps import instants_of_text
from millpy.model.record import RecordType
from millpy.model.time import Instant, instant


class Reading(msgspec.Struct):
    s: str
    i: int
    f: float = 1.5
    b: bool = False
    at: datetime | None = None
    o: str | None = None
    n: int | None = None
    u: UUID | None = None


TYPE = RecordType(Reading)
JSON = JsonColumns(TYPE)
ONE = _OneByOne(TYPE, "at")

GOOD = {"s": '"a"', "i": "1", "f": "0.5", "b": "true"}
RAW_VALUES = [
    "1", "0", "-0", "-0.0", "1.0", "1e3", "1E+2", "1e400", "-1e-400", "01", "+1", ".5", "1.", "1e", "-", "NaN",
    "Infinity", "-Infinity", "nan", "null", "true", "false", "tru", '""', '"x"', '"\\u0000"', '"\\ud800"',
    '"\\udc00"', '"\\ud83d\\ude00"', '"\\ud83d\\u0041"', '"\\q"', '"a\tb"', '"a\x01b"', '"a\nb"', '"é😀"',
    "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "99999999999999999999999", "9007199254740993", "0.1", "123456789012345678.9", '"2026-01-01T00:00:00Z"',
    '"2026-01-01T00:00:00.123456Z"', '"2026-01-01T00:00:00.1234567Z"', '"2026-01-01T00:00:00+02:00"',
    '"2026-01-01T00:00:00"', '"2026-01-01"', '"2026-02-29T00:00:00Z"', '"2024-02-29T23:59:59.9-11:30"',
    '"2026-01-01t00:00:00z"', '"2026-01-01 00:00:00Z"', '"0001-01-01T00:00:00+01:00"',
    '"9999-12-31T23:59:59.999999Z"', '"9999-12-31T23:59:59-01:00"', '"0000-01-01T00:00:00Z"',
    '"2026-13-01T00:00:00Z"', '"2026-01-01T24:00:00Z"', '"2026-01-01T00:00:60Z"', "1577836800",
    '"2026-01-01T00:00:00+24:00"', '"2026-01-01T00:00:00+00:60"', '"2026-01-01T00:00:00.Z"',
    '"6f3c9a52-7d39-4b6c-8f53-2f0a9d3f6f11"', '"6F3C9A52-7D39-4B6C-8F53-2F0A9D3F6F11"',
    '"6f3c9a527d394b6c8f532f0a9d3f6f11"', "[]", "{}", "[1,[2,{}]]", '{"s":1}', "[" * 60 + "]" * 60,
    "[" * 3000 + "]" * 3000, '{"x":[{}', "{}]}", "]", "}",
]  # fmt: skip
NAMES = ["s", "i", "f", "b", "at", "o", "n", "u", "z", "", "\\u0069", "s "]


@st.composite
def objects(draw: st.DrawFn) -> str:
    """A record that is mostly valid; sometimes a field is wrong, missing, doubled or unknown."""
    members = [f'"{name}":{value}' for name, value in GOOD.items()]
    for _ in range(draw(st.integers(0, 2))):
        name, value = draw(st.sampled_from(NAMES)), draw(st.sampled_from(RAW_VALUES))
        kept = members if draw(st.integers(0, 9)) == 0 else [m for m in members if not m.startswith(f'"{name}":')]
        members = [*kept, f'"{name}":{value}']
    if draw(st.integers(0, 9)) == 0:
        members.pop(draw(st.integers(0, len(members) - 1)))
    before, after = "", ""
    if draw(st.integers(0, 9)) == 0:
        before = draw(st.sampled_from([" ", "\ufeff", "[", "{}", "\r"]))
    if draw(st.integers(0, 9)) == 0:
        after = draw(st.sampled_from([" ", ",", "{}", "\r", "]", "\x00", "//"]))
    return before + "{" + ",".join(members) + "}" + after


byte_lines = st.one_of(
    objects().map(lambda text: text.encode()),
    objects().map(lambda text: text.encode()),
    st.sampled_from(
        [
            b"",
            b"{",
            b"}",
            b'{"s":"\xff","i":1}',
            b'{"s":"a","i":1,"z":"\xff"}',
            b"\xed\xa0\x80",
            b"{}",
            b"null",
            b"[1]",
            b'{"s":"a","i":1,"f":1,"b":true,"z":"\xff"}',
            b'{"s":"a","i":1,"f":1,"b":true}{"s":"a"',
        ]
    ),
)


def the_slow_path(lines: list[bytes], **how: object) -> tuple[list[int], list[object]]:
    rows, found = ONE.decode(SourceBatch("json", Instant(0), **how), np.arange(len(lines)), lines.__getitem__, [])
    return rows.tolist(), found


def same(left: list[object], right: list[object]) -> bool:
    return repr_of(left) == repr_of(right)


def repr_of(records: list[object]) -> list[object]:
    """Values with the sign of zero, so that -0.0 and 0.0 differ."""
    return [
        {k: (v, math.copysign(1, v)) if isinstance(v, float) else v for k, v in msgspec.structs.asdict(r).items()}
        for r in records
    ]


@settings(max_examples=600, deadline=None)
@given(st.lists(byte_lines, min_size=1, max_size=4))
def test_columns_equal_what_msgspec_decodes_line_by_line(lines: list[bytes]) -> None:
    block = b"\n".join(lines)

    batch = JSON.columns(block, block.count(b"\n") + 1)

    if batch is not None:
        rows, found = the_slow_path(block.split(b"\n"))
        assert rows == list(range(batch.num_rows))
        assert same(TYPE.objects_of(batch), found)


@settings(max_examples=100, deadline=None)
@given(st.lists(byte_lines, min_size=1, max_size=6), st.integers(0, 200))
def test_large_batch_decodes_like_its_records_one_by_one(lines: list[bytes], at: int) -> None:
    plain = [b'{"s":"dev","i":%d,"f":1,"b":true,"at":"2026-01-01T00:00:00Z"}' % i for i in range(200)]
    payloads = plain[:at] + lines + plain[at:]

    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=payloads))

    rows, found = the_slow_path(payloads)
    assert decoded.rows.tolist() == rows
    assert same(decoded.objects or TYPE.objects_of(decoded.batch), found)
    assert sorted([*rows, *(r.row for r in decoded.refused)]) == list(range(len(payloads)))


FIRST, LAST = datetime(1, 1, 2), datetime(9999, 12, 30)  # noqa: DTZ001 (the strategy adds the zone)


class Strict(Reading, forbid_unknown_fields=True):
    """Takes no field that it does not know."""


STRICT = RecordType(Strict)
STRICT_COLUMNS = JsonColumns(STRICT)


@settings(max_examples=200, deadline=None)
@given(st.lists(byte_lines, min_size=1, max_size=3))
def test_unknown_fields_are_forbidden_in_columns_as_msgspec_forbids_them(lines: list[bytes]) -> None:
    block = b"\n".join(lines)

    batch = STRICT_COLUMNS.columns(block, block.count(b"\n") + 1)

    if batch is not None:
        parts = block.split(b"\n")
        rows, found = _OneByOne(STRICT, "at").decode(
            SourceBatch("json", Instant(0)), np.arange(len(parts)), parts.__getitem__, []
        )
        assert rows.tolist() == list(range(batch.num_rows))
        assert same(STRICT.objects_of(batch), found)


def test_strict_class_uses_the_fast_path_too() -> None:
    member = ",".join(f'"{name}":{value}' for name, value in GOOD.items())

    assert STRICT_COLUMNS.columns(("{" + member + "}").encode(), 1) is not None
    assert STRICT_COLUMNS.columns(("{" + member + ',"z":1}').encode(), 1) is None
    assert CsvColumns(STRICT, HEADER).columns(",".join(PLAIN).encode(), 1) is None
    assert CsvColumns(STRICT, HEADER[:-1]).columns(",".join(PLAIN[:-1]).encode(), 1) is not None


class Moment(msgspec.Struct):
    at: datetime


MOMENTS = _OneByOne(RecordType(Moment), "at")
moments = st.datetimes(min_value=FIRST, max_value=LAST, timezones=st.just(UTC))


@given(
    st.lists(
        st.tuples(
            moments,
            st.sampled_from(["Z", "z", "+00:00", "-11:30", "+05:45", "+0530", "-0030", "+00", "-11"]),
            st.integers(0, 6),
            st.sampled_from("T t"),
        ),
        min_size=1,
    )
)
def test_times_in_columns_equal_those_of_msgspec(parts: list[tuple[datetime, str, int, str]]) -> None:
    texts = []
    for moment, zone, digits, between in parts:
        fraction = f".{moment.microsecond:06}"[: digits + 1] if digits else ""
        texts.append(f"{moment.year:04}-{moment:%m-%d}{between}{moment:%H:%M:%S}{fraction}{zone}")

    times = instants_of_text(pa.array(texts))

    assert times is not None
    # msgspec reads all but an offset without minutes, as PostgreSQL prints it; the decoder adds them.
    whole = [text if len(zone) != 3 else f"{text}:00" for text, (_, zone, _, _) in zip(texts, parts, strict=True)]
    assert times.tolist() == [instant(msgspec.convert(text, datetime)) for text in whole]
    lines = [b'{"at":"%s"}' % text.encode() for text in texts]
    assert [
        moment.at
        for moment in MOMENTS.decode(SourceBatch("json", Instant(0)), np.arange(len(lines)), lines.__getitem__, [])[1]
    ] == [msgspec.convert(text, datetime) for text in whole]


CELLS = [
    "", "1", "-1", "0", "-0", "+1", "007", "1.0", "1e3", " 1", "1 ", "0x1F", "nan", "inf", "1e400", "1e-5", ".5",
    "1.", "null", "true", "TRUE", "false", "yes", "a", "ä", "a b", "99999999999999999999", "2026-01-01T00:00:00Z",
    "2026-01-01T00:00:00", "1577836800", "2026-01-01 00:00:00.5+00", "2026-01-01T00:00:00+0530",
    "2026-01-01T00:00:00+0",
    '"a"', '"a,b"', '"a', 'a"b', "\x00", '""', '"a""b"', '"1"', '"1"2', ' "a"', '"a" ', '"""a"',
    '"', '"2026-01-01T00:00:00Z"', '" "',
    "6f3c9a52-7d39-4b6c-8f53-2f0a9d3f6f11", "-9223372036854775808", "9223372036854775808", "1_0",
]  # fmt: skip
HEADER = ("i", "s", "f", "at", "n", "o", "b", "u", "z")
PLAIN = ["1", "x", "2.5", "2026-01-01T00:00:00Z", "", "", "true", "", ""]


@settings(max_examples=600, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, len(HEADER) - 1), st.sampled_from(CELLS)), max_size=2), min_size=1, max_size=3
    )
)
def test_csv_columns_equal_what_msgspec_decodes_line_by_line(changes: list[list[tuple[int, str]]]) -> None:
    lines = []
    for changed in changes:
        row = list(PLAIN)
        for place, cell in changed:
            row[place] = cell
        lines.append(",".join(row).encode())

    batch = CsvColumns(TYPE, HEADER).columns(b"\n".join(lines), len(lines))

    if batch is not None:
        rows, found = ONE.decode(
            SourceBatch("csv", Instant(0), header=HEADER), np.arange(len(lines)), lines.__getitem__, []
        )
        assert rows.tolist() == list(range(batch.num_rows))
        assert same(TYPE.objects_of(batch), found)


def test_plain_data_uses_the_fast_path() -> None:
    member = ",".join(f'"{name}":{value}' for name, value in GOOD.items())

    assert JSON.columns(("{" + member + "}").encode(), 1) is not None
    assert CsvColumns(TYPE, HEADER).columns(",".join(PLAIN).encode(), 1) is not None
    quoted = ",".join(f'"{cell}"' for cell in [*PLAIN[:8], 'a ""quote"", a comma'])
    assert CsvColumns(TYPE, HEADER).columns(f"{quoted}\n{quoted}".encode(), 2) is not None
