"""The supervisor of `millpy run --workers N`: which workers it starts again, and how its run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog

from millpy.process import supervisor
from millpy.process.exit import EXIT_USAGE
from millpy.process.supervisor import BACKOFF_S_MAX, RESTARTS_MAX, Supervisor, backoff_s, exit_status, may_restart

KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
FAILS_ONCE = """
import os, signal, sys
try:
    os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
except FileExistsError:
    sys.exit(0)
{then}
"""
KILLED_ONCE = FAILS_ONCE.format(then=KILLS_ITSELF)
INTERRUPTS_ITS_PARENT = """
import os, select, signal, sys
while not select.select([sys.stdin], [], [], 0.05)[0]:
    os.kill(os.getppid(), signal.SIGINT)
"""
TERMINATES_ITS_PARENT = """
import os, select, signal, sys
signal.signal(signal.SIGTERM, lambda *_: {handler})
os.kill(os.getppid(), signal.SIGTERM)
while True:
    signal.pause()
"""
BROKEN_FOR_A_WHILE = """
import os, signal, sys
with open(sys.argv[1], "a+") as starts:
    starts.write("x")
    starts.seek(0)
    started = len(starts.read())
if started == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if started <= {mended}:
    sys.exit(2)
open(sys.argv[2], "w").close()
"""
DEPLOYED_BENEATH = """
import sys
with open(sys.argv[1], "a+") as starts:
    starts.write("x")
    starts.seek(0)
    started = len(starts.read())
sys.exit(4 if started <= {deployments} else {then})
"""
RUNS_UNTIL_DONE = """
import os, sys, time
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
"""
LEAVES_A_PROCESS = """
import os, signal, subprocess, sys
print("x" * 100_000, flush=True)
with open(sys.argv[1], "a+") as seen:
    seen.seek(0)
    if seen.read():
        sys.exit(0)
    seen.write(str(subprocess.Popen(["sleep", "60"]).pid))
os.kill(os.getpid(), signal.SIGRTMIN + 1)
"""


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> structlog.testing.LogCapture:
    capture = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(None, processors=[capture])  # one of its own: a command before may have bound it
    monkeypatch.setattr(supervisor, "log", logger)
    return capture


def run(script: str, *arguments: str, grace_s: float = 30.0) -> int:
    command = [sys.executable, "-I", "-S", "-c", script, *arguments]
    return Supervisor(command, os.environ, 1, grace_s=grace_s, backoff=lambda _: 0.0).run()


def events(logged: structlog.testing.LogCapture) -> list[str]:
    return [str(line["event"]) for line in logged.entries]


@pytest.mark.parametrize(
    ("codes", "status"),
    [([0, 0], 0), ([0, -9], 0), ([-9, -9], 1), ([0, 2], 2), ([3, 1, -15], 3)],
)
def test_run_exits_with_the_status_of_its_workers(codes: list[int], status: int) -> None:
    assert exit_status(codes) == status


def test_pause_doubles_up_to_its_bound() -> None:
    assert [backoff_s(restarts) for restarts in (0, 1, 2, 6, 10_000)] == [1, 2, 4, BACKOFF_S_MAX, BACKOFF_S_MAX]


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, True), (2, False), (3, False), (4, True), (-9, True), (-11, True), (-15, False)]
)
def test_only_what_a_restart_may_change_is_restarted(code: int, again: bool) -> None:
    assert may_restart(code) is again
    assert may_restart(code, worked=True) is (again or code == EXIT_USAGE)


def test_killed_worker_is_started_again(logged: structlog.testing.LogCapture, tmp_path: Path) -> None:
    assert run(KILLED_ONCE, str(tmp_path / "killed")) == 0

    assert events(logged) == ["worker killed", "restarting worker"]


def test_process_that_a_worker_leaves_behind_delays_no_restart(
    logged: structlog.testing.LogCapture,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It holds the output of the worker open."""
    command = [sys.executable, "-I", "-S", "-c", LEAVES_A_PROCESS, str(tmp_path / "pid")]
    try:
        made = Supervisor(command, os.environ, 1, out=subprocess.PIPE, grace_s=30.0, backoff=lambda _: 0.0)
        assert made.run() == 0
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        for thread in threading.enumerate():
            if thread.name == "output-0":
                thread.join()

    assert events(logged) == ["worker killed", "restarting worker"]
    assert capsys.readouterr().err.count("x") == 200_000


