"""A replication connection: the stream of pgoutput messages of one slot, by libpq.

    server   w start end time message     k end time reply         (COPY in both directions)
    client   r written flushed applied time reply

`flushed` lets the server forget the log before it. The server ends a connection that says nothing for
`wal_sender_timeout`, so a status is sent also while nothing is read.
"""

from __future__ import annotations

import select
import struct

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo

from millpy.store.postgres.session_settings import ENCODING, KEEPALIVES

_DATA, _KEEPALIVE, _STATUS = struct.Struct(">qqq"), struct.Struct(">qqb"), struct.Struct(">qqqqb")
SETTINGS = {
    "datestyle": "ISO",
    "timezone": "UTC",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "search_path": "pg_catalog",
}
"""What the text of values depends on: the same as on the connection that copies the table."""


def is_readable(descriptor: int, wait_s: float = 0.0) -> bool:
    """Tell whether a socket has something to read, or has ended. Any number of descriptors may be open."""
    poll = select.poll()  # `select` refuses descriptors from 1024 on
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(wait_s * 1_000))


class ReplicationError(psycopg.OperationalError):
    """The stream has ended, or did not begin.

    Attributes:
        is_in_use: whether another connection reads the slot.
    """

    def __init__(self, message: str, *, is_in_use: bool = False) -> None:
        super().__init__(message)
        self.is_in_use = is_in_use


class ReplicationStream:
    """The messages of a slot. For one thread.

    Args:
        url: the database.
        slot, publication: their names.
        connect_s: limit of the attempt to connect.
    """

    def __init__(self, url: str, slot: str, publication: str, connect_s: float) -> None:
        settings = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        conninfo = make_conninfo(
            url,
            replication="database",
            options=settings,
            connect_timeout=max(2, int(connect_s)),
            application_name="millpy changes",
            client_encoding=ENCODING,
            **KEEPALIVES,
        )
        self._connection = pq.PGconn.connect(conninfo.encode())
        if self._connection.status != pq.ConnStatus.OK:
            raise ReplicationError(self._said())
        if self._connection.server_version >= 170000:  # the server sends each transaction within one of its own
            self._connection.exec_(b"SET transaction_timeout TO 0")
        # A name of a publication is quoted twice: as an identifier, in a literal.
        names = sql.Literal(sql.Identifier(publication).as_string(None)).as_string(None)
        command = f"START_REPLICATION SLOT {sql.Identifier(slot).as_string(None)} LOGICAL 0/0"
        result = self._connection.exec_(f"{command} (proto_version '1', publication_names {names})".encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
            said = self._said()
            self.close()
            raise ReplicationError(said, is_in_use=state == b"55006")
        self.reached = 0
        """The position of the log up to which the server has looked."""

    def next(self, wait_s: float) -> bytes | None:
        """Return the next message of pgoutput; b"" for a sign of life; None when neither comes within `wait_s`.

        Raises:
            ReplicationError: the stream has ended.
        """
        connection = self._connection
        while True:
            size, data = connection.get_copy_data(1)
            if size > 0:
                found = bytes(data)
                if found[:1] == b"w":
                    return found[1 + _DATA.size :]
                self.reached = max(self.reached, _KEEPALIVE.unpack_from(found, 1)[0])
                return b""
            if size < 0:
                raise ReplicationError(self._said() or "the server has ended the stream of changes")
            if not is_readable(connection.socket, wait_s):
                return None
            connection.consume_input()
            if connection.status != pq.ConnStatus.OK:
                raise ReplicationError(self._said() or "the connection was lost")

    def send_status(self, flushed: int, *, asks: bool) -> None:
        """Say up to where changes are committed; `asks` for an answer, by which `reached` moves."""
        written = max(flushed, self.reached)
        self._connection.put_copy_data(b"r" + _STATUS.pack(written, flushed, flushed, 0, asks))
        self._connection.flush()

    def close(self) -> None:
        """Disconnect."""
        self._connection.finish()

    def _said(self) -> str:
        return self._connection.error_message.decode("utf-8", "replace").strip()
