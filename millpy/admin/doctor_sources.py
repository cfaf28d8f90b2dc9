"""Check the sources and sinks of a graph: each examines its other side (`Source.examine`, `Sink.examine`)."""

from __future__ import annotations

from millpy.errors import MillError
from millpy.graph import Graph
from millpy.model.finding import Finding, Severity
from millpy.sinks.protocol import UNDELIVERED

UNREACHED = "its records wait at the broker; what exceeds the broker's limits is lost"


async def examine_sources(graph: Graph) -> list[Finding]:
    """Return the findings on all sources and sinks, in the graph's order."""
    found: list[Finding] = []
    for node in graph.injectors():
        try:
            async for finding in node.source.examine(graph.permanent_name, node.name):
                found.append(finding)
        except MillError as error:
            found.append(Finding(Severity.ERROR, "broker", f"{node.name}: {error.message}", UNREACHED, error.hint))
    for step, sink in graph.sinks():
        try:
            async for finding in sink.examine(graph.permanent_name, step.name):
                found.append(finding)
        except MillError as error:
            found.append(Finding(Severity.ERROR, "sink", f"{step.name}: {error.message}", UNDELIVERED, error.hint))
    return found
