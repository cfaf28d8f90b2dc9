"""The position of a Kafka partition, as our commits store it."""

from __future__ import annotations

from uuid import UUID

import msgspec


class KafkaPosition(msgspec.Struct, frozen=True):
    """The position at which reading resumes.

    Attributes:
        offset: the offset of the next record.
        begun: the instant of `--from` when reading began.
        topic_id: the id of the topic to which the offset belongs; None if the broker has told none. A topic that is
            deleted and created again has another one.
    """

    offset: int
    begun: int | None = None
    topic_id: UUID | None = None
