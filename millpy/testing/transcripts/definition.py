"""What a transcript computes: its words become windows, aggregates, and a graph with one source and one windowed step.

`WINDOWS`, `TRIGGERS` and the other tables here list everything that the format can say. A word that they lack is
unknown; a word whose place in them is empty is known, but this engine cannot do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, TypeVar

import msgspec

from millpy.errors import GraphError, UsageError
from millpy.graph import Graph
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.model.keys import Key
from millpy.model.time import Instant
from millpy.testing.kit.manual_source import ManualSource
from millpy.testing.transcripts.format import TranscriptText
from millpy.testing.transcripts.notation import duration_us, time_us
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.distinct import ApproxDistinct
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, StandardDeviation, Sum, Variance
from millpy.windowing.aggregates.positional import Collect, First, Last, Top
from millpy.windowing.aggregates.quantile import Median, Quantile
from millpy.windowing.calendar_windows import CalendarWindows
from millpy.windowing.composite_triggers import AfterAll, AfterAny, AfterEach, AfterWatermark, OrFinally, Repeatedly
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.pane_rules import FiringBehavior
from millpy.windowing.percentile_trigger import AfterPercentile
from millpy.windowing.triggers import AfterCount, AfterProcessingTime, Every, Never, Trigger
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows

_Choice = TypeVar("_Choice", bound=Enum)
SOURCE, STEP = "records", "panes"
INTERVALS = 2
CLOCK = "2100-01-01T00:00:00Z"
"""The processing time at which a transcript begins, unless it says another: no record is then from the future."""

WINDOWS: Mapping[str, Sequence[str]] = {
    "fixed": ("offset",),
    "sliding": ("every", "offset"),
    "calendar": ("zone", "starts_at"),
    "session": ("by_key", "by_field", "max_gap"),
    "global": (),
}
"""Kind of windows -> further keys."""
WINDOWS_TO_COME: Mapping[str, Sequence[str]] = {
    "session": ("max_length", "max_records"),
}
CHOICES: Mapping[str, tuple[str, Sequence[str]]] = {
    "timestamp_combiner": ("end_of_window", ("earliest", "latest")),
}
"""Key -> (what the engine does, what it does not do yet)."""
COMPOSITES: Mapping[str, Callable[..., Trigger]] = {
    "after_any": AfterAny,
    "after_all": AfterAll,
    "after_each": AfterEach,
    "or_finally": OrFinally,
}
"""Triggers of several triggers."""
DELAYS: Mapping[str, Callable[[timedelta], Trigger]] = {"after_processing_time": AfterProcessingTime, "every": Every}
TRIGGERS = ("after_watermark", "after_count", "after_percentile", *DELAYS, "repeatedly", *COMPOSITES, "never")
AGGREGATES: Mapping[str, Callable[..., Aggregate]] = {
    "count": Count,
    "sum": Sum,
    "mean": Mean,
    "variance": Variance,
    "standard_deviation": StandardDeviation,
    "min": Min,
    "max": Max,
    "first": First,
    "last": Last,
    "top": Top,
    "collect": Collect,
    "quantile": Quantile,
    "median": Median,
    "approx_distinct": ApproxDistinct,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a transcript computes.

    Attributes:
        record: the class of its records: `key`, `at`, `value`, `id`.
        origin: the time from which its times count.
        clock: the processing time at the beginning.
    """

    windows: Windows
    trigger: Trigger
    allowed_lateness: timedelta
    accumulation: Accumulation
    on_time_pane: FiringBehavior
    final_pane: FiringBehavior
    aggregates: Mapping[str, Aggregate]
    event_time: EventTime
    idle: AdvanceWithClock | None
    dedupe: Dedupe | None
    partitions: tuple[str, ...]
    record: type[msgspec.Struct]
    origin: Instant
    clock: Instant

    def graph(self, name: str) -> Graph:
        """Return a graph that computes it.

        Raises:
            GraphError, SchemaError: its parts do not fit each other.
        """
        graph = Graph(name)
        source = ManualSource(*self.partitions)
        records = graph.inject(
            SOURCE, source, schema=self.record, event_time=self.event_time, dedupe=self.dedupe, idle=self.idle
        )
        windowed = records.key_by("key").window(
            self.windows,
            allowed_lateness=self.allowed_lateness,
            trigger=self.trigger,
            accumulation=self.accumulation,
            on_time_pane=self.on_time_pane,
            final_pane=self.final_pane,
            pane_info=True,
            name=STEP,
            intervals=INTERVALS,
        )
        windowed.aggregate(**self.aggregates).to_table(STEP)
        return graph


