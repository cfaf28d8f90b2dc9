"""Names of files that a pattern selects below a directory, and opening them: neither ever follows a link.

Whoever may write into a directory must not make us read what lies elsewhere, such as `/proc/self/environ`, nor a FIFO
or a device. So a symbolic link is passed over, be it a file or a directory on the way, and a file is opened one name
after the other from the directory, each without following links: nothing can be put in its place between a check and
the opening. The directory itself, and a file that is named in a graph, may be links: their names are the user's own.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from millpy.errors import BrokenFileError, ConfigError, SourceUnavailableError

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO without a writer must not be waited for
_ENTER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_ANY_DEPTH = "**"
PassedOver = Callable[[str, str], None]


class Pattern:
    """Selects names below a directory: `*.csv`, `*/*.csv`; `**` stands for directories of any depth.

    Args:
        text: relative, without `..`. Raises ConfigError.
    """

    def __init__(self, text: str) -> None:
        parts = Path(text).parts
        if not parts or Path(text).is_absolute() or ".." in parts:
            raise ConfigError(f"{text!r} is no pattern of files below a directory", hint='such as "*.csv"')
        if parts[-1] == _ANY_DEPTH:
            parts = (*parts, "*")
        self._parts = [None if part == _ANY_DEPTH else re.compile(fnmatch.translate(part)) for part in parts]

    def begin(self) -> frozenset[int]:
        """Return the places in the pattern at which its directory stands."""
        return self._closed({0})

    def _closed(self, places: set[int]) -> frozenset[int]:
        for place in sorted(places):
            while place < len(self._parts) and self._parts[place] is None:
                place += 1
                places.add(place)
        return frozenset(places)

    def enter(self, places: frozenset[int], name: str) -> frozenset[int]:
        """Return the places for a directory of this name; none when nothing below it can be selected."""
        found = set()
        for place in places:
            part = self._parts[place]
            if part is None:
                found.add(place)
            elif place + 1 < len(self._parts) and part.match(name):
                found.add(place + 1)
        return self._closed(found)

    def selects(self, places: frozenset[int], name: str) -> bool:
        """Whether a file of this name is selected."""
        last = self._parts[-1]
        assert last is not None
        return len(self._parts) - 1 in places and last.match(name) is not None

    def matches(self, names: Sequence[str]) -> bool:
        """Whether a file is selected; `names` lead to it from the directory."""
        places = self.begin()
        for name in names[:-1]:
            places = self.enter(places, name)
        return bool(names) and self.selects(places, names[-1])


def found_below(
    root: str, pattern: Pattern, *, passed_over: PassedOver, meant: Callable[[str], bool] = lambda _: True
) -> Iterator[os.DirEntry[str]]:
    """Yield the regular files that a pattern selects, in no order.

    Args:
        root: the directory; may be a link.
        pattern: what is selected.
        passed_over: called with path and reason of what would be selected if it were a regular file below `root`.
        meant: whether a name counts at all, of a file or of a directory on the way.

    Raises:
        OSError: `root` cannot be read; a directory below it that cannot be is passed over.
    """
    waiting = [(root, pattern.begin())]
    while waiting:
        directory, places = waiting.pop()
        try:
            with os.scandir(directory) as listing:
                entries = list(listing)
        except OSError as error:
            if directory == root:
                raise
            if not isinstance(error, FileNotFoundError):
                passed_over(directory, f"it cannot be read: {error.strerror}")
            continue
        for entry in entries:
            if not meant(entry.name):
                continue
            inside, selected = pattern.enter(places, entry.name), pattern.selects(places, entry.name)
            if not (inside or selected):
                continue
            if not _is_utf8(entry.name):
                passed_over(entry.path, "its name is not UTF-8")
            elif entry.is_symlink():
                passed_over(entry.path, "it is a symbolic link")
            elif entry.is_dir(follow_symlinks=False):
                if inside:
                    waiting.append((entry.path, inside))
            elif not selected:
                continue
            elif entry.is_file(follow_symlinks=False):
                yield entry
            else:
                passed_over(entry.path, "it is no regular file")


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_name(path: str) -> None:
    """Refuse a path that cannot be written down.

    Raises:
        ConfigError: it is not UTF-8, or holds NUL.
    """
    if not _is_utf8(path) or "\0" in path:
        raise ConfigError(f"{path!r} is no name that can be stored: it is not UTF-8", hint="give it another name")


def open_regular(path: str, root: str | None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: of the file; begins with `root`.
        root: the directory below which no link is followed; None for a file that is named by the user.

    Raises:
        BrokenFileError: there is no such file, it is no regular one, or a link is on the way.
        SourceUnavailableError: it cannot be opened now.
    """
    try:
        descriptor = os.open(path, _READ) if root is None else _open_below(root, Path(path).relative_to(root).parts)
    except OSError as error:
        if error.errno == errno.ELOOP or isinstance(error, NotADirectoryError):
            raise BrokenFileError(
                f"{path} is a symbolic link, or lies behind one", hint="put the file itself"
            ) from None
        if isinstance(error, (FileNotFoundError, IsADirectoryError)):
            raise BrokenFileError(f"{path} is not there any more", hint="keep a file until it has been read") from None
        raise SourceUnavailableError(f"{path}: {error}", hint="is the file readable?") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BrokenFileError(f"{path} is no regular file", hint="pipes and devices are not read")
    return os.fdopen(descriptor, "rb")


def _open_below(root: str, names: Sequence[str]) -> int:
    directory = os.open(root, _ENTER)
    try:
        for name in names[:-1]:
            inner = os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        return os.open(names[-1], _READ | os.O_NOFOLLOW, dir_fd=directory)
    finally:
        os.close(directory)
