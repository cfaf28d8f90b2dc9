"""Reading an archive: which files hold a time range, which bundles they have, and whether one is missing.

The manifest in PostgreSQL lists the files; a copy of the directory is read without it, by the statistics in its files.
`hour=` in a path is the hour of most records of a bundle, so it selects nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpy.errors import CorruptionError, UsageError
from millpy.model.deployment import ComputationSpec, GraphSpec
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, describe
from millpy.store.archive.directory import ArchiveDirectory
from millpy.store.archive.parquet import (
    EVENT_TIME,
    METADATA,
    PARTITION,
    SEQ,
    WATERMARK,
    ArchivedBundle,
    FileDescription,
)
from millpy.store.archive.storage import parquet_file, parquet_metadata, published_files, storage_at, together


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as the manifest lists it.

    Attributes:
        path: path below the directory of all archives.
        event_time_lo, event_time_hi: smallest and largest event time.
        partitions: source partition or key interval -> numbers of its first and last bundle.
    """

    path: str
    event_time_lo: Instant
    event_time_hi: Instant
    partitions: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class BundlePlace:
    """Where a bundle is.

    Attributes:
        seq: its number.
        watermark: the watermark of its partition after it.
        file: the file that has it.
    """

    seq: int
    watermark: Instant
    file: str


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Event times from `first` to before `end`."""

    first: Instant = INSTANT_MIN
    end: Instant = INSTANT_MAX


class ArchiveReader:
    """The files of one archive.

    Args:
        place: the directory of all archives.
        name: the archive's path below it, "GRAPH/ARCHIVE".
        listed: what the manifest lists; None to list the directory, in which no archiver may delete files meanwhile.
    """

    def __init__(self, place: str | Path, name: str, listed: Sequence[ListedFile] | None = None) -> None:
        self._storage = storage_at(place)
        self._name = listed[0].path.rsplit("/", 2)[0] if listed else name
        self._directory = ArchiveDirectory(place, self._name)
        self._listed = listed
        self._described: dict[str, FileDescription] = {}

    @cached_property
    def files(self) -> Sequence[ListedFile]:
        """All files."""
        if self._listed is not None:
            return self._listed
        found = published_files(self._storage, self._name)
        return together(lambda path: _listed(path, self._storage.full_name(path)), found)

    def holding(self, span: TimeRange, source: str = "") -> list[ListedFile]:
        """Return the files that may have records of a time range, of one source or of all.

        Raises:
            UsageError: there is none.
        """
        if found := self.find_in_range(span, source):
            return found
        raise UsageError(f"{self._name} has no files in this range", hint="run `millpy archive`")

    def find_in_range(self, span: TimeRange, source: str = "") -> list[ListedFile]:
        """Return the files that may have records of a time range, of one source or of all; perhaps none."""
        of = self._files_of(source)
        return [file for file in of if file.event_time_hi >= span.first and file.event_time_lo < span.end]

    def find_beside(self, span: TimeRange, source: str) -> list[ListedFile]:
        """Return the last file of a source before a time range in which it has none, and the first behind it."""
        of = self._files_of(source)
        before = [file for file in of if file.event_time_hi < span.first]
        behind = [file for file in of if file.event_time_lo >= span.end]
        last = sorted(before, key=lambda file: file.event_time_hi)[-1:]
        return last + sorted(behind, key=lambda file: file.event_time_lo)[:1]

    def _files_of(self, source: str) -> list[ListedFile]:
        return [file for file in self.files if not source or any(_is_of(place, source) for place in file.partitions)]

    def find(self, file: ListedFile) -> str:
        """Return the full name of a file. Raises ArchiveUnavailableError if it is lost."""
        return self._directory.find(file.path)

    def find_all(self, files: Iterable[ListedFile]) -> list[str]:
        """Return the full names of files. Raises ArchiveUnavailableError if one is lost."""
        return together(self.find, files)

    def check(self, chosen: Sequence[ListedFile], source: str, span: TimeRange, ahead_us: int) -> None:
        """Check that no bundle is missing between those of the chosen files, before them or behind them.

        An archive that was added to a running graph, or whose old files were deleted, begins later than its stream.
        That is no gap for a range behind everything that can have come before.

        Args:
            chosen: the files that hold the range.
            source: the source that is read.
            span: the time range.
            ahead_us: how far an event time can be ahead of the watermark behind its record.

        Raises:
            UsageError: the archive lacks a bundle.
        """
        for partition in sorted({name for file in chosen for name in file.partitions if _is_of(name, source)}):
            own = [file for file in self.files if partition in file.partitions]
            low = min(file.partitions[partition][0] for file in chosen if partition in file.partitions)
            high = max(file.partitions[partition][1] for file in chosen if partition in file.partitions)
            bundles = self._bundles_within(own, partition, low, high)
            gaps = [after for before, after in pairwise(sorted(bundles)) if bundles[after][2] != before]
            if (start := bundles[low][2]) and not self._has(own, partition, start):
                gaps.append(low)
            for behind in sorted(gaps, reverse=True):
                begins = self._watermark_before(own, partition, behind) + ahead_us
                if span.first < begins:
                    raise UsageError(
                        f"{self._name} lacks records: what came before bundle {behind} of {partition} is not there",
                        hint=f"read a range that begins at {describe(Instant(begins))} or later, or ends well before",
                    )

    def _bundles_within(
        self, files: Sequence[ListedFile], partition: str, low: int, high: int
    ) -> dict[int, ArchivedBundle]:
        """Return the bundles of a partition from `low` to `high`, and the one behind them."""
        behind = min((f.partitions[partition][0] for f in files if f.partitions[partition][0] > high), default=high)
        found: dict[int, ArchivedBundle] = {}
        for file in files:
            first, last = file.partitions[partition]
            if last >= low and first <= behind:
                found |= {bundle[1]: bundle for bundle in self._description(file).bundles if bundle[0] == partition}
        behind = min((seq for seq in found if seq > high), default=high)
        return {seq: bundle for seq, bundle in found.items() if low <= seq <= behind}

    def _has(self, files: Sequence[ListedFile], partition: str, seq: int) -> bool:
        return any(
            (partition, seq) == bundle[:2]
            for file in files
            if file.partitions[partition][0] <= seq <= file.partitions[partition][1]
            for bundle in self._description(file).bundles
        )

    def _watermark_before(self, files: Sequence[ListedFile], partition: str, seq: int) -> int:
        """Return the watermark before the first record of a bundle."""
        for file in files:
            if file.partitions[partition][0] <= seq <= file.partitions[partition][1]:
                table = parquet_file(self.find(file)).read(columns=[PARTITION, SEQ, WATERMARK])
                own = pc.and_(pc.equal(table[PARTITION], partition), pc.equal(table[SEQ], seq))
                if pc.any(own).as_py():
                    return int(pc.min(table.filter(own)[WATERMARK]).as_py())
        return INSTANT_MAX

    def _description(self, file: ListedFile) -> FileDescription:
        if file.path not in self._described:
            self._described[file.path] = described(parquet_metadata(self.find(file)))
        return self._described[file.path]


def archive_of(spec: GraphSpec, stream: str) -> ComputationSpec | None:
    """Return the archive of all records of a stream, as they are, if the graph declares one."""
    archives = {computation.name: computation for computation in spec.computations if computation.kind == "archive"}
    consumers = (each.consumer for each in spec.subscriptions if each.stream == stream and not each.operators)
    return next((archives[consumer] for consumer in consumers if consumer in archives), None)


def bundles_of(files: Iterable[str], partition: str) -> list[BundlePlace]:
    """Return the bundles of a partition in their order.

    Raises:
        CorruptionError: two files have the same bundle.
    """
    found: dict[int, BundlePlace] = {}
    names = list(files)
    for file, metadata in zip(names, together(parquet_metadata, names), strict=True):
        own = {bundle[1]: bundle for bundle in described(metadata).bundles if bundle[0] == partition}
        places = {seq: BundlePlace(seq, Instant(bundle[3]), file) for seq, bundle in own.items()}
        if twice := found.keys() & places.keys():
            raise CorruptionError(
                f"{file} and another file both have bundle {min(twice)} of {partition}",
                hint="name the database, whose manifest lists the files that are valid",
            )
        found |= places
    return [found[seq] for seq in sorted(found)]


def partitions_of(files: Iterable[str], source: str) -> set[str]:
    """Return the partitions of a source of which files have bundles."""
    found = together(parquet_metadata, list(files))
    return {bundle[0] for metadata in found for bundle in described(metadata).bundles if _is_of(bundle[0], source)}


def described(metadata: pq.FileMetaData) -> FileDescription:
    """Return what the metadata of an archived file say."""
    return msgspec.json.decode(metadata.metadata[METADATA.encode()], type=FileDescription)


def _listed(path: str, name: str) -> ListedFile:
    metadata = parquet_metadata(name)
    partitions: dict[str, tuple[int, int]] = {}
    for partition, seq, _, _ in described(metadata).bundles:
        first, last = partitions.get(partition, (seq, seq))
        partitions[partition] = min(first, seq), max(last, seq)
    # Nested fields have several columns each, so a column is found by its path.
    (column,) = (at for at in range(metadata.num_columns) if metadata.schema.column(at).path == EVENT_TIME)
    seen = [metadata.row_group(at).column(column).statistics for at in range(metadata.num_row_groups)]
    # A file may have nothing left after an erasure: it holds no range, but its bundles are there.
    lo, hi = min((one.min for one in seen), default=INSTANT_MAX), max((one.max for one in seen), default=INSTANT_MIN)
    return ListedFile(path, Instant(lo), Instant(hi), partitions)


def _is_of(partition: str, source: str) -> bool:
    return partition.partition("/")[0] == source
