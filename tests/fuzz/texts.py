"""Records as text, from a seed: values in every way that is right, and now and then one that is not."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

from tests.fuzz.reference import REQUIRED, Field, Shape

CHARACTERS = [
    "a",
    "b",
    " ",
    ",",
    '"',
    "'",
    "\\",
    "/",
    "é",
    "\u20ac",
    "\U0001f600",
    "\u2028",
    "{",
    "}",
    "[",
    ":",
    "0",
    "\x7f",
]
WEIRD_TEXTS = ["", "\x00", "\ufeff", "a\nb", "\r", "\t", "null", "true", "1", "NaN", "\\N", "x" * 700, "\ud800"]
WEIRD_NUMBERS = [
    "0", "-0", "-0.0", "-0e0", "1.0", "1.50", "1e3", "1E+2", "1e18", "1e19", "1e400", "-1e-400", "0e999", "01", "+1",
    ".5",
    "1.", "1e", "-", "NaN", "Infinity", "-Infinity", "nan", "inf", "1_0", "0x1F", " 1", "1 ", "9007199254740993",
    "9007199254740993.0", "9007199254740993e0", "90071992547409930e-1", "1.00000000000000000001", "9223372036854775807",
    "9223372036854775807.0", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "18446744073709551615",
    "18446744073709551616", "1" * 30, "1" * 310, "0." + "1" * 400, "123456789012345678.9", "2.2250738585072011e-308",
    "4.9e-324", "1.7976931348623157e308", "1.7976931348623159e308", "5e-1", "16777217.0", "0.1", "3.4e38", "1577836800",
]  # fmt: skip
WEIRD_TIMES = [
    "2026-01-01T00:00:00", "2026-01-01", "2026-02-29T00:00:00Z", "2024-02-29T23:59:59.9-11:30", "2026-01-01t00:00:00z",
    "2026-01-01 00:00:00Z", "2026-01-01T00:00:00.1234565Z", "2026-01-01T00:00:00.12345649Z",
    "0001-01-01T00:00:00+01:00",
    "2025-12-31T23:59:59.9999999Z", "9999-12-31T23:59:59.9999999Z", "9999-12-31T23:59:59-01:00", "0000-01-01T00:00:00Z",
    "2026-13-01T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01T00:00:60Z", "2026-01-01T00:00:00+24:00",
    "2026-01-01T00:00:00+00:60", "2026-01-01T00:00:00+0200", "2026-01-01T00:00:00+02", "2026-01-01T00:00:00.Z",
    "2026-01-01T00:00Z", "20260101", "20260101T000000Z", "1577836800", "1577836800.5", "1577836800000", "-1", "1e3",
    "yesterday",
    "2099-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00Z", "1969-12-31T23:59:59.999999Z",
]  # fmt: skip
WEIRD_UUIDS = [
    "6F3C9A52-7D39-4B6C-8F53-2F0A9D3F6F11",
    "6f3c9a527d394b6c8f532f0a9d3f6f11",
    "{6f3c9a52}",
    "6f3c9a52-7d39",
]
WEIRD_JSON = [
    "null", "true", "false", "tru", "[]", "{}", '[1,[2,{"a":null}]]', '"\\u0000"', '"\\ud800"', '"\\udc00"',
    '"\\ud83d\\ude00"',
    '"\\ud83d\\u0041"', '"\\q"', '"\\u00e9\\n\\t\\/"', '"a\tb"', '"a\x01b"', "[" * 30 + "]" * 30,
    "[" * 9000 + "]" * 9000,
    '{"a":1.5,"b":-0}', '{"name":"n","values":[1,2.5]}', '{"name":"n"}', '{"name":"n","values":[1,"x"]}', "[1,]", "{,}",
]  # fmt: skip
WEIRD_CELLS = ["", "null", "NULL", "true", "TRUE", "False", "yes", "0", '"', "None", " ", "\x00", "\x0c"]
BEGIN, END = datetime(1970, 1, 1, tzinfo=UTC), datetime(2026, 6, 1, tzinfo=UTC)


def a_text(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return f"dev-{rng.randrange(5)}"
    return "".join(rng.choices(CHARACTERS, k=rng.randrange(1, 9)))


def a_float(rng: random.Random) -> str:
    """Return a number that is mostly of a sensor's size, because one out of range disables columns for its bundle."""
    kind = rng.choice([0, 1, 2, 4]) if rng.random() < 0.995 else 3
    if kind == 0:
        return str(rng.randrange(-(2**60), 2**60))
    if kind == 1:
        return f"{rng.uniform(-1000, 1000):.{rng.randrange(1, 25)}f}"
    if kind == 2:
        return f"{rng.uniform(-9, 9):.{rng.randrange(1, 20)}{rng.choice('eE')}}"
    number = struct.unpack("<d", rng.randbytes(8))[0] if kind == 3 else rng.uniform(-1e6, 1e6)
    return repr(number) if math.isfinite(number) else "0.5"


