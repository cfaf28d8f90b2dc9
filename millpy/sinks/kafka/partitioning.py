"""Which partition a key belongs to, as the clients of other languages choose it, or a function of the user.

murmur2   Kafka's own clients (Java), kafka-python, aiokafka
crc32     librdkafka's default, `consistent_random`: C, Python's confluent-kafka, .NET, Go's confluent-kafka-go
fnv1a     Sarama (Go), and librdkafka's `fnv1a`
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable

from aiokafka.partitioner import murmur2

from millpy.errors import SinkUnavailableError
from millpy.model.dead_letter import error_text
from millpy.model.step_progress import is_user_error
from millpy.sinks.kafka.topic import Partitioner

_FNV_OFFSET, _FNV_PRIME = 0x811C9DC5, 0x01000193


def partition_of(partitioner: Partitioner, key: bytes, count: int) -> int:
    """Return the partition of a key among `count`.

    Raises:
        SinkUnavailableError: the user's function raised, or returned no partition.
    """
    if isinstance(partitioner, str):
        return _HASHES[partitioner](key) % count
    try:
        found = partitioner(key, count)
        number = operator.index(found)
    except BaseException as error:  # a user's function may raise anything
        if not is_user_error(error):
            raise
        raise SinkUnavailableError(
            f"the partitioner failed for key {key[:100]!r}: {error_text(error)}", hint=_HINT
        ) from error
    if isinstance(found, bool) or not 0 <= number < count:
        raise SinkUnavailableError(
            f"the partitioner returned {found!r} for key {key[:100]!r}, and not a partition from 0 to {count - 1}",
            hint=_HINT,
        )
    return number


_HINT = "correct the function, and deploy the graph again; nothing is lost, and what is behind the message waits"


def _fnv1a(key: bytes) -> int:
    found = _FNV_OFFSET
    for byte in key:
        found = (found ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return 2**32 - found if found >= 2**31 else found  # the absolute value of a signed number


_HASHES: dict[str, Callable[[bytes], int]] = {
    "murmur2": lambda key: murmur2(key) & 0x7FFFFFFF,
    "crc32": zlib.crc32,
    "fnv1a": _fnv1a,
}
