"""Up to which end the windows of each step are closed when all sources before it have ended.

The end of a source closes every window that a record can have been in: that of its newest record is the last. Behind
windows, the last pane is in the last window. A Computation may give what it produces any later time, so nothing
tells which windows behind it are closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millpy.graph import InjectorNode, StageNode
from millpy.hosting.plan import Plan
from millpy.model.time import INSTANT_MIN, Instant
from millpy.operators.deduplicate import DeduplicateLogic
from millpy.operators.interval_join import IntervalJoinLogic
from millpy.operators.lookup import LookupLogic
from millpy.windowing.last_end import last_end
from millpy.windowing.window_spec import WindowSpec

_KEEP_TIMES = (DeduplicateLogic, IntervalJoinLogic, LookupLogic)


def closed_ends(plan: Plan, newest: Mapping[str, Instant]) -> dict[str, Instant]:
    """Return the end up to which the windows of each step are closed, if that can be told.

    Args:
        plan: the graph.
        newest: source -> the event time of its newest record.
    """
    ends: dict[str, Instant] = {}
    latest: dict[str, Instant | None] = {}  # of what each step has produced; None if that is not known
    for computation in plan:
        node = computation.node
        if isinstance(node, InjectorNode):
            latest[node.name] = newest.get(node.name, INSTANT_MIN)
            continue
        times = [latest[taken.producer.name] for taken in node.inputs]
        known = [at for at in times if at is not None]
        at = max(known) if len(known) == len(times) else None
        if isinstance(node.logic, WindowSpec):
            if at is not None and at > INSTANT_MIN:
                at = last_end(node.logic.windows, at)
                if at is not None:
                    ends[node.name] = at
                    at = Instant(at - 1)  # the event time of its last pane
            latest[node.name] = at
        else:
            latest[node.name] = at if isinstance(node.logic, _KEEP_TIMES) else None
    return ends


def why_not_reopened(plan: Plan, source: str) -> str:
    """Return why a source that has ended cannot be read on; "" if it can."""
    behind = list(_consumers(plan, source))
    ends = closed_ends(plan, {c.name: Instant(0) for c in plan if c.stage is None})
    for node in behind:
        if node.by_site:
            return f"{node.name} has a watermark for each site, and they have all ended"
        if isinstance(node.logic, WindowSpec) and node.name not in ends:
            return (
                f"it is not known which windows of {node.name} its end has closed: a function or step of yours decides"
            )
    return ""


def _consumers(plan: Plan, source: str) -> Iterator[StageNode]:
    """Yield the steps behind a source."""
    names = {source}
    for computation in plan:
        node = computation.node
        if isinstance(node, StageNode) and any(taken.producer.name in names for taken in node.inputs):
            names.add(node.name)
            yield node
