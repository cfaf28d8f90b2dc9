"""The supervisor of `millpy run --workers N`: keeps N worker processes running until the graph ends or a signal comes.

A worker that is killed, or that fails with status 1, is started again after a pause that doubles from BACKOFF_S to
BACKOFF_S_MAX. A worker that has run for STEADY_S begins with the shortest pause again. After RESTARTS_MAX restarts of
one worker in a row the run ends, and so it does at once for a reason that a restart does not change: a wrong graph or
setting (status 2), or corrupt data (status 3). The statuses are those of `process/exit.py`.

A worker that ends because another version of its graph was deployed (status 4) has not failed: it is started again
after the shortest pause, with the file as it is by then, however often that happens.

A worker that was started again, or has run for STEADY_S, and fails with status 2 has met a graph, setting or right that
somebody is changing. It is started again, too, and does not end the run while another worker runs.

The workers are on a leash, their standard input: they drain when this process ends, also by SIGKILL.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from millpy.clock import SystemClock
from millpy.process.exit import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REPLACED, EXIT_USAGE, Interrupts

log = structlog.get_logger("millpy.process.supervisor")
BACKOFF_S = 1.0
BACKOFF_S_MAX = 60.0
STEADY_S = 60.0
RESTARTS_MAX = 8
STOP_MARGIN_S = 5.0
LOOK_EVERY_S = 1.0
PAUSE_S = 0.1
FORWARD_S = 1.0
"""Seconds that the output of a worker that has ended is waited for: a process that it left behind may hold it open."""


def backoff_s(restarts: int) -> float:
    """Return the pause in seconds before a restart, of which `restarts` came before it in a row."""
    return min(BACKOFF_S * 2.0 ** min(restarts, 32), BACKOFF_S_MAX)


def may_restart(code: int, *, worked: bool = False) -> bool:
    """Tell whether a worker that ended with this code, negative for a signal, may do better when it is started again.

    A SIGTERM ends a process only before it has a handler, that is before it has started. `worked` tells whether the
    worker has run for a while, or was started again: then its graph, settings or rights have changed since.
    """
    again = code in (EXIT_FAILED, EXIT_REPLACED) or (worked and code == EXIT_USAGE)
    return again or (code < 0 and code != -signal.SIGTERM)


def exit_status(codes: Sequence[int]) -> int:
    """Return the run's exit status for those of its workers, which are negative after a signal.

    It is the status of a worker that stopped with an error; else 0 if any worker finished, and 1 if all were killed.
    """
    failed = [code for code in codes if code > 0]
    if failed:
        return max(failed)
    return 0 if 0 in codes else 1


class Supervisor:
    """Runs workers as child processes and starts those again that are killed or fail.

    Args:
        command: the command line of each worker, or a function that returns that of the worker with a number; it is
            called before each start.
        environment: the environment of each worker.
        workers: the number of workers.
        out: where a worker's standard output goes, as for `subprocess.Popen`.
        error: where its standard error goes.
        grace_s: seconds that workers have to drain, after which they are killed.
        backoff: returns the pause in seconds for the number of restarts in a row.

    Attributes:
        restarts: how often each worker was started again.
    """

    def __init__(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        workers: int,
        *,
        out: int | None = None,
        error: int | None = None,
        grace_s: float,
        backoff: Callable[[int], float] = backoff_s,
    ) -> None:
        self._command, self._environment = command, environment
        self._out, self._error = out, error
        self._grace_s, self._backoff = grace_s, backoff
        self.restarts = [0] * workers
        self._clock = SystemClock()
        self._children: list[subprocess.Popen[bytes] | None] = [None] * workers
        self._codes: list[int | None] = [None] * workers
        self._sent: signal.Signals | None = None  # the signal that every worker gets, also one that is just starting
        self._stop_at: float | None = None

    def run(self, look: Callable[[], None] | None = None) -> int:
        """Run the workers to their end, and return the exit status.

        SIGTERM drains the workers, and so does the first SIGINT; a SIGINT after either of them kills the workers.

        Args:
            look: called every second, to show progress.
        """
        interrupts = Interrupts(lambda: self._send(signal.SIGTERM), lambda: self._send(signal.SIGKILL))

        def drain(number: int, frame: object) -> None:  # a service manager may send it several times
            if not interrupts.count:
                interrupts(number, frame)

        handlers: dict[signal.Signals, Any] = {signal.SIGTERM: drain, signal.SIGINT: interrupts}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        slots = [
            threading.Thread(target=self._keep, args=(slot,), name=f"worker-{slot}", daemon=True)
            for slot in range(len(self._children))
        ]
        for thread in slots:
            thread.start()
        try:
            while any(thread.is_alive() for thread in slots):
                if look is not None:
                    look()
                next((thread for thread in slots if thread.is_alive()), slots[0]).join(LOOK_EVERY_S)
                self._enforce_grace()
        finally:
            for child in self._children:
                if child is not None and child.stdin is not None:
                    child.stdin.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        if interrupts.count > 1:
            return EXIT_INTERRUPTED
        return exit_status([code for code in self._codes if code is not None])

    def running(self) -> list[int | None]:
        """Return the process id of each worker; None for one that does not run."""
        return [None if child is None or child.poll() is not None else child.pid for child in self._children]

    def _others_run(self) -> bool:
        """Tell whether a worker runs; asked for one that has ended."""
        return any(pid is not None for pid in self.running())

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to all workers. It runs in a signal handler, too, so it takes no lock and does not log."""
        # Never SIGINT: a child that is still importing has no handler, and Python would print a traceback.
        if self._sent is not signal.SIGKILL:
            self._sent = number
        if self._stop_at is None:
            self._stop_at = self._clock.monotonic() + self._grace_s
        for child in self._children:
            if child is not None and child.poll() is None:
                child.send_signal(number)

    def _enforce_grace(self) -> None:
        if self._stop_at is not None and self._clock.monotonic() >= self._stop_at and self._sent != signal.SIGKILL:
            log.warning("workers did not drain in time; killing them", grace_s=self._grace_s)
            self._send(signal.SIGKILL)

    def _keep(self, slot: int) -> None:
        """Keep one worker running, and record the code of its last process."""
        restarts, pause = 0, threading.Event()
        try:
            while self._sent is None:
                started = self._clock.monotonic()
                code = self._run_child(slot)
                self._codes[slot] = 0 if code == EXIT_REPLACED else code
                was_steady = self._clock.monotonic() - started >= STEADY_S
                if self._sent is not None or not may_restart(code, worked=was_steady or self.restarts[slot] > 0):
                    return
                if code == EXIT_REPLACED or was_steady:
                    restarts = 0
                if restarts >= RESTARTS_MAX and not (code == EXIT_USAGE and self._others_run()):
                    log.error("worker ended too often in a row; ending the run", worker=slot, restarts=restarts)
                    self._codes[slot] = max(code, EXIT_FAILED)
                    return
                due_s = self._backoff(restarts)
                restarts = min(restarts + 1, RESTARTS_MAX)
                self.restarts[slot] += 1
                log.warning("restarting worker", worker=slot, in_s=due_s, restarts=restarts, of=RESTARTS_MAX)
                due = self._clock.monotonic() + due_s
                while self._sent is None and self._clock.monotonic() < due:
                    pause.wait(min(PAUSE_S, due_s))
        except OSError as error:  # no process or no memory for one
            log.error("cannot start a worker", worker=slot, reason=error.strerror)
            self._codes[slot] = EXIT_FAILED
        finally:
            if (self._codes[slot] or 0) > 0 and self._sent is None:
                self._send(signal.SIGTERM)  # a failed worker ends the run

    def _run_child(self, slot: int) -> int:
        """Run one process to its end, forward its output, log how it ended, and return its code."""
        child = subprocess.Popen(
            list(self._command(slot) if callable(self._command) else self._command),
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._error,
            env=self._environment,
            start_new_session=True,
        )
        self._children[slot] = child
        if self._sent is not None:  # while it was being made
            child.send_signal(self._sent)
        forwarding = threading.Thread(target=_forward, args=(child,), name=f"output-{slot}", daemon=True)
        forwarding.start()
        code = child.wait()
        forwarding.join(FORWARD_S)
        assert child.stdin is not None
        child.stdin.close()
        if code == -signal.SIGTERM:
            log.info("worker stopped before it had started", worker=slot, pid=child.pid)
        elif code < 0:
            left = "the others take over" if self._others_run() else "no other worker runs"
            log.warning("worker killed", worker=slot, pid=child.pid, signal=_signal_name(-code), left=left)
        elif code == EXIT_REPLACED:
            log.info("worker ended for another version of the graph", worker=slot, pid=child.pid)
        elif code > 0:
            log.error("worker failed", worker=slot, pid=child.pid, status=code)
        return code


def _forward(child: subprocess.Popen[bytes]) -> None:
    output = child.stdout or child.stderr
    if output is not None:
        with output:
            for written in output:
                sys.stderr.write(written.decode(errors="replace"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
