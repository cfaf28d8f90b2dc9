"""Joins of two keyed streams, as steps of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from millpy.errors import GraphError
from millpy.graph.nodes import Input, StageNode
from millpy.model.time import check_length
from millpy.operators.interval_join import IntervalJoinLogic
from millpy.operators.join_output import HOWS, How, JoinedType

Within = timedelta | tuple[timedelta, timedelta]
"""How far a right record may be before and after a left one; one duration is for both."""


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
    if left[0].key_types != right[0].key_types:
        keys = " and ".join(_key_text(one[0]) for one in (left, right))
        raise GraphError(f"cannot join on keys of different types: {keys}", hint="map one stream to the other's type")
    if how not in HOWS:
        raise GraphError(
            f"unknown how={how!r} of a join", hint='use "inner", "left" or "full"; swap the sides of a right one'
        )
    before, after = _bounds_of(within)
    if allowed_lateness < timedelta(0):
        raise GraphError("allowed_lateness must not be negative", hint="use zero or a positive duration")
    check_length("allowed_lateness", allowed_lateness)
    if not isinstance(suffix, str) or not f"a{suffix}".isidentifier():
        raise GraphError(f"suffix={suffix!r} makes no field name", hint='for example suffix="_right"')
    joined = JoinedType(left[0].record_type, left[0].fields, right[0].record_type, right[0].fields, how, suffix)
    logic = IntervalJoinLogic(
        joined,
        len(left),
        before,
        after,
        how=how,
        allowed_lateness=allowed_lateness,
        takes_retractions=any(taken.retracts for taken in (*left, *right)),
    )
    return StageNode(name, (*left, *right), logic, intervals), joined


def _bounds_of(within: Any) -> tuple[timedelta, timedelta]:
    """Return how far a right record may be before and after a left one."""
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
    return before, after


def _key_text(taken: Input) -> str:
    types = ", ".join(kind.__name__ for kind in taken.key_types)
    return f"({', '.join(taken.fields)}) of {taken.record_type.struct.__name__}: {types}"
