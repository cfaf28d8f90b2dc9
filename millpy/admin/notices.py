"""Listen for the notifications of workers, on one connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg

from millpy.store.postgres.errors import connect_error, translate
from millpy.store.postgres.session import connect

CONNECT_S_MAX = 10


class NoticeListener:
    """A connection that listens on channels. It is no transaction, so it holds nothing back.

    Args:
        url: the database.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None
        self._channels: set[str] = set()

    def wait(self, channels: Sequence[str], timeout_s: float) -> bool:
        """Wait for a notification on one of the channels; return whether there was one.

        Raises:
            ConfigError, StoreUnavailableError: the database cannot be reached; the next call connects again.
        """
        try:
            return self._wait(channels, timeout_s)
        except psycopg.Error as error:
            self.close()
            if error.sqlstate is None:
                raise connect_error(error) from error
            raise translate(error) from error

    def _wait(self, channels: Sequence[str], timeout_s: float) -> bool:
        if self._connection is None:
            self._connection = connect(self._url, connect_timeout=CONNECT_S_MAX)
            self._channels = set()
        for channel in sorted(set(channels) - self._channels):
            self._connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel)))
            self._channels.add(channel)
        heard: Iterator[object] = self._connection.notifies(timeout=timeout_s, stop_after=1)
        return sum(1 for _ in heard) > 0

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
