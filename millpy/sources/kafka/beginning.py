"""The beginning of a Kafka partition: does it exist, where does reading begin, and is that offset still there?"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.model.time import Instant, instant
from millpy.sources.kafka.client import Client
from millpy.sources.kafka.source import Kafka, Start
from millpy.sources.kafka.topic_ids import TopicMetadata

PARTITIONS_MAX = 1_000
"""The most partitions to which a deployed source grows by itself."""


class NotThereError(SourceUnavailableError):
    """The broker says that the partition does not exist."""


async def look(client: Client, source: Kafka, setup: SourceSetup, tell: Callable[[str, str], None]) -> TopicMetadata:
    """Check that a partition exists, and return the topic's metadata; its first one reports a topic that has grown.

    Raises:
        NotThereError: the partition does not exist.
        SourceUnavailableError: no broker answers.
        ConfigError: we may not see the topic.
    """
    number = int(setup.partition.rpartition("/")[2])
    found = await client.topic()
    topic, there = source.topic, found.partitions
    if there <= number:
        has = f"has {there} partitions" if there else "does not exist"
        raise NotThereError(f"cannot read {setup.partition}: topic {topic!r} {has}")
    if number == 0 and there > source.count and not _are_added(source, setup, there):
        tell(
            "source_grown", f"topic {topic!r} has {there} partitions, but the graph reads {source.count}: "
            f"deploy with Kafka({topic!r}, partitions={there})",
        )  # fmt: skip
    return found


def _are_added(source: Kafka, setup: SourceSetup, there: int) -> bool:
    """Let the worker add the new partitions of the topic, if the source says so and they are not too many."""
    if source.new_partitions != "read" or there > PARTITIONS_MAX:
        return False
    return setup.gained([source.partition(number) for number in range(there)])


def begins(source: Kafka, setup: SourceSetup) -> Start | Instant:
    """Return where to begin a partition without a committed offset."""
    start = source.start if setup.start is None else setup.start
    return "earliest" if start == "latest" and setup.joined else start


async def first_offset(client: Client, begin: Start | Instant, oldest: int, end: int) -> int:
    """Return the offset at which a partition without a committed offset begins."""
    if begin == "earliest":
        return oldest
    if begin == "latest":
        return end
    at = instant(begin) if isinstance(begin, datetime) else Instant(int(begin))
    found = await client.at_time(-(-at // 1_000))
    return end if found is None else found  # the earlier end: later records may have this timestamp


def gone(partition: str, offset: int, oldest: int, end: int) -> str:
    """Say that an offset is not in the log."""
    return f"{partition}: offset {offset} is gone, the log holds {oldest} to {end}"


def check_lost(source: Kafka, text: str, why: str = "retention deleted it") -> None:
    """Let the source continue at the oldest offset if that is its policy.

    Raises:
        ConfigError: it is not.
    """
    if source.lost == "stop":
        raise ConfigError(
            f"{text}: {why}",
            hint='resume at the oldest offset with Kafka(…, lost="continue"), or start a new graph',
        )


def replaced(partition: str, topic: str, offset: int) -> str:
    """Say that an offset belongs to a topic that no longer exists."""
    return f"{partition}: offset {offset} is gone, topic {topic!r} was deleted and created again"
