"""`millpy crash-test` from end to end: a sound graph passes, and one that is not does not."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from millpy.clock import SystemClock
from millpy.embedded import free_port
from millpy.model.time import Instant
from millpy.testing.crash_test import session
from millpy.testing.crash_test.feed_source import FeedInjector
from millpy.testing.crash_test.options import FaultKind, Options
from millpy.testing.crash_test.page import page
from millpy.testing.crash_test.report import CrashReport, as_json, build
from millpy.testing.crash_test.terminal import Lines
from millpy.testing.crash_test.text_report import report_text
from millpy.testing.crash_test.verdict import Judgment

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = Path(__file__).with_name("crash_test_graphs")
WORKER = "millpy.testing.crash_test.worker"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MILLPY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.timeout(300)
def test_sound_graph_passes_under_kills_freezes_and_database_crashes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "factory.py", tmp_path)
    command = "-m millpy crash-test factory.py --generate 6000 --kills 3 --workers 2 --faults kill,freeze,db"
    command += " --json"

    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == (tmp_path / "crash-test-factory.json").read_text() + "\n"
    report = msgspec.json.decode(done.stdout, type=CrashReport)
    assert report_text(report).startswith("PASSED: exactly once.")
    assert (report.lost, report.doubled, report.changed, report.records) == (0, 0, 0, 6000)
    assert sorted(fault.kind for fault in report.faults) == ["db", "freeze", "kill"]
    assert all(fault.recovered_s is not None for fault in report.faults)
    assert {table.name: table.rows > 1000 for table in report.tables}["temperature_5s"]
    assert "fault 3" in done.stderr
    assert "Exactly once" in (tmp_path / "crash-test-factory.html").read_text()
    assert list((tmp_path / ".millpy" / "crash-test").iterdir()) == []  # it has passed, so nothing is kept


def test_worker_waits_for_a_database_that_a_fault_took_before_its_first_turn(tmp_path: Path) -> None:
    url = f"postgresql://postgres@127.0.0.1:{free_port()}/factory"
    command = [sys.executable, "-m", WORKER, str(ROOT / "examples" / "factory.py"), str(tmp_path)]
    environment = {**os.environ, "MILLPY_DATABASE_URL": url}

    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None and worker.stderr is not None
        waits = any("trying again" in line for line in worker.stderr)
        worker.stdin.close()  # the leash
        worker.stderr.read()

    assert waits
    assert worker.returncode == 0


def crash_tested(graph: str, url: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> CrashReport:
    monkeypatch.setattr(session, "SECOND_S", 1.0)
    options = Options(
        graph=str(GRAPHS / graph), generate=3000, count=2, workers=2, faults=(FaultKind.KILL,), database_url=url
    )
    clock = SystemClock()
    display = Lines(Console(file=io.StringIO()), clock)
    return build(session.crash_test(options, place, clock, display), Instant(0))


@pytest.mark.timeout(300)
def test_nondeterministic_code_is_distinguished_from_the_effects_of_faults(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "url").write_text(database_url)
    monkeypatch.setenv("MILLPY_DATABASE_URL_FILE", str(tmp_path / "url"))  # of the run; its workers get another
    with_password = database_url.replace("@", ":%70assw0rd-shown-nowhere@")
    report = crash_tested("dice.py", with_password, tmp_path, monkeypatch)

    assert "assw0rd" not in page(report) + as_json(report).decode()
    assert (report.verdict, report.passed) == (Judgment.UNSTEADY, False)
    assert (report.lost, report.doubled, report.changed) == (0, 0, 0)
    (unsteady,) = report.unsteady
    assert (unsteady.table, unsteady.columns, unsteady.rows) == ("alerts", ("drawn",), False)
    assert ["random.random" in suspect.why for suspect in report.suspects] == [True]


@pytest.mark.timeout(300)
def test_source_that_is_read_again_after_a_kill_is_caught(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("CANARY_PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(FeedInjector, "open", FeedInjector.open)  # the graph replaces it, in this process too

    report = crash_tested("rereads.py", database_url, tmp_path, monkeypatch)

    assert (report.verdict, report.passed) == (Judgment.DIFFERENT, False)
    assert report.doubled > 0
    assert report.unsteady == ()
    assert any("records were read of 3,000" in complaint for complaint in report.complaints)
