"""ArchivingStore: the store of an archiver, whose commits write files before and publish them after.

    write     the bundles of a turn become pending files, durably
    commit    one fenced transaction moves the cursors and adds the files to the manifest (I1, I2)
    publish   the files get their final names

    forget    files of old hours leave the manifest for the list of garbage, are deleted, and leave that list
    compact   a merged file is pending, takes the place of small ones in the manifest under the fence, is published; the
              small ones are garbage

An interval's owner settles what its predecessors left: after a claim the database knows which pending files are
committed. It publishes these and deletes the others, so a crash at any point loses and doubles nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millpy.clock import Clock
from millpy.errors import ArchiveUnavailableError, CommitUnknownError, MillError
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import ArchivedFile, Checkpoint, Grant
from millpy.model.deployment import Deployment, GraphSpec, permanent_name
from millpy.model.time import Instant
from millpy.store.archive.compaction import MERGED_BYTES_MAX, MERGED_RECORDS_MAX, SmallFile, first_run, merge
from millpy.store.archive.directory import ArchiveDirectory, hour_name
from millpy.store.archive.parquet import encode
from millpy.store.archive.storage import claim_place
from millpy.store.postgres.arrays import Bigints, Texts
from millpy.store.postgres.connection import all_rows
from millpy.store.postgres.retention import FORGET_ROWS
from millpy.store.postgres.statements import statement
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import CommitFailpoint, OwnerSnapshot, PollResult, SegmentQuery

HOUR_US = 3_600_000_000
COMPACT_EVERY_S = 60.0
"""Seconds between two looks at the manifest when nothing is to be merged."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArchiveInto:
    """Where and how often an archiver writes.

    Attributes:
        directory: the directory of all archives, or the URL of an object store; it belongs to one database.
        every_s: seconds between two polls of an archive that keeps up, so that files do not get too small.
        kept_s: seconds from the end of an hour of event time until its files are deleted; None to keep all.
        compact_after_s: seconds without a new file of an hour until its small files are merged; None for never.
    """

    directory: str | Path
    every_s: float
    kept_s: float | None = None
    compact_after_s: float | None = None


