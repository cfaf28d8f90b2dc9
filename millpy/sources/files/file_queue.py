"""The order of files: names and patterns in the order given, or new files of a watched directory.

A file that has been read to its end leaves a note (its position, size and time of change), so each file is read once,
in whatever order the files appear. A text file that is longer than its note says has grown, and is read on from there.
A missing file may come back, as when a disk was not mounted for a while: its note
stays for `Limits.absent_files_kept_s`, for at most the `Limits.absent_files_max` files that disappeared last. A file
that comes back unchanged is recognized by size and time of change, or else by its first bytes; a different file under
an old name is a new file.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import xxhash

from millpy.errors import BrokenFileError, ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.sources.files.byte_reader import REPLACED_HINT, FilePosition, check_grown, recognize
from millpy.sources.files.file_names import NamePattern, ReportSkipped, found_below, open_regular

log = logging.getLogger(__name__)

_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".inprogress", ".crdownload", "~")
_ABSENT_AT_LEAST_S = 3_600.0
_UNSETTLED_AFTER_S = 60.0
_UNSETTLED_HINT = "settle=seconds(0) reads a file on while it is written, if its writer writes whole lines"


class SkipReporter:
    """Reports skipped files: the first for each reason."""

    def __init__(self, setup: SourceSetup) -> None:
        self._setup = setup
        self._told: set[str] = set()

    def __call__(self, path: str, why: str) -> None:
        """Report a skipped file."""
        if why in self._told:
            return
        self._told.add(why)
        log.warning("skipping %s: %s", ascii(path), why)
        self._setup.tell(
            "file_skipped",
            {"stream": self._setup.stream, "partition": self._setup.partition, "file": ascii(path), "why": why},
        )


@dataclass(slots=True)
class Notes:
    """The files that have been read to their end, by path.

    Attributes:
        done: path -> position at its end; `gone_us` is when it was first missing, 0 while it exists.
        changed: paths whose notes must be written again.
        missed: path -> when this process first missed it, in seconds on a monotonic clock.
    """

    done: dict[str, FilePosition] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    missed: dict[str, float] = field(default_factory=dict)

    @classmethod
    def recovered(cls, notes: Mapping[str, bytes]) -> Notes:
        """Decode the notes that `SourceBatch.notes` stored."""
        return cls({path: msgspec.json.decode(note, type=FilePosition) for path, note in notes.items()})

    def finish(self, position: FilePosition) -> dict[str, bytes | None]:
        """Record that a file has been read to its end; return the note to commit."""
        self.done[position.path] = position
        self.changed.discard(position.path)
        self.missed.pop(position.path, None)
        return {position.path: msgspec.json.encode(position)}

    def returned(self, path: str, changed_ns: int) -> None:
        """Record that a missing file is back unchanged."""
        self.done[path] = msgspec.structs.replace(self.done[path], gone_us=0, changed_ns=changed_ns)
        self.missed.pop(path, None)
        self.changed.add(path)

    def forget(self, path: str) -> None:
        """Drop a file's note, so that a file under this name is new."""
        del self.done[path]
        self.missed.pop(path, None)
        self.changed.add(path)

    def miss(self, present: frozenset[str], *, now_us: int, monotonic: float) -> list[str]:
        """Record which files are missing among those that exist, and return them."""
        absent = [path for path in self.done if path not in present]
        for path in absent:
            self.missed.setdefault(path, monotonic)
            if not self.done[path].gone_us:
                self.done[path] = msgspec.structs.replace(self.done[path], gone_us=max(now_us, 1))
                self.changed.add(path)
        return absent

    def look(
        self, present: frozenset[str], *, now_us: int, monotonic: float, kept_s: float, absent_max: int
    ) -> tuple[dict[str, bytes | None], int]:
        """Compare the notes with the files that exist.

        A note is dropped when its file has been missing for `kept_s` by the wall clock, and for a while by the
        monotonic clock, so that a step of the wall clock drops nothing.

        Returns:
            The notes to commit, and how many were dropped because too many files are missing.
        """
        absent = self.miss(present, now_us=now_us, monotonic=monotonic)
        over = [
            path
            for path in absent
            if now_us - self.done[path].gone_us > kept_s * 1_000_000
            and monotonic - self.missed[path] >= min(kept_s, _ABSENT_AT_LEAST_S)
        ]
        for path in over:
            self.forget(path)
        left = sorted((path for path in absent if path in self.done), key=lambda path: self.done[path].gone_us)
        dropped = left[: max(0, len(left) - absent_max)]
        for path in dropped:
            self.forget(path)
        changes = {path: self._note(path) for path in self.changed}
        self.changed.clear()
        return changes, len(dropped)

    def _note(self, path: str) -> bytes | None:
        done = self.done.get(path)
        return None if done is None else msgspec.json.encode(done)


