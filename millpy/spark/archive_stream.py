"""A growing archive as the source of a streaming query: its bundles, in the order of their numbers.

`ArchivePartition` reads one source partition batch by batch: it lists the archive's files, and continues behind the
bundle that was committed last. Bundles form a chain, so one that is missing shows. Compaction and erasure publish a
file before they delete those that it replaces, so a bundle may be in two files for a while, but is in none only if it
is not published yet, or is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pyarrow.compute as pc

from millpy.errors import ArchiveUnavailableError, UsageError
from millpy.hosting.interval_state import IntervalState
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX, Instant, describe
from millpy.spark.archive_input import ArchivedBatch, ArchivedHistory, DecodedFile, FollowedHistory, records_of_bundle
from millpy.spark.stream_sources import SourceNews, SourceTurn
from millpy.store.archive.parquet import WATERMARK
from millpy.store.archive.reader import described
from millpy.store.archive.storage import PENDING, parquet_metadata, published_files, storage_at, together

BUNDLES_MAX = 1_000
"""Bundles of a partition in a batch. Workers with little to do archive small ones."""
LISTINGS_MAX = 4
"""How often files are listed again when one was deleted meanwhile, or a bundle is not seen."""


class BundlePosition(msgspec.Struct, frozen=True):
    """The number of the last bundle that was taken."""

    seq: int


class FollowedBundle(msgspec.Struct, frozen=True):
    """A bundle: its number and that of the one before it, the watermark after it, and the file that has it."""

    seq: int
    previous: int
    watermark: Instant
    path: str


class ArchivePartition:
    """One source partition of an archive that grows.

    Args:
        history: the archive.
        partition: its name there.
        known: the names of all partitions of the source.
        interval: the interval that reads it.
        record_type: the type of its records.
        limits: the limits of bundles.

    Attributes:
        is_quiet: whether the archive had nothing more at the end of the last batch.
        news: what there is to say after the last batch.
    """

    def __init__(
        self,
        history: FollowedHistory,
        partition: str,
        known: Iterable[str],
        interval: IntervalState,
        record_type: RecordType,
        limits: Limits,
    ) -> None:
        self.is_quiet = False
        self.news = SourceNews()
        self._history = history
        self._partition = partition
        self._known = frozenset(known)
        self._interval = interval
        self._type = record_type
        self._records_max = limits.bundle_records_max
        self._storage = storage_at(history.place)
        self._bundles: dict[str, list[FollowedBundle]] = {}  # file -> its bundles of this partition
        self._decoded: DecodedFile | None = None

    def batches(self, turn: SourceTurn) -> Iterator[ArchivedBatch]:
        """Yield the bundles behind the last one.

        Raises:
            UsageError: the archive has lost bundles.
        """
        assert self._interval.intake is not None
        position = self._interval.intake.position
        at = 0 if position is None else msgspec.json.decode(position, type=BundlePosition).seq
        told: list[str] = []
        until, taken, records = turn.until, 0, 0
        try:
            chain = self._chain(at, told)
            until = until if until is not None else chain[-1].seq if chain else at
            for bundle in chain:
                is_full = taken >= BUNDLES_MAX or records >= turn.bundles_max * self._records_max
                if is_full or (turn.until is not None and bundle.seq > turn.until):
                    break
                batch = self._read(bundle, turn.now_us)
                at, taken, records = bundle.seq, taken + 1, records + batch.records
                yield batch
            self.is_quiet = not chain or at == chain[-1].seq
        except (ArchiveUnavailableError, FileNotFoundError) as error:
            # Nothing is skipped: the next batch looks for the same bundle.
            self.is_quiet = False
            told.append(f"{self._history.name} cannot be read now, the next batch tries again: {error}")
        self.news = SourceNews(until, until is not None and at >= until, told)

    def _chain(self, at: int, told: list[str]) -> list[FollowedBundle]:
        """Return the bundles behind `at`, each behind the one before it.

        Raises:
            UsageError: the archive has lost bundles.
        """
        linked, missing = self._linked(at, self._listed(at))
        pending = []
        for _ in range(LISTINGS_MAX):
            if missing is None:
                return linked
            # In this order: what is published in between is listed.
            pending = self._storage.list_files(f"{self._history.name}/{PENDING}")
            linked, missing = self._linked(at, self._listed(at))
        if missing is None:
            return linked
        behind = f"the bundles of {self._partition} before {missing.seq} are in no file"
        if pending:  # of the files of one turn, some have their final name already
            told.append(f"{self._history.name}: {behind} that is published, so the query waits for an archiver")
            return linked
        begins = describe(Instant(self._watermark_before(missing) + self._history.ahead_us))
        raise UsageError(
            f"{self._history.name} lacks records: {behind}, and this query has read up to bundle {at}",
            hint="if retention has deleted them, raise MILLPY_ARCHIVE_KEPT_S; to go on without them, begin with"
            f" --from {begins} or later, and with another checkpoint and output",
        )

    def _linked(self, at: int, bundles: list[FollowedBundle]) -> tuple[list[FollowedBundle], FollowedBundle | None]:
        """Return the bundles up to the first that does not follow the one before it, and that one."""
        linked: list[FollowedBundle] = []
        for bundle in bundles:
            if bundle.previous != at and not self._begins_before_range(bundle):
                return linked, bundle
            at = bundle.seq
            linked.append(bundle)
        return linked, None

    def _begins_before_range(self, bundle: FollowedBundle) -> bool:
        """Tell whether all that came before a bundle is earlier than the range."""
        return self._watermark_before(bundle) + self._history.ahead_us <= self._history.first

    def _listed(self, at: int) -> list[FollowedBundle]:
        """List the archive, and return its bundles behind `at` in their order."""
        paths = set(published_files(self._storage, self._history.name))
        new = sorted(paths - self._bundles.keys())
        self._bundles = {path: of for path, of in self._bundles.items() if path in paths}
        self._bundles.update(zip(new, together(self._bundles_of, new), strict=True))
        found: dict[int, FollowedBundle] = {}
        # A file that an erasure has rewritten is of a later sequencer than the file that it replaces.
        for path in sorted(self._bundles, key=_sequencer):
            found.update((bundle.seq, bundle) for bundle in self._bundles[path] if bundle.seq > at)
        return [found[seq] for seq in sorted(found)]

    def _bundles_of(self, path: str) -> list[FollowedBundle]:
        try:
            bundles = described(parquet_metadata(self._storage.full_name(path))).bundles
        except FileNotFoundError:  # another file has its bundles
            return []
        source = self._partition.partition("/")[0]
        for of in {bundle[0] for bundle in bundles} - self._known:
            if of.partition("/")[0] == source:
                raise UsageError(
                    f"the archive has records of {of}, which source {source!r} does not read",
                    hint="let the source have the partitions that it had",
                )
        return [
            FollowedBundle(seq, previous or 0, Instant(watermark), path)
            for partition, seq, previous, watermark in bundles
            if partition == self._partition
        ]

    def _read(self, bundle: FollowedBundle, now_us: Instant) -> ArchivedBatch:
        history = ArchivedHistory((), self._history.first, INSTANT_MAX)
        for listing in range(LISTINGS_MAX):
            try:
                records = records_of_bundle(self._file(bundle.path), bundle.seq, self._type, history)
                break
            except FileNotFoundError:  # compacted or erased since it was listed
                found = next((of for of in self._listed(bundle.seq - 1) if of.seq == bundle.seq), None)
                if found is None or listing == LISTINGS_MAX - 1:
                    raise
                bundle = found
        position = msgspec.json.encode(BundlePosition(bundle.seq))
        return ArchivedBatch(
            "columns", now_us, position=position, watermark=bundle.watermark, accepted=records, records=len(records)
        )

    def _file(self, path: str) -> DecodedFile:
        name = self._storage.full_name(path)
        if self._decoded is None or self._decoded.name != name:
            self._decoded = None  # never two in memory
            self._decoded = DecodedFile(self._partition, name)
        return self._decoded

    def _watermark_before(self, bundle: FollowedBundle) -> int:
        table = self._file(bundle.path).bundle(bundle.seq)
        return int(pc.min(table[WATERMARK]).as_py()) if len(table) else INSTANT_MAX

    def close(self) -> None:
        """Forget the files."""
        self._decoded = None
        self._bundles.clear()


def _sequencer(path: str) -> tuple[int, str]:
    """Return the order of files that have the same bundle: the newest last."""
    parts = path.rpartition("/")[2].split("-")
    return (int(parts[1]), path) if len(parts) > 1 and parts[1].isdigit() else (0, path)
