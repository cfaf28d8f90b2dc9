"""Which file is read next: names and patterns in the order given, or what appears in a watched directory.

A file that has been read to its end leaves a note (its position and size), which stays as long as the file is there: so
each file is read once, whatever order they come in, and what is kept grows no further than the directory. The note of
a file that is gone is dropped together with the next file that is read, never because a directory looks empty: a disk
that is not mounted must not make old files new ones.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.injectors.files_bytes import FilePosition

log = logging.getLogger(__name__)

_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".inprogress", ".crdownload", "~")


@dataclass(slots=True)
class Notes:
    """The files that have been read to their end, by path."""

    done: dict[str, FilePosition] = field(default_factory=dict)

    @classmethod
    def recovered(cls, notes: Mapping[str, bytes]) -> Notes:
        """As `Taken.notes` left them behind."""
        return cls({path: msgspec.json.decode(note, type=FilePosition) for path, note in notes.items()})

    def finish(self, position: FilePosition) -> dict[str, bytes | None]:
        """A file has been read to its end; the note to commit."""
        self.done[position.path] = position
        return {position.path: msgspec.json.encode(position)}

    def forget(self, present: frozenset[str]) -> dict[str, bytes | None]:
        """Drop the notes of files that are gone; the notes to commit."""
        gone = [path for path in self.done if path not in present]
        for path in gone:
            del self.done[path]
        return dict.fromkeys(gone)


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

    def holds(self, path: str) -> bool:
        """Whether a file is there and belongs to the set."""
        ...

    def next(self) -> Next | None:
        """The next file; None when there is none (now). Raises SourceUnavailableError."""
        ...

    def forgotten(self) -> dict[str, bytes | None]:
        """Notes of files that are gone; asked when a file is begun."""
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

    def __init__(self, paths: tuple[str, ...], notes: Notes, ours: Callable[[str], bool]) -> None:
        self._paths = paths
        self._notes = notes
        self._ours = ours
        self._found: deque[str] = deque()

    def check(self) -> None:
        """Refuse a name without a file, and a pattern that nothing matches.

        Raises:
            ConfigError: with where it was looked for.
        """
        for path in self._paths:
            if path not in self._notes.done and not list(expanded(path)):
                what = "file matches" if is_pattern(path) else "file is named"
                raise ConfigError(f"no {what} {path!r}", hint=f"looked in {Path.cwd()}; give an existing path")

    def holds(self, path: str) -> bool:
        """Whether a file is among them."""
        return any(path == name for named in self._paths for name in expanded(named))

    def next(self) -> Next | None:
        """The first that has not been read. Patterns are matched again when all that they gave has been read."""
        if not self._found:
            names = dict.fromkeys(
                name for path in self._paths if path not in self._notes.done for name in expanded(path)
            )
            self._found.extend(name for name in names if name not in self._notes.done and self._ours(name))
        while self._found and self._found[0] in self._notes.done:
            self._found.popleft()
        return Next(FilePosition(self._found[0])) if self._found else None

    def forgotten(self) -> dict[str, bytes | None]:
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


def expanded(path: str) -> Iterator[str]:
    """The files that a path stands for, sorted by name."""
    if not is_pattern(path):
        if Path(path).is_file():
            yield path
        return
    parts = Path(path).parts
    fixed = next(index for index, part in enumerate(parts) if any(sign in part for sign in "*?["))
    yield from sorted(str(found) for found in Path(*parts[:fixed]).glob(str(Path(*parts[fixed:]))) if found.is_file())


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
        monotonic: Callable[[], float],
    ) -> None:
        self._directory = Path(directory)
        self._pattern = pattern
        self._notes = notes
        self._ours = ours
        self._settle_s = settle_s
        self._monotonic = monotonic
        self._seen: dict[str, _Seen] = {}  # not read as they are
        self._ready: deque[str] = deque()
        self._listed: frozenset[str] | None = None  # nobody has looked yet
        self._unnamed = False

    def check(self) -> None:
        """Refuse a directory that is not there.

        Raises:
            ConfigError: with where it was looked for.
        """
        check_directory(self._directory)

    def holds(self, path: str) -> bool:
        """Whether a file is there."""
        return Path(path).is_file()

    def next(self) -> Next | None:
        """The first file by name that is whole and not read, or that has grown since.

        Raises:
            SourceUnavailableError: the directory cannot be read.
        """
        if not self._ready:
            self._list()
            now = self._monotonic()
            self._ready.extend(sorted(p for p, seen in self._seen.items() if now - seen.since >= self._settle_s))
        while self._ready:
            path = self._ready.popleft()
            seen = self._seen.pop(path)
            done = self._notes.done.get(path)
            if done is None:
                return Next(FilePosition(path))
            if done.broken or (seen.size > done.size and not path.lower().endswith((".gz", ".parquet", ".pq"))):
                return Next(msgspec.structs.replace(done, size=0, broken=False))
            problem = f"{path} has changed after it was read: {done.size} bytes then, {seen.size} now"
            return Next(msgspec.structs.replace(done, size=seen.size), problem)
        return None

    def _list(self) -> None:
        """Look at the directory; what is new or has changed waits until it has settled."""
        now = self._monotonic()
        waiting: dict[str, _Seen] = {}
        listed = []
        try:
            for found in self._directory.glob(self._pattern):
                path = str(found)
                state = self._state(found)
                if state is None or not self._ours(path):
                    continue
                listed.append(path)
                done = self._notes.done.get(path)
                if done is not None and done.size == state.st_size:
                    continue
                before = self._seen.get(path)
                same = before is not None and (before.size, before.changed_ns) == (state.st_size, state.st_mtime_ns)
                since = before.since if before is not None and same else now
                waiting[path] = _Seen(state.st_size, state.st_mtime_ns, since)
        except OSError as error:
            raise SourceUnavailableError(f"{self._directory}: {error}", hint="is the directory readable?") from error
        self._seen, self._listed = waiting, frozenset(listed)

    def _state(self, found: Path) -> os.stat_result | None:
        """Size and time of change of a file that is meant; None for anything else, or when it has just gone."""
        inside = found.relative_to(self._directory).parts
        if any(part.startswith((".", "_")) for part in inside) or found.name.lower().endswith(_UNFINISHED):
            return None
        try:
            str(found).encode()
            state = found.stat()
        except UnicodeEncodeError:
            if not self._unnamed:
                log.warning("%r is passed over: its name is not UTF-8", found)
            self._unnamed = True
            return None
        except FileNotFoundError:
            return None
        return state if stat.S_ISREG(state.st_mode) else None

    def forgotten(self) -> dict[str, bytes | None]:
        """Notes of files that are gone; none before anybody has looked, as when the first file is resumed."""
        return self._notes.forget(self._listed) if self._listed is not None else {}

    def is_over(self) -> bool:
        """Never: another may come."""
        return False

    def is_waiting(self) -> bool:
        """Whether a file has not settled yet."""
        return bool(self._seen)
