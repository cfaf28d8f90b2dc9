"""Refusals of windows and joins that would never give a pane, or would count records that are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from millpy.errors import GraphError
from millpy.graph.nodes import InjectorNode, Input, StageNode
from millpy.model.keys import is_key_of
from millpy.operators.lookup import LookupLogic
from millpy.operators.stateless import Chain
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.composite_triggers import AfterWatermark
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.triggers import Never, Trigger
from millpy.windowing.window import SessionWindows, Windows
from millpy.windowing.window_function import WindowFunction

if TYPE_CHECKING:
    from millpy.graph.streams import Stream


def refuse_windows(windows: object) -> None:
    """Refuse what is no windows, and a window function that could not run.

    Raises:
        GraphError: it is.
    """
    if not isinstance(windows, Windows):
        raise GraphError(
            f"{windows!r} is no windows",
            hint="for example FixedWindows(minutes(1)), or an instance of your subclass of WindowFunction",
        )
    if isinstance(windows, WindowFunction):
        windows.check()


def refuse_other_keys(windows: object, fields: Sequence[str], key_types: tuple[type, ...]) -> None:
    """Refuse session gaps of keys that the stream cannot have: no record would have them.

    Raises:
        GraphError: there are such.
    """
    for key, _ in windows.by_key if isinstance(windows, SessionWindows) else ():
        if not is_key_of(key, key_types):
            names = ", ".join(f"{field}: {kind.__name__}" for field, kind in zip(fields, key_types, strict=True))
            raise GraphError(
                f"by_key= has a gap for {key!r}, which is no key ({names})",
                hint="name keys as the stream has them; that of several fields is a tuple",
            )


def refuse_closing(windows: Windows, trigger: Trigger) -> None:
    """Refuse triggers that close their window, for windows that a user's function merges.

    Raises:
        GraphError: they do.
    """
    if isinstance(windows, WindowFunction) and windows.merges and trigger.may_finish:
        raise GraphError(
            f"windows that merge cannot have {trigger!r}, which closes its window: it may become part of another",
            hint=f"use Repeatedly({trigger!r}), or AfterWatermark(early={trigger!r})",
        )


def refuse_endless(stream: Stream, windows: Windows, trigger: Trigger) -> None:
    """Refuse a window that waits for the end of sources, if one of these does not end.

    Raises:
        GraphError: it would never have a pane.
    """
    waits = isinstance(trigger, Never) or (isinstance(trigger, AfterWatermark) and trigger.early is None)
    if not isinstance(windows, GlobalWindow) or not waits:
        return
    endless = sorted(name for name, ends in _sources(stream).items() if not ends)
    if endless:
        raise GraphError(
            f"a global window over {stream.name!r} would never have a pane: the source of {endless[0]!r} does not end",
            hint="give it a trigger that fires before, such as AfterWatermark(early=Every(seconds(10)))",
        )


def refuse_retention(node: StageNode, retention: timedelta) -> None:
    """Refuse a retention of rows that never grow old, or that are dropped before they are final.

    Raises:
        GraphError: the windows never end, or take late records for longer.
    """
    if not isinstance(node.logic, WindowedLogic):
        return
    if isinstance(node.logic.windows, GlobalWindow):
        raise GraphError("a global window never ends, so its rows never grow old", hint="omit retention=")
    lateness = timedelta(microseconds=node.allowed_lateness_us)
    if retention < lateness:
        raise GraphError(
            f"a retention of {retention} is shorter than the allowed lateness of {lateness}: rows change until then",
            hint="give a longer retention, or a shorter allowed_lateness",
        )


def refuse_several_ways(deduplicate: str, inputs: Sequence[Input]) -> None:
    """Refuse to deduplicate records of one stream that come by several ways, if they may be retracted.

    A pane may take another way than the pane before it, and come before the retraction of that.

    Raises:
        GraphError: they do.
    """
    ways: dict[Stream, Chain] = {}
    for taken in inputs:
        if taken.retracts and ways.setdefault(taken.stream, taken.operators) != taken.operators:
            raise GraphError(
                f"records of {taken.stream.name!r} may be retracted, and reach deduplicate {deduplicate!r} by several"
                " ways: one that comes before the retraction of a record with its id would be dropped as a duplicate",
                hint="deduplicate before the ways part, or each way by itself",
            )


def refuse_repeated_panes(stream: Stream, what: str = "window") -> None:
    """Refuse to window or join panes that may repeat: each pane of a window would count as a record.

    Raises:
        GraphError: the stream has such panes.
    """
    producer = stream.producer
    if not isinstance(producer, StageNode):
        return
    if producer.keeps_ids or isinstance(producer.logic, LookupLogic):  # each pane that it lets through is still one
        for earlier in producer.inputs:
            refuse_repeated_panes(earlier.stream, what)
    logic = producer.logic
    if not isinstance(logic, WindowedLogic) or logic.accumulation is not Accumulation.ACCUMULATING:
        return
    if logic.panes_repeat:
        name, given = stream.name or producer.name, f"allowed_lateness={logic.allowed_lateness!r}"
        if logic.trigger.per_pane:
            given = f"trigger={logic.trigger!r}"
        raise GraphError(
            f"cannot {what} the panes of {name!r}: with {given} a window may have several panes, and each would count",
            hint=f"choose for {name!r}: accumulation=Accumulation.RETRACTING, whose panes are subtracted again, or"
            f" Accumulation.DISCARDING, whose panes add up; or omit its {given.partition('=')[0]}, and each window has"
            " one pane",
        )


def refuse_retractions(stream: str, windows: Windows, accumulation: Accumulation) -> None:
    """Refuse windows that cannot subtract retractions, whatever their aggregates are.

    Raises:
        GraphError: the windows are sessions, or discard.
    """
    if isinstance(windows, SessionWindows) or (isinstance(windows, WindowFunction) and windows.merges):
        raise GraphError(
            f"records of {stream!r} may be retracted, and a session that they have extended could not shrink again",
            hint="use fixed or sliding windows; or let the windows before it have"
            " accumulation=Accumulation.DISCARDING, whose panes are never retracted",
        )
    if accumulation is Accumulation.DISCARDING:
        raise GraphError(
            f"records of {stream!r} may be retracted, and a pane of what is new cannot take back what is old",
            hint="use accumulation=Accumulation.RETRACTING",
        )


def _sources(stream: Stream) -> dict[str, bool]:
    """Return the sources behind a stream by the name of their injector, and whether each of them ends."""
    found: dict[str, bool] = {}
    waiting, seen = [stream], set()
    while waiting:
        for route in waiting.pop().routes:
            producer = route.stream.producer
            if isinstance(producer, InjectorNode):
                found[producer.name] = producer.source.ends()
            elif producer is not None and producer.name not in seen:
                seen.add(producer.name)
                waiting += [taken.stream for taken in producer.inputs]
    return found
