"""ArchivingStore: the store of an archiver, whose commits write files before and publish them after.

    write     the bundles of a turn become pending files, durably
    commit    one fenced transaction moves the cursors and adds the files to the manifest (I1, I2)
    publish   the files get their final names

    forget    files of old hours leave the manifest for the list of garbage, are deleted, and leave that list
    compact   a merged file is pending, takes the place of small ones in the manifest under the fence, is published; the
              small ones are garbage

An interval's owner settles what its predecessors left: after a claim the database knows which pending files are
committed. It publishes these and deletes the others, so a crash at any point loses and doubles nothing. If the place is
away then, the owner does so before it writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millpy.clock import Clock
from millpy.errors import ArchiveUnavailableError, CommitUnknownError, CorruptionError, MillError
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import ArchivedFile, Checkpoint, Grant
from millpy.model.deployment import Deployment, GraphSpec, permanent_name
from millpy.model.stage import UNBOUNDED
from millpy.model.stored_windows import ClosedKind
from millpy.model.time import Instant
from millpy.store.archive.compaction import (
    MERGED_BYTES_MAX,
    MERGED_RECORDS_MAX,
    DamagedFiles,
    SmallFile,
    can_be_read,
    first_run,
    merge,
)
from millpy.store.archive.directory import ArchiveDirectory, hour_name
from millpy.store.archive.parquet import encode
from millpy.store.archive.storage import claim_place
from millpy.store.postgres.arrays import Bigints, Texts
from millpy.store.postgres.connection import all_rows
from millpy.store.postgres.retention import FORGET_ROWS
from millpy.store.postgres.statements import statement
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import CommitFailpoint, OwnerSnapshot

HOUR_US = 3_600_000_000
COMPACT_EVERY_S = 60.0
"""Seconds between two looks at the manifest when nothing is to be merged."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArchiveInto:
    """Where and how often an archiver writes.

    Attributes:
        directory: the directory of all archives, or the URL of an object store; it belongs to one database.
        every_s: seconds between two polls of an archive that keeps up (runtime/archive_pace.py).
        kept_s: seconds from the end of an hour of event time until its files are deleted; None to keep all.
        compact_after_s: seconds without a new file of an hour until its small files are merged; None for never.
        in_worker: whether the process also runs other computations, which do not wait for the place to be there.
    """

    directory: str | Path
    every_s: float
    kept_s: float | None = None
    compact_after_s: float | None = None
    in_worker: bool = False


