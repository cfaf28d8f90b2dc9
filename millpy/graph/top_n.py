"""Top-n: of each window the keys with the greatest values, in two steps, so that no key interval has all keys.

    panes ──► NAME_parts: the best n of each part of the keys, by window ──► NAME: the best n of all parts, by window

Both are windowed steps over panes, so corrections upstream are retracted and amend the ranking.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

from millpy.errors import GraphError
from millpy.graph.arguments import field_names
from millpy.graph.names import checked_name
from millpy.graph.nodes import StageNode
from millpy.graph.refusals import refuse_repeated_panes
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.arguments import check_flags, check_instance, is_whole
from millpy.model.keys import key_text
from millpy.model.record import column_name
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.ranking import Ranking
from millpy.windowing.calendar_windows import CalendarWindows
from millpy.windowing.composite_triggers import AFTER_WATERMARK, AfterWatermark
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.triggers import AfterCount, Trigger
from millpy.windowing.window import FixedWindows, SlidingWindows, Windows

if TYPE_CHECKING:
    from millpy.graph.streams import Stream

PARTS_MAX = 1_024


class TopOfPanes:
    """The method of a windowed stream that ranks its keys."""

    __slots__ = ()

    def top_n(  # noqa: PLR0913 - those of a window, and those of a ranking
        self,
        n: int,
        *,
        by: str,
        name: str,
        per: str | Sequence[str] = (),
        smallest: bool = False,
        trigger: Trigger | None = None,
        accumulation: Accumulation = Accumulation.ACCUMULATING,
        parts: int = 16,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Rank the keys of each window by one of its aggregates: the n keys with the greatest values.

        A pane has the fields of `per`, the window, and `top`: a list of the other key fields and the value, best first;
        in SQL `jsonb`. Without `per` its key is `top_of`, the name of the windowed step. Windows are those of the step;
        of sliding windows, the last `every` before the end. A correction of a value, or of what has fallen out of the
        first n, amends the ranking, for as long as the step allows records to be late.

        Args:
            n: how many keys, from 1 to 1,000.
            by: the aggregate by which they are ranked: an int or float. None, NaN and infinities have no rank.
            name: the step's name; `NAME_parts` is the name of the step before it.
            per: fields of the key for whose values there is a ranking each.
            smallest: whether the least values are ranked.
            trigger: when rankings fire. Default: when the watermark has passed the window; and if the step has early
                panes, also before, with each of them.
            accumulation: as for `window`.
            parts: number of parts in which the keys are ranked first, from 1 to 1,024.
            intervals: number of key intervals of either step.

        Raises:
            GraphError: the stream has no panes of fixed, sliding or calendar windows, or they discard, or sliding ones
                have the times of records; a field does not exist; or as for `window`.
            SchemaError: n is out of bounds, or the aggregate is no number.
        """
        stream = cast("Stream", self)
        checked_name(name, "step")
        step, logic = _windowed(stream)
        if not is_whole(parts, 1, PARTS_MAX):
            raise GraphError(f"parts={parts!r} of top_n is not a number from 1 to {PARTS_MAX:,}", hint="leave it out")
        check_flags(smallest=smallest)
        if trigger is not None:
            check_instance("trigger", trigger, Trigger, "for example trigger=AfterWatermark(early=Every(seconds(10)))")
        panes = _Panes(stream, step, logic, field_names("per", per), by, parts)
        if trigger is None:
            trigger = AfterWatermark(early=AfterCount(1)) if logic.trigger.per_pane else AFTER_WATERMARK
        repeat = step.retracts or logic.allowed_lateness > timedelta(0) or trigger.per_pane
        window: dict[str, Any] = {
            "windows": _windows_of_panes(logic.windows),
            "allowed_lateness": logic.allowed_lateness,
            "trigger": trigger,
            "intervals": intervals,
        }
        first = panes.ranking(n, smallest=smallest, retracts=step.retracts)
        ranked = _ranked_parts(stream, panes, first, f"{name}_parts", repeat, window)
        keyed = ranked.flat_map(panes.to_entries, panes.entry_type, immediate=True).key_by(*panes.entry_key)
        last = panes.ranking(n, smallest=smallest, retracts=repeat)
        return keyed.window(accumulation=accumulation, name=name, **window).aggregate(top=last)


def _ranked_parts(
    stream: Stream, panes: _Panes, ranking: Ranking, name: str, repeat: bool, window: Mapping[str, Any]
) -> Stream:
    """Return the best of each part of the keys; panes that repeat are retracted."""
    return (
        stream.map(panes.to_part, panes.part_type, immediate=True)
        .key_by("part", *panes.groups)
        .window(
            accumulation=Accumulation.RETRACTING if repeat else Accumulation.ACCUMULATING,
            name=name,
            **window,
        )
        .aggregate(top=ranking)
    )


