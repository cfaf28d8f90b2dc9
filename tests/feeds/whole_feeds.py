"""The whole feeds through mosquitto into real workers, some of them killed: against the tables computed without us.

    python -m tests.feeds.whole_feeds [FEED ...]        (make feeds)

Prints feed x expected x rows x differences; the last line is JSON: tables, rows, differences. Exit status 0 only when
there are none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from millpy.embedded import EmbeddedBroker, EmbeddedPostgres
from millpy.store.postgres.deployment.migrate import migrate
from tests.feeds.feed import DATA, FEEDS, Feed
from tests.feeds.through_mqtt import run_through_mqtt

KILLS = 4


def run(feed: Feed) -> dict[str, tuple[int, int]]:
    """Table -> (expected rows, differences), of one feed."""
    with (
        tempfile.TemporaryDirectory(prefix="millpy-feeds-") as place,
        EmbeddedPostgres(Path(place) / "postgres") as server,
        EmbeddedBroker(Path(place) / "broker") as broker,
    ):
        try:
            migrate(server.url())
            faults = run_through_mqtt(feed, Path(place), server.url(), broker, kills=KILLS)
            found = feed.check(server.url())
        finally:
            server.kill()  # it would look for its files in a moment, and they will be gone
    for fault in faults:
        print(f"{feed.name}: {fault}", file=sys.stderr)
    return found | {"what an observer saw": (0, len(faults))} if faults else found


def main(names: list[str]) -> int:
    """Run some feeds, or all."""
    if not DATA.exists():
        print(f"the recorded feeds are not in {DATA}", file=sys.stderr)
        return 2
    tables = rows = differences = 0
    print(f"{'feed':20} {'expected':42} {'rows':>9} {'differences':>12}")
    for feed in (FEEDS[name] for name in names or FEEDS):
        for table, (count, wrong) in run(feed).items():
            print(f"{feed.name:20} {table:42} {count:>9,} {wrong:>12,}", flush=True)
            tables, rows, differences = tables + 1, rows + count, differences + wrong
    print(json.dumps({"tables": tables, "rows": rows, "differences": differences}))
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
