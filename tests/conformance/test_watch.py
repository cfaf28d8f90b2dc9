"""`millpy status --watch` on terminals and in pipes: redrawn, one connection, through an outage of the database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from millpy.embedded import EmbeddedPostgres
from millpy.store.postgres.store import PostgresStore
from tests.commands import run_millpy
from tests.conformance.store_builders import a_graph
from tests.databases import passing_server
from tests.terminal import ROOT, ROWS, Terminal, seen

MILLPY = [sys.executable, "-m", "millpy"]
WATCH = [*MILLPY, "status", "--watch", "--every", "500ms"]
SESSIONS = """
SELECT pid, state, xact_start FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


@pytest.fixture
def url(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MILLPY_DATABASE_URL", database_url)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return database_url


@pytest.fixture
async def plant(url: str) -> str:
    """A database with a graph."""
    async with PostgresStore(url) as store:
        await store.deploy(a_graph())
    return url


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server that a test may kill."""
    with passing_server(tmp_path / "server") as found:
        yield found


def looks(written: bytes, least: int) -> bool:
    return written.count(b"\x1b[H") >= least


def sessions(url: str) -> list[tuple[int, str, object]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(SESSIONS).fetchall()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_watch_redraws_in_place_and_ends_at_a_signal(plant: str, tmp_path: Path, number: signal.Signals) -> None:
    watch = Terminal(WATCH, cwd=tmp_path, columns=80)
    watch.read_until(lambda written: looks(written, 3))
    watch.process.send_signal(number)

    status, written = watch.end()

    assert status == 0, written
    lines = seen(written)
    drawn = lines[-ROWS:]
    assert sum("accounts" in line for line in lines) == 1, "one picture, however often it was drawn"
    assert any(line.startswith("all graphs, 20") and line.endswith("every 0.5 s") for line in drawn), drawn
    assert any(line.startswith("source ") for line in drawn) and any("sums" in line for line in drawn)
    assert max(map(len, lines)) <= 80
    assert b"\x1b[?" not in written, "a killed process could not show the cursor, or the first screen, again"


async def test_watch_has_one_connection_without_a_transaction_between_looks(plant: str, tmp_path: Path) -> None:
    watch = Terminal([*WATCH[:-1], "1h"], cwd=tmp_path, columns=80)
    watch.read_until(lambda written: b"accounts" in written)

    between = sessions(plant)
    watch.process.send_signal(signal.SIGINT)

    assert [(state, begun) for _, state, begun in between] == [("idle", None)]
    assert watch.end()[0] == 0
    again = Terminal(WATCH, cwd=tmp_path, columns=80)
    again.read_until(lambda written: looks(written, 1))
    first = {pid for pid, _, _ in sessions(plant)}
    again.read_until(lambda written: looks(written, 6))
    assert {pid for pid, _, _ in sessions(plant)} == first and len(first) == 1
    again.process.send_signal(signal.SIGINT)
    assert again.end()[0] == 0


def test_watch_says_since_when_the_database_is_away_and_continues(
    server: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL", server.url("millpy_template"))
    watch = Terminal(WATCH, cwd=tmp_path, columns=80)
    watch.read_until(lambda written: looks(written, 2))
    server.kill()
    away = watch.read_until(lambda written: b"DATABASE AWAY since 20" in written)
    server.restart()
    watch.read_until(lambda written: b"The database was away from 20" in written)
    assert len(sessions(server.url("millpy_template"))) == 1
    watch.process.send_signal(signal.SIGINT)

    status, written = watch.end()

    assert status == 0, written
    assert any(line.startswith("accounts") for line in seen(away)), "what was before stays"
    assert max(map(len, seen(written))) <= 80, "no traceback of the thread that looks"


async def test_watch_tells_of_a_database_that_does_not_answer(plant: str, tmp_path: Path) -> None:
    watch = Terminal(WATCH, cwd=tmp_path, columns=80)
    watch.read_until(lambda written: looks(written, 1))
    ((frozen, _, _),) = sessions(plant)
    os.kill(frozen, signal.SIGSTOP)
    try:
        watch.read_until(lambda written: b": it does not answer." in written)
        watch.process.send_signal(signal.SIGINT)
        assert watch.end()[0] == 0, "an end does not wait for the database"
    finally:
        os.kill(frozen, signal.SIGCONT)


def piped(*arguments: str, place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*WATCH, *arguments], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_to(process: subprocess.Popen[str], begin: str) -> list[str]:
    """Return the lines up to the one with this beginning."""
    assert process.stdout is not None and process.stderr is not None
    lines = []
    while not lines or not lines[-1].startswith(begin):
        line = process.stdout.readline()
        assert line, (lines, process.stderr.read())
        lines.append(line)
    return lines


async def test_piped_watch_writes_a_block_for_each_look(plant: str, tmp_path: Path) -> None:
    with piped(place=tmp_path) as watch:
        lines = [line for _ in range(3) for line in read_to(watch, "all graphs, ")]
        watch.terminate()
        assert watch.wait(60) == 0
        assert watch.stderr is not None and watch.stderr.read() == ""
    assert sum(line == "accounts\n" for line in lines) == 2
    assert "\x1b" not in "".join(lines)


def test_piped_watch_tells_once_that_the_database_is_away(
    server: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL", server.url("millpy_template"))
    with piped(place=tmp_path) as watch, piped("--json", place=tmp_path) as machine:
        first = json.loads(read_to(machine, "{")[-1])
        read_to(watch, "all graphs, ")
        server.kill()
        lines = read_to(watch, "DATABASE AWAY")
        document = json.loads(read_to(machine, '{"away_since"')[-1])
        server.restart()
        lines += read_to(watch, "The database was away")
        for process in (watch, machine):
            process.terminate()
            assert process.wait(60) == 0
    assert first.keys() == {"at", "workers", "sources", "accounting", "silences"}
    assert document.keys() == {"away_since", "why"} and "database" in document["why"]
    assert sum(line.startswith("DATABASE AWAY") for line in lines) == 1


async def test_sources_are_watched_too(plant: str, tmp_path: Path) -> None:
    watch = Terminal([*MILLPY, "sources", "list", "--watch"], cwd=tmp_path, columns=80)
    watch.read_until(lambda written: b"without a worker" in written)
    watch.process.send_signal(signal.SIGINT)

    status, written = watch.end()

    assert status == 0
    assert [line for line in seen(written) if line.startswith(("workers", "accounts"))] == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--every", "5s"], "--every is the interval of --watch"),
        (["--watch", "--every", "10ms"], "--every must be between 500ms and 1d"),
        (["--watch", "--every", "2d"], "--every must be between 500ms and 1d"),
        (["--watch", "nope"], "no graph 'nope' is deployed"),
    ],
)
def test_watch_that_cannot_be_is_refused(url: str, arguments: list[str], why: str) -> None:
    status, output = run_millpy("status", *arguments)

    assert status == 2
    assert why in output


def test_watch_of_an_absent_database_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL", "postgresql://x@127.0.0.1:1/x")

    status, output = run_millpy("status", "--watch")

    assert status == 1
    assert "cannot reach the database: nothing listens at" in output
