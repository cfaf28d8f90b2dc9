"""How an error ends a process: one clear line, a hint, and an exit status."""

from __future__ import annotations

import sys

from millpy.errors import CorruptionError, MillError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3


def complain(error: MillError) -> int:
    """Say on standard error what is wrong in one line and what to do in another; returns the exit status."""
    print(f"millpy: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {error.hint}", file=sys.stderr)
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_CORRUPT if isinstance(error, CorruptionError) else EXIT_FAILED
