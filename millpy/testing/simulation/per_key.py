"""The tools per key behind the source, as the graph declares them; `tools.py` has the same as plain loops."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from millpy.graph.streams import KeyedStream
from millpy.operators.pattern import Pattern

Tool = Literal["changes", "rates", "grid", "matches", "absences"]
TOOLS: tuple[Tool, ...] = ("changes", "rates", "grid", "matches", "absences")
"""Each is the name of a branch, of its step and of its table."""
BY, SILENCE_US = 25, 500_000
WRAPS_AT, RATE_GAP_US = 100, 600_000
GRID_US, GRID_LIMIT_US = 100_000, 500_000
WITHIN_US = 400_000
SMALL, LARGE, ENDS = 40, 60, (45, 55)
"""Values below, from and between these are the steps of a pattern, and what may not be between them."""


def is_small(reading: Any) -> bool:
    """Tell whether a value begins a pattern."""
    return bool(reading.value < SMALL)


def is_large(reading: Any) -> bool:
    """Tell whether a value is the second step of a pattern."""
    return bool(reading.value >= LARGE)


def is_between(reading: Any) -> bool:
    """Tell whether a value ends a pattern without a match."""
    return bool(ENDS[0] <= reading.value < ENDS[1])


def add_tool(keyed: KeyedStream, tool: Tool) -> None:
    """Run a tool on the readings of each device, with its result in a table."""
    within = timedelta(microseconds=WITHIN_US)
    if tool == "changes":
        made = keyed.changes("value", by=BY, max_silence=timedelta(microseconds=SILENCE_US), name=tool, intervals=2)
    elif tool == "rates":
        gap = timedelta(microseconds=RATE_GAP_US)
        made = keyed.rates("value", wraps_at=WRAPS_AT, max_gap=gap, name=tool, intervals=2)
    elif tool == "grid":
        every, limit = timedelta(microseconds=GRID_US), timedelta(microseconds=GRID_LIMIT_US)
        made = keyed.fill_gaps("value", every=every, limit=limit, name=tool, intervals=2)
    elif tool == "matches":
        pattern = Pattern("small", is_small).then("large", is_large, within=within).unless("between", is_between)
        made = keyed.match(pattern, name=tool, intervals=2)
    else:
        pattern = Pattern("small", is_small).then_not("large", is_large, within=within)
        made = keyed.match(pattern, name=tool, after_match="to_next", intervals=2)
    made.to_table(tool)
