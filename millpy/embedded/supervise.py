"""Stops an embedded server once its last holder is gone.

Run as a script, and with the standard library only, so that it stays small. Every process that uses the server holds
a shared lock on `holders.lock`; the kernel drops it when the process ends, SIGKILL included. This process waits for the
exclusive lock, that is for the last holder's end, and then stops the server. It keeps the exclusive lock while it
stops, so a newcomer waits, finds no server, and starts one with a supervisor of its own.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

PROC = Path("/proc")
MARK = "millpy.data"
"""A setting of no effect by which a server's process shows whose it is."""
OPENED_DATA = "@data"
"""In the command that stops the server: the data directory, as an open descriptor."""


def postmaster(data: Path) -> int | None:
    """Process id of the server that runs on a data directory; None when there is none.

    `postmaster.pid` outlives a server that was killed, and then the number in it may be any other process's: above all
    after a restart of the machine or container, where the same numbers come again.
    """
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None
    return pid if runs(pid, "postgres", f"{MARK}={data}") else None


def runs(pid: int, program: str, argument: str) -> bool:
    """Whether a process is of that program, called with that argument among others."""
    if (PROC / "self").exists():
        try:
            called, *arguments = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return os.path.basename(called) == os.fsencode(program) and os.fsencode(argument) in arguments
    found = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False).stdout
    return os.fsencode(program) in found and os.fsencode(argument) in found


def main(directory: str, command: list[str]) -> int:
    """Wait for the last holder to go, then run the command that stops the server."""
    # Opened first and closed first: whoever gets past `holders.lock` after us finds this one free.
    with Path(directory, "supervisor.lock").open("w") as own, Path(directory, "holders.lock").open("r+") as holders:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # another supervisor waits already
        fcntl.flock(holders, fcntl.LOCK_EX)
        code = 0
        if postmaster(Path(directory, "data")) is not None:
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