def definition_of(text: TranscriptText, values: set[type]) -> Definition:
    """Return what a transcript computes; `values` are the types of its values.

    Raises:
        UsageError: a word is unknown, a value is wrong, or the engine cannot do what it asks for.
    """
    for key, (done, to_come) in CHOICES.items():
        _choose(key, getattr(text, key), done, to_come)
    for key in ("percentile", "watermark_by"):
        if getattr(text, key) is not None:
            raise not_implemented(key, "the watermark of a source partition, with max_disorder")
    if text.idle is not None and text.clock is None:
        raise UsageError("idle: needs clock:", hint="say at which processing time the transcript begins")
    if len(set(text.partitions)) < len(text.partitions) or not all(text.partitions):
        raise UsageError(f"partitions: {text.partitions} are not different names")
    origin = time_us(text.origin, Instant(0), "origin")
    return Definition(
        windows=_windows(text.windows),
        trigger=_trigger(text.trigger),
        allowed_lateness=_duration(text.allowed_lateness, "allowed_lateness"),
        accumulation=_choice("mode", text.mode, Accumulation),
        on_time_pane=_choice("on_time_pane", text.on_time_pane, FiringBehavior),
        final_pane=_choice("final_pane", text.final_pane, FiringBehavior),
        aggregates={name: _aggregate(name, value) for name, value in text.aggregates.items()},
        event_time=EventTime(
            "at",
            max_disorder=_duration(text.max_disorder, "max_disorder"),
            future_tolerance=_duration(text.future_tolerance, "future_tolerance"),
        ),
        idle=None if text.idle is None else AdvanceWithClock(_duration(text.idle, "idle")),
        dedupe=None if text.dedupe is None else Dedupe("id", within=_duration(text.dedupe, "dedupe")),
        partitions=tuple(text.partitions),
        record=_record(values),
        origin=origin,
        clock=time_us(text.clock or CLOCK, origin, "clock"),
    )


def not_implemented(what: str, instead: str) -> UsageError:
    """Return the error for what the format can say and the engine cannot do."""
    return UsageError(f"{what} is not implemented in this version of millpy", hint=f"it has: {instead}")


def _choose(key: str, value: str, done: str, to_come: Sequence[str]) -> None:
    if value in to_come:
        raise not_implemented(f"{key}: {value}", done)
    if value != done:
        raise UsageError(f"{key}: unknown value {value!r}", hint=f"choose from: {', '.join([done, *to_come])}")


def _choice(key: str, value: str, kind: type[_Choice]) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(str(each.value) for each in kind)
        raise UsageError(f"{key}: unknown value {value!r}", hint=f"choose from: {choices}") from None


def _record(values: set[type]) -> type[msgspec.Struct]:
    if str in values and len(values) > 1:
        raise UsageError("the values are text and numbers", hint="let all values of a transcript be of one type")
    kind = str if str in values else float if float in values else int
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [
        ("key", str),
        ("at", datetime),
        ("value", kind | None, None),
        ("id", str | None, None),
    ]
    return msgspec.defstruct("TranscriptRecord", fields)


def _windows(given: Mapping[str, Any]) -> Windows:
    kinds = [*dict.fromkeys([*WINDOWS, *WINDOWS_TO_COME])]
    kind = next((key for key in given if key in kinds), None)
    if kind is None:
        raise UsageError(f"windows: unknown kind {', '.join(given) or 'none'}", hint=f"choose from: {', '.join(kinds)}")
    known, to_come = WINDOWS.get(kind, ()), WINDOWS_TO_COME.get(kind, ())
    for key in given:
        if key != kind and key not in (*known, *to_come):
            raise UsageError(
                f"windows: unknown key {key!r} of {kind}", hint=f"its keys are: {', '.join([kind, *known, *to_come])}"
            )
        if kind not in WINDOWS or (key != kind and key in to_come):
            raise not_implemented(f"windows: {kind if kind not in WINDOWS else key}", ", ".join(WINDOWS))
    what = f"windows: {kind}"
    if kind == "calendar":
        return _calendar(given)
    if kind == "global":
        if given["global"] is not True:
            raise UsageError(f"windows: global is {given['global']!r}", hint="write {global: true}")
        return GlobalWindow()
    offset = _duration(given.get("offset", "0s"), "windows: offset")
    if kind == "fixed":
        return FixedWindows(_duration(given[kind], what), offset=offset)
    if kind == "sliding":
        every = _duration(given.get("every"), "windows: every")
        return SlidingWindows(_duration(given[kind], what), every=every, offset=offset)
    by_key = given.get("by_key", {})
    if not isinstance(by_key, Mapping):
        raise UsageError("windows: by_key is not a mapping of keys to durations")
    gaps: dict[Key, timedelta] = {str(key): _duration(gap, f"windows: by_key: {key}") for key, gap in by_key.items()}
    max_gap = _duration(given["max_gap"], "windows: max_gap") if "max_gap" in given else None
    try:
        return SessionWindows(
            _duration(given[kind], what), by_key=gaps, by_field=given.get("by_field", ""), max_gap=max_gap
        )
    except GraphError as error:
        raise UsageError(f"windows: {error.message}", hint=error.hint) from None