@dataclass(frozen=True, slots=True)
class NextFile:
    """A file and the position to begin at.

    Attributes:
        problem: why it must not be read; empty if it may be.
        grown: whether it was read to its end, which is the position, and is longer now.
    """

    position: FilePosition
    problem: str = ""
    grown: bool = False


def read_on(done: FilePosition, size: int, changed_ns: int) -> NextFile:
    """Return where to go on in a file that has another size than when it was read, or that was broken."""
    if done.broken:
        return NextFile(msgspec.structs.replace(done, size=0, broken=False))
    if size > done.size and not done.path.lower().endswith((".parquet", ".pq")):
        return NextFile(done, grown=True)
    problem = f"{done.path} has changed since it was read: from {done.size} to {size} bytes"
    return NextFile(msgspec.structs.replace(done, size=size, changed_ns=changed_ns), problem)


def rewritten(done: FilePosition, changed_ns: int, open: Callable[[str], BinaryIO]) -> NextFile | None:
    """Return the problem of a file of the size that was read, which was changed since; None if it was only touched.

    Raises:
        SourceUnavailableError: it cannot be read.
    """
    try:
        opened = open(done.path)
    except BrokenFileError:  # it has gone since it was listed
        return None
    with opened:
        try:
            check_grown(done, opened)
        except BrokenFileError as error:
            return NextFile(msgspec.structs.replace(done, changed_ns=changed_ns), error.message)
    return None


class FileQueue(Protocol):
    """The order in which files are read."""

    def check(self) -> None:
        """Check that the files or the directory exist. Raises ConfigError."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file of the set. Raises BrokenFileError (not in the set, or missing), SourceUnavailableError."""
        ...

    def next(self) -> NextFile | None:
        """Return the next file, or None if there is none now. Raises SourceUnavailableError."""
        ...

    def changed_notes(self) -> dict[str, bytes | None]:
        """Return the notes that changed because files disappeared or came back; called when reading begins a file."""
        ...

    def is_over(self) -> bool:
        """Tell whether `next` will never find another file."""
        ...

    def is_waiting(self) -> bool:
        """Tell whether there is a file that may not be read yet."""
        ...


def is_ours(path: str, place: int, of: int) -> bool:
    """Tell whether a file belongs to source partition `place` of several, by the hash of its name."""
    return of == 1 or xxhash.xxh3_64_intdigest(Path(path).name.encode()) % of == place