class ArchivingStore(PostgresStore):
    """The store of an archiver.

    Args:
        url: the database.
        into: where to write.
        clock: the clock of the pace.
        more: the arguments of `PostgresStore`.
    """

    def __init__(self, url: str, into: ArchiveInto, clock: Clock, **more: Any) -> None:
        super().__init__(url, **more)
        self._into = into
        self._clock = clock
        self._buckets: dict[int, int] = {}
        self._directories: dict[int, ArchiveDirectory] = {}
        self._producers: dict[int, str] = {}
        self._heads: dict[tuple[int, int], int] = {}
        self._due_at = self._compact_at = float("-inf")
        self._grants: dict[int, Grant] = {}
        self._unlike: set[str] = set()

    async def deploy(self, spec: GraphSpec, **how: Any) -> Deployment:
        """Deploy the graph, and learn its archives; see `Store.deploy`.

        Raises:
            UsageError: also when the directory belongs to another database.
        """
        async with self._admin.use() as connection:
            ((database,),) = await all_rows(connection, statement("identify_database"), {})
        await asyncio.to_thread(claim_place, self._into.directory, database)
        deployment = await super().deploy(spec, **how)
        self._producers = {interval.interval_id: interval.place for interval in deployment.intervals}
        for archive in (c for c in spec.computations if c.kind == "archive"):
            name = f"{permanent_name(spec.name, spec.generation)}/{archive.name}"
            for interval in deployment.intervals_of(archive.name):
                self._directories[interval.interval_id] = ArchiveDirectory(self._into.directory, name)
                self._buckets[interval.interval_id] = archive.identity["buckets"]
        return deployment

    async def read(self, grants: Sequence[Grant], *, state_rows_max: int) -> Sequence[OwnerSnapshot]:
        """Read the stored data of owned intervals, and settle the pending files of earlier owners."""
        found = await super().read(grants, state_rows_max=state_rows_max)
        for grant in grants:
            await self._settle(grant)
            self._grants[grant.interval_id] = grant
        self._heads.clear()
        return found

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
        which = {
            "intervals": Bigints(list(self._grants)),
            "after_s": self._into.compact_after_s,
            "records_max": MERGED_RECORDS_MAX,
            "bytes_max": MERGED_BYTES_MAX,
            "paths": Texts(list(self._unlike)),
        }
        async with self._fold.use() as connection:
            files = await all_rows(connection, statement("find_small_files"), which)
        if not files:
            self._compact_at = self._clock.monotonic() + COMPACT_EVERY_S
            return 0
        grant = self._grants[files[0][0]]
        directory = self._directories[grant.interval_id]
        run = [file.path for file in first_run([SmallFile(*file[1:]) for file in files], self._unlike)]
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
        except (ArchiveUnavailableError, OSError, pa.ArrowException) as error:  # an erasure may have deleted a file
            log.warning("small files of an archive are not merged: %s", error)
            self._compact_at = self._clock.monotonic() + COMPACT_EVERY_S
            return 0
        if not replaced:
            del self._grants[grant.interval_id]  # another process owns it, or has just deleted one of the files
        return count if replaced else 0

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

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Read segments; return nothing while every consumer has kept up and the next poll is not due."""
        now = self._clock.monotonic()
        behind = any(query.after < self._heads.get((query.consumer, query.producer), 0) for query in queries)
        if not behind and now < self._due_at:
            return []
        answers = await super().poll(queries, bytes_max)
        self._due_at = now + self._into.every_s
        self._heads = {(answer.query.consumer, answer.query.producer): answer.head_seq for answer in answers}
        return answers

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
        written = [await asyncio.to_thread(self._written, checkpoint) for checkpoint in checkpoints]
        try:
            await super().commit(written, graph_version=graph_version, inside=inside, trial=trial)
        except CommitUnknownError:
            raise
        except MillError:
            for checkpoint in written:
                for file in checkpoint.files:
                    directory = self._directories[checkpoint.grant.interval_id]
                    await asyncio.to_thread(directory.discard, file.path)
            raise
        try:
            await asyncio.to_thread(self._publish, written)
        except ArchiveUnavailableError as error:
            raise CommitUnknownError(error.message, hint=error.hint) from error

    def _written(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with the files of its bundles, which are written; a thread calls this."""
        if not checkpoint.archived:
            return checkpoint
        interval_id, files = checkpoint.grant.interval_id, []
        for hour, bundles in _by_hour(checkpoint.archived).items():
            content = encode(bundles, self._producers, self._buckets[interval_id])
            path = self._directories[interval_id].write(checkpoint.grant, checkpoint.bundle, hour, content)
            lo = min(int(bundle.records.event_times.min()) for bundle in bundles)
            hi = max(int(bundle.records.event_times.max()) for bundle in bundles)
            seqs: dict[str, list[int]] = {}
            for bundle in bundles:
                seqs.setdefault(self._producers[bundle.producer], []).append(bundle.seq)
            partitions = {partition: (min(of), max(of)) for partition, of in seqs.items()}
            records = sum(map(len, bundles))
            files.append(ArchivedFile(path, records, len(content), Instant(lo), Instant(hi), partitions))
        return replace(checkpoint, files=files)

    def _publish(self, checkpoints: Sequence[Checkpoint]) -> None:
        for checkpoint in checkpoints:
            for file in checkpoint.files:
                self._directories[checkpoint.grant.interval_id].publish(file.path)

    async def _settle(self, grant: Grant) -> None:
        directory = self._directories.get(grant.interval_id)
        paths = [] if directory is None else await asyncio.to_thread(directory.pending, grant)
        if directory is None or not paths:
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
