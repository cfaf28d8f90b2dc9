"""The end of a process by an error or by Ctrl-C: a message, a hint and an exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from millpy.config.escape import visible
from millpy.config.secrets import redacted
from millpy.errors import CorruptionError, GraphReplacedError, MillError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3
EXIT_REPLACED = 4
"""A worker ended because another version of its graph was deployed, which is no failure of its own."""
EXIT_INTERRUPTED = 130


def report_error(error: MillError, *, as_json: bool = False) -> int:
    """Print an error's message and hint on standard error. Return the exit status.

    With `as_json`, print a JSON object on one line.
    """
    status, message = EXIT_FAILED, redacted(error.message)
    if isinstance(error, UsageError):
        status = EXIT_USAGE
    elif isinstance(error, CorruptionError):
        status = EXIT_CORRUPT
    elif isinstance(error, GraphReplacedError):
        status = EXIT_REPLACED
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
    """A handler of SIGINT: the first signal drains, the second one stops.

    It runs between any two instructions, also while a user's code holds the event loop, so it does not use the log,
    whose locks may be held.
    """

    def __init__(self, drain: Callable[[], object], stop: Callable[[], object]) -> None:
        self._drain = drain
        self._stop = stop
        self.count = 0

    def __call__(self, _number: int, _frame: object) -> None:
        """Handle a SIGINT: drain at the first one, stop at the second."""
        self.count += 1
        if self.count == 1:
            _write(b"millpy: draining; press Ctrl-C again to stop at once\n")
            self._drain()
        elif self.count == 2:
            _write(b"millpy: stopped at once; uncommitted work is repeated by the next worker\n")
            self._stop()


def _write(line: bytes) -> None:
    # On a terminal, clear the line of the cursor, which shows ^C and the progress.
    os.write(2, b"\r\x1b[K" + line if os.isatty(2) else line)
