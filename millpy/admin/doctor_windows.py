"""Judge windows: triggers that cannot fire, windows that hold a watermark after their end, or that fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity
from millpy.model.identity_text import identity_text
from millpy.model.time import duration_text
from millpy.windowing.window_memory import FIRING_BYTES, PANE_BYTES, SESSION_BYTES

HELD_S_MAX = 60.0
"""How long, in event time, a window may hold the low watermark after its end before it is worth a warning."""


CLOCKS = frozenset({"after_processing_time", "every", "after_percentile"})
"""Triggers that make panes due without a record, before the end of the window."""
LONG_KINDS = frozenset({"collect", "top", "quantile", "approx_distinct", "combiner"})
"""Aggregates that may be long."""
OF_RECORDS = "AfterWatermark(early=, late=) with triggers that count records"


def judge_windows(facts: Facts, limits: Limits) -> Iterator[Finding]:
    """Yield a finding for each step whose trigger cannot fire, or whose windows hold its watermark or fill memory."""
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

    yield from _in_memory(facts, limits)


def _in_memory(facts: Facts, limits: Limits) -> Iterator[Finding]:
    """Yield a finding for each step whose windows stay in memory and take half of the bound."""
    for row in facts.open_windows:
        resident = resident_windows(row["identity"])
        if resident is None:
            continue
        windows = row["unfired"] if resident.until_fired else row["windows"]
        size, bytes_max = windows * resident.bytes_each, limits.open_windows_bytes_max
        if size <= bytes_max // 2:
            continue
        yield Finding(
            Severity.WARNING,
            "windows in memory",
            f"{row['graph']}.{row['computation']}: {windows:,} open windows stay in memory, about"
            f" {size / 1e6:,.0f} MB over all workers",
            f"{resident.why}; the bound for all windows of the graph is {bytes_max / 1e6:,.0f} MB"
            " (MILLPY_OPEN_WINDOWS_BYTES_MAX), at which records that open another one are dead letters",
            f"{resident.instead}, or give the workers this memory",
        )


class Resident(NamedTuple):
    """Windows that stay in memory.

    Attributes:
        why: why they do.
        instead: what lets them leave.
        until_fired: whether they may leave when they have fired; otherwise they stay until they expire.
        bytes_each: about the bytes of one in memory.
    """

    why: str
    instead: str
    until_fired: bool
    bytes_each: int


def resident_windows(identity: Mapping[str, Any]) -> Resident | None:
    """Return why the windows of a step, as the graph's description has it, stay in memory; None if they may leave.

    It does not know which fields are text, nor whether the step takes a watermark for each site or is archived.
    """
    kind, trigger = identity["window"]["kind"], identity["trigger"]
    kinds = {aggregate["kind"] for _, aggregate in identity["aggregates"]}
    by_pane = trigger != {"kind": "after_watermark"}
    found: tuple[str, str, bool] | None = None
    if identity.get("takes_retractions"):
        found = "they subtract retractions", "let the inner windows have one pane each", False
    elif "on_time_pane" in identity or "final_pane" in identity:
        found = "they emit empty panes", "leave out on_time_pane and final_pane", False
    elif kind == "window_function":
        found = "a function of yours makes them", "use windows of millpy", False
    elif identity["stored_form"] == "slices":
        found = "they are stored as slices", "choose a longer `every`, or FixedWindows", True
    elif identity.get("timestamp_combiner"):
        found = "they combine the times of their records", "use the end of the window as the time of its panes", True
    elif by_pane and (kind == "session" or not _is_due_by_records(trigger)):
        what = "a trigger of sessions" if kind == "session" else identity_text(trigger)
        instead = "use the default trigger" if kind == "session" else f"use {OF_RECORDS}"
        found = f"{what} keeps its panes there", instead, True
    elif long := sorted(kinds & LONG_KINDS):
        found = f"their aggregates may be long ({', '.join(long)})", "aggregate numbers and times in them", True
    if found is None:
        return None
    each = PANE_BYTES + 100 * len(identity["aggregates"]) + (FIRING_BYTES if by_pane else 0)
    return Resident(*found, each + (SESSION_BYTES if kind == "session" else 0))


def _is_due_by_records(trigger: Mapping[str, Any]) -> bool:
    """Tell whether records and the watermark alone make panes of a trigger due, and none waits after the end."""
    return bool(trigger["kind"] == "after_watermark") and not any(kind in CLOCKS for kind in _kinds(trigger))


def _kinds(trigger: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of a trigger and of those that it is composed of."""
    yield trigger["kind"]
    parts = [trigger[name] for name in ("early", "late", "trigger", "until") if isinstance(trigger.get(name), Mapping)]
    for part in (*parts, *trigger.get("triggers", ())):
        yield from _kinds(part)


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
