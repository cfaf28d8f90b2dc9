"""One worker of a crash test: `python -m millpy.testing.crash_test.worker GRAPH.py FEED`.

It runs the user's graph as `millpy run` does, but every source is replaced by what FEED has for its stream. The
database comes by MILLPY_DATABASE_URL. Standard input is a leash: when it ends, the worker drains. The exit status is
that of `millpy run`, but for a database that does not answer.
"""

from __future__ import annotations

import sys
from pathlib import Path

from millpy.complaint import complain
from millpy.config import Settings, configure_logging
from millpy.errors import MillError, StoreUnavailableError, UsageError
from millpy.graph_file import load_graph
from millpy.injectors.mqtt import Mqtt
from millpy.testing.crash_test.broker import redirected
from millpy.testing.crash_test.inputs import injectors
from millpy.testing.crash_test.tape import Tape
from millpy.worker_process import run_until_told

EXIT_UNAVAILABLE = 75
"""A worker that starts while the database is away ends; whoever runs workers starts another."""


def main() -> int:
    """Entry of the process; the exit status says how it went."""
    location, feed = sys.argv[1], Path(sys.argv[2])
    try:
        settings = Settings.load()
        configure_logging(settings)
        if settings.database_url is None:
            raise UsageError("MILLPY_DATABASE_URL is not set")
        graph = load_graph(location)
        for node in injectors(graph):
            over_broker = redirected(node.source, feed / node.name) if isinstance(node.source, Mqtt) else None
            node.source = over_broker or Tape(feed / node.name)
        run_until_told(graph, settings.database_url, settings, leash=True)
    except StoreUnavailableError as error:
        complain(error)
        return EXIT_UNAVAILABLE
    except MillError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
