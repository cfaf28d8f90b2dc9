"""A real pgbouncer before a server of the tests, where it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from millpy.embedded import free_port

START_S_MAX = 60
UNPRIVILEGED = "nobody"
"""It refuses to be root."""


def program() -> str | None:
    """Where it is; Debian puts it where only root's PATH looks."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


class Pgbouncer:
    """Pools connections to the server at `server_url` (TCP) while inside; asks for the same password.

    Args:
        directory: for its configuration and log.
        server_url: where the server is, with a password; its database names are passed on.
        mode: "session", "transaction" or "statement".
        size: how many connections it makes to one database.
    """

    def __init__(self, directory: Path, server_url: str, mode: str, size: int = 20) -> None:
        self._directory = directory
        self._server = urlsplit(server_url)
        self._settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(free_port()),
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": str(directory / "users"),
            "pool_mode": mode,
            "default_pool_size": str(size),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        found, configuration = program(), self._directory / "pgbouncer.ini"
        assert found is not None
        server = f"host={self._server.hostname} port={self._server.port}"
        lines = ["[databases]", f"* = {server}", "[pgbouncer]", *(f"{k} = {v}" for k, v in self._settings.items())]
        configuration.write_text("\n".join(lines) + "\n")
        users = self._directory / "users"
        users.touch(mode=0o600)
        users.write_text(f'"{self._server.username}" "{self._server.password}"\n')
        command = [found, str(configuration)]
        if os.geteuid() == 0:
            command[1:1] = ["--user", UNPRIVILEGED]
        with (self._directory / "pgbouncer.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + START_S_MAX
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < deadline, "pgbouncer does not start"
            time.sleep(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def url(self, database: str) -> str:
        """Return the URL of the database behind the pool."""
        login = f"{self._server.username}:{self._server.password}"
        return f"postgresql://{login}@127.0.0.1:{self._settings['listen_port']}/{database}"

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(self._settings["listen_port"])), 1).close()
        except OSError:
            return False
        return True
