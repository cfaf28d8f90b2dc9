"""Polls a result table and notes when each row became visible, in its own process.

    python -m benchmarks.reader --database URL --table stages.pongs --rows 60000 --out FILE.npy

A row counts as visible when a query of an ordinary autocommit connection has returned it. Within an interval bundles
commit in order, so the reader asks for what comes after the last (bundle, ordinal) that it has of each interval. It
asks again 1 ms after each answer; that wait is part of the figures. Writes int64[n, 3]: seq, sent, seen (monotonic ns).
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from array import array
from pathlib import Path

import numpy as np
import psycopg

PAUSE_S = 0.001
ROWS_AT_ONCE = 5_000
INTERVALS = """
SELECT i.interval_id FROM mill.result_tables AS t JOIN mill.intervals AS i USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = t.graph_id
 WHERE (g.name, t.name) = (%s, %s) ORDER BY 1
"""
NEWER = """
SELECT p.interval_id, t.bundle, t.ordinal, t.seq, t.sent_ns
  FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS p (interval_id, bundle, ordinal)
 CROSS JOIN LATERAL (
    SELECT r.bundle, r.ordinal, r.seq, r.sent_ns FROM {table} AS r
     WHERE r.interval_id = p.interval_id AND (r.bundle, r.ordinal) > (p.bundle, p.ordinal)
     ORDER BY r.bundle, r.ordinal LIMIT {limit}
 ) AS t
"""


class Reader:
    """Polls the table; keeps its position in each interval, and the rows that it has seen."""

    def __init__(self, url: str, table: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
            self._connection.execute(f"SET {setting} = off")  # the table has no statistics yet
        found = self._connection.execute(INTERVALS, tuple(table.split("."))).fetchall()
        self._positions = {interval_id: (0, -1) for (interval_id,) in found}
        self._statement = NEWER.format(table=table, limit=ROWS_AT_ONCE)
        self.seen = array("q")
        self.rows = 0
        self.stopping = False

    def poll(self) -> bool:
        """Query once; return whether there were new rows."""
        ids = list(self._positions)
        bundles, ordinals = zip(*self._positions.values(), strict=True)
        rows = self._connection.execute(self._statement, (ids, list(bundles), list(ordinals)), prepare=True).fetchall()
        now = time.monotonic_ns()
        for interval_id, bundle, ordinal, seq, sent_ns in rows:
            self._positions[interval_id] = (bundle, ordinal)
            if seq >= 0:
                self.seen.extend((seq, sent_ns, now))
                self.rows += 1
        return bool(rows)

    def stop(self, *_: object) -> None:
        """Make `run` return."""
        self.stopping = True

    def run(self, rows: int) -> None:
        """Poll until that many rows have been seen, or until stopped."""
        while not self.stopping and self.rows < rows:
            self.poll()
            time.sleep(PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reader")
    parser.add_argument("--database", required=True)
    parser.add_argument("--table", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    reader = Reader(options.database, options.table)
    signal.signal(signal.SIGTERM, reader.stop)
    reader.run(options.rows)
    np.save(options.out, np.array(reader.seen, dtype=np.int64).reshape(-1, 3))
    print(json.dumps({"rows": reader.rows}))


if __name__ == "__main__":
    main()