def check_directory(directory: Path) -> None:
    """Check that a directory exists.

    Raises:
        ConfigError: it does not; the hint names the working directory.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {str(directory)!r}",
            hint=f"name an existing directory; paths are relative to {Path.cwd()}",
        )


class FixedFileQueue:
    """A queue of names and patterns, which ends when all matching files have been read.

    Files that had been read before, and have grown since, are read on, each once: a file that is always written to must
    not keep the source from its end.

    Args:
        paths: the names and patterns, in the order of reading.
        notes: the files that have been read to their end.
        ours: tells whether a file belongs to this source partition.
        report_skipped: called with the path and the reason for each skipped file.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        notes: Notes,
        ours: Callable[[str], bool],
        report_skipped: ReportSkipped,
    ) -> None:
        self._paths = paths
        self._notes = notes
        self._ours = ours
        self._report_skipped = report_skipped
        self._found: deque[str] = deque()
        self._earlier = dict(notes.done)  # read before this queue was made

    def check(self) -> None:
        """Check that each name is a file, and that each pattern matches a file.

        Raises:
            ConfigError: one does not; the hint names the working directory.
        """
        for path in self._paths:
            if path not in self._notes.done and not any(True for _ in files_of(path, self._report_skipped)):
                what = "file matches" if is_pattern(path) else "such file:"
                hint = f"name an existing file; paths are relative to {Path.cwd()}"
                raise ConfigError(f"no {what} {path!r}", hint=hint)

    def open(self, path: str) -> BinaryIO:
        """Open a file that is named or that a pattern matches."""
        if path in self._paths and not is_pattern(path):
            return open_regular(path, None)
        for named in self._paths:
            if is_pattern(named):
                root, pattern = split(named)
                if path.startswith(_prefix_of(root)) and pattern.matches(Path(path).relative_to(root).parts):
                    return open_regular(path, root)
        raise BrokenFileError(
            f"the stored position is in {path!r}, which is no longer among the files",
            hint="keep a file until it has been read",
        )

    def next(self) -> NextFile | None:
        """Return the first file with unread bytes. Match the patterns again when all files found have been read."""
        if not self._found:
            self._found.extend(name for name in self._names() if self._following(name) is not None)
        while self._found:
            if (following := self._following(self._found[0])) is not None:
                return following
            self._found.popleft()
        return None

    def _names(self) -> Iterator[str]:
        """Yield the files of this source partition, each once."""
        for name in dict.fromkeys(name for path in self._paths for name in files_of(path, self._report_skipped)):
            if self._ours(name):
                yield name

    def _following(self, name: str) -> NextFile | None:
        """Return where to begin in a file; None if nothing of it is to be read now."""
        done = self._notes.done.get(name)
        if done is None:
            return NextFile(FilePosition(name))
        if done is not self._earlier.get(name) or (state := _status(name)) is None:
            return None
        if state.st_size == done.size:
            same = done.broken or state.st_mtime_ns == done.changed_ns
            return None if same else rewritten(done, state.st_mtime_ns, self.open)
        return read_on(done, state.st_size, state.st_mtime_ns)

    def changed_notes(self) -> dict[str, bytes | None]:
        """Return an empty dict: the notes of a fixed set of files stay."""
        return {}

    def unread(self, *, stops: bool) -> list[str]:
        """Say which files are new or have another size since all files were read.

        Args:
            stops: whether a file that was replaced, or has shrunk, is an error.

        Raises:
            BrokenFileError: there is such a file, and `stops` is set.
        """
        found = []
        for name in self._names():
            following, state, done = self._following(name), _status(name), self._notes.done.get(name)
            if following is None or state is None:
                continue
            if stops:
                self._check(following)
            found.append(f"{name} is new" if done is None else f"{name} had {done.size} bytes and has {state.st_size}")
        return found

    def _check(self, following: NextFile) -> None:
        """Raise BrokenFileError for a file that is not what was read, and more."""
        if following.problem:
            raise BrokenFileError(following.problem, hint=REPLACED_HINT)
        if following.grown:
            with self.open(following.position.path) as opened:
                check_grown(following.position, opened)

    def is_over(self) -> bool:
        """Tell whether all files have been read."""
        return self.next() is None and self.next() is None  # the files found, then those that match by now

    def is_waiting(self) -> bool:
        """Return False: the files of a fixed set are complete."""
        return False