def a_time(rng: random.Random) -> str:
    span = (END - BEGIN) // timedelta(microseconds=1)
    moment = BEGIN + timedelta(microseconds=rng.randrange(span))
    digits = rng.randrange(7)
    fraction = f".{moment.microsecond:06}"[: digits + 1] if digits else ""
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}{rng.choice(['Z', 'Z', '+00:00', '-11:30', '+05:45', '+14:00'])}"


def an_int(rng: random.Random) -> str:
    """Small, of 64 bits, or a time in milliseconds."""
    return str(
        rng.choice([rng.randrange(-5, 40), rng.randrange(-(2**63), 2**63), rng.randrange(10**12, 1_800 * 10**9)])
    )


RIGHT: dict[str, Callable[[random.Random], str]] = {
    "int": an_int,
    "float": a_float,
    "bool": lambda rng: rng.choice(["true", "false"]),
    "text": a_text,
    "time": a_time,
    "uuid": lambda rng: str(UUID(bytes=rng.randbytes(16))),
}


def json_value(rng: random.Random, field: Field) -> str:
    """A value that is right."""
    if field.nullable and rng.random() < 0.2:
        return "null"
    if field.kind == "list":
        assert field.inner
        return "[" + ",".join(json_value(rng, field.inner) for _ in range(rng.randrange(4))) + "]"
    if field.kind == "object":
        assert field.inner
        members = (f"{_quoted(rng, a_text(rng))}:{json_value(rng, field.inner)}" for _ in range(rng.randrange(4)))
        return "{" + ",".join(members) + "}"
    if field.kind == "record":
        return json_object(rng, Shape(field.fields or {}), 0.0)
    text = RIGHT[field.kind](rng)
    return text if field.kind in ("int", "float", "bool") else _quoted(rng, text)


def _quoted(rng: random.Random, text: str) -> str:
    return json.dumps(text, ensure_ascii=rng.random() < 0.3)


def weird_json_value(rng: random.Random) -> str:
    texts = [*WEIRD_TEXTS, *WEIRD_TIMES, *WEIRD_UUIDS]
    return rng.choice([rng.choice(WEIRD_NUMBERS), rng.choice(WEIRD_JSON), _quoted(rng, rng.choice(texts))])


def json_object(rng: random.Random, shape: Shape, weird: float) -> str:
    """A record; each field is as likely as `weird` to be something else."""
    members = []
    for name, field in shape.fields.items():
        if rng.random() < (0.3 if field.default is not REQUIRED else weird / 5):
            continue
        texts = WEIRD_TIMES if field.kind == "time" else WEIRD_NUMBERS if field.kind in ("int", "float") else []
        value = json_value(rng, field)
        if rng.random() < weird:
            fit = texts and rng.random() < 0.6
            value = rng.choice(texts) if fit else weird_json_value(rng)
            value = _quoted(rng, value) if fit and field.kind == "time" else value
        members.append(f"{_quoted(rng, name)}:{value}")
        if rng.random() < weird / 5:
            members.append(f'"{name}":{rng.choice([json_value(rng, field), weird_json_value(rng)])}')
    if (not shape.strict and rng.random() < 0.2) or rng.random() < weird / 5:
        members.append(f'"unknown":{json_value(rng, Field(rng.choice(list(RIGHT))))}')  # type: ignore[arg-type]
    if rng.random() < weird / 5:
        name = rng.choice(["z", "", "id ", "\ud800"])
        members.append(f"{_quoted(rng, name)}:{weird_json_value(rng)}")
    if rng.random() < 0.3:
        rng.shuffle(members)
    return "{" + rng.choice([",", ", "]).join(members) + "}"


def json_payload(rng: random.Random, shape: Shape, weird: float) -> bytes:
    """A record as bytes, of which few may be changed."""
    payload = bytearray(json_object(rng, shape, weird).encode("utf-8", "surrogatepass"))
    if rng.random() < weird / 3:
        around = rng.choice(
            [b" %b", b"%b\r", b"%b ", b"\xef\xbb\xbf%b", b"[%b]", b"%b{}", b"%b,", b"\x00%b", b"%b\x0c"]
        )
        payload = bytearray(around.replace(b"%b", payload))
    if rng.random() < weird / 3:
        at = rng.randrange(len(payload) + 1)
        payload[at : at + rng.randrange(3)] = rng.choice(
            [b"", b"\xff", b"\xed\xa0\x80", b'"', b"}", b"\\", b"1", b"\xc3"]
        )
    return bytes(payload)


