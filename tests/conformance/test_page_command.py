"""`millpy ui` and `millpy run --ui`: a link that logs in, as long as the command runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest

from tests.api_server import ROOT, ApiServer
from tests.commands import run_millpy
from tests.page_client import PageClient
from tests.terminal import Terminal
from tests.waiting import await_true

GRAPH = """
from datetime import datetime

import msgspec
from millpy import Count, EventTime, FixedWindows, Graph, Http, minutes, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime


graph = Graph("waiting")
source = Http("/readings", url="http://127.0.0.1:{port}")
readings = graph.inject(
    "readings", source, schema=Reading, event_time=EventTime("at", max_disorder=seconds(10)), dedupe=None
)
readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("readings_1m")
"""
WAIT_S = 60


@contextmanager
def started(arguments: Sequence[str], url: str, cwd: Path, **more: object) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "MILLPY_DATABASE_URL": url, "MILLPY_API": "127.0.0.1:0", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "millpy", *arguments], cwd=cwd, env=environment, text=True, stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, **more,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        for pipe in (process.stdin, process.stdout):
            pipe.close()


def link_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    deadline, lines = time.monotonic() + WAIT_S, []
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
        if found := re.search(r"the page: (\S+)", line):
            return found[1]
    raise AssertionError("".join(lines))


def client_of(link: str, url: str) -> PageClient:
    return PageClient(ApiServer(link, None, [], url))


def path_of(link: str) -> str:
    parts = urlsplit(link)
    return f"{parts.path}?{parts.query}"


def tokens(url: str) -> list[tuple[str, bool]]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT role, revoked_at IS NOT NULL FROM mill.tokens").fetchall()


@pytest.fixture
def terminal_may_close() -> Iterator[None]:
    """A process that the test starts does not ignore SIGHUP, though the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal_may_close")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_the_link_logs_in_until_the_command_ends(database_url: str, tmp_path: Path, end: signal.Signals) -> None:
    with started(["ui"], database_url, tmp_path) as process:
        link = link_of(process)
        client = client_of(link, database_url)

        assert client.send("GET", "/enter?code=wrong").status == HTTPStatus.FORBIDDEN
        assert client.send("GET", "/enter").status == HTTPStatus.FORBIDDEN
        assert client.send("GET", "/").status == HTTPStatus.SEE_OTHER
        assert client.send("GET", path_of(link)).status == HTTPStatus.OK
        assert "(admin)" in client.get("/").text
        process.send_signal(end)
        assert process.wait(WAIT_S) == 0

    ((role, revoked),) = tokens(database_url)
    assert revoked, role


BROWSER = """
import os, stat, sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

path = Path(unquote(urlsplit(sys.argv[1]).path))
rights = [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)]
print(sys.argv[1], *map(oct, rights), path.read_text(), file=open(os.environ["SEEN"], "w"), flush=True)
os.rename(os.environ["SEEN"], os.environ["SEEN"] + ".whole")
"""


def test_no_command_line_of_a_browser_has_the_code(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "browser.py").write_text(BROWSER)
    seen = tmp_path / "seen"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {
        "MILLPY_DATABASE_URL": database_url, "MILLPY_API": "127.0.0.1:0",
        "SEEN": str(seen), "BROWSER": f"{sys.executable} {tmp_path / 'browser.py'} %s", "TMPDIR": str(temporary),
    }  # fmt: skip
    shown = Terminal([sys.executable, "-m", "millpy", "ui"], cwd=tmp_path, environment=environment)
    try:
        await_true(Path(f"{seen}.whole").exists, "the browser has written what it saw")
        given, directory, file, *text = Path(f"{seen}.whole").read_text().split()
        shown.process.send_signal(signal.SIGTERM)
    finally:
        status, _ = shown.end()

    assert status == 0
    assert "code" not in given and given.startswith("file:")
    assert (directory, file) == ("0o700", "0o600")
    assert "/enter?code=" in "".join(text)
    assert list(temporary.iterdir()) == []


def test_two_pages_on_one_machine_do_not_end_each_others_sessions(database_url: str, tmp_path: Path) -> None:
    with started(["ui"], database_url, tmp_path) as one, started(["ui"], database_url, tmp_path) as other:
        links = link_of(one), link_of(other)
        clients = [client_of(link, database_url) for link in links]
        clients[1].cookies = clients[0].cookies  # as in a browser, where cookies have no port
        for client, link in zip(clients, links, strict=True):
            assert client.send("GET", path_of(link)).status == HTTPStatus.OK
        assert ["(admin)" in client.get("/").text for client in clients] == [True, True]
        assert clients[1].send("POST", "/logout", {"csrf": clients[1].csrf}).status == HTTPStatus.SEE_OTHER
        assert [client.send("GET", "/").status for client in clients] == [HTTPStatus.OK, HTTPStatus.SEE_OTHER]


def test_the_end_of_input_ends_it_on_a_leash(database_url: str, tmp_path: Path) -> None:
    with started(["ui", "--leash"], database_url, tmp_path) as process:
        link_of(process)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0

    assert [revoked for _, revoked in tokens(database_url)] == [True]


def test_json_names_address_and_link(database_url: str, tmp_path: Path) -> None:
    with started(["ui", "--json", "--no-browser"], database_url, tmp_path) as process:
        text = ""
        while "}" not in text:
            line = process.stdout.readline()
            text += line if line.startswith(("{", " ", "}")) else ""
        found = json.loads(text)

    assert found["link"].startswith(found["address"] + "/enter?code=")


@pytest.mark.parametrize("address", ["0.0.0.0:0", ":0"])
def test_it_serves_this_machine_only(database_url: str, address: str) -> None:
    status, error = run_millpy("ui", "--http", address, "--database", database_url)

    assert status == 2 and "this machine only" in error


def is_away(client: PageClient) -> bool:
    try:
        client.send("GET", "/login")
    except OSError:
        return True
    return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_serves_the_page_beside_and_survives_it(database_url: str, tmp_path: Path, workers: int) -> None:
    (tmp_path / "graph.py").write_text(GRAPH.replace("{port}", str(free_port())))
    with started(["run", "graph.py", "--ui", "--workers", str(workers)], database_url, tmp_path) as process:
        link = link_of(process)
        client = client_of(link, database_url)
        assert client.send("GET", path_of(link)).status == HTTPStatus.OK
        (page,) = [one for one in psutil.Process(process.pid).children(recursive=True) if "ui" in one.cmdline()]
        page.kill()
        await_true(lambda: is_away(client), "the page is away")

        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT graph FROM millpy.graphs").fetchall() == [("waiting",)]


def test_the_page_ends_with_its_run(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(GRAPH.replace("{port}", str(free_port())))
    with started(["run", "graph.py", "--ui"], database_url, tmp_path) as process:
        link_of(process)
        (page,) = [one for one in psutil.Process(process.pid).children(recursive=True) if "ui" in one.cmdline()]
        process.kill()
        page.wait(WAIT_S)  # another process reaps it

    assert [revoked for _, revoked in tokens(database_url)] == [True]
