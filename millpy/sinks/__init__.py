"""What leaves the graph: statements in the commit, messages after it; and what a sink of your own is made of."""

from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup

__all__ = ["SendBound", "Sink", "SinkConnection", "SinkMessages", "SinkSetup"]
