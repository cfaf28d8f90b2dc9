"""Processes that begin as forks of one that has imported millpy: a start costs 10 ms instead of a second.

    programs        `crash_worker` (`python -m millpy.testing.crash_worker`), and `millpy`

    ForkServer      a process with everything imported and no thread; it forks at each request
    ForkedProcess   a fork: a process of its own, to kill, freeze and await, as a `subprocess.Popen` is

The server is a child of the tests, the forks are children of the server, which tells their exit statuses.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
REQUEST_BYTES_MAX = 1 << 20


class ForkedProcess:
    """A process that a fork server has begun.

    Attributes:
        pid: the number of the process.
        stdin: what it reads; closing it ends the input.
        returncode: the exit status, -n after signal n; None until the end was noticed by `poll` or `wait`.
    """

    def __init__(self, pid: int, stdin: IO[bytes], status: int, outputs: Sequence[IO[bytes]] = ()) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._status = status
        self._outputs = outputs

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

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close the input, await the end, and return both outputs of a process of `fork_millpy`.

        Raises:
            TimeoutExpired: the process still runs after `timeout` seconds.
        """
        self.stdin.close()
        self.wait(timeout)
        out, err = (_taken(output) for output in self._outputs)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended, which the server may not have told yet."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
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
            assert told, "the fork server has ended"
            os.close(self._status)
            self.returncode = int(told)
        return self.returncode


def _taken(output: IO[bytes]) -> str:
    """Return the contents of a file, and close it."""
    with output:
        output.seek(0)
        return output.read().decode()


class ForkServer:
    """Begins processes, for each thread that asks. Its process ends when the tests do."""

    def __init__(self) -> None:
        self._asking = threading.Lock()  # an answer does not name its request
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def begin(
        self,
        program: str,
        arguments: Sequence[str],
        outputs: tuple[IO[bytes], IO[bytes]],
        environment: Mapping[str, str],
        directory: Path,
    ) -> ForkedProcess:
        """Begin a program, with its standard output and standard error in two files."""
        stdin, ours = os.pipe()
        status, theirs = os.pipe()
        request = json.dumps([program, list(arguments), dict(environment), str(directory)]).encode()
        files = [stdin, *(output.fileno() for output in outputs), theirs]
        with self._asking:
            try:
                socket.send_fds(self._requests, [request], files)
            finally:
                os.close(stdin)
                os.close(theirs)
            answer = self._requests.recv(16)
        assert answer, "the fork server has ended"
        return ForkedProcess(int(answer), os.fdopen(ours, "wb"), status, outputs)


_beginning = threading.Lock()


def fork_server() -> ForkServer:
    """Return the server of this process, which begins with its first use."""
    with _beginning:
        return _only_server()


@cache
def _only_server() -> ForkServer:
    return ForkServer()


def fork_millpy(directory: Path, *arguments: str) -> ForkedProcess:
    """Begin `millpy ARGUMENTS` in a directory; `communicate` returns its outputs."""
    outputs = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    return fork_server().begin("millpy", arguments, outputs, os.environ, directory)


def serve(requests: socket.socket) -> tuple[str, list[str]]:
    """Fork at each request. Return, in a fork, its program and the arguments; in the server, never."""
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
        request, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
        if not request:  # the tests have ended
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        program, arguments, environment, directory = json.loads(request)
        stdin, out, err, status = files
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(stdin, 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for descriptor in {requests.detach(), woken, wakes, *files, *running.values()}:
                os.close(descriptor)
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)
            sys.path.insert(0, directory)
            return program, arguments
        for descriptor in (stdin, out, err):
            os.close(descriptor)
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
    import pyarrow as pa

    from millpy import public  # noqa: F401
    from millpy.cli import app
    from millpy.process import launcher, worker_process  # noqa: F401 - what most commands import later
    from millpy.testing import crash_worker

    dict(app.NamedCommands())  # imports all of them
    pa.array([0.0])  # loads pandas, which takes a third of what a short test's worker needs
    gc.collect()
    gc.freeze()  # no fork scans what all have in common, which would also copy it
    program, given = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [program, *given]
    if program == "millpy":
        app.main()
    else:
        sys.exit(crash_worker.main(given))
