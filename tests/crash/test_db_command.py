"""`millpy db` keeps the embedded database up on a TCP port, whatever ends, and leaves no lock behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from millpy.embedded import EmbeddedPostgres
from tests.commands import run_millpy

ROOT = Path(__file__).resolve().parents[2]


def serving(directory: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    """Start `millpy db` in a directory; return its process and the URL that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("MILLPY_DATABASE_URL", None)
    command = [sys.executable, "-m", "millpy", "db", "--json", *more]
    process = subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    document = "".join(iter(process.stdout.readline, "}\n")) + "}"
    return process, str(json.loads(document)["url"])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        with psycopg.connect(url) as connection:
            return connection.execute("SELECT count(*) FROM millpy.graphs").fetchall() == [(0,)]
    except psycopg.OperationalError:
        return False


def test_database_is_up_until_a_signal_through_crashes_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLPY_DATABASE_URL", raising=False)
    server = EmbeddedPostgres(tmp_path / ".millpy" / "postgres")
    with server:  # as a worker that runs already
        of_worker = server.url()
        assert "runs already, without TCP" in run_millpy("db")[1]
        process, url = serving(tmp_path, "--restart")
        assert answers(url)
        assert answers(of_worker)  # it connects again
        assert not answers(url.replace("millpy:", "millpy:wrong"))
        status, said = run_millpy("db")
        assert (status, f"already on 127.0.0.1:{server.url().rpartition('=')[2]}" in said) == (2, True), said
        server.kill()
        until(lambda: answers(url))
        process.kill()
        process.communicate(timeout=30)
        again, same = serving(tmp_path)
        assert same == url
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=30)
    assert again.returncode == 0
    until(lambda: not answers(url))
