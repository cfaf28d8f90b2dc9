"""The supervisor process that stops an embedded server after its last holder has ended.

It runs as a script with the standard library only, so that it stays small. Every process that uses the server holds a
shared lock on `holders.lock`; the kernel releases it when the process ends, even by SIGKILL. This process waits for the
exclusive lock, that is for the last holder's end, and then stops the server. It keeps the exclusive lock while it stops
the server, so a new holder waits, finds the server stopped, and starts it with a new supervisor.

Meanwhile it keeps the server's log short. PostgreSQL itself bounds only the age of the files of a log, not their size.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
MARK = "millpy.data"
"""A setting without effect that marks a server process with its data directory."""
STARTING_S_MAX = 1.0
LOG_BYTES_MAX = 10_000_000
"""The size above which the log is moved to `log.old`, of which it replaces the content."""
LOG_EVERY_S = 2.0
"""Seconds between two looks at the log's size."""
OPENED_DATA = "@data"
"""Placeholder for the data directory, as an open descriptor, in the command that stops the server."""


def postmaster(data: Path) -> int | None:
    """Return the process id of the server that runs on a data directory; None when there is none.

    `postmaster.pid` outlives a killed server, and its number may belong to another process then, especially after a
    restart of the machine or container, which assigns the same numbers again.
    """
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None
    return pid if runs(pid, "postgres", f"{MARK}={data}") else None


def runs(pid: int, program: str, argument: str) -> bool:
    """Tell whether a process runs this program with this argument among others."""
    if (PROC / "self").exists():
        try:
            called, *arguments = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return os.path.basename(called) == os.fsencode(program) and os.fsencode(argument) in arguments
    found = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False).stdout
    return os.fsencode(program) in found and os.fsencode(argument) in found


def keep_log_short(log: Path) -> None:
    """Look at the log's size for ever. The server appends to it, so it continues at the beginning of an empty one."""
    pause = threading.Event()
    while not pause.wait(LOG_EVERY_S):
        with suppress(OSError):
            size = log.stat().st_size
            if size > LOG_BYTES_MAX:
                with suppress(OSError), log.open("rb") as file:  # the disk may be full
                    file.seek(size - LOG_BYTES_MAX)
                    log.with_suffix(".old").write_bytes(file.read(LOG_BYTES_MAX))
                os.truncate(log, 0)


def main(directory: str, command: list[str]) -> int:
    """Wait for the last holder to end, then run the command that stops the server."""
    # supervisor.lock is released first: the next holder of `holders.lock` must find it free.
    with Path(directory, "supervisor.lock").open("w") as own, Path(directory, "holders.lock").open("r+") as holders:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # another supervisor is waiting
        threading.Thread(target=keep_log_short, args=(Path(directory, "log"),), daemon=True).start()
        fcntl.flock(holders, fcntl.LOCK_EX)
        code = 0
        deadline = time.monotonic() + STARTING_S_MAX
        while (found := postmaster(Path(directory, "data"))) is None and time.monotonic() < deadline:
            time.sleep(0.05)  # the holder may have been killed while it started the server
        if found is not None:
            data = os.open(Path(directory, "data"), os.O_RDONLY | os.O_DIRECTORY)
            words = [f"/proc/self/fd/{data}" if word == OPENED_DATA else word for word in command]
            code = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, check=False, pass_fds=[data]
            ).returncode
        own.close()
        return code


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # so that the holder has no child to wait for
    os.setsid()
    os.chdir("/")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
