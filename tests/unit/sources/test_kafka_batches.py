"""Each offset of any fetch is a record or is named as unreadable, once and in order."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.sources.kafka.batch_columns import BATCH_RECORDS_MIN
from millpy.sources.kafka.batches import FETCHED_BYTES_MAX, Batches, FetchedRecords
from millpy.sources.kafka.expansion import EXPANDED_BYTES_MAX, bound_legacy_expansion
from millpy.sources.kafka.record_columns import RecordColumns, UnreadableRecord

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
Header = tuple[str, bytes | None]
Rows = Sequence[tuple[bytes, Sequence[Header]]]


def a_batch(codec: str, rows: Rows) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=CODECS[codec], is_transactional=0, producer_id=-1, producer_epoch=-1,
        base_sequence=-1, batch_size=10**9,
    )  # fmt: skip
    for offset, (value, headers) in enumerate(rows):
        builder.append(offset, timestamp=0, key=None, value=value, headers=list(headers))
    return bytes(builder.build())


def sealed(batch: bytes) -> bytes:
    """With the right checksum."""
    return batch[:17] + struct.pack(">I", calc_crc32c(batch[21:])) + batch[21:]


def rewritten(batch: bytes, place: int, layout: str, value: int) -> bytes:
    size = struct.calcsize(layout)
    return sealed(batch[:place] + struct.pack(layout, value) + batch[place + size :])


def plain(codec: str, values: Sequence[bytes]) -> bytes:
    return a_batch(codec, [(value, ()) for value in values])


def with_a_bad_name(codec: str, values: Sequence[bytes]) -> bytes:
    rows: list[tuple[bytes, Sequence[Header]]] = [(value, [("site", b"v")]) for value in values]
    rows[len(rows) // 2] = (values[len(rows) // 2], [("qqzz", b"v")])
    batch = a_batch("none", rows).replace(b"qqzz", b"\xff\xfe\xff\xfe")  # the builder writes text only
    return _of_payload(codec, _COMPRESSED[codec](batch[61:]), len(values))


# Batches of WHOLE yield all of their values, those of BROKEN none.
WHOLE: dict[str, Callable[[str, Sequence[bytes]], bytes]] = {
    "plain": plain,
    "bad header name": with_a_bad_name,
    "more records than there are": lambda codec, values: rewritten(plain(codec, values), 57, ">i", 2**31 - 1),
}
BROKEN: dict[str, Callable[[str, Sequence[bytes]], bytes]] = {
    "bomb": lambda codec, values: _bomb(),
    "not compressed": lambda codec, values: rewritten(plain("none", values), 21, ">h", CODECS[codec]),
    "unknown compression": lambda codec, values: rewritten(plain("none", values), 21, ">h", 6),
    "cut inside": lambda codec, values: sealed(
        (whole := plain(codec, values))[:8] + struct.pack(">i", len(whole) - 13) + whole[12:-1]
    ),
    "checksum": lambda codec, values: plain(codec, values)[:-1] + b"\x7f\x7f",
    "snappy that lies": lambda codec, values: _of_payload("snappy", b"\xff\xff\xff\xff\x0f" + b"x" * 40, len(values)),
    "snappy of bad blocks": lambda codec, values: _of_payload(
        "snappy", b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, -5) + b"x" * 40, len(values)
    ),
    "many headers": lambda codec, values: _many_headers(),
}


@cache
def _bomb() -> bytes:
    return plain("zstd", [bytes(EXPANDED_BYTES_MAX // 4)] * 5)


@cache
def _many_headers() -> bytes:
    return a_batch("zstd", [(b"1", [("", None)] * 600_000)])


_COMPRESSED = {
    "none": bytes, "gzip": gzip_encode, "snappy": snappy_encode, "lz4": lz4_encode, "zstd": zstd_encode
}  # fmt: skip


def _of_payload(codec: str, payload: bytes, count: int) -> bytes:
    head = plain("none", [b"1"] * count)[:61]
    batch = head[:8] + struct.pack(">i", 49 + len(payload)) + head[12:] + payload
    return rewritten(batch, 21, ">h", CODECS[codec])


def a_log(batches: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """Build batches with consecutive offsets; return them with their first offsets."""
    found, begins, offset = [], [], 0
    for batch in batches:
        found.append(struct.pack(">q", offset) + batch[8:])
        begins.append(offset)
        offset += struct.unpack_from(">i", batch, 23)[0] + 1
    return found, [*begins, offset]


@dataclass
class Record:
    offset: int
    value: bytes | None
    headers: Sequence[Header]


def records_of(run: RecordColumns) -> list[Any]:
    headers = run.headers or [()] * len(run)
    return [
        run.unreadable.get(row) or Record(offset, run.values[row], headers[row])
        for row, offset in enumerate(run.offsets.tolist())
    ]


def fetched(batches: list[bytes], begins: list[int], many: int = 100_000) -> Iterator[list[Any]]:
    """As aiokafka's consumer reads: again and again from where it is, `many` runs at a time."""
    offset = 0
    while offset < begins[-1]:
        first = next(i for i in range(len(batches)) if begins[i + 1] > offset)
        place = TopicPartition("t", 0)
        records = FetchedRecords(place, Batches(b"".join(batches[first:])), [], offset, None, None, True, 1)
        found: list[Any] = []
        while True:
            runs = list(itertools.islice(records, many))
            found += [record for run in runs for record in records_of(run)]
            if len(runs) < many:
                break
        assert records.next_fetch_offset > offset, "nothing moves"
        offset = records.next_fetch_offset
        yield found


