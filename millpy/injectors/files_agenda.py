"""Which file is read next: names and patterns in the order given, or what appears in a watched directory.

A file that has been read to its end leaves a note (its position, size and time of change), so each file is read once,
whatever order they come in. A file that is gone may come back, as when a disk was not mounted for a while: its note
stays for `Limits.absent_files_kept_s`, and of at most `Limits.absent_files_max` files, those that went last. What comes
back as it was is known by size and time of change, else by its first bytes; another file under an old name is new.
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
from millpy.injectors.files_bytes import FilePosition, recognize
from millpy.injectors.files_names import Pattern, found_below, open_regular
from millpy.injectors.protocol import SourceSetup

log = logging.getLogger(__name__)

_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".inprogress", ".crdownload", "~")
_ABSENT_AT_LEAST_S = 3_600.0


class PassedOver:
    """Tells of names that are not read: the first for each reason."""

    def __init__(self, setup: SourceSetup) -> None:
        self._setup = setup
        self._told: set[str] = set()

    def __call__(self, path: str, why: str) -> None:
        """Tell of one."""
        if why in self._told:
            return
        self._told.add(why)
        log.warning("%s is passed over: %s", ascii(path), why)
        self._setup.tell(
            "file_passed_over",
            {"stream": self._setup.stream, "partition": self._setup.partition, "file": ascii(path), "why": why},
        )


@dataclass(slots=True)
class Notes:
    """The files that have been read to their end, by path.

    Attributes:
        done: of each, where it ended; `gone_us` is when it was first missed, 0 while it is there.
        changed: paths whose note is to be written anew.
        missed: path -> when this process first missed it, seconds on a monotonic clock.
    """

    done: dict[str, FilePosition] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    missed: dict[str, float] = field(default_factory=dict)

    @classmethod
    def recovered(cls, notes: Mapping[str, bytes]) -> Notes:
        """As `Taken.notes` left them behind."""
        return cls({path: msgspec.json.decode(note, type=FilePosition) for path, note in notes.items()})

    def finish(self, position: FilePosition) -> dict[str, bytes | None]:
        """A file has been read to its end; the note to commit."""
        self.done[position.path] = position
        self.changed.discard(position.path)
        self.missed.pop(position.path, None)
        return {position.path: msgspec.json.encode(position)}

    def returned(self, path: str, changed_ns: int) -> None:
        """A file that was away is there as it was."""
        self.done[path] = msgspec.structs.replace(self.done[path], gone_us=0, changed_ns=changed_ns)
        self.missed.pop(path, None)
        self.changed.add(path)

    def forget(self, path: str) -> None:
        """There is another file under an old name."""
        del self.done[path]
        self.missed.pop(path, None)
        self.changed.add(path)

    def look(
        self, present: frozenset[str], *, now_us: int, monotonic: float, kept_s: float, absent_max: int
    ) -> tuple[dict[str, bytes | None], int]:
        """Compare with what is there.

        A file is forgotten when it has been away for long by the wall clock, and for a while by ours: one step of the
        wall clock forgets nothing.

        Returns:
            The notes to commit, and how many were dropped because too many files are away.
        """
        absent = [path for path in self.done if path not in present]
        for path in absent:
            self.missed.setdefault(path, monotonic)
            if not self.done[path].gone_us:
                self.done[path] = msgspec.structs.replace(self.done[path], gone_us=max(now_us, 1))
                self.changed.add(path)
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
class Next:
    """A file and where to begin in it; with a `problem` it is not to be read."""

    position: FilePosition
    problem: str = ""


class Agenda(Protocol):
    """The order of files."""

    def check(self) -> None:
        """Refuse what cannot be. Raises ConfigError."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file of the set. Raises BrokenFileError (it is none of the set, or gone), SourceUnavailableError."""
        ...

    def next(self) -> Next | None:
        """The next file; None when there is none (now). Raises SourceUnavailableError."""
        ...

    def changed_notes(self) -> dict[str, bytes | None]:
        """Notes that have changed because files are gone or back; asked when a file is begun."""
        ...

    def is_over(self) -> bool:
        """Whether `next` will never find another file."""
        ...

    def is_waiting(self) -> bool:
        """Whether there is a file that may not be read yet."""
        ...


