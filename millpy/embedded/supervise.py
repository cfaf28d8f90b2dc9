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


def main(directory: str, command: list[str]) -> int:
    """Wait for the last holder to go, then run the command that stops the server."""
    # Opened first and closed first: whoever gets past `holders.lock` after us finds this one free.
    with Path(directory, "supervisor.lock").open("w") as own, Path(directory, "holders.lock").open("r+") as holders:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # another supervisor waits already
        fcntl.flock(holders, fcntl.LOCK_EX)
        code = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode
        own.close()
        return code


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # so that the holder has no child to wait for
    os.setsid()
    os.chdir("/")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
