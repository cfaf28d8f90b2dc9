"""How an error or a person ends a process: one clear line, a hint, and an exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from millpy.errors import CorruptionError, MillError, UsageError
from millpy.secret import redacted
from millpy.visible import visible

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3
EXIT_INTERRUPTED = 130


def complain(error: MillError, *, as_json: bool = False) -> int:
    """Say on standard error what is wrong in one line and what to do in another; returns the exit status.

    `as_json` makes it one line with a JSON object.
    """
    status, message = EXIT_FAILED, redacted(error.message)
    if isinstance(error, UsageError):
        status = EXIT_USAGE
    elif isinstance(error, CorruptionError):
        status = EXIT_CORRUPT
    if as_json:
        kind = type(error).__name__
        found = {"kind": kind, "message": message, "hint": error.hint, "exit_status": status}
        print(json.dumps({"error": found}), file=sys.stderr)
        return status
    print(f"millpy: {visible(message)}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {visible(error.hint)}", file=sys.stderr)
    return status


class Interrupts:
    """A handler of SIGINT: the first one drains, the second one stops.

    It runs between any two instructions, also while a user's code holds the event loop; so it writes past the log,
    whose locks may be held.
    """

    def __init__(self, drain: Callable[[], object], stop: Callable[[], object]) -> None:
        self._drain = drain
        self._stop = stop
        self.count = 0

    def __call__(self, _number: int, _frame: object) -> None:
        """SIGINT has come."""
        self.count += 1
        if self.count == 1:
            _write(b"millpy: draining; Ctrl-C once more stops at once\n")
            self._drain()
        elif self.count == 2:
            _write(b"millpy: stopped at once; what was not committed is done again by whoever comes next\n")
            self._stop()


def _write(line: bytes) -> None:
    # On a terminal the line that the cursor is on holds the key that was pressed, and how far we are.
    os.write(2, b"\r\x1b[K" + line if os.isatty(2) else line)
