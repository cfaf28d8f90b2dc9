"""Sources as a streaming query reads them: from the committed position, batch by batch.

FileSource         stays open between batches, in the Python worker that has read it last
KafkaRange         is opened for each batch, and takes what a repeated batch takes again (`stream_offsets`)
ArchivePartition   lists the archive in each batch (`archive_stream`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from millpy.clock import SystemClock
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.graph import InjectorNode
from millpy.hosting.interval_state import IntervalState
from millpy.hosting.plan import ComputationPlan
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.model.time import Instant
from millpy.sources.files.source import Directory
from millpy.sources.kafka.position import KafkaPosition
from millpy.sources.kafka.source import Kafka
from millpy.spark.archive_input import FollowedArchive
from millpy.spark.job import HostedPlan
from millpy.spark.stream_offsets import OffsetLog, TakenRange

SOURCE_WAIT_S = 0.5
"""How long a source task waits for a source that may have something."""
SOURCE_LOOK_S = 0.05
"""How long it looks before it believes a source that says it has nothing."""
OPEN_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class SourceTurn:
    """The bounds of one batch.

    Attributes:
        batch: its number.
        now_us: its processing time.
        bundles_max: the number of bundles that a source partition may give.
        until: the position at which a query ends that reads what there was at its start; None without, or not known.
        log: what batches have taken.
    """

    batch: int
    now_us: Instant
    bundles_max: int
    until: int | None
    log: OffsetLog


class SourceNews(msgspec.Struct, frozen=True):
    """What a source partition has to say after a batch.

    Attributes:
        until: the position behind everything that there was; None if it has none.
        drained: whether the source has given everything up to there, or had nothing more.
        told: what people must know.
    """

    until: int | None = None
    drained: bool = False
    told: list[str] = []


NOTHING = SourceNews()


class StreamSource(Protocol):
    """A source partition.

    Attributes:
        is_quiet: whether the source had nothing more, and has said so, at the end of the last batch.
    """

    is_quiet: bool

    @property
    def news(self) -> SourceNews:
        """What there is to say after the last batch."""
        ...

    def batches(self, turn: SourceTurn) -> Iterator[SourceBatch]:
        """Yield what the source has, until it has nothing or has ended."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


def source_of(hosted: HostedPlan, of: ComputationPlan, interval: IntervalState) -> StreamSource:
    """Return the source of an interval, not yet open."""
    assert isinstance(of.node, InjectorNode)
    if isinstance(of.node.source, FollowedArchive):
        from millpy.spark.archive_stream import ArchivePartition

        source, limits = of.node.source, hosted.job.limits
        known = [f"{of.name}/{partition}" for partition in source.partitions()]
        partition = f"{of.name}/{interval.deployed.partition}"
        return ArchivePartition(source.history, partition, known, interval, of.node.record_type, limits)
    if isinstance(of.node.source, Kafka):
        return KafkaRange(of.node.source, hosted, of, interval)
    return FileSource(hosted, of, interval)


class _BatchClock(SystemClock):
    """A clock that stays at the time of the batch."""

    now = Instant(0)

    def now_us(self) -> Instant:
        return self.now


def _setup_of(
    hosted: HostedPlan, of: ComputationPlan, interval: IntervalState, clock: _BatchClock, told: dict[str, str]
) -> SourceSetup:
    assert isinstance(of.node, InjectorNode)
    assert interval.intake is not None
    return SourceSetup(
        graph=hosted.plan.permanent_name,
        stream=of.name,
        partition=interval.deployed.partition,
        limits=hosted.job.limits,
        clock=clock,
        ready=asyncio.Event(),
        record_type=of.node.record_type,
        notes=interval.intake.notes,
        deduplicated=of.keeps_runs,
        tell=lambda kind, detail: told.update({kind: str(detail["what"])} if "what" in detail else {}),
    )


