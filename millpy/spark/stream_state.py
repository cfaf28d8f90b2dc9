"""The state of a streamed interval: a header, and files of delta documents that are folded now and then.

A file belongs to the attempt that has written it, and counts only if a commit names it (`stream_commits`). So an
attempt that fails, or a driver that is no longer the one, leaves files behind but changes nothing.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from millpy.errors import CorruptionError
from millpy.hosting.interval_state import IntervalState
from millpy.model.checkpoint import DedupeRun, Delta, Entries, Kind
from millpy.model.delta import decode_document, encode_documents
from millpy.model.stage import StoredInterval
from millpy.model.time import INSTANT_MIN, Instant
from millpy.store.archive.local_storage import sync_directory
from millpy.store.protocol import OwnerSnapshot

FOLD_EVERY = 32
"""Number of files of an interval after which they are folded into one."""
DOCUMENT_BYTES_MAX = 4 << 20
SEQUENCER = 1
"""The only grant of an interval: commits are fenced as a whole."""


class StateFile(msgspec.Struct, frozen=True):
    """A file of state documents, and the checksum of its bytes."""

    name: str
    checksum: int


class RunOfBundle(msgspec.Struct, frozen=True):
    """A dedupe run, and the bundle that wrote it."""

    bundle: int
    ids: bytes
    times: bytes
    expires_at: int
    clock: int
    whole: bool


class StateDocuments(msgspec.Struct, frozen=True):
    """The content of a state file."""

    documents: list[bytes]
    runs: list[RunOfBundle]


class IntervalHeader(msgspec.Struct, frozen=True):
    """What an interval has committed, except the content of its files.

    Attributes:
        token: chosen at random by the attempt that was committed. An opened interval in a Python worker may go on only
            if it is that of the same attempt: the same bundle number may have been stepped otherwise.
        cursors: producer -> (seq, watermark).
        last_segments: subscription -> seq of the last segment.
        finished: whether a source has ended, or has nothing more before the hand-over.
        files: the files of the state, oldest first.
    """

    bundle: int
    token: str
    input_watermark: int
    low_watermark: int
    processing_floor: int
    cursors: dict[int, tuple[int, int]]
    last_segments: dict[int, int]
    finished: bool
    files: tuple[StateFile, ...]


def header_of(interval: IntervalState, token: str, files: Sequence[StateFile], *, finished: bool) -> IntervalHeader:
    """Return the header of an interval after a batch."""
    return IntervalHeader(
        interval.bundle,
        token,
        interval.input_watermark,
        interval.low_watermark,
        interval.processing_floor,
        {producer: (cursor.seq, cursor.watermark) for producer, cursor in interval.cursors.items()},
        dict(interval.last_segments),
        finished,
        tuple(files),
    )


class StateChanges:
    """Changes of keyed entries, of each the newest, and dedupe runs."""

    def __init__(self) -> None:
        self._newest: dict[tuple[Kind, str], dict[tuple[bytes, str], tuple[int, bytes | None, int]]] = {}
        self._runs: list[RunOfBundle] = []

    def add(self, delta: Delta) -> None:
        """Apply the changes of a checkpoint or document; a tombstone stays."""
        for entries in delta:
            of_kind = self._newest.setdefault((entries.kind, entries.namespace), {})
            names = zip(entries.keys, entries.subkeys, strict=True)
            values = zip(entries.key_hashes, entries.values, entries.fire_ats, strict=True)
            of_kind.update(zip(names, values, strict=True))

    def add_run(self, bundle: int, run: DedupeRun) -> None:
        """Add the dedupe run of a checkpoint."""
        self._runs.append(RunOfBundle(bundle, **asdict(run)))

    def add_documents(self, documents: StateDocuments) -> None:
        """Apply a file."""
        for document in documents.documents:
            self.add(decode_document(document))
        self._runs += documents.runs

    def forget_the_past(self) -> None:
        """Drop tombstones, and runs that have expired: nothing older is left that they could be about."""
        for of_kind in self._newest.values():
            for name in [name for name, (_, value, _) in of_kind.items() if value is None]:
                del of_kind[name]
        self._runs = _needed(self._runs)

    def delta(self) -> Delta:
        """Return the newest changes."""
        found = []
        for (kind, namespace), of_kind in self._newest.items():
            entries = Entries(kind, namespace)
            for (key, subkey), (key_hash, value, fire_at) in of_kind.items():
                entries.add(key, key_hash, subkey, value, fire_at)
            found.append(entries)
        return tuple(found)

    def runs(self) -> list[DedupeRun]:
        """Return the runs that have not expired, oldest first."""
        return [
            DedupeRun(run.ids, run.times, Instant(run.expires_at), Instant(run.clock), run.whole)
            for run in _needed(self._runs)
        ]

    def documents(self) -> StateDocuments | None:
        """Return the changes as the content of a file; None if there are none."""
        delta = self.delta()
        if not any(map(len, delta)) and not self._runs:
            return None
        return StateDocuments(encode_documents(delta, DOCUMENT_BYTES_MAX), self._runs)


def _needed(runs: Sequence[RunOfBundle]) -> list[RunOfBundle]:
    clock = max((run.clock for run in runs), default=INSTANT_MIN)
    whole = max((run.bundle for run in runs if run.whole), default=0)
    return [run for run in runs if (run.expires_at >= clock and run.bundle >= whole) or run.clock == clock]


class StateDirectory:
    """The state files of a query; every machine sees the directory under the same name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self) -> None:
        """Make the directory if it does not exist."""
        self._path.mkdir(parents=True, exist_ok=True)

    def append(self, name: str, changes: StateChanges, files: Sequence[StateFile]) -> list[StateFile]:
        """Write the changes of a batch as a file, or fold all files into one; return the files of the state."""
        documents = changes.documents()
        if documents is None:
            return list(files)
        if len(files) + 1 < FOLD_EVERY:
            return [*files, self._write(name, documents)]
        folded = self.read(files)
        folded.add_documents(documents)
        folded.forget_the_past()
        return [self._write(name, folded.documents() or StateDocuments([], []))]

    def read(self, files: Sequence[StateFile]) -> StateChanges:
        """Read the state.

        Raises:
            CorruptionError: a file is missing or has changed.
        """
        found = StateChanges()
        for file in files:
            path = self._path / file.name
            try:
                content = path.read_bytes()
            except FileNotFoundError as error:
                raise CorruptionError(f"the state file {path} is missing") from error
            if zlib.crc32(content) != file.checksum:
                raise CorruptionError(f"the state file {path} is not what was written")
            found.add_documents(msgspec.msgpack.decode(content, type=StateDocuments))
        return found

    def snapshot(self, interval_id: int, header: IntervalHeader) -> tuple[OwnerSnapshot, list[DedupeRun]]:
        """Read what an interval has committed, and its dedupe runs."""
        changes = self.read(header.files)
        changes.forget_the_past()
        runs = changes.runs()
        recovered = StoredInterval(
            interval_id,
            SEQUENCER,
            bundle=header.bundle,
            folded_bundle=header.bundle,
            input_watermark=Instant(header.input_watermark),
            low_watermark=Instant(header.low_watermark),
            processing_floor=Instant(header.processing_floor),
            entries=changes.delta(),
        )
        cursors = {producer: (seq, Instant(watermark)) for producer, (seq, watermark) in header.cursors.items()}
        return OwnerSnapshot(recovered, cursors, dict(header.last_segments), 0), runs

    def sweep(self, kept: frozenset[str]) -> None:
        """Delete all other files."""
        for path in self._path.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _write(self, name: str, documents: StateDocuments) -> StateFile:
        content = msgspec.msgpack.encode(documents)
        write_durably(self._path / name, content)
        return StateFile(name, zlib.crc32(content))


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file, and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
