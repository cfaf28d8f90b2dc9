"""Payloads as nobody should send them: strategies from nearly right to plain rubbish."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

TEXTS = st.one_of(
    st.sampled_from(
        ["dev-1", "dev-2", "dev-3", "", "é", "\U0001f600", "\t", "\\N", "\\", '"', "'; --", "a\nb", "\x7f"]
    ),
    st.text(max_size=12),
    st.sampled_from(["\x00", "a\x00b", "\ufeff", "\u2028", "\ufffe", "x" * 3_000]),
)
INTEGERS = st.one_of(
    st.integers(-5, 5),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([2**63, -(2**63) - 1, 10**30, 42]),
)
FLOATS = st.one_of(
    st.floats(-100, 100),
    st.floats(),
    st.sampled_from([1e308, -1e308, 1.7976931348623157e308, 5e-324, -0.0, 42.0]),
)
MOMENTS = st.one_of(
    st.integers(0, 3_600).map(lambda s: f"2026-01-01T{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}Z"),
    st.datetimes().map(lambda at: at.isoformat()),
    st.datetimes().map(lambda at: at.isoformat() + "+05:45"),
    st.sampled_from(
        ["2026-01-01T00:00:00", "2099-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z"]
    ),
    st.sampled_from(
        ["", "yesterday", "2026-02-30T00:00:00Z", "2026-01-01T25:00:00Z", "2026-01-01T00:00:00.123456789Z"]
    ),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
RUBBISH = st.one_of(
    st.binary(max_size=80),
    st.sampled_from(
        [
            b"",
            b" ",
            b"null",
            b"[]",
            b"{}",
            b"\xff\xfe",
            b"\x00",
            b"NaN",
            b'{"id":',
            b"[" * 2_000,
            b'{"id":' * 600,
            b'{"id":1}{"id":2}',
            b"\xef\xbb\xbf{}",
            b"x" * 5_000,
            b"\r\n",
        ]
    ),
)


def good(number: int) -> dict[str, Any]:
    """A record that every graph of the fuzz test accepts."""
    return {
        "id": number,
        "device": f"dev-{number % 7}",
        "at": f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z",
        "count": number % 10,
        "value": number / 8,
        "flag": number % 2 == 0,
    }


FIELDS = {
    "id": st.one_of(INTEGERS, ANYTHING),
    "device": st.one_of(TEXTS, ANYTHING),
    "at": st.one_of(MOMENTS, ANYTHING),
    "count": st.one_of(INTEGERS, ANYTHING),
    "value": st.one_of(FLOATS, INTEGERS, ANYTHING),
    "flag": ANYTHING,
    "note": st.one_of(TEXTS, ANYTHING),
    "inner": st.one_of(ANYTHING, st.fixed_dictionaries({"name": TEXTS, "values": st.lists(FLOATS, max_size=4)})),
    "unknown": ANYTHING,
}


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """A good record with some fields replaced, added or left out; written in one of several ways."""
    record = good(draw(st.integers(0, 3_000)))
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3)):
        record[name] = draw(FIELDS[name])
    if draw(st.integers(0, 9)) == 0:
        record.pop(draw(st.sampled_from(sorted(record))))
    text = json.dumps(record, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([(",", ":"), None])))
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A record with bytes changed, lost or put in."""
    payload = bytearray(draw(records()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(payload)))
        payload[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(payload)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A line of CSV, more or less."""
    record = good(draw(st.integers(0, 3_000))) | {"flag": "true", "note": ""}
    for name in draw(st.lists(st.sampled_from(sorted(record)), max_size=2)):
        record[name] = draw(FIELDS[name])
    cells = [str(value) for value in record.values()]
    if draw(st.integers(0, 9)) == 0:
        cells = cells[: draw(st.integers(0, 9))] + draw(st.lists(TEXTS, max_size=2))
    if draw(st.booleans()):
        cells = ['"' + cell.replace('"', '""') + '"' for cell in cells]
    return ",".join(cells).encode("utf-8", "surrogatepass")


payloads = st.one_of(
    st.integers(0, 3_000).map(lambda number: json.dumps(good(number)).encode()),
    records(),
    records(),
    damaged(),
    RUBBISH,
)
batches = st.lists(payloads, min_size=1, max_size=40)
tables = st.lists(st.one_of(lines(), lines(), RUBBISH), min_size=1, max_size=40)
