"""Whatever a message contains, its format makes records and dead letters of it, and raises nothing.

`make fuzz MINUTES=60` tries more examples.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from millpy import Cbor, Csv, Decode, Format, Gzip, Json, LineProtocol, MessagePack, Scalar
from millpy.formats import Message
from millpy.ingest.decode import Decoder
from millpy.ingest.expansion import Expander, Expansion
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant

EXAMPLES = 25 if not os.environ.get("FUZZ_MINUTES") else int(float(os.environ["FUZZ_MINUTES"]) * 2_000)
NO_SHRINK = [phase for phase in Phase if phase is not Phase.shrink]
LIMITS = Limits(record_bytes_max=2_000, message_records_max=20)


class Reading(msgspec.Struct):
    device: str
    at: int
    temperature: float | None = None
    ok: bool = True


TYPE = RecordType(Reading)
FORMATS: dict[str, Format] = {
    "json": Json(),
    "many": Json(path="a", many="b.0", envelope={"device": "d"}, fields={"at": "x.y"}, arrival="at"),
    "scalar": Scalar("temperature", arrival="at"),
    "csv": Csv(),
    "semicolons": Csv(delimiter=";", decimal=",", encoding="cp1252", null=["", "-"], header=["device", "at", "ok"]),
    "lines": LineProtocol(precision="s", time="at", measurement="device"),
    "message_pack": MessagePack(),
    "cbor": Cbor(Json(many="a")),
    "gzip": Gzip(Csv()),
    "function": Decode(lambda message: [Reading(message.payload.decode(), len(message.payload))]),
}

NAMES = st.sampled_from(["a", "b", "d", "x", "y", "at", "device", "temperature", "ok"])
LEAVES = st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner),
    max_leaves=12,
)
WORDS = b"device at temperature 1 1.5 1,5 - t 3i # m { } [ ] : , ; = null 1e999 '".split(b" ")
TOKENS = st.lists(
    st.sampled_from([*WORDS, b" ", b"\n", b"\r", b'"', b"\\", b"\xef\xbb\xbf", b"\xff", b"\0"]), max_size=40
).map(b"".join)


def json_text(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (ValueError, OverflowError):
        return b"{"


PAYLOADS = (
    st.binary(max_size=60)
    | TOKENS
    | JSON.map(json_text)
    | JSON.map(lambda value: msgspec.msgpack.encode(value) if not _is_large(value) else b"\xc1")
    | (TOKENS | JSON.map(json_text)).map(gzip.compress)
)


def _is_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    if isinstance(value, list):
        return any(map(_is_large, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def expanded(format: Format, payloads: list[bytes]) -> Expansion:
    messages = [Message(payload, "topic", arrived_at=7, ending=b',"device":"t"}') for payload in payloads]
    found = Expander(format, TYPE, LIMITS).expand(messages, records_max=10**6, bytes_max=10**9)
    assert found.taken == len(payloads)
    assert len(found.origins) == len(found.payloads)
    assert {bad.row for bad in found.refused} == set(found.messages)
    return found


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=EXAMPLES, deadline=None, phases=NO_SHRINK)
@given(payloads=st.lists(PAYLOADS, min_size=1, max_size=3))
def test_any_bytes_become_records_and_dead_letters(name: str, payloads: list[bytes]) -> None:
    """The same in columns, one by one and bundled otherwise; and a bad part read again is one bad part."""
    format = FORMATS[name]
    found = expanded(format, payloads)
    one_by_one = [part for payload in payloads for part in expanded(format, [payload]).payloads]
    assert found.payloads == one_by_one
    for row, message in found.messages.items():
        again = expanded(format, [message.payload])
        if format.identity()["kind"] not in ("gzip", "separated_values"):  # their bytes are not unique
            assert found.payloads[row] in again.payloads
        assert len(again.refused) >= 1
    copies = 1 + 300 // max(1, len(found.payloads))
    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=found.payloads * copies, refused=[]))
    single = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=found.payloads))
    rows = single.rows.tolist()
    size = len(found.payloads)
    assert decoded.rows.tolist() == [row + copy * size for copy in range(copies) for row in rows]
    if decoded.batch is not None and rows:
        columns = decoded.batch.slice(0, len(rows)).to_pylist()
        objects = single.objects if single.objects is not None else []
        assert not objects or columns == [msgspec.to_builtins(record) for record in objects]


READINGS = st.lists(
    st.builds(
        Reading,
        device=st.text(st.characters(codec="cp1252", exclude_categories=["Cc"]), min_size=1, max_size=8).map(
            lambda text: f"d{text}d"
        ),
        at=st.integers(0, 10**9),
        temperature=st.none() | st.floats(-1e9, 1e9).map(lambda value: value + 0.0),
        ok=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def as_csv(readings: list[Reading]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=";", lineterminator="\n")
    writer.writerow(["ok", "unknown", "device", "temperature", "at"])
    for r in readings:
        temperature = "" if r.temperature is None else repr(r.temperature).replace(".", ",")
        writer.writerow([str(r.ok).lower(), "x", r.device, temperature, f"+0{r.at}"])
    return out.getvalue().encode("cp1252")


def as_lines(readings: list[Reading]) -> bytes:
    lines = []
    for r in readings:
        device = "".join(f"\\{c}" if c in ",= " else c for c in r.device)
        text = r.device.replace("\\", "\\\\").replace('"', '\\"')
        temperature = "" if r.temperature is None else f",temperature={r.temperature!r}"
        lines.append(f'a\\ b,device={device},z=1 ok={str(r.ok)[0]}{temperature},u=5i,s="{text}\n{text}" {r.at}')
    return "\n".join(lines).encode()


def as_map(r: Reading) -> dict[str, Any]:
    return {"device": r.device, "at": r.at, "temperature": r.temperature, "ok": r.ok}


ENCODERS: dict[str, tuple[Format, Any]] = {
    "csv": (Csv(delimiter=";", decimal=",", encoding="cp1252"), as_csv),
    "lines": (LineProtocol(precision="s", time="at"), as_lines),
    "message_pack": (MessagePack(), lambda readings: msgpack.packb([as_map(r) for r in readings])),
    "gzip": (Gzip(Json()), lambda readings: gzip.compress(msgspec.json.encode(readings))),
    "function": (Decode(lambda m: msgspec.json.decode(m.payload, type=list[Reading])), msgspec.json.encode),
    "nested": (
        Json(path="p", many="q.1", envelope={"device": "e"}),
        lambda readings: msgspec.json.encode({"e": "never", "p": {"q": [0, readings]}}),
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=EXAMPLES, deadline=None, phases=NO_SHRINK)
@given(readings=READINGS)
def test_records_of_an_independent_encoder_come_back(name: str, readings: list[Reading]) -> None:
    format, encode = ENCODERS[name]
    found = Expander(format, TYPE, LIMITS).expand([Message(encode(readings))], records_max=10**6, bytes_max=10**9)
    assert found.refused == []
    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=found.payloads))
    assert decoded.objects == readings
    assert np.array_equal(decoded.rows, np.arange(len(readings)))
