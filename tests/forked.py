"""Processes of `crash_worker` that begin as forks of one that has imported it: a start costs 10 ms instead of a second.

    ForkServer      a process with everything imported and no thread; it forks at each request
    ForkedProcess   a fork: a process of its own, to kill, freeze and await, as a `subprocess.Popen` is

The server is a child of the tests, the forks are children of the server, which tells their exit statuses.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, BinaryIO

ROOT = Path(__file__).resolve().parents[2]
REQUEST_BYTES_MAX = 1 << 20


class ForkedProcess:
    """A process that a fork server has begun.

    Attributes:
        pid: the number of the process.
        stdin: what it reads; closing it ends the input.
        returncode: the exit status, -n after signal n; None until the end was noticed by `poll` or `wait`.
    """

    def __init__(self, pid: int, stdin: IO[bytes], status: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Await the end and return the exit status.

        Raises:
            TimeoutExpired: the process still runs after `timeout` seconds.
        """
        status = self._ended_within(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the end was noticed."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def _ended_within(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            told = os.read(self._status, 16)
            os.close(self._status)
            assert told, "the fork server has ended"
            self.returncode = int(told)
        return self.returncode


class ForkServer:
    """Begins processes of `crash_worker`. Its process ends when the tests do."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def begin(
        self, arguments: Sequence[str], log: BinaryIO, environment: Mapping[str, str], directory: Path
    ) -> ForkedProcess:
        """Begin `python -m millpy.testing.crash_worker ARGUMENTS`, with both outputs in a log."""
        stdin, ours = os.pipe()
        status, theirs = os.pipe()
        request = json.dumps([list(arguments), dict(environment), str(directory)]).encode()
        try:
            socket.send_fds(self._requests, [request], [stdin, log.fileno(), theirs])
        finally:
            os.close(stdin)
            os.close(theirs)
        answer = self._requests.recv(16)
        assert answer, "the fork server has ended"
        return ForkedProcess(int(answer), os.fdopen(ours, "wb"), status)


@cache
def fork_server() -> ForkServer:
    """Return the server of this process, which begins with its first use."""
    return ForkServer()


def serve(requests: socket.socket) -> Sequence[str]:
    """Fork at each request. Return, in a fork, the arguments of its program; in the server, never."""
    running: dict[int, int] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([requests.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4_096)
            tell_ends(running)
        if requests.fileno() not in ready:
            continue
        request, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 3)
        if not request:  # the tests have ended
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        arguments, environment, directory = json.loads(request)
        stdin, log, status = files
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(stdin, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for descriptor in {requests.detach(), woken, wakes, *files, *running.values()}:
                os.close(descriptor)
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)
            sys.path.insert(0, directory)
            return list(arguments)
        os.close(stdin)
        os.close(log)
        running[pid] = status
        requests.send(str(pid).encode())


def tell_ends(running: dict[int, int]) -> None:
    """Tell the exit statuses of the forks that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        descriptor = running.pop(pid)
        os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(descriptor)


if __name__ == "__main__":
    from millpy.testing import crash_worker

    given = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv[1:] = given
    sys.exit(crash_worker.main(given))
