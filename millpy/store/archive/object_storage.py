"""An object store as the place of archives: S3, or another one that fsspec has a client for.

An object appears whole or not at all, under one PUT. Its name cannot change, so a move is a copy inside the store, and
then a delete: a process that dies in between leaves both, and the next process that moves it ends with one. The store
may still be working on a copy when its process has lost the archive, and so bring back an object that was deleted
meanwhile. What is deleted must therefore be deleted again when `settled_s` have passed.

Credentials come from where the client looks for them, and are in no name.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from millpy.config.extras import to_install
from millpy.config.secrets import redacted
from millpy.errors import ArchiveUnavailableError, UsageError

REQUEST_S_MAX = 45.0
"""Seconds of one operation with all its retries: less than the watchdog of a worker allows."""
SETTLED_S = 600.0
"""Seconds after which the store has ended what a process that is gone has asked of it."""
_S3 = {"connect_timeout": 5, "read_timeout": 15, "retries": {"mode": "standard", "total_max_attempts": 4}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": _S3}, "s3a": {"config_kwargs": _S3}}
_ONE_PUT: dict[str, dict[str, Any]] = {"s3": {"chunksize": 2**31}, "s3a": {"chunksize": 2**31}}
"""Client -> how a file is written by one request: an upload in parts that is cut off would leave the parts there."""
_UNLESS_THERE: dict[str, dict[str, Any]] = {"s3": {"mode": "create"}, "s3a": {"mode": "create"}}


class ObjectStorage:
    """The objects below a URL; see `ArchiveStorage`.

    Args:
        url: where they begin, as in `s3://bucket/prefix`.

    Raises:
        UsageError: the URL is none of an object store, or its client is not installed.
    """

    settled_s = SETTLED_S

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        host, _, port = parts.netloc.rpartition(":")
        # A secret may have a slash in it.
        if parts.query or parts.fragment or "@" in parts.path or "@" in host or (host and not port.isdigit()):
            raise UsageError(
                f"{parts.scheme}://… has more than a bucket and a prefix",
                hint="name no more, and set the credentials in the environment as for other programs",
            )
        if not parts.netloc or "::" in url or parts.scheme == "memory":
            raise UsageError(f"{url} is no place for an archive", hint="write it like s3://bucket/prefix")
        self._url = url.rstrip("/")
        self._protocol = parts.scheme
        _client(self._url)

    def full_name(self, path: str) -> str:
        """Return the URL of an object."""
        return f"{self._url}/{path}"

    def create(self, path: str, content: pa.Buffer) -> None:
        """Write an object. It is in memory twice."""
        self._write(path, content.to_pybytes(), _ONE_PUT)

    def create_once(self, path: str, content: bytes) -> bytes:
        """Write an object unless there is one; return the content that it has."""
        if not self.exists(path):
            with suppress(FileExistsError):  # another process was faster
                self._write(path, content, _UNLESS_THERE)
        return read_object(self.full_name(path))

    def move(self, source: str, target: str) -> None:
        """Give an object another name, unless it has it already."""
        name, to = self.full_name(source), self.full_name(target)
        try:
            call(name, "cp_file", _client(to)[1])
        except FileNotFoundError as error:
            if not self.exists(target):  # the interval's next owner has published it, unless it is lost
                raise _unavailable(to, error) from error
        self.delete(source)

    def exists(self, path: str) -> bool:
        """Return whether there is such an object."""
        return bool(call(self.full_name(path), "exists"))

    def delete(self, path: str) -> None:
        """Delete an object, if it exists."""
        with suppress(FileNotFoundError):
            call(self.full_name(path), "rm_file")

    def list_files(self, folder: str) -> list[str]:
        """Return the paths of all objects below a folder."""
        root = PurePosixPath(_client(self._url)[1])
        try:
            found = call(self.full_name(folder), "find")
        except FileNotFoundError:
            return []
        return sorted(str(PurePosixPath(name).relative_to(root)) for name in found)

    def _write(self, path: str, content: bytes, how: dict[str, dict[str, Any]]) -> None:
        name = self.full_name(path)
        try:
            call(name, "pipe_file", content, **how.get(self._protocol, {}))
        except FileNotFoundError as error:  # the bucket
            raise _unavailable(name, error) from error


def read_object(name: str, last: int | None = None) -> bytes:
    """Read an object by its URL, or as many bytes of its end.

    Raises:
        FileNotFoundError: there is no such object.
        ArchiveUnavailableError: the store does not give it.
    """
    content: bytes = call(name, "cat_file", **({} if last is None else {"start": -last}))
    return content


def call(name: str, method: str, *given: Any, **more: Any) -> Any:
    """Call a method of the store's client for an object, within `REQUEST_S_MAX`.

    Raises:
        FileNotFoundError, FileExistsError: as the method does.
        ArchiveUnavailableError: the store does not answer, or refuses.
    """
    from fsspec.asyn import sync

    client, path = _client(name)
    try:
        if not client.async_impl:
            return getattr(client, method)(path, *given, **more)
        return sync(client.loop, getattr(client, f"_{method}"), path, *given, timeout=REQUEST_S_MAX, **more)
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:  # each store's client has errors of its own
        raise _unavailable(name, error) from error


def _client(name: str) -> tuple[Any, str]:
    """Return the client of an object's store, and its path there. fsspec keeps a client for each process."""
    protocol = name.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        client, path = url_to_fs(name, use_listings_cache=False, **_OPTIONS.get(protocol, {}))
    except ImportError as error:
        if protocol in _OPTIONS:
            raise UsageError("an archive in S3 needs the package s3fs", hint=to_install("s3")) from error
        raise UsageError(
            f"an archive at {protocol}:// needs a package that is not installed: {error}",
            hint="install the client that fsspec has for this store",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{name} is no place for an archive: {error}", hint="write it like s3://bucket/prefix"
        ) from error
    if protocol in _OPTIONS:
        client.retries = 1  # botocore retries already
    return client, path


def _unavailable(name: str, error: Exception) -> ArchiveUnavailableError:
    return ArchiveUnavailableError(
        f"the archive cannot use {name}: {redacted(str(error) or type(error).__name__)}",
        hint="check that the store answers, that the bucket exists, and what the credentials may do",
    )