def files_of(path: str, report_skipped: ReportSkipped) -> Iterator[str]:
    """Yield the files that a name or pattern denotes, sorted by name. Raises SourceUnavailableError."""
    if not is_pattern(path):
        if Path(path).is_file():
            yield path
        return
    root, pattern = split(path)
    try:
        found = found_below(root, pattern, report_skipped=report_skipped)
        yield from sorted(_without_dot(entry.path) for entry in found)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise SourceUnavailableError(f"{root}: {error}", hint="make the directory readable") from error


def _status(path: str) -> os.stat_result | None:
    """Return the status of a file; None if it is gone."""
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None


def is_pattern(path: str) -> bool:
    """Tell whether a path contains wildcards and is not itself the name of a file."""
    return any(sign in path for sign in "*?[") and not Path(path).is_file()


def split(path: str) -> tuple[str, NamePattern]:
    """Split a path with wildcards into a directory and a pattern below it. Raises ConfigError."""
    parts = Path(path).parts
    fixed = next(index for index, part in enumerate(parts) if any(sign in part for sign in "*?["))
    return str(Path(*parts[:fixed])), NamePattern(str(Path(*parts[fixed:])))


def _prefix_of(root: str) -> str:
    return "" if root == "." else root.rstrip("/") + "/"


def _without_dot(path: str) -> str:
    return path.removeprefix("./")  # so that a file has the same path whether named or found


@dataclass(slots=True)
class _GrowingFile:
    """A file that may still be written to; `found` and `since` are when it was first seen, and first seen like this.

    `was_read` tells whether a file of this size was read to its end: it was probably only touched.
    """

    size: int
    changed_ns: int
    since: float
    found: float
    was_read: bool


