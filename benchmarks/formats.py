"""The payload formats, without a database: records a CPU second that are expanded, decoded and dated, by format.

Each format gets the same readings, as an independent encoder writes them: messages of 100, of one where a message holds
one. `plain` is JSON without a format, which is decoded as columns. The last line is JSON; figures are medians.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cbor2
import fastavro
import msgpack
import msgspec

from benchmarks.harness import commit_hash
from millpy import Avro, Cbor, Csv, Gzip, Json, LineProtocol, MessagePack, Scalar
from millpy.formats import Format, Message
from millpy.ingest.decode import Decoder
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant

OF_MESSAGE, BUNDLE = 100, 10_000
NOW = Instant(1_700_000_000_000_000)


class Reading(msgspec.Struct):
    device: str
    at: int
    temperature: float | None = None
    ok: bool = True


Rows = Sequence[Mapping[str, Any]]
FIELDS = [("device", "string"), ("at", "long"), ("temperature", "double"), ("ok", "boolean")]
SCHEMA = {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in FIELDS]}
SEVERAL = {"type": "record", "name": "S", "fields": [{"name": "a", "type": {"type": "array", "items": SCHEMA}}]}


def as_csv(rows: Rows) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=";")
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow([str(value).lower().replace(".", ",") for value in row.values()])
    return out.getvalue().encode()


def as_lines(rows: Rows) -> bytes:
    return "\n".join(
        f"room,device={row['device']} temperature={row['temperature']},ok={row['ok']} {row['at']}" for row in rows
    ).encode()


def as_avro(rows: Rows) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(SEVERAL), {"a": list(rows)})
    return out.getvalue()


def as_json(rows: Rows) -> bytes:
    return json.dumps(rows).encode()


FORMATS: Mapping[str, tuple[Format | None, int, Callable[[Rows], bytes]]] = {
    "plain": (None, 1, lambda rows: json.dumps(rows[0]).encode()),
    "json": (Json(), OF_MESSAGE, as_json),
    "json_nested": (
        Json(path="p", many="q", envelope={"device": "e"}),
        OF_MESSAGE,
        lambda rows: json.dumps({"e": "hall", "p": {"q": rows}}).encode(),
    ),
    "scalar": (Scalar("temperature", arrival="at"), 1, lambda rows: str(rows[0]["temperature"]).encode()),
    "csv": (Csv(delimiter=";", decimal=","), OF_MESSAGE, as_csv),
    "line_protocol": (LineProtocol(precision="s", time="at"), OF_MESSAGE, as_lines),
    "message_pack": (MessagePack(), OF_MESSAGE, msgpack.packb),
    "cbor": (Cbor(), OF_MESSAGE, cbor2.dumps),
    "avro": (Avro(SEVERAL, inside=Json(many="a")), OF_MESSAGE, as_avro),
    "gzip": (Gzip(Json()), OF_MESSAGE, lambda rows: gzip.compress(as_json(rows))),
}


def seconds_of(format: Format | None, payloads: Sequence[bytes], records: int) -> float:
    """Return the CPU seconds in which these payloads become records, a bundle at a time."""
    record_type, limits = RecordType(Reading), Limits()
    decoder = Decoder(record_type)
    expander = None if format is None else Expander(format, record_type, limits)
    started, found = time.process_time(), 0
    for lo in range(0, len(payloads), BUNDLE):
        part = list(payloads[lo : lo + BUNDLE])
        if expander is not None:
            messages = [Message(payload, "hall/1", arrived_at=NOW, ending=b',"device":"hall"}') for payload in part]
            expanded = expander.expand(messages, records_max=10**9, bytes_max=10**12)
            assert not expanded.refused, expanded.refused[0]
            part = list(expanded.payloads)
        decoded = decoder.decode(SourceBatch("json", NOW, payloads=part))
        assert not decoded.refused, decoded.refused[0]
        found += len(decoded.rows)
    assert found == records, (found, records)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    chance = random.Random(1)
    names, at = [f"d{number}" for number in range(1_000)], 1_700_000_000
    rows = [
        {"device": names[n % 1_000], "at": at + n // 1_000, "temperature": chance.randint(0, 9_999) / 64, "ok": True}
        for n in range(options.records)
    ]
    rates = {}
    for name, (format, size, encode) in FORMATS.items():
        payloads = [encode(rows[lo : lo + size]) for lo in range(0, len(rows), size)]
        taken = [seconds_of(format, payloads, len(rows)) for _ in range(options.times)]
        rates[f"{name}_per_cpu_s"] = round(len(rows) / statistics.median(taken))
        print(f"{name:15s} {rates[f'{name}_per_cpu_s']:12,.0f}", flush=True)
    print(json.dumps({"workload": "formats", "commit": commit_hash(), **rates}))


if __name__ == "__main__":
    main()