def is_ours(path: str, place: int, of: int) -> bool:
    """Whether a file belongs to this one of several source partitions: by the hash of its name."""
    return of == 1 or xxhash.xxh3_64_intdigest(Path(path).name.encode()) % of == place


def check_directory(directory: Path) -> None:
    """Refuse one that is not there.

    Raises:
        ConfigError: with where it was looked for.
    """
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {str(directory)!r}", hint=f"looked in {Path.cwd()}")


class FixedAgenda:
    """Names and patterns: what they stand for when the next file is looked for; over when all has been read."""

    def __init__(
        self, paths: tuple[str, ...], notes: Notes, ours: Callable[[str], bool], passed_over: Callable[[str, str], None]
    ) -> None:
        self._paths = paths
        self._notes = notes
        self._ours = ours
        self._passed_over = passed_over
        self._found: deque[str] = deque()

    def check(self) -> None:
        """Refuse a name without a file, and a pattern that nothing matches.

        Raises:
            ConfigError: with where it was looked for.
        """
        for path in self._paths:
            if path not in self._notes.done and not any(True for _ in self._expanded(path)):
                what = "file matches" if is_pattern(path) else "file is named"
                raise ConfigError(f"no {what} {path!r}", hint=f"looked in {Path.cwd()}; give an existing path")

    def open(self, path: str) -> BinaryIO:
        """Open a file that is named, or that a pattern matches."""
        if path in self._paths and not is_pattern(path):
            return open_regular(path, None)
        for named in self._paths:
            if is_pattern(named):
                root, pattern = split(named)
                if path.startswith(_below(root)) and pattern.matches(Path(path).relative_to(root).parts):
                    return open_regular(path, root)
        raise BrokenFileError(
            f"reading had come to {path!r}, which is not among the files any more",
            hint="keep a file until it has been read",
        )

    def next(self) -> Next | None:
        """The first that has not been read. Patterns are matched again when all that they gave has been read."""
        if not self._found:
            names = dict.fromkeys(
                name for path in self._paths if path not in self._notes.done for name in self._expanded(path)
            )
            self._found.extend(name for name in names if name not in self._notes.done and self._ours(name))
        while self._found and self._found[0] in self._notes.done:
            self._found.popleft()
        return Next(FilePosition(self._found[0])) if self._found else None

    def _expanded(self, path: str) -> Iterator[str]:
        """The files that a path stands for, sorted by name. Raises SourceUnavailableError."""
        if not is_pattern(path):
            if Path(path).is_file():
                yield path
            return
        root, pattern = split(path)
        try:
            found = found_below(root, pattern, passed_over=self._passed_over)
            yield from sorted(_without_dot(entry.path) for entry in found)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise SourceUnavailableError(f"{root}: {error}", hint="is the directory readable?") from error

    def changed_notes(self) -> dict[str, bytes | None]:
        """None: a set of files is not forgotten."""
        return {}

    def is_over(self) -> bool:
        """Whether all has been read."""
        return self.next() is None and self.next() is None  # what was found, and what matches by now

    def is_waiting(self) -> bool:
        """Never: the files are whole."""
        return False


def is_pattern(path: str) -> bool:
    """Whether a path holds wildcards; a file of that very name is meant as it is."""
    return any(sign in path for sign in "*?[") and not Path(path).is_file()


def split(path: str) -> tuple[str, Pattern]:
    """Part a path with wildcards into a directory and a pattern below it. Raises ConfigError."""
    parts = Path(path).parts
    fixed = next(index for index, part in enumerate(parts) if any(sign in part for sign in "*?["))
    return str(Path(*parts[:fixed])), Pattern(str(Path(*parts[fixed:])))


def _below(root: str) -> str:
    return "" if root == "." else root.rstrip("/") + "/"


def _without_dot(path: str) -> str:
    return path.removeprefix("./")  # `a.csv` is one file, named and found


@dataclass(slots=True)
class _Seen:
    """A file that may still be written to."""

    size: int
    changed_ns: int
    since: float


