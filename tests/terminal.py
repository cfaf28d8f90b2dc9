"""Programs on a real pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAIT_S_MAX = 60
ROWS = 30
CODES = re.compile(rb"\x1b\[(\??)([0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """A program on a pseudo-terminal, with its standard output, unless that goes to a file.

    Args:
        command: what to run.
        cwd: where.
        environment: over that of the tests.
        columns: how wide the terminal is.
    """

    def __init__(
        self, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None, columns: int = 100
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**own, "PYTHONPATH": str(ROOT), "TERM": "xterm", **(environment or {})},
        )  # fmt: skip
        os.close(theirs)
        self.written = b""

    def read_until(self, there: Callable[[bytes], bool]) -> bytes:
        """Return the output as soon as it is enough, or the program has ended."""
        while not there(self.written):
            ready, _, _ = select.select([self._ours], [], [], WAIT_S_MAX)
            assert ready, self.written
            try:
                self.written += os.read(self._ours, 65536)
            except OSError:  # it has ended
                break
        return self.written

    def end(self) -> tuple[int, bytes]:
        """Exit status, and all that it has written."""
        try:
            self.read_until(lambda _: False)
            return self.process.wait(WAIT_S_MAX), self.written
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._ours)


def seen(written: bytes) -> list[str]:
    """Return the final lines of the screen, on a terminal that does not wrap."""
    lines, row, column = [""], 0, 0
    for private, numbers, code, control, text in CODES.findall(written):
        if text:
            shown = text.decode(errors="replace")
            lines[row] = lines[row][:column].ljust(column) + shown + lines[row][column + len(shown) :]
            column += len(shown)
        elif control == b"\r":
            column = 0
        elif control == b"\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif code == b"A":
            row = max(0, row - int(numbers or 1))
        elif code == b"H":
            wanted = int((numbers or b"1").split(b";")[0]) - 1
            row, column = max(0, len(lines) - ROWS) + wanted, 0
            lines += [""] * (row + 1 - len(lines))
        elif code == b"K":
            lines[row] = "" if numbers == b"2" else lines[row][:column]
        else:
            assert private or code == b"m", (numbers, code)
    while lines and not lines[-1].strip():
        lines.pop()
    return [line.rstrip() for line in lines]
