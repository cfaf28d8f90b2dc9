"""Open panes: the state of a window of a key between bundles, and its stored form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX
from millpy.windowing.accumulator import AccumulatorSet

NO_TIME = INSTANT_MAX
"""The combined event time of a pane without records that were on time."""


class PaneContent(msgspec.Struct, gc=False, omit_defaults=True):
    """The content of a pane, or of a part of it: accumulators, and the number of late records."""

    values: list[Any]
    late_count: int = 0


FIRST = "first"
"""`FiringState.before` of a window's first pane."""


class FiringState(msgspec.Struct, gc=False, omit_defaults=True):
    """What the trigger of a pane knows, if it decides pane by pane.

    Attributes:
        trigger: the state of the trigger.
        since: number of records since the newest pane.
        late: number of late ones among them.
        timing: timing of the newest pane; "" without one.
        before: while a turn emits a pane, the timing of the one before it, or `FIRST`.
        on_time_index: number of its panes since the end of the window, minus one; -1 if the newest one is early.
        last: whether no pane follows the newest one.
        closed: whether the trigger was finished, or has been asked when the window was over.
        expected: whether the trigger has been asked since the percentile watermark has reached the end of the window.
        failing: whether a predicate of the trigger raised when it was asked last.
        passed: whether the trigger has been asked since the watermark has reached the end of the window.
        holds: whether the pane still keeps the low watermark back after that, for records that were on time.
        waits: whether it may then be due without another record, so that an owner needs the pane in memory.
    """

    trigger: list[Any]
    since: int = 0
    late: int = 0
    timing: str = ""
    before: str = ""
    on_time_index: int = -1
    last: bool = False
    closed: bool = False
    failing: bool = False
    expected: bool = False
    passed: bool = False
    holds: bool = False
    waits: bool = False


class OpenPane(msgspec.Struct, gc=False, omit_defaults=True):
    """The state of a window of a key.

    Attributes:
        values: its accumulators; [] for a slice without records.
        pane_index: index of the next pane that it emits (I7).
        late_count: number of records that arrived after the watermark had reached the window's end.
        emitted: whether it has emitted a pane.
        bundle: number of the bundle that stored it last; 0 if it is not stored.
        kept: for a retracting window, the content of its newest pane if it has changed since; for a discarding one,
            what has come since then, if anything has; None in other modes.
        firing: the state of its trigger, if that has one.
        at: the combined event time of the records since its newest pane, if its window combines times.
        newest_at: the event time of its newest pane, if that is not the end of its window.
    """

    values: list[Any]
    pane_index: int = 0
    late_count: int = 0
    emitted: bool = False
    bundle: int = 0
    kept: PaneContent | None = None
    firing: FiringState | None = None
    at: int = NO_TIME
    newest_at: int = NO_TIME


DuePane: TypeAlias = "tuple[int, int, Key, OpenPane]"
"""(window start, window end, key, pane)."""

_encode_lines = msgspec.json.Encoder().encode_lines
_decode = msgspec.json.Decoder(OpenPane).decode
_decode_all = msgspec.json.Decoder(list[OpenPane]).decode


def encode_panes(panes: Sequence[OpenPane], accumulators: AccumulatorSet) -> list[bytes]:
    """Encode panes as JSON: in one call, except those with values that JSON cannot hold, or only at length."""
    if accumulators.stores_text:
        return [_encode_exactly(pane, accumulators) for pane in panes]
    if not panes:
        return []
    try:
        text = _encode_lines(panes)
    except (OverflowError, TypeError):
        return [_encode_exactly(pane, accumulators) for pane in panes]
    lines: list[bytes] = text.splitlines()
    if b"null" not in text:
        return lines
    return [
        _encode_exactly(pane, accumulators) if b"null" in line else line
        for pane, line in zip(panes, lines, strict=True)
    ]


def decode_pane(stored: bytes, accumulators: AccumulatorSet) -> OpenPane:
    """Decode a stored pane."""
    return _from_stored(_decode(stored), accumulators)


def decode_panes(stored: Sequence[bytes], accumulators: AccumulatorSet) -> list[OpenPane]:
    """Decode stored panes: in one call, and accumulator by accumulator."""
    panes = _decode_all(b"[" + b",".join(stored) + b"]")
    width = len(accumulators.members)
    if any(len(pane.values) != width or pane.kept is not None for pane in panes):
        return [_from_stored(pane, accumulators) for pane in panes]
    columns = zip(*(pane.values for pane in panes), strict=True)
    found = [map(member.from_stored, column) for member, column in zip(accumulators.members, columns, strict=False)]
    for pane, values in zip(panes, zip(*found, strict=True), strict=False):
        pane.values = list(values)
    return panes


def _from_stored(pane: OpenPane, accumulators: AccumulatorSet) -> OpenPane:
    pane.values = pane.values and accumulators.from_stored(pane.values)
    if pane.kept is not None:
        pane.kept.values = accumulators.from_stored(pane.kept.values)
    return pane


def _encode_exactly(pane: OpenPane, accumulators: AccumulatorSet) -> bytes:
    """Encode a pane with its accumulators in the form that `from_stored` reads."""
    kept = pane.kept
    if kept is not None:
        kept = PaneContent(accumulators.to_stored(kept.values), kept.late_count)
    return msgspec.json.encode(
        msgspec.structs.replace(pane, values=pane.values and accumulators.to_stored(pane.values), kept=kept)
    )
