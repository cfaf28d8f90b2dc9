"""Small inputs that might cost a lot, by format: each is drawn from a seeded generator, and at most some 300 kB."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from aiokafka.record.default_records import DefaultRecordBatchBuilder

BYTES = 200_000
GOOD = b'{"id":1,"device":"d","at":"2026-01-01T00:00:00Z","value":1.5}'
Generator = Callable[[random.Random], bytes]


def json_text(rng: random.Random) -> bytes:
    """Nested, wide, long or endless JSON; more or less a record."""
    size = rng.choice([100, 5_000, BYTES])
    piece = rng.choice(
        [b"[", b'{"a":', b"[[],", b'{"id":1,"values":[', b'"\\u0000', b"1", b"-", b"\\", b" ", b"\xff", b"[]"]
    )
    text = (piece * (size // len(piece) + 1))[:size]
    around = rng.choice([b"%b", b'{"id":1,"note":"%b"}', b'{"id":%b}', b'{"id":1,"values":[%b]}', b'{"value":1e%b}'])
    return around.replace(b"%b", text)


def lines(rng: random.Random) -> bytes:
    """Lines of JSON, many of them or one."""
    line = rng.choice([json_text(rng), b"{}", b"", b"[]", b"\xff", GOOD, GOOD[:-1], b'{"device":' + b'"x' * 50])
    return (line + rng.choice([b"\n", b"\r\n", b"\n\n"])) * max(1, BYTES // (len(line) + 1))


def table(rng: random.Random) -> bytes:
    """CSV of any quoting, under few or very many columns."""
    tokens = [b'"', b'""', b",", b"\n", b"a", b"\r\n", b'"a","b\n', b'"a"b', b" ", b"1", b'","']
    piece = b"".join(rng.choices(tokens, k=rng.choice([1, 2, 3, 8]))) + rng.choice([b"", b"\n"])
    extra = b"".join(b",c%d" % number for number in range(rng.choice([0, 0, 3_000])))
    return b"id,device,at,value,note" + extra + b"\n" + piece * (BYTES // len(piece))


def zipped(rng: random.Random) -> bytes:
    """gzip of lines, of zeros, of one endless line; once or in many members."""
    inside = rng.choice([lines(rng), bytes(BYTES), b"a" * 50_000_000, b"\n" * 3_000_000, b"{" * 20_000_000])
    times = max(1, rng.choice([1, 20]) * BYTES // max(BYTES, len(inside)))
    return gzip.compress(inside, compresslevel=6) * times


def parquet(rng: random.Random) -> bytes:
    """Build a file whose pages, dictionaries, footers or row groups claim more than they have."""
    kind = rng.choice(PARQUET)
    out = io.BytesIO()
    PARQUET_OF[kind](out, rng)
    return out.getvalue()


def _columns(rows: int, **columns: Any) -> pa.Table:
    base = {
        "id": pa.array([1] * rows), "device": pa.array(["d"] * rows), "value": pa.array([1.5] * rows),
        "at": pa.array([1_767_225_600_000_000] * rows, pa.timestamp("us", "UTC")),
    }  # fmt: skip
    return pa.table(base | columns)


def _long_text(out: io.BytesIO, rng: random.Random, **options: Any) -> None:
    rows, size = rng.choice([(2_000, 900_000), (60_000, 60_000), (500, 4_000_000)])
    text = pa.array(["x" * size])
    note = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), text)
    if options:  # written out once, and cut to what the writer can hold
        note = pa.array(["x" * 20_000] * min(rows, 5_000))
    pq.write_table(_columns(len(note), note=note), out, compression="zstd", **options)


def _page_of_zeros(out: io.BytesIO, rng: random.Random) -> None:
    rows = rng.choice([4_000_000, 20_000_000])
    ids = pa.array(memoryview(bytes(8 * rows)).cast("q"))
    pq.write_table(
        pa.table({"id": ids}), out, compression="zstd", use_dictionary=False, data_page_size=10**9,
        row_group_size=rows, write_batch_size=rows, max_rows_per_page=rows,
    )  # fmt: skip


def _same_rows(out: io.BytesIO, rng: random.Random) -> None:
    pq.write_table(_columns(100_000), out, compression="zstd", row_group_size=100_000)


def _footer(out: io.BytesIO, rng: random.Random) -> None:
    which = rng.randrange(3)
    if which == 0:
        found = _columns(1, **{f"c{number}": pa.array([1]) for number in range(1_500)})
        pq.write_table(found, out)
    elif which == 1:
        pq.write_table(_columns(400), out, row_group_size=1)
    else:
        pq.write_table(_columns(1).replace_schema_metadata({"k": "x" * BYTES}), out)


def _lists(out: io.BytesIO, rng: random.Random) -> None:
    rows, each = rng.choice([(1, 10_000_000), (10, 10_000_000), (60_000, 1_000), (2_000, 500)])
    ends = pa.array(range(0, rows * each + 1, each), pa.int32())
    if rng.randrange(2):
        values = pa.ListArray.from_arrays(ends, pa.array(np.full(rows * each, 7, np.int64)))
        pq.write_table(_columns(rows, values=values), out, compression="zstd")
    else:
        names = pa.array(np.zeros(rows * each, np.int32))
        texts = pa.DictionaryArray.from_arrays(names, ["x" * rng.choice([10, 10_000])])
        plain = pa.ListArray.from_arrays(ends, texts)
        pq.write_table(_columns(rows, texts=plain), out, compression="zstd", store_schema=bool(rng.randrange(2)))


def _damaged(out: io.BytesIO, rng: random.Random) -> None:
    inside = io.BytesIO()
    rng.choice([_long_text, _same_rows, _footer])(inside, rng)
    data = bytearray(inside.getvalue())
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(len(data))] = rng.choice([0, 0x7F, 0xFF, rng.randrange(256)])
    out.write(data)


PARQUET_OF: dict[str, Callable[[io.BytesIO, random.Random], None]] = {
    "dictionary": _long_text,
    "delta": lambda out, rng: _long_text(out, rng, use_dictionary=False, column_encoding={"note": "DELTA_BYTE_ARRAY"}),
    "zeros": _page_of_zeros,
    "same": _same_rows,
    "footer": _footer,
    "lists": _lists,
    "damaged": _damaged,
}
PARQUET = sorted(PARQUET_OF)


def message(rng: random.Random) -> bytes:
    """A topic and a payload; arrays under long topics."""
    topic = b"plant/" + rng.choice([b"d", b"x" * 60_000, b"\x01" * 60_000, b'"' * 1_000, b"/" * 60_000])
    element = rng.choice([b"{}", b"1", b"[]", b'""', GOOD, b"[[[[]]]]", b'{"a":{}}'])
    array = b"[" + b",".join([element] * (BYTES // (len(element) + 1))) + rng.choice([b"]", b"", b",]"])
    return topic + b"\n" + rng.choice([array, array, json_text(rng)])


def fetch(rng: random.Random) -> bytes:
    """Batches as Kafka has them: few bytes of records of many or of many bytes."""
    count, codec = rng.randint(1, 12), rng.choice([1, 3, 4])
    rows: list[tuple[bytes, list[tuple[str, bytes | None]]]] = rng.choice(
        [
            [(bytes(40_000_000), [])],
            [(bytes(30_000_000), [])] * 3,
            [(b"{}", [("", None)] * 1_000_000)],
            [(b"", [])] * 100_000,
            [(GOOD, [])] * 2_000,
        ]
    )
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1,
        batch_size=10**9,
    )  # fmt: skip
    for offset, (value, headers) in enumerate(rows):
        builder.append(offset, timestamp=0, key=None, value=value, headers=headers)
    batch = bytes(builder.build())
    data = b"".join(struct.pack(">q", number * len(rows)) + batch[8:] for number in range(count))
    return struct.pack(">q", count * len(rows)) + data


FORMATS: dict[str, tuple[str, str, Generator]] = {
    "json": ("file", "ndjson", lambda rng: json_text(rng) + b"\n"),
    "lines": ("file", "ndjson", lines),
    "gzip": ("file", "ndjson.gz", zipped),
    "csv": ("file", "csv", table),
    "csv gzip": ("file", "csv.gz", lambda rng: gzip.compress(table(rng))),
    "parquet": ("file", "parquet", parquet),
    "mqtt": ("mqtt", "mqtt", message),
    "kafka": ("kafka", "kafka", fetch),
}


def described(data: bytes) -> str:
    """The beginning of an input, for a failure."""
    return json.dumps(repr(data[:120]))
