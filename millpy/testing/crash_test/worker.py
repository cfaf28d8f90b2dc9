"""One worker of a crash test: `python -m millpy.testing.crash_test.worker GRAPH.py FEED`.

It runs the user's graph as `millpy run` does, but FEED replaces every source, and it waits for a database that does not
answer, because a fault may reach it before its first turn. The database is MILLPY_DATABASE_URL. Standard input is a
leash: when it ends, the worker drains. The exit status is that of `millpy run`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from millpy.config.settings import Settings, configure_logging
from millpy.errors import MillError, UsageError
from millpy.graph.loader import load_graph
from millpy.process.exit import report_error
from millpy.process.worker_process import run_until_stopped
from millpy.testing.crash_test.broker import source_at_broker
from millpy.testing.crash_test.feed_source import FeedSource


def main() -> int:
    """Run the worker; return the exit status."""
    location, feed = sys.argv[1], Path(sys.argv[2])
    try:
        settings = Settings.load()
        configure_logging(settings)
        if settings.database_url is None:
            raise UsageError("MILLPY_DATABASE_URL is not set")
        graph = load_graph(location)
        for node in graph.injectors():
            node.source = source_at_broker(node.source, feed / node.name) or FeedSource(feed / node.name)
        run_until_stopped(graph, settings.database_url, settings, leash=True, patient=True)
    except MillError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
