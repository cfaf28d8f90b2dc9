"""A local directory as the place of archives: a name changes at once and durably."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from millpy.errors import ArchiveUnavailableError

HOUR = "hour="
"""What the names of folders of files begin with."""
MOVES_MAX = 100
"""How often a file is given its name while others delete the folder, each time when it is empty."""


class LocalStorage:
    """The files below a directory; see `ArchiveStorage`.

    Args:
        root: the directory.
    """

    settled_s = 0.0

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def full_name(self, path: str) -> str:
        """Return the absolute name of a file."""
        return str(self._root / path)

    def create(self, path: str, content: pa.Buffer) -> None:
        """Write a new file durably."""
        file = self._root / path
        with _unavailable(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("xb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            sync_directory(file.parent)

    def create_once(self, path: str, content: bytes) -> bytes:
        """Write a file durably unless there is one; return the content that it has."""
        file = self._root / path
        with suppress(ArchiveUnavailableError):  # it is there, or reading it says why it is not
            self.create(path, pa.py_buffer(content))
        with _unavailable(file):
            return file.read_bytes()

    def move(self, source: str, target: str) -> None:
        """Give a file another name durably, unless it has it already."""
        final = self._root / target
        with _unavailable(final):
            for left in reversed(range(MOVES_MAX)):
                try:
                    final.parent.mkdir(exist_ok=True)
                    (self._root / source).rename(final)
                except (FileNotFoundError, FileExistsError):
                    if left and (self._root / source).exists():
                        continue  # the folder was empty, and was deleted in between
                    if not final.exists():  # the interval's next owner has published it, unless it is lost
                        raise
                break
            sync_directory(final.parent)
            sync_directory(final.parent.parent)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        with _unavailable(self._root / path):
            return (self._root / path).exists()

    def delete(self, path: str) -> None:
        """Delete a file, if it exists, and the folder of its hour, if that is empty then."""
        file = self._root / path
        with _unavailable(file):
            file.unlink(missing_ok=True)
        if file.parent.name.startswith(HOUR):
            with suppress(OSError):  # there are others
                file.parent.rmdir()

    def list_files(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder; none if there is no such folder."""
        with _unavailable(self._root / folder):
            if not (self._root / folder).exists():
                return []
            walked = os.walk(self._root / folder, onerror=_raise)
            found = (Path(directory, name) for directory, _, names in walked for name in names)
            return sorted(str(file.relative_to(self._root)) for file in found)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # an empty folder was deleted meanwhile
        raise error


@contextmanager
def _unavailable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArchiveUnavailableError(
            f"the archive cannot use {path}: {error.strerror}",
            hint="make room, or restore the directory and its rights",
        ) from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
