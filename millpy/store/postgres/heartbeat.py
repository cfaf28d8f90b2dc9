"""Heartbeats: renew one worker's lease from a separate thread, on a separate connection.

The lease thus survives a long computation and a busy event loop. A heartbeat is not durable on purpose: a lease that is
lost in a crash of the server has expired by then.
"""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow

from millpy.model.lease import Renewal, WorkerUsage
from millpy.store.postgres.errors import connect_error, translate
from millpy.store.postgres.session import pin
from millpy.store.postgres.session_settings import ENCODING
from millpy.store.postgres.statements import statement
from millpy.store.postgres.timeouts import BoundedConnection


class HeartbeatConnection:
    """The synchronous connection of the heartbeat thread. It reconnects at the next heartbeat after a loss.

    Args:
        url: the database.
        timeout_s: server-side limit of a heartbeat; without any answer, the connection hangs up after twice as long.
    """

    def __init__(self, url: str, *, timeout_s: float = 1.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._connection: BoundedConnection[TupleRow] | None = None

    def beat(self, worker_id: UUID, ttl_s: float, usage: WorkerUsage) -> Renewal | None:
        """Renew the lease, and report `usage`. Return None when it has expired, or the worker is unknown.

        Raises:
            TransientError: the database does not answer; whether the lease was renewed is unknown.
        """
        parameters: dict[str, Any] = {"worker_id": worker_id, "ttl_s": ttl_s, **asdict(usage)}
        try:
            connection = self._connected()
            row = connection.execute(statement("renew_lease"), parameters).fetchone()
            return None if row is None else Renewal(*row)
        except psycopg.Error as error:
            self.close()
            raise translate(error) from error

    def close(self) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> HeartbeatConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> BoundedConnection[TupleRow]:
        if self._connection is None or self._connection.closed:
            timeout_ms = int(self._timeout_s * 1000)
            try:
                self._connection = BoundedConnection.connect(
                    self._url,
                    autocommit=True,
                    connect_timeout=2,
                    application_name="millpy heartbeat",
                    tcp_user_timeout=timeout_ms,
                    prepare_threshold=None,
                    client_encoding=ENCODING,
                )
                self._connection.answer_s = 2 * self._timeout_s  # the server ends the statement after timeout_s
                pin(self._connection, {"statement_timeout": str(timeout_ms), "synchronous_commit": "off"})
            except psycopg.OperationalError as error:
                raise connect_error(error) from error
        return self._connection
