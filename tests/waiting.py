"""Wait for what other processes do, and measure it on a machine that may be busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

WITHIN_S = float(os.environ.get("WITHIN_S", "120"))
"""Seconds, on a machine that may be slow and busy: only a failure takes them."""
ATTEMPTS = 3


def await_true(condition: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
    """Wait until a condition holds; return what it gave."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
    return found


def quickest_s(measure: Callable[[], float], enough_s: float) -> float:
    """Return the least of up to ATTEMPTS times in seconds; the first that is short enough ends it."""
    took_s = [measure()]
    while len(took_s) < ATTEMPTS and min(took_s) >= enough_s:
        took_s.append(measure())
    return min(took_s)
