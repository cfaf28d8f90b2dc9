"""The fluent API: computations joined by streams, as a user writes them."""

from millpy.graph.graph import Graph
from millpy.graph.nodes import InjectorNode, StageNode
from millpy.graph.streams import KeyedStream, Stream
from millpy.graph.windowed import WindowedStream

__all__ = ["Graph", "InjectorNode", "KeyedStream", "StageNode", "Stream", "WindowedStream"]
