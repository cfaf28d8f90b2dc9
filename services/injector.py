"""A worker that takes only the injectors of a graph: `python -m services.injector GRAPH.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from millpy.graph import Graph
from services.worker import serve


def injectors(graph: Graph, named: Sequence[str]) -> Sequence[str]:
    """Those named, or all that the graph has."""
    return named or [spec.name for spec in graph.spec().computations if spec.kind == "injector"]


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], injectors))