def json_payloads(rng: random.Random, shape: Shape) -> list[bytes]:
    """Few or many, all right or nearly, or with strange ones among them."""
    count, weird = rng.choice([3, 20, 70, 150, 300]), rng.choice([0.0, 0.0, 0.002, 0.05, 0.3])
    return [json_payload(rng, shape, weird) for _ in range(count)]


def messages(rng: random.Random, shape: Shape) -> list[bytes]:
    """Payloads, some of which are arrays of them."""
    found, waiting = [], json_payloads(rng, shape)
    while waiting:
        count = rng.choice([1, 1, 1, 2, 5, 40, 150])
        some, waiting = waiting[:count], waiting[count:]
        if count == 1:
            found += some
            continue
        array = rng.choice([b"[", b" [ ", b"[\n"]) + rng.choice([b",", b" ,\n"]).join(some) + b"]"
        found.append(array[: -rng.randrange(1, 9)] if rng.random() < 0.05 else array)
        if rng.random() < 0.1:
            found.append(
                rng.choice(
                    [b"[]", b"[ ]", b"[1]", b"[[]]", b"[{}]", b"[{},1,null]", b"", b" ", b"null", b"[", b"[{}]]"]
                )
            )
    return found


def lines(rng: random.Random, payloads: list[bytes]) -> bytes:
    """Join payloads into lines, with blank lines, and with or without a final newline."""
    end = rng.choice([b"\n", b"\n", b"\r\n"])
    parts = [payload.replace(b"\n", b" ") for payload in payloads]
    if rng.random() < 0.3:
        for _ in range(3):
            parts.insert(rng.randrange(len(parts) + 1), rng.choice([b"", b" ", b"\t", b"\r", b"\x0c"]))
    return rng.choice([b"", b"", b"\xef\xbb\xbf"]) + end.join(parts) + rng.choice([end, b""])


def csv_header(rng: random.Random, shape: Shape) -> list[str]:
    """Names of columns: out of order, without some that may be missing, with others that are not known."""
    header = [name for name, field in shape.fields.items() if field.default is REQUIRED or rng.random() < 0.9]
    if rng.random() < 0.3:
        rng.shuffle(header)
    if rng.random() < 0.3:
        header.insert(rng.randrange(len(header) + 1), rng.choice(["z", "a,b", 'q"', "é"]))
    return header


def csv_line(rng: random.Random, shape: Shape, header: list[str], weird: float, quoting: float) -> bytes:
    """A record under that header."""
    cells = []
    for name in header:
        field = shape.fields.get(name, Field("text"))
        cell = RIGHT[field.kind](rng)
        if (field.nullable or field.default is not REQUIRED) and rng.random() < 0.2:
            cell = ""
        strange = rng.random() < weird
        if strange:
            fit = {"time": WEIRD_TIMES, "int": WEIRD_NUMBERS, "float": WEIRD_NUMBERS, "uuid": WEIRD_UUIDS}.get(
                field.kind
            )
            cell = rng.choice(rng.choice([fit or WEIRD_TEXTS, WEIRD_CELLS, WEIRD_TEXTS]))
        raw = strange and rng.random() < 0.2
        if not raw and (rng.random() < quoting or any(mark in cell for mark in ',"\n\r')):
            cell = '"' + cell.replace('"', '""') + '"'
        cells.append(cell)
    if rng.random() < weird / 5:
        cells = cells[:-1] if rng.random() < 0.5 else [*cells, "more"]
    line = bytearray(",".join(cells).encode("utf-8", "surrogatepass"))
    if rng.random() < weird / 3:
        at = rng.randrange(len(line) + 1)
        line[at : at + rng.randrange(3)] = rng.choice([b"", b"\xff", b'"', b",", b"\r", b"\n", b'"\n', b"\xc3"])
    return bytes(line)


def table(rng: random.Random, shape: Shape) -> tuple[list[str], list[bytes]]:
    """A header and what stands under it."""
    header = csv_header(rng, shape)
    count, weird = rng.choice([3, 20, 70, 150, 300]), rng.choice([0.0, 0.0, 0.002, 0.05, 0.3])
    quoting = rng.choice([0.0, 0.1, 1.0])
    return header, [csv_line(rng, shape, header, weird, quoting) for _ in range(count)]


def csv_lines(rng: random.Random, header: list[str], records: list[bytes]) -> bytes:
    """The same as a file."""
    names = ",".join('"' + name.replace('"', '""') + '"' if set(name) & {*',"'} else name for name in header)
    end = rng.choice([b"\n", b"\n", b"\r\n"])
    parts = list(records)
    if rng.random() < 0.3:
        for _ in range(3):
            parts.insert(rng.randrange(len(parts) + 1), rng.choice([b"", b" ", b"\t", b"\r"]))
    return rng.choice([b"", b"", b"\xef\xbb\xbf"]) + end.join([names.encode(), *parts]) + rng.choice([end, b""])
