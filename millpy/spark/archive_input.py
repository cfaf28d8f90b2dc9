"""An archive as the input of a batch: its bundles take the place of the graph's sources, as they were.

On the driver, `Archive.histories` chooses the files and checks that no bundle is missing. In a task of a source
partition, `archived_batches` yields the partition's bundles, and `ArchivedIntake` passes their records on: they were
decoded, deduplicated and judged before they were archived, and each has the watermark that was before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import UsageError
from millpy.graph import Graph, InjectorNode
from millpy.ingest.intake import Intake, IntakeResult, IntakeSettings
from millpy.ingest.protocol import Injector, Source, SourceBatch, SourceSetup
from millpy.model.deployment import permanent_name
from millpy.model.identity import Identity
from millpy.model.record import Records, RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, ClockReading, Instant, instant
from millpy.spark.takes import TakeHistory, take_archives, take_histories
from millpy.store.archive.parquet import EVENT_TIME, ORDINAL, PARTITION, SEQ, WATERMARK
from millpy.store.archive.reader import ArchiveReader, ListedFile, TimeRange, archive_of, bundles_of
from millpy.store.archive.storage import parquet_file

OPEN_FILES_MAX = 4
"""Bundles of one turn lie in a file for each hour of event time: these stay decoded."""


class ArchivedHistory(msgspec.Struct, frozen=True):
    """The archived files that replace a source.

    Attributes:
        files: full names.
        first, end: event times of the records that are read, from `first` to before `end`.
        through: partition -> number of its last bundle; another list of the same archive may have later ones.
    """

    files: tuple[str, ...]
    first: int
    end: int
    through: dict[str, int] = {}

    def inside(self, table: pa.Table) -> pa.Table:
        """Return the rows of archived records that are read."""
        if self.first <= INSTANT_MIN and self.end >= INSTANT_MAX:
            return table
        times = table[EVENT_TIME]
        return table.filter(pc.and_(pc.greater_equal(times, self.first), pc.less(times, self.end)))


class FollowedHistory(msgspec.Struct, frozen=True):
    """The archive that replaces a source.

    Attributes:
        place: the directory of all archives, or the URL of an object store.
        name: the archive's path below it.
        first: the event time from which records are read.
        ahead_us: how far an event time can be ahead of the watermark behind its record.
    """

    place: str
    name: str
    first: int
    ahead_us: int


class FollowedArchive(Source):
    """A source whose records are read from its archive.

    Args:
        history: the archive.
        partitions: the source partitions that it has bundles of.
    """

    __slots__ = ("_partitions", "history")

    def __init__(self, history: FollowedHistory, partitions: tuple[str, ...]) -> None:
        self.history = history
        self._partitions = partitions

    def identity(self) -> Identity:
        """Describe the archive: its bundles are the same wherever it is."""
        first, partitions = self.history.first, list(self._partitions)
        return {"kind": "followed archive", "archive": self.history.name, "first": first, "partitions": partitions}

    def partitions(self) -> tuple[str, ...]:
        """Return the source partitions of the graph's own source."""
        return self._partitions

    def connect(self, setup: SourceSetup) -> Injector:
        """Refuse: workers read the source itself."""
        raise UsageError(f"only a stream on Spark reads the archive {self.history.name}", hint="run the graph's file")


