"""Sources behind a stream that do not end, so that nothing which waits for their end ever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpy.errors import GraphError
from millpy.graph.nodes import InjectorNode
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.triggers import AfterWatermark, Never, Trigger
from millpy.windowing.window import Windows

if TYPE_CHECKING:
    from millpy.graph.streams import Stream


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