def _calendar(given: Mapping[str, Any]) -> CalendarWindows:
    starts_at = _duration(given.get("starts_at", "0s"), "windows: starts_at")
    try:
        return CalendarWindows(given["calendar"], zone=given.get("zone", ""), starts_at=starts_at)
    except GraphError as error:
        raise UsageError(f"windows: {error.message}", hint=error.hint) from None


def _trigger(given: Any, what: str = "trigger") -> Trigger:
    name, argument = _named(given, what)
    if name not in TRIGGERS:
        raise UsageError(f"{what}: unknown trigger {name!r}", hint=f"choose from: {', '.join(TRIGGERS)}")
    if isinstance(given, Mapping) and len(given) > 1:
        raise UsageError(f"{what}: {', '.join(map(str, given))} are several", hint="join them by after_any")
    try:
        return _built_trigger(name, argument, f"{what}: {name}")
    except GraphError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from None


def _built_trigger(name: str, argument: Any, what: str) -> Trigger:
    if name in DELAYS:
        return DELAYS[name](_duration(argument, what))
    if name == "after_count":
        return AfterCount(argument)
    if name == "after_percentile":
        return AfterPercentile(argument)
    if name == "repeatedly":
        return Repeatedly(_trigger(argument, what))
    if name in COMPOSITES:
        if not isinstance(argument, list) or (name == "or_finally" and len(argument) != 2):
            number = "two triggers" if name == "or_finally" else "triggers"
            raise UsageError(f"{what}: {argument!r} is not a list of {number}")
        return COMPOSITES[name](*(_trigger(part, what) for part in argument))
    if name == "never":
        if argument is not None:
            raise UsageError(f"{what} has no argument", hint="write trigger: never")
        return Never()
    parts = {} if argument is None else argument
    if not isinstance(parts, Mapping) or not parts.keys() <= {"early", "late"}:
        raise UsageError(f"{what}: {argument!r} is not a mapping with early, late or both")
    early = _trigger(parts["early"], f"{what}: early") if "early" in parts else None
    if "late" not in parts:
        return AfterWatermark(early=early)
    late = None if parts["late"] == "nothing" else _trigger(parts["late"], f"{what}: late")
    return AfterWatermark(early=early, late=late)


def _aggregate(column: str, given: Any) -> Aggregate:
    what = f"aggregates: {column}"
    name, field = _named(given, what)
    if name not in AGGREGATES:
        raise UsageError(f"{what}: unknown aggregate {name!r}", hint=f"choose from: {', '.join(AGGREGATES)}")
    options = {key: value for key, value in given.items() if key != name} if isinstance(given, Mapping) else {}
    if field is None and name != "count":
        raise UsageError(f"{what}: {name} needs a field", hint=f"for example {{{name}: value}}")
    try:
        return AGGREGATES[name](*([] if field is None else [field]), **options)
    except (TypeError, GraphError) as error:
        raise UsageError(f"{what}: {error}", hint=f"for example {{{name}: value}}") from None


def _named(given: Any, what: str) -> tuple[str, Any]:
    """Return (name, argument) of `name`, or of a mapping whose first key is the name."""
    if isinstance(given, str):
        return given, None
    if isinstance(given, Mapping) and given:
        name = next(iter(given))
        return name, given[name]
    raise UsageError(f"{what}: {given!r} is neither a name nor a mapping that begins with one")


def _duration(given: Any, what: str) -> timedelta:
    if not isinstance(given, str):
        raise UsageError(f"{what}: {given!r} is not a duration", hint="write a duration with its unit, such as 90s")
    return timedelta(microseconds=duration_us(given, what))
