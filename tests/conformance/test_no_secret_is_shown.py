"""A password is in no log at level debug, no answer of a command and no error, however it came in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.embedded import EmbeddedBroker, EmbeddedPostgres
from tests.databases import fresh_database

ROOT = Path(__file__).resolve().parents[2]
CORES = ("hunter2", "swordf1sh")
DATABASE_PASSWORD, MQTT_PASSWORD = (f"{core}@/:#? %" for core in CORES)
GRAPH = """
import msgspec
from millpy import Count, EventTime, FixedWindows, Graph, Mqtt, minutes

class Reading(msgspec.Struct):
    device: str
    at: int

graph = Graph("secretive")
readings = graph.inject(
    "readings", Mqtt("sensors/+/reading"), schema=Reading, event_time=EventTime("at", unit="s", sorted=True)
)
readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
"""
ASKED = (
    ("status",), ("watermarks",), ("sources", "list"), ("events",), ("dead-letters", "list"), ("fleet",),
    ("doctor", "graph.py"), ("graphs",), ("deploy", "graph.py"), ("migrate",), ("deploy", "changed.py"),
    ("run", "changed.py"), ("deploy", "broken.py"),
)  # fmt: skip


@pytest.fixture(params=["in the addresses", "in files"])
def secrets(
    request: pytest.FixtureRequest, postgres: EmbeddedPostgres, broker: EmbeddedBroker, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:  # fmt: skip
    """Set an environment with passwords; return the database URL without them."""
    if request.param == "in files":
        before = after = ""
        for name, password in (("DATABASE", DATABASE_PASSWORD), ("MQTT", MQTT_PASSWORD)):
            (tmp_path / name).write_text(password)
            monkeypatch.setenv(f"MILLPY_{name}_PASSWORD_FILE", str(tmp_path / name))
    else:
        before, after = (":" + quote(password, safe="") for password in (DATABASE_PASSWORD, MQTT_PASSWORD))
    with fresh_database(postgres) as name:
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute("DROP ROLE IF EXISTS secretive")
            statement = "CREATE ROLE secretive SUPERUSER LOGIN PASSWORD {}"
            connection.execute(sql.SQL(statement).format(sql.Literal(DATABASE_PASSWORD)))
        port = postgres.tcp_url().rpartition(":")[2].partition("/")[0]
        monkeypatch.setenv("MILLPY_DATABASE_URL", f"postgresql://secretive{before}@127.0.0.1:{port}/{name}")
        monkeypatch.setenv("MILLPY_MQTT_URL", f"mqtt://me{after}@{broker.host}:{broker.port}")
        yield postgres.url(name)


def test_no_password_is_shown(
    secrets: str, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "changed.py").write_text(GRAPH.replace("minutes(1)", "minutes(2)"))
    (tmp_path / "broken.py").write_text(
        "import os\nraise ValueError('cannot reach ' + os.environ['MILLPY_MQTT_URL'])\n"
    )

    said = [worker_at_level_debug(secrets, broker)]
    for words in ASKED:
        said += [CliRunner().invoke(app, [*words, *more]).output for more in ([], ["--json"])]

    assert "cannot reach mqtt://me" in said[-1]
    assert [(core, text) for text in said for core in CORES if core in text] == []


def worker_at_level_debug(url: str, broker: EmbeddedBroker) -> str:
    """The log of a worker that loses its broker and its database."""
    command = [sys.executable, "-m", "millpy", "run", "graph.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MILLPY_LOG_LEVEL": "debug"}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    assert running.stderr is not None
    try:
        said = [until("mqtt connected", running.stderr)]
        broker.kill()
        broker.start()
        said.append(until("mqtt connected", running.stderr))
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'secretive'")
        said.append(until("reading again|recover|StoreUnavailable|heartbeat failed", running.stderr))
        running.send_signal(signal.SIGTERM)
        return "".join([*said, running.communicate(timeout=60)[1]])
    finally:
        running.kill()
        running.communicate()


def until(pattern: str, log: IO[str]) -> str:
    """The log as far as a line with this."""
    lines: list[str] = []
    for line in log:
        lines.append(line)
        if re.search(pattern, line):
            break
    else:
        pytest.fail("".join(lines))
    return "".join(lines)
