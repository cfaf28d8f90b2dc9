"""The commits of a streaming query: one file a batch, which alone says what has happened.

    CHECKPOINT/query.json         the graph as it was when the query began, and the name of the query
    CHECKPOINT/commits/N.json     every interval's header, the files of a batch's rows, the counts
    CHECKPOINT/state/             state files (`stream_state`)
    CHECKPOINT/offsets/           what the batch that runs has taken from sources with positions (`stream_offsets`)
    CHECKPOINT/spark/             Spark's own: the log of offsets, from which a batch has its time

A commit appears whole, under the next number, which can be taken once. A driver that starts takes a number, too, with
the newest commit again: from then on every commit of an earlier driver is refused. Whatever the newest commit does not
name is a remainder of an attempt that failed, and is swept then.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec

from millpy.errors import OwnershipError, UsageError
from millpy.model.deployment import GraphSpec
from millpy.model.graph_changes import changes_between
from millpy.spark.hosted_task import IntervalEnd
from millpy.spark.stream_offsets import OffsetLog
from millpy.spark.stream_state import IntervalHeader, StateDirectory, write_durably
from millpy.store.archive.local_storage import sync_directory

COMMITS_KEPT = 64
"""Number of commits that are kept; only the newest counts."""


class StreamCommit(msgspec.Struct, frozen=True):
    """What one batch has changed.

    Attributes:
        batch: its number in Spark's log of offsets, from 0; -1 before the first.
        now_us: its processing time.
        intervals: interval -> header.
        before: interval -> its bundle before this batch.
        outputs: interval -> files of rows that this batch adds, below the output directory.
        rows: table -> number of its rows in all batches.
        left: interval -> what it has counted in all batches, and left undone.
        finished: whether all sources have ended.
    """

    batch: int
    now_us: int
    intervals: dict[int, IntervalHeader]
    before: dict[int, int]
    outputs: dict[int, list[str]]
    rows: dict[int, int]
    left: dict[int, IntervalEnd]
    finished: bool


class StreamCommits:
    """The checkpoint directory of a query, as its driver sees it.

    Attributes:
        newest: the newest commit of this driver; that of the one before it at the start.
        worker_id: the name of the query in a database, the same for all its drivers.
    """

    def __init__(self, checkpoint: Path, spec: GraphSpec) -> None:
        """Become the only driver of a query.

        Raises:
            UsageError: the checkpoint is one of another graph.
        """
        self._path = checkpoint
        self._commits = checkpoint / "commits"
        self._commits.mkdir(parents=True, exist_ok=True)
        self.state = StateDirectory(checkpoint / "state")
        self.state.create()
        self._offsets = OffsetLog(checkpoint)
        self._offsets.create()
        self.worker_id = self._query_of(spec)
        while not self._take_over():
            pass
        self._kept = _files(self.newest)
        self.state.sweep(self._kept)
        self._offsets.sweep(self.newest.batch)

    def commit(self, commit: StreamCommit) -> None:
        """Commit a batch.

        Raises:
            OwnershipError: another driver has started since.
        """
        assert commit.batch > self.newest.batch, (commit.batch, self.newest.batch)
        if not self._append(self._number + 1, commit):
            raise OwnershipError(
                f"another driver has started with the checkpoint {self._path}", hint="let only one of them run"
            )
        for number in self._numbers()[:-COMMITS_KEPT]:
            self._name(number).unlink(missing_ok=True)
        self._offsets.sweep(commit.batch)
        kept = _files(commit)
        if not self._kept <= kept:  # something was folded
            self.state.sweep(kept)
        self._kept = kept

    def _take_over(self) -> bool:
        numbers = self._numbers()
        newest = StreamCommit(-1, 0, {}, {}, {}, {}, {}, False)
        if numbers:
            newest = msgspec.json.decode(self._name(numbers[-1]).read_bytes(), type=StreamCommit)
        return self._append(numbers[-1] + 1 if numbers else 0, newest)

    def _append(self, number: int, commit: StreamCommit) -> bool:
        """Write a commit; return False if another driver has the number."""
        ready = self._path / f"commit-{uuid4().hex}"
        write_durably(ready, msgspec.json.encode(commit))
        try:
            os.link(ready, self._name(number))
        except FileExistsError:
            return False
        finally:
            ready.unlink()
        sync_directory(self._commits)
        if self._numbers()[-1] != number:  # frozen for so long that the commit of this number is deleted again
            self._name(number).unlink(missing_ok=True)
            return False
        self._number, self.newest = number, commit
        return True

    def _name(self, number: int) -> Path:
        return self._commits / f"{number:012}.json"

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._commits.glob("*.json"))

    def _query_of(self, spec: GraphSpec) -> UUID:
        """Begin the query, or check that it is one of the same graph; return its name."""
        stored = self._path / "query.json"
        description = {"name": spec.name, "generation": spec.generation, **spec.description()}
        if not stored.exists():
            ready = self._path / f"query-{uuid4().hex}"
            write_durably(ready, msgspec.json.encode(_Query(uuid4(), description)))
            try:
                with suppress(FileExistsError):
                    os.link(ready, stored)
            except OSError as error:
                raise UsageError(
                    f"the file system of {self._path} has no hard links: {error.strerror}",
                    hint="keep the checkpoint on a local disk or a shared file system that has them",
                ) from error
            finally:
                ready.unlink()
            sync_directory(self._path)
        query = msgspec.json.decode(stored.read_bytes(), type=_Query)
        changes = [str(change) for change in changes_between(query.graph, description)]
        changes += [
            f"its {of} was {query.graph[of]}" for of in ("name", "generation") if query.graph[of] != description[of]
        ]
        if changes:
            raise UsageError(
                f"the checkpoint {self._path} is one of another graph: {'; '.join(changes)}",
                hint="name a new directory: a changed graph starts from the beginning",
            )
        return query.worker_id


class _Query(msgspec.Struct, frozen=True):
    """A query: its name as a worker, and the description of its graph."""

    worker_id: UUID
    graph: dict[str, Any]


def _files(commit: StreamCommit) -> frozenset[str]:
    return frozenset(file.name for header in commit.intervals.values() for file in header.files)
