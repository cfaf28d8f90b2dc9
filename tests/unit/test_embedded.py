"""Embedded PostgreSQL: shared, persistent, and unharmed by SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError

HOLDER = """
import sys
from millpy.embedded import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1])
server.start()
print("held", flush=True)
input()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "server"


def hold_elsewhere(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"server {pid} is still there"
        os.sched_yield()


def values(server: EmbeddedPostgres) -> Iterator[int]:
    with psycopg.connect(server.url()) as connection:
        yield from (value for (value,) in connection.execute("SELECT value FROM kept"))


def test_server_outlives_one_of_two_holders_and_not_the_last(directory: Path) -> None:
    server = EmbeddedPostgres(directory)
    server.start()
    with psycopg.connect(server.url()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
    other = hold_elsewhere(directory)
    pid = server.pid()

    server.release()

    assert list(values(server)) == [1]
    kill(other)
    wait_until_gone(pid)


def test_committed_rows_survive_sigkill_of_server_and_holder(directory: Path) -> None:
    other = hold_elsewhere(directory)
    server = EmbeddedPostgres(directory)
    with psycopg.connect(server.url()) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        connection.execute("CREATE TABLE kept AS SELECT 7 AS value")

    server.kill()
    kill(other)

    with server:
        assert list(values(server)) == [7]


def test_directory_keeps_its_version(directory: Path) -> None:
    directory.mkdir()
    (directory / "version").write_text("16\n")

    with pytest.raises(ConfigError, match="holds PostgreSQL 16, not 18"):
        EmbeddedPostgres(directory, version="18").start()
