"""Judge the triggers of windows: those that cannot fire, and windows that hold a watermark after their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity
from millpy.model.identity_text import identity_text
from millpy.model.time import duration_text

HELD_S_MAX = 60.0
"""How long, in event time, a window may hold the low watermark after its end before it is worth a warning."""


def judge_windows(facts: Facts, _: Limits) -> Iterator[Finding]:
    """Yield a finding for each step whose trigger cannot fire, or whose windows hold its watermark for long."""
    held = {(row["graph"], row["computation"]): row for row in facts.held_windows}
    for row in facts.window_triggers:
        name = f"{row['graph']}.{row['computation']}"
        if not can_fire(row["trigger"]):
            yield Finding(
                Severity.NOTE,
                "trigger of windows",
                f"{name}: {identity_text(row['trigger'])} cannot fire",
                f"each window gives one pane, {duration_text(row['allowed_lateness_us'])} after its end, and holds the"
                " watermark until then",
                "leave Never() to windows that need no earlier pane, or choose AfterWatermark()",
            )
        waits = held.get((row["graph"], row["computation"]))
        if waits is None or waits["held_s"] <= HELD_S_MAX:
            continue
        yield Finding(
            Severity.WARNING,
            "windows",
            f"{name}: {waits['windows']:,} windows with {waits['records']:,} records that no pane has hold the low"
            f" watermark, the oldest for {waits['held_s']:,.0f} s of event time after its end",
            f"{identity_text(row['trigger'])} has not fired for them; the last one is over at {waits['over_at']}",
            "choose a trigger that fires at the end, such as AfterWatermark(), or a shorter allowed_lateness",
        )


def can_fire(trigger: Mapping[str, Any]) -> bool:
    """Tell whether a trigger, as the graph's description has it, can be ready."""
    kind = trigger["kind"]
    decide: Callable[[list[bool]], bool] | None = {"after_all": all, "after_any": any, "after_each": _first}.get(kind)
    if decide is not None:
        return decide([can_fire(part) for part in trigger["triggers"]])
    if kind == "repeatedly":
        return can_fire(trigger["trigger"])
    if kind == "or_finally":
        return can_fire(trigger["trigger"]) or can_fire(trigger["until"])
    return bool(kind != "never")


def _first(parts: list[bool]) -> bool:
    return parts[0]
