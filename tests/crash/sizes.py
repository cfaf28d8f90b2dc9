"""Feeds of a requested size and their expected results, for tests that exceed a bound."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from tests.crash.checks import accounting_faults, differences
from tests.crash.harness import Worker

WHOLE = os.environ.get("SIZES") == "whole"
"""`make sizes` plays all of what is played in part with all tests."""
GRAPH = Path(__file__).with_name("sizes_graph.py")
START_S = 1_700_000_040
"""On a whole minute, and on a whole half of one."""


@dataclass(frozen=True)
class Feed:
    """Keys, each with a number of records in the same half minute, with texts of a given size."""

    path: Path
    keys: int
    each: int = 2
    text_bytes: int = 1

    def write(self) -> Feed:
        """Yield all keys, then all of them again, so that none is complete before the end."""
        text = "x" * self.text_bytes
        with self.path.open("w") as file:
            for turn in range(self.each):
                at = datetime.fromtimestamp(START_S + turn * 29.0 / self.each, UTC).isoformat()
                for key in range(self.keys):
                    file.write(json.dumps({"device": f"d{key}", "at": at, "value": key + turn, "text": text}) + "\n")
        return self

    def faults(self, url: str, windows: int = 1) -> list[str]:
        """Return the faults of a finished graph's results; each record is in `windows` windows."""
        wanted = {f"d{key}": (self.each * windows, self.total(key) * windows) for key in range(self.keys)}
        with psycopg.connect(url, autocommit=True) as connection:
            rows = connection.execute(
                "SELECT device, sum(n)::bigint, sum(total)::bigint FROM sizes.windows GROUP BY device"
            ).fetchall()
            found = differences("windows", {row[0]: row[1:] for row in rows}, wanted)
            return [str(fault) for fault in (*found, *accounting_faults(connection))]

    def total(self, key: int) -> int:
        """The sum of the values of a key."""
        return sum(key + turn for turn in range(self.each))


def worker(feed: Feed, url: str, environment: Mapping[str, str] | None = None, **settings: object) -> Worker:
    """A worker on the feed."""
    return Worker(feed.path.parent, url, feed.path, graph=GRAPH, environment=environment, **settings)  # type: ignore[arg-type]


def stored_windows(url: str, where: str) -> int:
    """How many windows there are in rows (`folded`), or in all deltas that were ever written."""
    query = "SELECT count(*) FROM mill.keyed WHERE kind = 'window'"
    if where == "unfolded":
        query = """SELECT coalesce(sum(json_array_length(e -> 'key')), 0)
                     FROM mill.deltas, json_array_elements(document) AS e WHERE e ->> 'kind' = 'window'"""
    with psycopg.connect(url, autocommit=True) as connection:
        ((count,),) = connection.execute(query).fetchall()
    return int(count)


def result_rows(url: str) -> int:
    """How many windows the result table has; 0 before it is there."""
    with psycopg.connect(url, autocommit=True) as connection:
        if connection.execute("SELECT to_regclass('sizes.windows')").fetchone() == (None,):
            return 0
        ((count,),) = connection.execute("SELECT count(*) FROM sizes.windows").fetchall()
    return int(count)