class ArchivingStore(PostgresStore):
    """The store of a process that writes archives.

    Args:
        url: the database.
        into: where to write.
        clock: paces compaction.
        more: the arguments of `PostgresStore`.
    """

    def __init__(self, url: str, into: ArchiveInto, clock: Clock, **more: Any) -> None:
        super().__init__(url, **more)
        self._into = into
        self._clock = clock
        self._buckets: dict[int, int] = {}
        self._directories: dict[int, ArchiveDirectory] = {}
        self._producers: dict[int, str] = {}
        self._compact_at = float("-inf")
        self._grants: dict[int, Grant] = {}
        self._unsettled: dict[int, Grant] = {}
        self._settling = asyncio.Lock()
        self._database: str | None = None
        self._refused_bytes = 0
        self._unlike: set[str] = set()
        self._damaged = DamagedFiles()

    async def deploy(self, spec: GraphSpec, **how: Any) -> Deployment:
        """Deploy the graph, and learn its archives; see `Store.deploy`.

        Raises:
            UsageError: also when the directory belongs to another database.
        """
        async with self._admin.use() as connection:
            ((self._database,),) = await all_rows(connection, statement("identify_database"), {})
        try:
            await self._claim_place()
        except ArchiveUnavailableError as error:
            if not self._into.in_worker:
                raise
            log.warning("%s (%s)", error.message, error.hint)
        deployment = await super().deploy(spec, **how)
        self._producers = {interval.interval_id: interval.place for interval in deployment.intervals}
        for archive in (c for c in spec.computations if c.kind == "archive"):
            name = f"{permanent_name(spec.name, spec.generation)}/{archive.name}"
            for interval in deployment.intervals_of(archive.name):
                self._directories[interval.interval_id] = ArchiveDirectory(self._into.directory, name)
                self._buckets[interval.interval_id] = archive.identity["buckets"]
        return deployment

    async def read(
        self,
        grants: Sequence[Grant],
        *,
        state_rows_max: int,
        closed_rows_max: int = UNBOUNDED,
        closed: ClosedKind = ClosedKind.WINDOWS,
    ) -> Sequence[OwnerSnapshot]:
        """Read the stored data of owned intervals, and settle the pending files of earlier owners."""
        bounds = {"state_rows_max": state_rows_max, "closed_rows_max": closed_rows_max}
        found = await super().read(grants, **bounds, closed=closed)
        own = {grant.interval_id: grant for grant in grants if grant.interval_id in self._directories}
        self._grants |= own
        self._unsettled |= own
        try:
            await self._settle(own)
        except ArchiveUnavailableError as error:
            log.warning("%s (%s)", error.message, error.hint)
        return found

    async def archives_are_available(self) -> bool:
        """Try to write as much as was refused; call it only while no commit writes files."""
        try:
            await self._claim_place()
            await self._settle(self._grants)
            for interval_id, grant in list(self._grants.items()):
                await asyncio.to_thread(self._directories[interval_id].try_out, grant, self._refused_bytes)
        except ArchiveUnavailableError as error:
            log.debug("%s (%s)", error.message, error.hint)
            return False
        return True

    async def forget_old(self, *, now_us: Instant, **kept_s: float) -> int:
        """Delete rows and archived files beyond their age, and merge small files; see `Store.forget_old`."""
        gone = await super().forget_old(now_us=now_us, **kept_s)
        if self._into.kept_s is not None:
            before = hour_name(Instant(max(0, now_us - int(self._into.kept_s * 1_000_000))))
            which = {"intervals": Bigints(list(self._directories)), "before": before, "rows_max": FORGET_ROWS}
            async with self._fold.use() as connection:
                gone += int((await all_rows(connection, statement("unlist_old_files"), which))[0][0])
        gone += await self._compact()
        await self.delete_garbage()
        return gone

    async def _compact(self) -> int:
        """Merge adjacent small files of one hour under the fence; return how many are replaced."""
        if self._into.compact_after_s is None or self._clock.monotonic() < self._compact_at:
            return 0
        alone = self._damaged.waiting(self._clock.monotonic())
        which = {
            "intervals": Bigints(list(self._grants)),
            "after_s": self._into.compact_after_s,
            "records_max": MERGED_RECORDS_MAX,
            "bytes_max": MERGED_BYTES_MAX,
            "paths": Texts(list(self._unlike)),
            "alone": Texts(list(alone)),
        }
        async with self._fold.use() as connection:
            files = await all_rows(connection, statement("find_small_files"), which)
        if not files:
            self._compact_at = self._clock.monotonic() + COMPACT_EVERY_S
            return 0
        grant = self._grants[files[0][0]]
        directory = self._directories[grant.interval_id]
        run = [file.path for file in first_run([SmallFile(*file[1:]) for file in files], self._unlike, alone)]
        try:
            merged = await asyncio.to_thread(lambda: merge([directory.find(path) for path in run]))
            if merged is None:
                self._unlike.add(run[1])
                return 0
            content, count = merged
            new_path = await asyncio.to_thread(directory.rewrite, grant, run[0], content)
            where = {"interval": grant.interval_id, "sequencer": grant.sequencer, "paths": Texts(run[:count])}
            async with self._fold.use() as connection:
                new = {"new_path": new_path, "size": len(content)}
                replaced = await all_rows(connection, statement("merge_files"), {**where, **new})
            await asyncio.to_thread(directory.publish if replaced else directory.discard, new_path)
        except (ArchiveUnavailableError, CorruptionError, OSError, pa.ArrowException) as error:
            # A file may be damaged. Or the place is away, or an erasure has deleted a file.
            if not await self._leave_damaged(grant, run):
                log.warning("small files of an archive are not merged: %s", error)
                self._compact_at = self._clock.monotonic() + COMPACT_EVERY_S
            return 0
        if not replaced:
            del self._grants[grant.interval_id]  # another process owns it, or has just deleted one of the files
        return count if replaced else 0

    async def _leave_damaged(self, grant: Grant, run: Sequence[str]) -> bool:
        """Find the files of a run that are damaged, and leave them alone for a time; return whether there are any."""
        directory = self._directories[grant.interval_id]

        def damaged() -> list[str]:
            directory.try_out(grant, 1)
            return [path for path in run if not can_be_read(directory, path)]

        try:
            found = set(await asyncio.to_thread(damaged)) & set(await self.listed(grant))
        except ArchiveUnavailableError:
            return False
        for path in sorted(found):
            wait_s = self._damaged.add(path, self._clock.monotonic())
            log.warning(
                "%s of the archive cannot be read: restore it; it is not merged, and tried again in %g h",
                path,
                wait_s / 3_600,
            )
        return bool(found)

    async def delete_garbage(self) -> None:
        """Delete files that the manifest no longer lists. Who dies in between leaves them to the next archiver."""
        settled_s = max((directory.settled_s for directory in self._directories.values()), default=0.0)
        which = {"intervals": Bigints(list(self._directories)), "rows_max": FORGET_ROWS, "settled_s": settled_s}
        async with self._fold.use() as connection:
            found = await all_rows(connection, statement("find_garbage"), which)
            try:
                for interval_id, path in found:
                    await asyncio.to_thread(self._directories[interval_id].delete, path)
            except ArchiveUnavailableError as error:
                log.warning("%s (%s)", error.message, error.hint)
            else:
                if found:
                    deleted = {"paths": Texts([path for _, path in found]), "settled_s": settled_s}
                    await connection.execute(statement("forget_garbage"), deleted)

    async def listed(self, grant: Grant) -> list[str]:
        """Return the files of an interval."""
        async with self._admin.use() as connection:
            rows = await all_rows(connection, statement("list_files"), {"interval": grant.interval_id})
        return [path for (path,) in rows]

    def find(self, grant: Grant, path: str) -> str:
        """Return the full name of a listed file. Raises ArchiveUnavailableError if it is lost."""
        return self._directories[grant.interval_id].find(path)

    async def replace(self, grant: Grant, path: str, content: pa.Buffer, records: int) -> int | None:
        """Replace a listed file under the fence; the old one becomes garbage.

        Returns:
            The number of records that it had; None if the grant is stale, or the file is no longer listed.
        """
        directory = self._directories[grant.interval_id]
        new_path = await asyncio.to_thread(directory.rewrite, grant, path, content)
        new = {"new_path": new_path, "records": records, "bytes": len(content)}
        where = {"interval": grant.interval_id, "sequencer": grant.sequencer, "path": path}
        async with self._admin.use() as connection:
            found = await all_rows(connection, statement("replace_file"), {**where, **new})
        await asyncio.to_thread(directory.publish if found else directory.discard, new_path)
        return int(found[0][0]) if found else None

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitFailpoint | None = None,
        trial: bool = False,
    ) -> None:
        """Write the archived bundles as files, commit a turn with their manifest, and publish them.

        Raises:
            ArchiveUnavailableError: the files cannot be written; nothing is committed.
            CommitUnknownError: also when committed files cannot be published; recovery publishes them.
        """
        if trial:
            checkpoints = [replace(checkpoint, archived=()) for checkpoint in checkpoints]
        archiving = [checkpoint for checkpoint in checkpoints if checkpoint.archived]
        if not archiving:
            return await super().commit(checkpoints, graph_version=graph_version, inside=inside, trial=trial)
        await self._claim_place()
        await self._settle([checkpoint.grant.interval_id for checkpoint in archiving])
        files: dict[int, list[ArchivedFile]] = {}
        try:
            await asyncio.to_thread(self._write_all, archiving, files)
            with_files = [replace(c, files=files.get(c.grant.interval_id, ())) for c in checkpoints]
            await super().commit(with_files, graph_version=graph_version, inside=inside, trial=trial)
        except CommitUnknownError:
            raise
        except MillError:
            await asyncio.to_thread(self._for_each, files, ArchiveDirectory.discard)
            raise
        try:
            await asyncio.to_thread(self._for_each, files, ArchiveDirectory.publish)
        except ArchiveUnavailableError as error:
            raise CommitUnknownError(error.message, hint=error.hint) from error

    def _write_all(self, checkpoints: Sequence[Checkpoint], files: dict[int, list[ArchivedFile]]) -> None:
        """Write the bundles of checkpoints, and add their files by interval as they are written; for a thread."""
        for checkpoint in checkpoints:
            interval_id = checkpoint.grant.interval_id
            written = files.setdefault(interval_id, [])
            for hour, bundles in _by_hour(checkpoint.archived).items():
                content = encode(bundles, self._producers, self._buckets[interval_id])
                try:
                    path = self._directories[interval_id].write(checkpoint.grant, checkpoint.bundle, hour, content)
                except ArchiveUnavailableError:
                    self._refused_bytes = len(content)
                    raise
                written.append(self._described(path, len(content), bundles))

    def _described(self, path: str, size: int, bundles: Sequence[Bundle]) -> ArchivedFile:
        """Describe a written file for the manifest."""
        lo = min(int(bundle.records.event_times.min()) for bundle in bundles)
        hi = max(int(bundle.records.event_times.max()) for bundle in bundles)
        seqs: dict[str, list[int]] = {}
        for bundle in bundles:
            seqs.setdefault(self._producers[bundle.producer], []).append(bundle.seq)
        partitions = {partition: (min(of), max(of)) for partition, of in seqs.items()}
        return ArchivedFile(path, sum(map(len, bundles)), size, Instant(lo), Instant(hi), partitions)

    def _for_each(
        self, files: Mapping[int, Sequence[ArchivedFile]], do: Callable[[ArchiveDirectory, str], None]
    ) -> None:
        for interval_id, of_interval in files.items():
            for file in of_interval:
                do(self._directories[interval_id], file.path)

    async def _claim_place(self) -> None:
        """Note in the place which database it belongs to, once.

        Raises:
            ArchiveUnavailableError: the place cannot be read or written.
            UsageError: it belongs to another database.
        """
        if self._database is not None:
            await asyncio.to_thread(claim_place, self._into.directory, self._database)
            self._database = None

    async def _settle(self, interval_ids: Iterable[int]) -> None:
        """Publish or delete the files that earlier owners have left pending, before these intervals write.

        Raises:
            ArchiveUnavailableError: the place cannot be read or written.
        """
        async with self._settling:  # a file that is written later must not be taken for one that was left
            for interval_id in self._unsettled.keys() & interval_ids:
                await self._settle_one(self._unsettled[interval_id])
                del self._unsettled[interval_id]

    async def _settle_one(self, grant: Grant) -> None:
        directory = self._directories[grant.interval_id]
        paths = await asyncio.to_thread(directory.pending, grant)
        if not paths:
            return
        async with self._admin.use() as connection:
            which = {"interval": grant.interval_id, "paths": Texts(paths)}
            committed = {path for (path,) in await all_rows(connection, statement("find_archived"), which)}
        for path in paths:
            await asyncio.to_thread(directory.publish if path in committed else directory.discard, path)


def _by_hour(bundles: Sequence[Bundle]) -> Mapping[Instant, list[Bundle]]:
    """Group bundles by the hour of their middle event time: a bundle is never cut, and a strange clock moves none."""

    def hour_of(bundle: Bundle) -> Instant:
        times = bundle.records.event_times
        middle = int(np.partition(times, len(times) // 2)[len(times) // 2])
        return Instant(middle - middle % HOUR_US)

    return {hour: list(of_hour) for hour, of_hour in groupby(sorted(bundles, key=hour_of), hour_of)}
