"""The position of a Kafka partition, as our commits store it."""

from __future__ import annotations

import msgspec


class KafkaPosition(msgspec.Struct, frozen=True):
    """The position at which reading resumes; `begun` is the instant of `--from` when reading began."""

    offset: int
    begun: int | None = None
