"""Windows of a keyed stream, and their aggregates, as steps of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, cast

from millpy.errors import GraphError
from millpy.graph.arguments import check_not_negative
from millpy.graph.names import RESERVED_COLUMNS, checked_name
from millpy.graph.nodes import StageNode
from millpy.graph.refusals import (
    refuse_closing,
    refuse_endless,
    refuse_other_keys,
    refuse_repeated_panes,
    refuse_retractions,
    refuse_windows,
)
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.arguments import check_instance
from millpy.model.record import column_name
from millpy.model.time import Instant, microseconds
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.composite_triggers import AFTER_WATERMARK
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.pane_rules import FiringBehavior, PaneRules
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows

if TYPE_CHECKING:
    from millpy.graph.streams import KeyedStream, Stream


class Windowing:
    """The method of a keyed stream that groups its records into windows."""

    __slots__ = ()

    def window(  # noqa: PLR0913 - keywords of the public interface
        self,
        windows: Windows,
        *,
        allowed_lateness: timedelta = timedelta(0),
        trigger: Trigger = AFTER_WATERMARK,
        accumulation: Accumulation = Accumulation.ACCUMULATING,
        timestamp_combiner: TimestampCombiner = TimestampCombiner.END_OF_WINDOW,
        on_time_pane: FiringBehavior = FiringBehavior.IF_NOT_EMPTY,
        final_pane: FiringBehavior = FiringBehavior.IF_NOT_EMPTY,
        pane_info: bool = False,
        name: str = "",
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> WindowedStream:
        """Group the records of each key into event-time windows.

        Args:
            windows: how records are grouped: fixed, sliding, calendar or session windows, the global one, or a
                `WindowFunction` of yours.
            allowed_lateness: how long past a window's end late records still amend it.
            trigger: when windows fire.
            accumulation: what a pane has of the panes of its window before it, and what becomes of these.
            timestamp_combiner: the event time of a pane: the end of its window, or the earliest or latest event time of
                the records that the pane is made for.
            on_time_pane: whether the pane that the trigger fires at the end of a window is emitted without new records.
            final_pane: whether the last pane of a window is: when the trigger is finished, or the window is over.
            pane_info: whether the stream and its table have two columns more: `pane_on_time_index`, the number of
                panes of the window that are not early and came before, or -1 for an early one; and `pane_last`,
                whether no pane of the window can follow.
            name: the step's name. Default: the name of its table.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: the lateness is negative; a session gap is of no key that the stream has; the trigger is none
                for these windows; the window would wait for the end of a source that does not end; the input has panes
                that repeat, which would count twice; or it has retractions, and these windows cannot subtract them.
        """
        keyed = cast("KeyedStream", self)
        if name:
            checked_name(name, "step")
        _check_member("accumulation", accumulation, Accumulation.RETRACTING)
        _check_member("timestamp_combiner", timestamp_combiner, TimestampCombiner.EARLIEST)
        refuse_windows(windows)
        refuse_other_keys(windows, keyed.fields, keyed.key_types)
        refuse_endless(keyed.stream, windows, trigger)
        for route in keyed.stream.routes:
            refuse_repeated_panes(route.stream)
        if any(taken.retracts for taken in keyed.inputs()):
            refuse_retractions(keyed.stream.name, windows, accumulation)
        _check_trigger(trigger, windows, allowed_lateness)
        rules = PaneRules(on_time_pane=on_time_pane, final_pane=final_pane, pane_info=pane_info)
        how = (trigger, accumulation, timestamp_combiner)
        return WindowedStream(keyed, windows, allowed_lateness, *how, name, intervals, rules)


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """Records grouped by key and window, ready for aggregates."""

    keyed: KeyedStream
    windows: Windows
    allowed_lateness: timedelta
    trigger: Trigger
    accumulation: Accumulation
    timestamp_combiner: TimestampCombiner
    name: str
    intervals: int
    rules: PaneRules

    def aggregate(self, **aggregates: Aggregate) -> Stream:
        """Compute one column per aggregate: `aggregate(n=Count(), mean=Mean("temperature")).to_table("t")`.

        Raises:
            GraphError: there is no aggregate, a column's name is taken, or records may be retracted, and an aggregate
                cannot subtract them.
            SchemaError: a field does not exist, or an aggregate does not accept its type.
        """
        if not aggregates:
            raise GraphError("aggregate needs at least one aggregate", hint="for example aggregate(n=Count())")
        for column, aggregate in aggregates.items():
            check_instance(f"aggregate {column}", aggregate, Aggregate, _example(column, aggregate))
        keyed = self.keyed
        inputs = keyed.inputs()
        logic = WindowedLogic(
            self.windows,
            self.allowed_lateness,
            aggregates,
            trigger=self.trigger,
            accumulation=self.accumulation,
            timestamps=self.timestamp_combiner,
            takes_retractions=any(taken.retracts for taken in inputs),
            rules=self.rules,
        )
        taken = [column_name(field) for field in keyed.fields]
        if len(set(taken)) < len(taken):
            raise GraphError(
                f"key fields {keyed.fields} share a column name", hint="map one of them to a field of another name"
            )
        for name in aggregates:
            checked_name(name, "column")
            if name in taken or name in RESERVED_COLUMNS["windowed"]:
                raise GraphError(f"column {name!r} is taken", hint="give the aggregate another name")
        output = logic.output_type(keyed.stream.record_type, keyed.fields)
        node = StageNode(
            self.name, inputs, logic, self.intervals, allowed_lateness_us=microseconds(self.allowed_lateness)
        )
        return keyed.stream.add_step(node, output)


def _example(column: str, given: object) -> str:
    """Return the hint for what is no aggregate."""
    if isinstance(given, type) and issubclass(given, Aggregate):
        made = "Count()" if given.__name__ == "Count" else f'{given.__name__}("temperature")'
        return f"make one: {column}={made}"
    if isinstance(given, str):
        return f'say which: {column}=Mean("{given}")'
    return f'for example {column}=Mean("temperature"); an aggregate of your own is a Combiner'


def _check_trigger(trigger: object, windows: Windows, allowed_lateness: timedelta) -> None:
    """Raise GraphError for what is no trigger of these windows, or a lateness that is negative or too short for it."""
    check_not_negative("allowed_lateness", allowed_lateness, "for example allowed_lateness=minutes(2)")
    if not isinstance(trigger, Trigger):
        raise GraphError(
            f"{trigger!r} is not a trigger", hint="for example trigger=AfterWatermark(early=Every(seconds(10)))"
        )
    refuse_closing(windows, trigger)
    if trigger.due_at(Instant(0)) > microseconds(allowed_lateness):
        raise GraphError(
            f"{trigger!r} fires windows after allowed_lateness={allowed_lateness!r}, when they are over",
            hint="choose a longer allowed_lateness",
        )


def _check_member(parameter: str, given: object, example: Enum) -> None:
    """Raise GraphError for a parameter that is not of the kind of an example."""
    if not isinstance(given, type(example)):
        raise GraphError(
            f"{parameter}={given!r} is not one of {type(example).__name__}", hint=f"for example {parameter}={example!r}"
        )