class WatchedFileQueue:
    """A queue of the new files of a directory, sorted by name; never over.

    Args:
        settle_s: a file is complete when its size and time of change have not changed for this many seconds.
    """

    def __init__(
        self,
        directory: str,
        pattern: str,
        notes: Notes,
        ours: Callable[[str], bool],
        *,
        settle_s: float,
        setup: SourceSetup,
    ) -> None:
        self._directory = Path(directory)
        self._pattern = NamePattern(pattern)
        self._notes = notes
        self._ours = ours
        self._settle_s = settle_s
        self._setup = setup
        self._report_skipped = SkipReporter(setup)
        self._seen: dict[str, _GrowingFile] = {}  # files that are new or changed, and not read yet
        self._ready: deque[str] = deque()
        self._listed: frozenset[str] | None = None  # None before the first listing
        self._too_many = False
        self._told_unsettled = False

    def check(self) -> None:
        """Check that the directory exists.

        Raises:
            ConfigError: it does not; the hint names the working directory.
        """
        check_directory(self._directory)

    def open(self, path: str) -> BinaryIO:
        """Open a file below the directory, without following links."""
        return open_regular(path, str(self._directory))

    def next(self) -> NextFile | None:
        """Return the first file by name that is complete and unread, or that has grown since it was read.

        Raises:
            SourceUnavailableError: the directory cannot be read.
        """
        if not self._ready:
            self._list()
            now = self._setup.clock.monotonic()
            self._ready.extend(sorted(p for p, seen in self._seen.items() if now - seen.since >= self._settle_s))
        while self._ready:
            path = self._ready.popleft()
            seen = self._seen.pop(path)
            if path in self._notes.done and self._notes.done[path].gone_us:
                self._recognize(path, seen)
            done = self._notes.done.get(path)
            if done is None:
                return NextFile(FilePosition(path))
            if done.size != seen.size or done.broken:
                return read_on(done, seen.size, seen.changed_ns)
            if done.changed_ns != seen.changed_ns:
                if (problem := rewritten(done, seen.changed_ns, self.open)) is not None:
                    return problem
                self._notes.returned(path, seen.changed_ns)
        return None

    def _recognize(self, path: str, seen: _GrowingFile) -> None:
        """Find out whether a file under the name of a missing file is the one that was read."""
        done = self._notes.done[path]
        try:
            with self.open(path) as opened:
                head, head_bytes, _ = recognize(path, opened, done.head_bytes)
        except BrokenFileError:
            head, head_bytes = "", -1  # missing again, or not a regular file: opening it reports that
        if (head, head_bytes) == (done.head, done.head_bytes):
            self._notes.returned(path, seen.changed_ns)
        else:
            self._notes.forget(path)

    def _list(self) -> None:
        """List the directory; new and changed files wait until they settle."""
        now = self._setup.clock.monotonic()
        waiting: dict[str, _GrowingFile] = {}
        listed = []
        try:
            for entry in found_below(
                str(self._directory), self._pattern, report_skipped=self._report_skipped, meant=_is_meant
            ):
                path = _without_dot(entry.path)
                state = _state(entry)
                if state is None or not self._ours(path):
                    continue
                listed.append(path)
                done = self._notes.done.get(path)
                as_it_was = done is not None and (done.size, done.changed_ns) == (state.st_size, state.st_mtime_ns)
                if done is not None and as_it_was:
                    if done.gone_us:
                        self._notes.returned(path, state.st_mtime_ns)
                    continue
                before = self._seen.get(path)
                same = before is not None and (before.size, before.changed_ns) == (state.st_size, state.st_mtime_ns)
                since = before.since if before is not None and same else now
                found = now if before is None else before.found
                was_read = done is not None and done.size == state.st_size and not (done.broken or done.gone_us)
                waiting[path] = _GrowingFile(state.st_size, state.st_mtime_ns, since, found, was_read)
        except OSError as error:
            raise SourceUnavailableError(f"{self._directory}: {error}", hint="make the directory readable") from error
        self._seen, self._listed = waiting, frozenset(listed)
        # At once, though it is committed with the next file: one that comes under this name soon is another file.
        self._notes.miss(self._listed, now_us=self._setup.clock.now_us(), monotonic=now)
        self._report_unsettled(now)

    def _report_unsettled(self, now: float) -> None:
        """Report a file that has been written to for so long that it may never settle; once, until there is none."""
        unread = (path for path, seen in self._seen.items() if not seen.was_read)
        unsettled = min(unread, key=lambda path: self._seen[path].found, default=None)
        if unsettled is None or now - self._seen[unsettled].found < self._settle_s + _UNSETTLED_AFTER_S:
            self._told_unsettled = False
        elif not self._told_unsettled:
            self._told_unsettled = True
            setup, path = self._setup, ascii(unsettled)
            what = f"{path} is not read, because it has not been unchanged for {self._settle_s:g} s since it was found"
            log.warning("%s", what, extra={"hint": _UNSETTLED_HINT})
            setup.tell("file_unsettled", {"stream": setup.stream, "partition": setup.partition, "what": what})

    def changed_notes(self) -> dict[str, bytes | None]:
        """Return the notes of files that disappeared or came back; empty before the first listing."""
        if self._listed is None:
            return {}
        setup, limits = self._setup, self._setup.limits
        changes, dropped = self._notes.look(
            self._listed,
            now_us=setup.clock.now_us(),
            monotonic=setup.clock.monotonic(),
            kept_s=limits.absent_files_kept_s,
            absent_max=limits.absent_files_max,
        )
        if dropped and not self._too_many:
            self._too_many = True
            what = f"more than {limits.absent_files_max} read files are missing: dropping the oldest of their notes"
            log.warning("%s: %s", self._directory, what, extra={"hint": "such a file is read again if it comes back"})
            setup.tell("files_forgotten", {"stream": setup.stream, "partition": setup.partition, "what": what})
        return changes

    def is_over(self) -> bool:
        """Return False: another file may appear."""
        return False

    def is_waiting(self) -> bool:
        """Tell whether some file has not settled yet."""
        return any(not seen.was_read for seen in self._seen.values())


def _is_meant(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.lower().endswith(_UNFINISHED)


def _state(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file; None when it has just disappeared, or its disk does not answer."""
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
