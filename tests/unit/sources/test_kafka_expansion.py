from __future__ import annotations

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from millpy.sources.kafka.expansion import EXPANDED_BYTES_MAX, ExpansionError, without_compression

CODECS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def a_batch(codec: str, values: list[bytes]) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=CODECS[codec], is_transactional=0, producer_id=-1, producer_epoch=-1,
        base_sequence=-1, batch_size=10**9,
    )  # fmt: skip
    for offset, value in enumerate(values):
        builder.append(offset, timestamp=0, key=None, value=value, headers=[])
    return bytes(builder.build())


def values_of(codec: str, batch: bytes) -> list[bytes]:
    plain = DefaultRecordBatch(without_compression(batch, codec))
    assert plain.compression_type == 0
    return [record.value for record in plain]


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_batches_are_read_as_they_were_written(codec: str) -> None:
    values = [b"%d" % number * 100 for number in range(2_000)]

    assert values_of(codec, a_batch(codec, values)) == values


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd"])
def test_batch_that_would_expand_too_far_is_refused_in_time(codec: str) -> None:
    # 16.5 kB of zstd became a gigabyte.
    bomb = a_batch(codec, [bytes(EXPANDED_BYTES_MAX // 4)] * 5)
    assert len(bomb) < 2_000_000

    with pytest.raises(ExpansionError, match="expands to more than"):
        values_of(codec, bomb)


def test_bytes_with_a_wrong_compression_are_refused() -> None:
    batch = bytearray(a_batch("zstd", [b"x" * 1_000]))
    batch[70] ^= 0xFF

    with pytest.raises(ExpansionError, match="is not valid zstd"):
        values_of("zstd", bytes(batch))
