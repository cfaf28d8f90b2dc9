"""Progress on a real terminal: one line below the log, gone in the end; in a pipe nothing but the log."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.terminal import ROOT, Terminal, seen

GRAPH = """
import msgspec
from millpy import Count, Directory, EventTime, FixedWindows, Graph, minutes, seconds

class Reading(msgspec.Struct):
    device: str
    at: int

def shown(reading):
    print("a graph's own words", flush=True)
    return True

graph = Graph("endless")
readings = graph.inject(
    "readings", Directory("inbox", settle=seconds(0)), schema=Reading, event_time=EventTime("at", unit="s", sorted=True)
)
readings.filter(shown).key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
"""
RUN = [sys.executable, "-m", "millpy", "run"]
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[(info|warning) +\] .*|a graph's own words|millpy: draining; .*")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Path:
    monkeypatch.setenv("MILLPY_DATABASE_URL", database_url)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a.ndjson").write_text("".join(f'{{"device": "a", "at": {second}}}\n' for second in range(3)))
    return tmp_path


@pytest.mark.parametrize("workers", [1, 2])
def test_run_shows_progress_below_the_log_and_removes_it_at_the_end(place: Path, workers: int) -> None:
    running = Terminal([*RUN, "--workers", str(workers)], cwd=place)
    running.read_until(lambda written: b"3 records, " in written)
    running.process.send_signal(signal.SIGINT)

    status, written = running.end()

    assert status == 0, written
    lines = seen(written)
    assert [line for line in lines if not LOG_LINE.fullmatch(line)] == []
    assert any("draining" in line for line in lines)
    assert any("claimed" in line for line in lines)
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l")


def test_piped_run_prints_only_the_log(place: Path) -> None:
    running = subprocess.Popen(RUN, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    try:
        before = [running.stdout.readline() for _ in range(4)]  # claimed, and three records
        running.send_signal(signal.SIGINT)
        lines = "".join([*before, running.communicate(timeout=60)[0]]).splitlines()
    finally:
        running.kill()
        running.communicate()

    assert running.returncode == 0
    assert [line for line in lines if not LOG_LINE.fullmatch(line)] == []


WORKING = """
import logging, sys, threading
from millpy.config.settings import Settings, configure_logging
from millpy.observability.status_line import CHANNEL, working
configure_logging(Settings.load())
log, channel = logging.getLogger("millpy.x"), logging.getLogger(CHANNEL)
channel.debug("nobody hears this")
shown, write = threading.Event(), sys.stderr.write
sys.stderr.write = lambda text: ("and a part of it" in text and shown.set(), write(text))[1]
with working("a long piece of work"):
    log.warning("a warning that is longer than the terminal is wide, and " + "so on, " * 9)
    channel.debug("and a part of it")
    shown.wait(60 if sys.stderr.isatty() else 0.9)  # in a pipe nothing is shown, ever
    print("said ", end="", file=sys.stderr)
    with working("within"):
        print("apart", file=sys.stderr)
    print("an end that never comes", end="", file=sys.stderr)
print(" comes", file=sys.stderr)
"""


def test_progress_of_a_command_does_not_break_the_log(tmp_path: Path) -> None:
    done = Terminal([sys.executable, "-c", WORKING], cwd=tmp_path, columns=24, environment={"NO_COLOR": "1"})

    status, written = done.end()

    assert status == 0, written
    first, *others = seen(written)
    assert first.endswith("so on, so on,  [millpy.x]")
    assert others == ["said apart", "an end that never comes", " comes"]
    frames = re.findall(rb"[-\\|/] (?:a long|and a part|within)[^\r\x1b]*", written)
    assert any(b"and a part of it" in frame for frame in frames)
    assert {len(frame.decode()) <= 24 for frame in frames} == {True}
    assert b"nobody hears" not in written


def test_piped_command_shows_no_progress(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKING], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=True
    )

    assert done.stderr.splitlines()[1:] == [b"said apart", b"an end that never comes comes"]


def test_progress_is_in_the_log_at_level_debug(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "MILLPY_LOG_LEVEL": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", WORKING], cwd=tmp_path, env=environment, capture_output=True, check=True, text=True
    )

    output = [line for line in done.stderr.splitlines() if "millpy.observability.status_line" in line]
    assert [word in line for word, line in zip(("nobody", "a long", "and a part", "within"), output, strict=True)] == [
        True
    ] * 4
