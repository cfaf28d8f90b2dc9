"""Finding the files that a pattern selects below a directory, and opening them, without following links.

A user who can write to a directory must not make us read a file elsewhere, such as `/proc/self/environ`, or a FIFO or a
device. So symbolic links to files and directories are skipped, and a file is opened one path component after the other
from the directory, each without following links: an attacker cannot replace it between a check and the opening. The
directory itself and a file that is named in a graph may be links, because the graph's author chose their names.
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

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO without a writer must not block
_ENTER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_ANY_DEPTH = "**"
ReportSkipped = Callable[[str, str], None]


class NamePattern:
    """A pattern for names below a directory: `*.csv`, `*/*.csv`; `**` matches directories of any depth.

    A walk down the directories carries places: the indexes of the components that the next name may match.

    Args:
        text: a relative path without `..`.

    Raises:
        ConfigError: the text is empty, absolute or contains `..`.
    """

    def __init__(self, text: str) -> None:
        parts = Path(text).parts
        if not parts or Path(text).is_absolute() or ".." in parts:
            raise ConfigError(f"invalid pattern {text!r} for files below a directory", hint='an example: "*.csv"')
        if parts[-1] == _ANY_DEPTH:
            parts = (*parts, "*")
        self._parts = [None if part == _ANY_DEPTH else re.compile(fnmatch.translate(part)) for part in parts]

    def begin(self) -> frozenset[int]:
        """Return the places for the names in the root directory."""
        return self._closed({0})

    def _closed(self, places: set[int]) -> frozenset[int]:
        for place in sorted(places):
            while place < len(self._parts) and self._parts[place] is None:
                place += 1
                places.add(place)
        return frozenset(places)

    def enter(self, places: frozenset[int], name: str) -> frozenset[int]:
        """Return the places for the names in a directory of this name; empty when the pattern selects none of them."""
        found = set()
        for place in places:
            part = self._parts[place]
            if part is None:
                found.add(place)
            elif place + 1 < len(self._parts) and part.match(name):
                found.add(place + 1)
        return self._closed(found)

    def selects(self, places: frozenset[int], name: str) -> bool:
        """Tell whether the pattern selects a file of this name."""
        last = self._parts[-1]
        assert last is not None
        return len(self._parts) - 1 in places and last.match(name) is not None

    def matches(self, names: Sequence[str]) -> bool:
        """Tell whether the pattern selects a file; `names` are the components of its path."""
        places = self.begin()
        for name in names[:-1]:
            places = self.enter(places, name)
        return bool(names) and self.selects(places, names[-1])


def found_below(
    root: str, pattern: NamePattern, *, report_skipped: ReportSkipped, meant: Callable[[str], bool] = lambda _: True
) -> Iterator[os.DirEntry[str]]:
    """Yield the regular files that a pattern selects, in arbitrary order.

    Args:
        root: the directory; may be a link.
        pattern: selects the files.
        report_skipped: called with the path and the reason for each skipped name that the pattern matches.
        meant: tells whether to consider a name of a file or directory at all.

    Raises:
        OSError: `root` cannot be read; an unreadable directory below it is skipped.
    """
    waiting = [(root, pattern.begin())]
    while waiting:
        directory, places = waiting.pop()
        for entry in _entries_of(directory, None if directory == root else report_skipped):
            if not meant(entry.name):
                continue
            inside, selected = pattern.enter(places, entry.name), pattern.selects(places, entry.name)
            if not (inside or selected):
                continue
            if not _is_utf8(entry.name):
                report_skipped(entry.path, "its name is not UTF-8")
            elif entry.is_symlink():
                report_skipped(entry.path, "it is a symbolic link")
            elif entry.is_dir(follow_symlinks=False):
                if inside:
                    waiting.append((entry.path, inside))
            elif not selected:
                continue
            elif entry.is_file(follow_symlinks=False):
                yield entry
            else:
                report_skipped(entry.path, "it is not a regular file")


def _entries_of(directory: str, report_skipped: ReportSkipped | None) -> list[os.DirEntry[str]]:
    """List a directory. Without `report_skipped`, raise OSError if it is unreadable."""
    try:
        with os.scandir(directory) as listing:
            return list(listing)
    except OSError as error:
        if report_skipped is None:
            raise
        if not isinstance(error, FileNotFoundError):
            report_skipped(directory, f"it is unreadable: {error.strerror}")
        return []


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_name(path: str) -> None:
    """Check that a path can be stored.

    Raises:
        ConfigError: it is not UTF-8, or contains NUL.
    """
    if not _is_utf8(path) or "\0" in path:
        raise ConfigError(f"cannot store file name {path!r}: it is not UTF-8 or contains NUL", hint="rename the file")


def open_regular(path: str, root: str | None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: the file's path; begins with `root`.
        root: the directory below which links are not followed; None for a file that the user named.

    Raises:
        BrokenFileError: the file does not exist or is not a regular file, or its path contains a link.
        SourceUnavailableError: the file cannot be opened now.
    """
    try:
        descriptor = os.open(path, _READ) if root is None else _open_below(root, Path(path).relative_to(root).parts)
    except OSError as error:
        if error.errno == errno.ELOOP or isinstance(error, NotADirectoryError):
            raise BrokenFileError(
                f"{path} is a symbolic link, or lies behind one", hint="put the file itself there"
            ) from None
        if isinstance(error, (FileNotFoundError, IsADirectoryError)):
            raise BrokenFileError(f"{path} no longer exists", hint="keep a file until it has been read") from None
        raise SourceUnavailableError(f"{path}: {error}", hint="make the file readable") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BrokenFileError(f"{path} is not a regular file", hint="name a file; pipes and devices are not read")
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