class FileSource:
    """A source of files, whose loop runs only during batches."""

    def __init__(self, hosted: HostedPlan, of: ComputationPlan, interval: IntervalState) -> None:
        assert isinstance(of.node, InjectorNode)
        self.is_quiet = False
        self._clock = _BatchClock()
        self._runner = asyncio.Runner()
        setup = _setup_of(hosted, of, interval, self._clock, {})
        self._ready = setup.ready
        self._injector = of.node.source.connect(setup)
        assert interval.intake is not None
        interval.intake.source_opened()
        self._position = interval.intake.position
        self._is_open = False
        self._patience_s = SOURCE_WAIT_S
        if isinstance(of.node.source, Directory):
            # A file settles while this process looks at it, and the next batch may be another process's.
            self._patience_s += (of.node.source.settle + of.node.source.every).total_seconds()

    @property
    def news(self) -> SourceNews:
        """Whether the source had nothing more."""
        return SourceNews(drained=self.is_quiet)

    def batches(self, turn: SourceTurn) -> Iterator[SourceBatch]:
        """Yield what the source has, until it has nothing or has ended."""
        self._clock.now = turn.now_us
        if not self._is_open:
            self._runner.run(self._injector.open(self._position))
            self._is_open = True
        for _ in range(turn.bundles_max):
            taken = self._runner.run(self._next())
            if taken is None:
                return
            yield taken
            if taken.finished:
                return

    async def _next(self) -> SourceBatch | None:
        end, self._patience_s = self._clock.monotonic() + self._patience_s, SOURCE_WAIT_S
        while True:
            self._ready.clear()
            if (taken := await self._injector.take()) is not None:
                return taken
            with suppress(TimeoutError):
                async with asyncio.timeout(SOURCE_LOOK_S):
                    await self._ready.wait()
            if self._injector.quiet() or self._clock.monotonic() >= end:
                break
        taken = await self._injector.take()
        self.is_quiet = taken is None and self._injector.quiet()
        return taken

    def close(self) -> None:
        """Disconnect."""
        if self._is_open:
            self._runner.run(self._injector.close())
        self._runner.close()


@dataclass(slots=True)
class KafkaRange:
    """A partition of a topic: of each batch the records up to the end that the broker names when the batch begins.

    While no broker answers, batches have no records of it, and the news say why.
    """

    source: Kafka
    hosted: HostedPlan
    of: ComputationPlan
    interval: IntervalState
    is_quiet: bool = False
    _news: SourceNews = NOTHING

    @property
    def news(self) -> SourceNews:
        """What there is to say after the last batch."""
        return self._news

    def batches(self, turn: SourceTurn) -> Iterator[SourceBatch]:
        """Yield bundles, at most up to the end; of a repeated batch the same.

        Raises:
            SourceUnavailableError: the records of a repeated batch cannot be read now.
            ConfigError: the broker rejects us; or records are gone that were read before, and `lost="stop"`.
        """
        from millpy.sources.kafka.range_reader import KafkaRangeReader

        interval = self.interval
        assert interval.intake is not None
        before = interval.intake.position
        logged = turn.log.read(turn.batch, interval.interval_id)
        self.is_quiet = logged is not None and logged.quiet
        self._news = SourceNews()
        if logged is not None and (logged.after is None or not _is_behind(logged.after, before)):
            return  # nothing was taken
        clock, told = _BatchClock(), dict[str, str]()
        clock.now = turn.now_us
        interval.intake.source_opened()
        reader = KafkaRangeReader(self.source, _setup_of(self.hosted, self.of, interval, clock, told))
        records, end, known = 0, None, turn.until
        with asyncio.Runner() as runner:
            try:
                end = runner.run(_opened(reader, before))
                if known is None:
                    known = runner.run(reader.end_before(self.hosted.job.until_us, end))
                until = min(end, known)
                until = until if logged is None or logged.after is None else logged.after
                for _ in range(turn.bundles_max):
                    taken = runner.run(reader.take(until))
                    if taken is None:
                        break
                    records += taken.records
                    yield taken
            except SourceUnavailableError as error:
                if logged is not None:
                    raise
                told["source_unavailable"] = error.message
            finally:
                runner.run(reader.close())
        self.is_quiet = end is not None and reader.offset >= end
        if logged is None:
            after = reader.offset if reader.offset >= 0 else None
            turn.log.decide(turn.batch, interval.interval_id, TakenRange(after, records, self.is_quiet))
        elif (logged.after, logged.records) != (reader.offset, records):
            told["source_lost"] = self._check_again(logged, records)
        self._news = SourceNews(known, known is not None and reader.offset >= known, [*told.values()])

    def _check_again(self, logged: TakenRange, records: int) -> str:
        """Say what a repeated batch lacks. Raises ConfigError, if the source is to stop then."""
        text = (
            f"{self.interval.deployed.partition}: of {logged.records} records before offset {logged.after}, which this"
            f" batch has read before it was interrupted, {records} are left"
        )
        if self.source.lost == "stop":
            raise ConfigError(
                f"{text}: retention or compaction has deleted the others",
                hint='go on without them with Kafka(…, lost="continue"), or start a new graph',
            )
        return text

    def close(self) -> None:
        """Do nothing: it is open only during a batch."""


async def _opened(reader: Any, position: bytes | None) -> int:
    try:
        async with asyncio.timeout(OPEN_S_MAX):
            end: int = await reader.open(position)
            return end
    except TimeoutError as error:
        raise SourceUnavailableError(f"Kafka did not answer within {OPEN_S_MAX:.0f} s") from error


def _is_behind(offset: int, position: bytes | None) -> bool:
    return position is None or offset > msgspec.json.decode(position, type=KafkaPosition).offset
