"""The fluent API: computations joined by streams, as a user writes them."""

from millpy.graph.graph import Graph
from millpy.graph.nodes import InjectorNode, StageNode
from millpy.graph.streams import KeyedStream, Stream, WindowedStream

__all__ = ["Graph", "InjectorNode", "KeyedStream", "StageNode", "Stream", "WindowedStream"]