def test_worker_that_is_killed_again_and_again_ends_the_run(logged: structlog.testing.LogCapture) -> None:
    assert run(KILLS_ITSELF) == 1

    assert events(logged).count("worker killed") == RESTARTS_MAX + 1
    assert events(logged)[-1] == "worker ended too often in a row; ending the run"
    assert {line["left"] for line in logged.entries if "left" in line} == {"no other worker runs"}


@pytest.mark.parametrize("then", [0, 3])
def test_deployments_are_no_failures_of_the_workers(
    logged: structlog.testing.LogCapture, tmp_path: Path, then: int
) -> None:
    script = DEPLOYED_BENEATH.format(deployments=RESTARTS_MAX + 2, then=then)

    assert run(script, str(tmp_path / "starts")) == then

    assert events(logged).count("worker ended for another version of the graph") == RESTARTS_MAX + 2
    assert events(logged).count("worker failed") == (then > 0)
    assert {line["restarts"] for line in logged.entries if "of" in line} == {1}


def test_drain_during_a_deployment_ends_with_status_0(tmp_path: Path) -> None:
    script = TERMINATES_ITS_PARENT.format(handler="sys.exit(4)")

    assert run(script) == 0


def test_wrong_graph_ends_the_run_at_once(logged: structlog.testing.LogCapture) -> None:
    assert run("import sys; sys.exit(2)") == 2

    assert events(logged) == ["worker failed"]


def test_right_that_is_missing_after_a_steady_run_does_not_end_it(
    logged: structlog.testing.LogCapture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)

    assert run(FAILS_ONCE.format(then="sys.exit(2)"), str(tmp_path / "failed")) == 0

    assert events(logged) == ["worker failed", "restarting worker"]


def test_graph_that_is_broken_while_it_runs_does_not_stop_the_workers_that_run(
    logged: structlog.testing.LogCapture, tmp_path: Path
) -> None:
    """One worker is killed while the file is broken. It fails more often than others may until the file is mended."""
    mended = RESTARTS_MAX + 3
    files = [str(tmp_path / "starts"), str(tmp_path / "done")]
    scripts = [BROKEN_FOR_A_WHILE.format(mended=mended), RUNS_UNTIL_DONE]
    commands = [[sys.executable, "-I", "-S", "-c", script, *files] for script in scripts]

    made = Supervisor(lambda worker: commands[worker], os.environ, 2, grace_s=30.0, backoff=lambda _: 0.0)

    assert made.run() == 0
    assert events(logged).count("worker failed") == mended - 1
    assert made.restarts == [mended, 0]


def test_graph_that_stays_broken_ends_the_run_when_no_worker_runs(
    logged: structlog.testing.LogCapture, tmp_path: Path
) -> None:
    assert run(BROKEN_FOR_A_WHILE.format(mended=1_000), str(tmp_path / "starts"), str(tmp_path / "done")) == 2

    assert events(logged).count("worker failed") == RESTARTS_MAX
    assert events(logged)[-1] == "worker ended too often in a row; ending the run"


def test_sigterm_drains_the_workers(logged: structlog.testing.LogCapture) -> None:
    """Another SIGTERM, while the worker drains, does not kill it."""
    again = "(os.kill(os.getppid(), signal.SIGTERM), select.select([sys.stdin], [], [], 0.2), sys.exit(0))"
    assert run(TERMINATES_ITS_PARENT.format(handler=again)) == 0

    assert "restarting worker" not in events(logged)


def test_worker_that_does_not_drain_in_time_is_killed(logged: structlog.testing.LogCapture) -> None:
    assert run(TERMINATES_ITS_PARENT.format(handler="None"), grace_s=0.1) == 1

    assert "workers did not drain in time; killing them" in events(logged)
    assert "restarting worker" not in events(logged)


def test_interrupt_before_a_worker_starts_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)  # for the moment before the run has its own
    try:
        run(INTERRUPTS_ITS_PARENT)
    finally:
        signal.signal(signal.SIGINT, before)

    assert "Traceback" not in capfd.readouterr().err
