"""Joins of two keyed streams, as steps of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from millpy.errors import GraphError
from millpy.graph.arguments import check_not_negative
from millpy.graph.nodes import Input, StageNode
from millpy.model.time import check_length, microseconds
from millpy.operators.as_of_join import AsOfJoinLogic
from millpy.operators.interval_join import IntervalJoinLogic
from millpy.operators.join_output import HOWS, How, JoinedType
from millpy.operators.join_reach import IntervalReach, Reach, WindowReach
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from millpy.windowing.window_function import WindowFunction

Within = timedelta | tuple[timedelta, timedelta] | FixedWindows
"""How far a right record may be before and after a left one, one duration for both; or the windows of both."""


def interval_join_node(  # noqa: PLR0913 - the parameters of `KeyedStream.join`
    name: str,
    left: Sequence[Input],
    right: Sequence[Input],
    *,
    within: Within,
    how: How,
    allowed_lateness: timedelta,
    suffix: str,
    intervals: int,
) -> tuple[StageNode, JoinedType]:
    """Return the step of an interval join, and the type of its output.

    Raises:
        GraphError: the keys have different types, `within` is empty, or a parameter is not one of its values.
    """
    _check_join(left, right, how, HOWS, allowed_lateness, suffix)
    joined = JoinedType(left[0].record_type, left[0].fields, right[0].record_type, right[0].fields, how, suffix)
    logic = IntervalJoinLogic(
        joined,
        len(left),
        _reach_of(within),
        how=how,
        allowed_lateness=allowed_lateness,
        takes_retractions=any(taken.retracts for taken in (*left, *right)),
    )
    return StageNode(name, (*left, *right), logic, intervals), joined


def as_of_join_node(  # noqa: PLR0913 - the parameters of `KeyedStream.join_as_of`
    name: str,
    left: Sequence[Input],
    right: Sequence[Input],
    *,
    within: timedelta,
    how: How,
    allowed_lateness: timedelta,
    suffix: str,
    intervals: int,
) -> tuple[StageNode, JoinedType]:
    """Return the step of an as-of join, and the type of its output.

    Raises:
        GraphError: the keys have different types, or a parameter is not one of its values.
    """
    _check_join(left, right, how, ("inner", "left"), allowed_lateness, suffix)
    if not isinstance(within, timedelta) or within < timedelta(0):
        raise GraphError(
            f"within={within!r} is not a duration", hint="for example within=minutes(5): no older record is joined"
        )
    check_length("within", within)
    joined = JoinedType(left[0].record_type, left[0].fields, right[0].record_type, right[0].fields, how, suffix)
    logic = AsOfJoinLogic(
        joined,
        len(left),
        within,
        how=how,
        allowed_lateness=allowed_lateness,
        takes_retractions=any(taken.retracts for taken in (*left, *right)),
    )
    return StageNode(name, (*left, *right), logic, intervals), joined


def _check_join(
    left: Sequence[Input],
    right: Sequence[Input],
    how: str,
    hows: Sequence[str],
    allowed_lateness: timedelta,
    suffix: str,
) -> None:
    """Check what all joins have.

    Raises:
        GraphError: the keys have different types, or a parameter is not one of its values.
    """
    if left[0].key_types != right[0].key_types:
        keys = " and ".join(_key_text(one[0]) for one in (left, right))
        raise GraphError(f"cannot join on keys of different types: {keys}", hint="map one stream to the other's type")
    if how not in hows:
        names = " or ".join(f'"{name}"' for name in hows)
        raise GraphError(f"unknown how={how!r} of a join", hint=f"use {names}; for a right join exchange the streams")
    check_not_negative("allowed_lateness", allowed_lateness, "for example allowed_lateness=minutes(2)")
    if not isinstance(suffix, str) or not f"a{suffix}".isidentifier():
        raise GraphError(f"suffix={suffix!r} makes no field name", hint='for example suffix="_right"')


def _reach_of(within: Any) -> Reach:
    """Return the reach of a join within an interval, or within windows."""
    if isinstance(within, FixedWindows):
        return WindowReach(within.size_us, within.offset_us)
    if isinstance(within, SlidingWindows | SessionWindows | WindowFunction):
        raise GraphError(
            f"cannot join within {within!r}: a record is in several windows, or in one that others make",
            hint="use FixedWindows, or an interval: within=(before, after)",
        )
    before, after = within if isinstance(within, tuple) and len(within) == 2 else (within, within)
    if not (isinstance(before, timedelta) and isinstance(after, timedelta)):
        raise GraphError(
            f"within={within!r} is not a duration or a pair of durations",
            hint="for example within=(seconds(5), minutes(1)): from 5 s before the left record to 1 min after it",
        )
    if -before > after:
        raise GraphError(
            f"within=({before!r}, {after!r}) is empty: it ends before it begins",
            hint="the first duration is how far before the left record, the second how far after it",
        )
    for bound in (before, after):
        check_length("within", abs(bound))
    return IntervalReach(microseconds(before), microseconds(after))


def _key_text(taken: Input) -> str:
    types = ", ".join(kind.__name__ for kind in taken.key_types)
    return f"({', '.join(taken.fields)}) of {taken.record_type.struct.__name__}: {types}"
