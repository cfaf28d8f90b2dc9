"""The partition of a key, by the published values of the clients that choose it so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millpy import KafkaTopic
from millpy.errors import ConfigError, SinkUnavailableError
from millpy.sinks.kafka.partitioning import partition_of

MANY = 2**31 - 1
OF_JAVA = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
"""Of org.apache.kafka.common.utils.Utils.murmur2, in its own test."""
OF_GO = {b"kafka": 0xD33C4E1, b"giberish123456789": 0x77A58295, b"1234": 0x23BDD03, b"234": 0x2DEA3CD2, b"": 0x7EE3623B}
"""Of Go's hash/fnv, in librdkafka's test of its `fnv1a`."""
OF_ZIP = {b"123456789": 0xCBF43926, b"": 0}
"""The check value of CRC-32, which librdkafka divides by the number of partitions."""


@pytest.mark.parametrize("count", [1, 7, 100, MANY])
def test_partitions_are_those_of_other_clients(count: int) -> None:
    for key, hashed in OF_JAVA.items():
        assert partition_of("murmur2", key, count) == (hashed & 0x7FFFFFFF) % count
    for key, hashed in OF_GO.items():
        assert partition_of("fnv1a", key, count) == hashed % count
    for key, hashed in OF_ZIP.items():
        assert partition_of("crc32", key, count) == hashed % count


def test_a_function_chooses_the_partition() -> None:
    assert partition_of(lambda key, count: key[0] % count, b"abc", 5) == 97 % 5
    assert partition_of(lambda key, count: np.int64(count - 1), b"", 5) == 4  # type: ignore[arg-type,return-value]


class HarmfulError(BaseException):
    def __str__(self) -> str:
        raise ValueError


def raises(error: BaseException) -> Any:
    def partitioner(key: bytes, count: int) -> int:
        raise error

    return partitioner


@pytest.mark.parametrize(
    ("partitioner", "said"),
    [
        (lambda key, count: count, "returned 3 for key b'k', and not a partition from 0 to 2"),
        (lambda key, count: -1, "returned -1 for key"),
        (lambda key, count: True, "returned True for key"),
        (lambda key, count: None, "the partitioner failed for key b'k'"),
        (lambda key, count: 1.0, "the partitioner failed for key b'k'"),
        (lambda key: 1, "the partitioner failed for key b'k'"),
        (raises(KeyError("hall")), "KeyError: 'hall'"),
        (raises(HarmfulError()), "the partitioner failed for key b'k'"),
        (raises(SystemExit(3)), "the partitioner failed for key b'k'"),
    ],
)
def test_a_function_that_chooses_none_is_an_outage_that_says_so(partitioner: Any, said: str) -> None:
    with pytest.raises(SinkUnavailableError) as error:
        partition_of(partitioner, b"k", 3)

    assert said in error.value.message
    assert "correct the function" in (error.value.hint or "")


@pytest.mark.parametrize("partitioner", ["random", None, 3])
def test_an_unknown_partitioner_is_refused(partitioner: Any) -> None:
    with pytest.raises(ConfigError, match="choose one of murmur2, crc32, fnv1a"):
        KafkaTopic("t", partitioner=partitioner)
    assert KafkaTopic("t", partitioner="crc32").identity() == KafkaTopic("t").identity()