class _Panes:
    """The panes that are ranked, and the functions between the steps of a top-n.

    Attributes:
        groups: the key fields of which each value has a ranking.
        part_type: the type of the entries that are ranked in parts.
        entry_type, entry_key: the type of the best entries of all parts, and the fields of its key.

    Raises:
        GraphError: a field does not exist, or no key field is left to be ranked.
    """

    def __init__(
        self, stream: Stream, step: StageNode, logic: WindowedLogic, groups: Sequence[str], by: str, parts: int
    ) -> None:
        keys = [column_name(field) for field in step.inputs[0].fields]
        if not isinstance(by, str) or by not in logic.aggregates:
            raise GraphError(f"{step.name!r} has no aggregate {by!r}", hint=f"it has: {', '.join(logic.aggregates)}")
        if unknown := [field for field in groups if field not in keys]:
            raise GraphError(f"per={unknown[0]!r} is no field of the key", hint=f"the key has: {', '.join(keys)}")
        type_of = stream.record_type.field_type
        self._labels = {key: type_of(key) for key in keys if key not in groups}
        if not self._labels:
            raise GraphError("top_n has no keys to rank: per= names all fields of the key", hint="leave one out")
        if taken := {"part", "top_of"} & {*keys, by}:
            raise GraphError(
                f"top_n has a field {min(taken)!r} of its own", hint="give the key or aggregate another name"
            )
        self._step, self._by, self._parts, self._kind = step.name, by, parts, type_of(by)
        self.groups = groups
        group_types = {field: type_of(field) for field in groups}
        entry = [*self._labels.items(), (by, self._kind | None)]
        self.part_type = msgspec.defstruct("PartEntry", [*group_types.items(), ("part", int), *entry])
        entry_types = group_types or {"top_of": str}
        self.entry_key = tuple(entry_types)
        self.entry_type = msgspec.defstruct("RankedEntry", [*entry_types.items(), *entry])

    def ranking(self, n: int, *, smallest: bool, retracts: bool) -> Ranking:
        """Return the aggregate."""
        return Ranking(self._by, self._labels, self._kind, n, smallest=smallest, retracts=retracts)

    def to_part(self, pane: Any) -> Any:
        """Return a pane as an entry of its part, which depends on nothing but the key."""
        labels = tuple(getattr(pane, label) for label in self._labels)
        part = zlib.crc32(key_text(labels)) % self._parts
        return self.part_type(*(getattr(pane, field) for field in self.groups), part, *labels, getattr(pane, self._by))

    def to_entries(self, pane: Any) -> list[Any]:
        """Return the entries of the ranking of a part."""
        groups = [getattr(pane, field) for field in self.groups] or [self._step]
        return [
            self.entry_type(*groups, *(getattr(entry, label) for label in self._labels), getattr(entry, self._by))
            for entry in pane.top
        ]


def _windowed(stream: Stream) -> tuple[StageNode, WindowedLogic]:
    """Return the step whose panes a stream has.

    Raises:
        GraphError: it has no panes that can be ranked.
    """
    step = stream.producer
    if not isinstance(step, StageNode) or not isinstance(step.logic, WindowedLogic):
        raise GraphError(
            f"{stream.name!r} has no panes that top_n could rank",
            hint="rank the stream that aggregate(…) returns, before any other operator",
        )
    logic = step.logic
    if not isinstance(logic.windows, FixedWindows | SlidingWindows | CalendarWindows):
        raise GraphError(
            f"top_n cannot rank over {logic.windows!r}: its keys share no window",
            hint="use fixed, sliding or calendar windows",
        )
    if isinstance(logic.windows, SlidingWindows) and logic.timestamps is not TimestampCombiner.END_OF_WINDOW:
        raise GraphError(
            f"panes of {stream.name!r} have the time of a record, which does not tell of which sliding window they are",
            hint="omit its timestamp_combiner",
        )
    if logic.accumulation is Accumulation.DISCARDING and logic.panes_repeat:
        raise GraphError(
            f"panes of {stream.name!r} have only what is new, which cannot be ranked",
            hint="use accumulation=Accumulation.RETRACTING",
        )
    refuse_repeated_panes(stream, "rank")
    if not step.name:
        raise GraphError("top_n needs the name of the windowed step", hint="name it: window(…, name=…) or to_table(…)")
    return step, logic


def _windows_of_panes(windows: Windows) -> Windows:
    """Return windows of which each has the panes of one window: the times of panes are in it, or the last µs of it."""
    if isinstance(windows, SlidingWindows):
        return FixedWindows(windows.every, offset=(windows.offset + windows.size) % windows.every)
    return windows
