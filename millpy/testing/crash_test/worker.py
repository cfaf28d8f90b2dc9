"""One worker of a crash test: `python -m millpy.testing.crash_test.worker GRAPH.py FEED`.

It runs the user's graph as `millpy run` does, but FEED replaces every source. The database is MILLPY_DATABASE_URL.
Standard input is a leash: when it ends, the worker drains. The exit status is that of `millpy run`, except for a
database that does not answer.
"""

from __future__ import annotations

import sys
from pathlib import Path

from millpy.config.settings import Settings, configure_logging
from millpy.errors import MillError, StoreUnavailableError, UsageError
from millpy.graph.loader import load_graph
from millpy.process.exit import report_error
from millpy.process.worker_process import run_until_stopped
from millpy.testing.crash_test.broker import source_at_broker
from millpy.testing.crash_test.feed_source import FeedSource

EXIT_UNAVAILABLE = 75
"""The exit status of a worker that finds no database when it starts; the crash test starts another worker."""


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
        run_until_stopped(graph, settings.database_url, settings, leash=True)
    except StoreUnavailableError as error:
        report_error(error)
        return EXIT_UNAVAILABLE
    except MillError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
