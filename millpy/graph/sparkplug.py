"""Sparkplug messages in a graph: the streams of their metrics; `millpy/operators/sparkplug.py` says how."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from millpy.errors import GraphError
from millpy.formats.sparkplug import SparkplugMessage
from millpy.graph.names import checked_name
from millpy.operators.sparkplug import RejectedMetric, SparkplugEvent, SparkplugMetric, SparkplugSession

if TYPE_CHECKING:
    from millpy.graph.streams import Stream


class SparkplugStreams(NamedTuple):
    """The streams of `Stream.sparkplug`: metrics, events of sessions, and metrics that are rejected."""

    metrics: Stream[SparkplugMetric]
    events: Stream[SparkplugEvent]
    rejected: Stream[RejectedMetric]


def sparkplug_streams(
    messages: Stream[Any], *, name: str, rebirth_every: timedelta, intervals: int
) -> SparkplugStreams:
    """Add the step; see `Stream.sparkplug`."""
    checked_name(name, "step")
    if messages.record_type.struct is not SparkplugMessage:
        raise GraphError(
            f"sparkplug {name!r} needs Sparkplug messages, not {messages.record_type.struct.__name__}",
            hint='graph.inject("messages", Mqtt("spBv1.0/#", format=Sparkplug()), schema=SparkplugMessage, …)',
        )
    session = SparkplugSession(name, rebirth_every)
    keyed = messages.key_by("group", "edge_node")
    found = keyed.process(session, name=name, output=session.outputs, intervals=intervals)
    return SparkplugStreams(*found.values())
