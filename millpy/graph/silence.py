"""Device silence, as steps of a graph; `millpy/operators/silence.py` says how they work together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from millpy.errors import GraphError
from millpy.graph.names import checked_name
from millpy.graph.nodes import InjectorNode, StageNode
from millpy.model.lookup import LookupTable
from millpy.model.record import RecordType
from millpy.operators.keyed_output import key_columns
from millpy.operators.silence import ITEM_TYPE, DeviceWatch, FeedGaps, SilenceItem, silence_of

if TYPE_CHECKING:
    from millpy.graph.streams import KeyedStream, Stream


def silent_after(
    keyed: KeyedStream,
    after: timedelta,
    *,
    name: str,
    devices: Sequence[Any] | LookupTable | None,
    intervals: int,
) -> Stream:
    """Add the steps; see `PerKeyTools.silent_after`."""
    checked_name(name, "step")
    tool = silence_of(after, key_columns(keyed.fields, keyed.key_types), devices)
    RecordType(tool.output)  # an output that cannot be a stream must leave the graph as it is
    bounds = []
    for route in keyed.stream.routes:
        producer = route.stream.producer
        if not isinstance(producer, InjectorNode):
            raise GraphError(
                f"silent_after {name!r} needs a stream straight from a source; {route.stream.name!r} is none",
                hint="only a source tells whether the feed as a whole was away; map and filter may be between",
            )
        if producer.event_time.watermark_by is not None:
            raise GraphError(
                f"silent_after {name!r} does not fit watermark_by={producer.event_time.watermark_by!r} of"
                f" {producer.name!r}: a gap of one site is none of the others",
                hint="inject the sites as streams of their own, or leave out watermark_by",
            )
        bounds.append(producer.event_time.max_disorder or timedelta(0))
    gaps = StageNode(f"{name}_gaps", keyed.inputs(), FeedGaps(after, max(bounds)), intervals)
    found = keyed.stream.add_step(gaps, ITEM_TYPE)
    watched: Any = keyed.in_order(name=f"{name}_in_order", intervals=intervals).process(
        DeviceWatch(after), name=f"{name}_watch", output=SilenceItem, intervals=intervals
    )
    items = found.union(watched).key_by("bucket").in_order(name=f"{name}_items_in_order", intervals=1)
    made: Stream = items.process(tool, name=name, output=tool.output, intervals=1)
    return made
