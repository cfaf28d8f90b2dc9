"""Polls the low watermark of a computation and notes how far it is behind the clock, in its own process.

    python -m benchmarks.lag_reader --database URL --graph stages --computation stage_3 --seconds 60 --out FILE.npy

The low watermark is the smallest of the computation's intervals, as an ordinary autocommit connection sees it. One
sample for each poll, so a watermark counts for as long as it stays; 1 ms between polls. Writes int64[n]:
µs from the low watermark to the wall clock.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from pathlib import Path

import numpy as np
import psycopg

PAUSE_S = 0.001
LOW = """
SELECT min(i.low_watermark) FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = c.graph_id WHERE (g.name, c.name) = (%s, %s)
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.lag_reader")
    parser.add_argument("--database", required=True)
    parser.add_argument("--graph", required=True)
    parser.add_argument("--computation", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lags = array("q")
    with psycopg.connect(options.database, autocommit=True) as connection:
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            row = connection.execute(LOW, (options.graph, options.computation), prepare=True).fetchone()
            assert row is not None
            lags.append(time.time_ns() // 1000 - row[0])
            time.sleep(PAUSE_S)
    np.save(options.out, np.array(lags, dtype=np.int64))
    print(json.dumps({"samples": len(lags)}))


if __name__ == "__main__":
    main()