class WatchedAgenda:
    """New files of a directory, by name; never over.

    Args:
        settle_s: a file is whole when its size and time of change have stood for so long.
        monotonic: seconds.
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
        self._pattern = Pattern(pattern)
        self._notes = notes
        self._ours = ours
        self._settle_s = settle_s
        self._setup = setup
        self._passed_over = PassedOver(setup)
        self._seen: dict[str, _Seen] = {}  # not read as they are
        self._ready: deque[str] = deque()
        self._listed: frozenset[str] | None = None  # nobody has looked yet
        self._too_many = False

    def check(self) -> None:
        """Refuse a directory that is not there.

        Raises:
            ConfigError: with where it was looked for.
        """
        check_directory(self._directory)

    def open(self, path: str) -> BinaryIO:
        """Open a file below the directory; no link is followed there."""
        return open_regular(path, str(self._directory))

    def next(self) -> Next | None:
        """The first file by name that is whole and not read, or that has grown since.

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
                return Next(FilePosition(path))
            if done.size == seen.size and not done.broken:
                continue
            if done.broken or (seen.size > done.size and not path.lower().endswith((".gz", ".parquet", ".pq"))):
                return Next(msgspec.structs.replace(done, size=0, broken=False))
            problem = f"{path} has changed after it was read: {done.size} bytes then, {seen.size} now"
            return Next(msgspec.structs.replace(done, size=seen.size, changed_ns=seen.changed_ns), problem)
        return None

    def _recognize(self, path: str, seen: _Seen) -> None:
        """A file is there under a name that was gone: find out whether it is the one that was read."""
        done = self._notes.done[path]
        try:
            with self.open(path) as opened:
                head, head_bytes, _ = recognize(path, opened, done.head_bytes)
        except BrokenFileError:
            head, head_bytes = "", -1  # gone again, or no file: said when it is opened
        if (head, head_bytes) == (done.head, done.head_bytes):
            self._notes.returned(path, seen.changed_ns)
        else:
            self._notes.forget(path)

    def _list(self) -> None:
        """Look at the directory; what is new or has changed waits until it has settled."""
        now = self._setup.clock.monotonic()
        waiting: dict[str, _Seen] = {}
        listed = []
        try:
            for entry in found_below(
                str(self._directory), self._pattern, passed_over=self._passed_over, meant=_is_meant
            ):
                path = _without_dot(entry.path)
                state = _state(entry)
                if state is None or not self._ours(path):
                    continue
                listed.append(path)
                done = self._notes.done.get(path)
                as_it_was = done is not None and (done.size, done.changed_ns) == (state.st_size, state.st_mtime_ns)
                if done is not None and done.size == state.st_size and (as_it_was or not done.broken):
                    if not done.gone_us:
                        continue
                    if as_it_was:
                        self._notes.returned(path, state.st_mtime_ns)
                        continue
                before = self._seen.get(path)
                same = before is not None and (before.size, before.changed_ns) == (state.st_size, state.st_mtime_ns)
                since = before.since if before is not None and same else now
                waiting[path] = _Seen(state.st_size, state.st_mtime_ns, since)
        except OSError as error:
            raise SourceUnavailableError(f"{self._directory}: {error}", hint="is the directory readable?") from error
        self._seen, self._listed = waiting, frozenset(listed)

    def changed_notes(self) -> dict[str, bytes | None]:
        """Notes of files that are gone or back; none before anybody has looked, as when the first file is resumed."""
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
            what = f"more than {limits.absent_files_max} files that were read are away: the first of them are forgotten"
            log.warning("%s: %s", self._directory, what, extra={"hint": "they are read again should they come back"})
            setup.tell("files_forgotten", {"stream": setup.stream, "partition": setup.partition, "what": what})
        return changes

    def is_over(self) -> bool:
        """Never: another may come."""
        return False

    def is_waiting(self) -> bool:
        """Whether a file has not settled yet."""
        return bool(self._seen)


def _is_meant(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.lower().endswith(_UNFINISHED)


def _state(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Size and time of change; None when the file has just gone, or its disk does not answer."""
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
