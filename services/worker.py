"""A worker in a container: `python -m services.worker GRAPH.py [COMPUTATION ...]`; settings come by the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from millpy.complaint import complain
from millpy.config import Settings, configure_logging
from millpy.errors import ConfigError, MillError, UsageError
from millpy.graph import Graph
from millpy.graph_file import load_graph
from millpy.worker_process import run_until_told


def serve(arguments: Sequence[str], choose: Callable[[Graph, Sequence[str]], Sequence[str]]) -> int:
    """Run a worker on the computations that `choose` picks; returns the exit status."""
    try:
        if not __debug__:
            raise UsageError("millpy does not run without its assertions", hint="leave out python -O")
        if not arguments:
            raise UsageError("no graph is given", hint="python -m services.worker GRAPH.py")
        settings = Settings.load()
        configure_logging(settings)
        if settings.database_url is None:
            raise ConfigError("no database is configured", hint="set MILLPY_DATABASE_URL")
        graph = load_graph(arguments[0])
        only = choose(graph, arguments[1:])
        run_until_told(graph, settings.database_url, settings, only=only, patient=True)
    except MillError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], lambda _graph, named: named))