@dataclass(frozen=True, slots=True)
class Archive:
    """The archives of a graph in place of its sources, each of which needs one.

    Attributes:
        directory: the directory of all archives, at the same place on all machines, or the URL of an object store.
        start: read records whose event time is this or later; None for all.
        end: read records whose event time is earlier; None for all.
        listed: archive -> its files by the manifest; None to list the directory.
        sources: the sources; None for all.
        exact: whether a batch makes every bundle again as a worker made it, by the graph's archived takes. What is
            unfinished in the workers stays unfinished.
    """

    directory: str | Path
    start: datetime | None = None
    end: datetime | None = None
    listed: Mapping[str, Sequence[ListedFile]] | None = None
    sources: Collection[str] | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for a part of a history, which cannot be exact."""
        if self.exact and any(part is not None for part in (self.start, self.end, self.sources)):
            raise UsageError("an exact batch reads the whole archive", hint="leave out the time range; or --exact")

    def histories(self, graph: Graph) -> dict[str, ArchivedHistory]:
        """Return the files for each source.

        A source that was quiet in the time range has none. Only a manifest, or files of other times, can say so.

        Raises:
            UsageError: a source has no archive, or it lacks bundles; or there are no files at all.
        """
        first = INSTANT_MIN if self.start is None else instant(self.start)
        span = TimeRange(first, INSTANT_MAX if self.end is None else instant(self.end))
        found = {}
        for source, archive in self._archived(graph):
            listed = None if self.listed is None else self.listed[archive]
            reader = ArchiveReader(self.directory, self._path(graph, archive), listed)
            chosen = reader.find_in_range(span, source.name)
            beside = [] if chosen else reader.find_beside(span, source.name)
            if not (chosen or beside or self.exact or self.listed is not None):
                raise UsageError(
                    f"{self._path(graph, archive)} has no files",
                    hint="run `millpy archive`; or name the database, which knows whether nothing has come",
                )
            reader.check(chosen or beside, source.name, span, _ahead_us(source))
            through: dict[str, int] = {}
            for file in chosen:
                for partition, (_, newest) in file.partitions.items():
                    if partition.partition("/")[0] == source.name:  # those of a union's others may be in other files
                        through[partition] = max(newest, through.get(partition, newest))
            found[source.name] = ArchivedHistory(tuple(reader.find_all(chosen)), span.first, span.end, through)
        if not self.exact and not any(history.files for history in found.values()):
            raise UsageError(f"the archives of {graph.name} have no files in this range", hint="run `millpy archive`")
        return found

    def takes(self, graph: Graph, histories: Mapping[str, ArchivedHistory]) -> dict[str, TakeHistory]:
        """Return the takes for each stage, as far as the histories of the sources reach.

        Raises:
            UsageError: takes are not archived, or not from the beginning.
        """
        readers = {}
        for stage, archive in take_archives(graph).items():
            listed = None if self.listed is None else self.listed[archive]
            readers[stage] = ArchiveReader(self.directory, self._path(graph, archive), listed)
        through = {place: newest for history in histories.values() for place, newest in history.through.items()}
        return take_histories(graph, readers, through)

    def followed(self, graph: Graph) -> dict[str, FollowedHistory]:
        """Return the archive for each source of a stream.

        Raises:
            UsageError: a source has no archive.
        """
        if self.end is not None:
            raise UsageError("a stream of an archive has no end", hint="leave out the end; or run a batch")
        if self.listed is not None:
            raise UsageError("a stream lists the archive itself, in each batch", hint="leave out `listed`")
        first = INSTANT_MIN if self.start is None else instant(self.start)
        # The tasks need not run where the driver does.
        place = str(self.directory) if "://" in str(self.directory) else str(Path(self.directory).absolute())
        return {
            source.name: FollowedHistory(place, self._path(graph, archive), first, _ahead_us(source))
            for source, archive in self._archived(graph)
        }

    def _path(self, graph: Graph, archive: str) -> str:
        spec = graph.spec()
        return f"{permanent_name(spec.name, spec.generation)}/{archive}"

    def _archived(self, graph: Graph) -> Iterator[tuple[InjectorNode, str]]:
        """Yield each source with the name of its archive."""
        spec = graph.spec()
        for source in graph.injectors():
            if self.sources is not None and source.name not in self.sources:
                continue
            archive = archive_of(spec, source.name)
            if archive is None:
                raise UsageError(f"source {source.name!r} has no archive", hint="declare one with .archive()")
            if archive.intervals > 1:
                raise UsageError(
                    f"{archive.name} has {archive.intervals} key intervals, which cut bundles: their order is lost",
                    hint="archive with intervals=1; or name the files of a history: --input",
                )
            yield source, archive.name


def _ahead_us(source: InjectorNode) -> int:
    """Return how far an event time can be ahead of the watermark behind its record."""
    return source.event_time.max_disorder_us + source.event_time.future_tolerance_us


@dataclass(slots=True)
class ArchivedBatch(SourceBatch):
    """Records that a source has accepted before; its watermark is that of the partition after them."""

    accepted: Records | None = field(default=None, kw_only=True)


class ArchivedIntake(Intake):
    """Passes archived records on with the watermarks that they have."""

    def __init__(self, settings: IntakeSettings, recovered: StoredInterval | None = None) -> None:
        super().__init__(settings, recovered or StoredInterval(0, 1))

    def step(self, taken: SourceBatch | None, *, clock: ClockReading, quiet: bool) -> IntakeResult:
        """Take a bundle as it is; without one, do nothing."""
        del quiet
        if taken is None:
            return IntakeResult(Records.empty(self._settings.record_type), self.watermark, False)
        assert isinstance(taken, ArchivedBatch), taken
        assert taken.accepted is not None
        count = len(taken.accepted)
        self._counts["injected"] += count
        self._counts["accepted"] += count
        self._advance(INSTANT_MAX if taken.finished else taken.watermark)
        self._source.finished = taken.finished
        if taken.position is not None:
            self._source.position = msgspec.Raw(taken.position)
        if count and self._settings.devices:
            devices = taken.accepted.keys(self._settings.devices, self._hasher)
            self._fleet.take(devices, taken.accepted.event_times, clock.now_us)
        delta = self._whole_delta(clock.now_us)
        return IntakeResult(taken.accepted, self.watermark, changed=True, accepted=count, delta=delta)


def archived_batches(
    history: ArchivedHistory, partition: str, record_type: RecordType, now_us: Instant
) -> Iterator[tuple[int, ArchivedBatch]]:
    """Yield the bundles of a source partition with their numbers, and at last its end.

    Bundles of the same number are taken in the same turn. A range may have none of the records of a bundle; the
    watermark after it counts all the same.

    Raises:
        UsageError: a file from before a deployment lacks a field.
    """
    opened = lru_cache(OPEN_FILES_MAX)(partial(DecodedFile, partition))
    for place in bundles_of(history.files, partition):
        records = records_of_bundle(opened(place.file), place.seq, record_type, history)
        yield (
            place.seq,
            ArchivedBatch("columns", now_us, watermark=place.watermark, accepted=records, records=len(records)),
        )
    # All partitions end together: one that has ended says that nothing late can come from it.
    end = ArchivedBatch("columns", now_us, finished=True, accepted=Records.empty(record_type), records=0)
    yield INSTANT_MAX - 1, end


class DecodedFile:
    """The records of one partition in a file, bundle by bundle. An archiver's turn, or compaction, bounds its size."""

    def __init__(self, partition: str, name: str) -> None:
        table = parquet_file(name).read()
        table = table.filter(pc.equal(table[PARTITION], partition))
        table = table.take(pc.sort_indices(table, sort_keys=[(SEQ, "ascending"), (ORDINAL, "ascending")]))
        self.name = name
        self._table = table
        self._seqs = table[SEQ].to_numpy()

    def bundle(self, seq: int) -> pa.Table:
        """Return the records of a bundle in their order; none if all of them were erased."""
        start, end = np.searchsorted(self._seqs, [seq, seq + 1]).tolist()
        return self._table.slice(start, end - start)


def records_of_bundle(file: DecodedFile, seq: int, record_type: RecordType, history: ArchivedHistory) -> Records:
    """Return the records of a bundle that happen in a range."""
    table = history.inside(file.bundle(seq))
    if not len(table):
        return Records.empty(record_type)
    columns = [_column(table, name, record_type, file.name) for name in record_type.fields]
    return Records(
        record_type,
        table[EVENT_TIME].to_numpy().astype(np.int64),
        watermarks=table[WATERMARK].to_numpy().astype(np.int64),
        batch=pa.RecordBatch.from_arrays(columns, schema=record_type.schema),
    )


def _column(table: pa.Table, name: str, record_type: RecordType, file: str) -> pa.Array:
    of = record_type.schema.field(name).type
    if name in table.column_names:
        return table[name].cast(of).combine_chunks()
    if not record_type.is_nullable(name):
        raise UsageError(
            f"{file} has no field {name!r}: it was archived before the field was added",
            hint="read a range from after the deployment; or let the field be `| None`",
        )
    return pa.nulls(len(table), of)