@pytest.fixture(autouse=True)
def bounded() -> None:
    bound_legacy_expansion()


kinds = st.tuples(st.sampled_from([*WHOLE, *BROKEN]), st.sampled_from(sorted(CODECS)), st.integers(1, 4))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(kinds, min_size=1, max_size=6),
    st.sampled_from([1, 3, 100_000]),
    st.sampled_from([1, 2, 8_192]),
    st.sampled_from([1, BATCH_RECORDS_MIN]),
)
def test_every_offset_is_a_record_or_is_named(
    chosen: list[tuple[str, str, int]], many: int, run: int, as_columns: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millpy.sources.kafka.batch_columns.BATCH_RECORDS_MIN", as_columns)
        patch.setattr("millpy.sources.kafka.batches.RUN_RECORDS", run)
        patch.setattr("millpy.sources.kafka.batches._PART_RECORDS", run)
        patch.setattr("millpy.sources.kafka.batches._LARGE_PART_RECORDS", run)
        check_every_offset(chosen, many)


def check_every_offset(chosen: list[tuple[str, str, int]], many: int) -> None:
    made, expected, offset = [], {}, 0
    for number, (kind, codec, count) in enumerate(chosen):
        values = [b"%d.%d" % (number, k) for k in range(count)]
        made.append({**WHOLE, **BROKEN}[kind](codec, values))
        size = struct.unpack_from(">i", made[-1], 23)[0] + 1
        if kind in WHOLE:
            expected |= dict(zip(range(offset, offset + count), values, strict=True))
        offset += size
    batches, begins = a_log(made)

    found = [record for part in fetched(batches, begins, many) for record in part]

    place = 0
    for record in found:
        first = record.first if isinstance(record, UnreadableRecord) else record.offset
        assert first == place
        place = record.offset + 1
    assert place == begins[-1]
    given = {record.offset: record.value for record in found if not isinstance(record, UnreadableRecord)}
    assert {offset: given[offset] for offset in expected} == expected


@pytest.mark.parametrize("kind", BROKEN)
def test_unreadable_record_is_named_and_its_neighbors_are_read(kind: str) -> None:
    batches, begins = a_log([plain("zstd", [b"a", b"b"]), BROKEN[kind]("gzip", [b"c"] * 3), plain("none", [b"d"])])

    parts = list(fetched(batches, begins))
    found = [record for part in parts for record in part]

    values = [record.value for record in found if not isinstance(record, UnreadableRecord)]
    unreadable = [record for record in found if isinstance(record, UnreadableRecord)]
    assert (values[:2], values[-1]) == ([b"a", b"b"], b"d")
    assert len(unreadable) == 1
    assert unreadable[0].damaged == (kind == "checksum")
    assert unreadable[0] == parts[0][-1] or not unreadable[0].damaged, "what follows is fetched after another attempt"
    assert unreadable[0].detail.startswith("a batch of ")


def test_fetch_holds_a_bounded_number_of_bytes_however_small_it_was() -> None:
    # 600 records of 60 MB, each well within the bound of a batch, are 4 MB of zstd.
    size = EXPANDED_BYTES_MAX - 1_000_000
    batches, begins = a_log([plain("zstd", [bytes(size)])] * 6)
    assert sum(map(len, batches)) < 100_000
    tracemalloc.start()
    try:
        found = 0
        for part in fetched(batches, begins):
            assert sum(len(record.value) for record in part) <= FETCHED_BYTES_MAX + EXPANDED_BYTES_MAX
            found += len(part)
            del part
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == 6
    assert peak < 5 * EXPANDED_BYTES_MAX


def test_header_name_that_is_not_text_is_harmless() -> None:
    values = [b"%d" % number for number in range(7)]
    batches, begins = a_log([with_a_bad_name("none", values)])

    found = [record for part in fetched(batches, begins) for record in part]

    assert [record.value for record in found] == values
    assert tuple(found[3].headers) == (("\ufffd" * 4, b"v"),)
    assert tuple(found[4].headers) == (("site", b"v"),)


def test_record_with_too_many_headers_is_rejected_and_its_neighbors_are_read() -> None:
    rows: list[tuple[bytes, Sequence[Header]]] = [(b"1", ()), (b"2", [("", None)] * 2_000_000), (b"3", ())]
    batches, begins = a_log([a_batch("zstd", rows)])
    tracemalloc.start()
    try:
        found = [record for part in fetched(batches, begins) for record in part]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert [(record.offset, record.value) for record in found] == [(0, b"1"), (1, None), (2, b"3")]
    assert peak < 40_000_000  # 2 million tuples are 150 MB
