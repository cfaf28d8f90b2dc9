"""Scores of `millpy report` on recorded feeds: how many windows are outliers, and which inserted faults are found.

    python -m benchmarks.scores [--seed 11]        (make bench-scores)

The windows are those of the feeds' expected tables. First they are judged as they are. Then faults of known place are
inserted into every device with 50 windows or more: spikes of one window (3 to 10 of the device's robust standard
deviations), level shifts and drifts (2 to 6), and stuck values, the latter three over a tenth of the device's windows,
6 to 48. A fault is found when one of its windows is an outlier. Precision is the share of outliers that lie in an
inserted fault: what is really unusual in a feed counts against it, so it is a lower bound.

The last line is JSON. Needs the feeds in the directory of `tests.feeds.feed`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from millpy.spark import session
from millpy.spark.scores import judged
from millpy.spark.statistics import Columns
from tests.feeds.feed import DATA, FEEDS, ROOT

TABLES = {"campusiot_lorawan": "tumbling_10min_dedup", "ooo_umts": "tumbling_10s", "open_smart_home": "tumbling_10min"}
KINDS = ("spike", "shift", "drift", "stuck")
WINDOWS_MIN = 50
LONG_MIN, LONG_MAX = 6, 48
Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Faults:
    """The values with faults, each window's fault (0: none), and the kind of each fault."""

    values: Numbers
    of_window: Places
    kinds: dict[int, str]


def windows_of(feed: str) -> pa.Table:
    """Return key, window_start and window_end in µs, and value, in order; windows without a value are left out."""
    found = pq.read_table(DATA / feed / "expected" / f"{TABLES[feed]}.parquet")
    found = found.filter(pc.greater(found["n_values"], 0))
    us = 1_000_000 // FEEDS[feed].per_s
    key = pc.binary_join_element_wise(*(found[name].cast("string") for name in FEEDS[feed].keys), " / ")
    columns = {
        "key": key,
        "window_start": pc.multiply(found["window_start"].cast("int64"), us),
        "window_end": pc.multiply(found["window_end"].cast("int64"), us),
        "value": pc.divide(found["value_sum"].cast("double"), found["n_values"].cast("double")),
    }
    return pa.table(columns).sort_by([("key", "ascending"), ("window_start", "ascending")])


def with_faults(windows: pa.Table, seed: int) -> Faults:
    """Insert faults into a copy of the values; the first quarter of each device stays as it was."""
    rng = np.random.default_rng(seed)
    keys = np.array(windows["key"].to_pylist())
    values: Numbers = windows["value"].to_numpy().copy()
    of_window: Places = np.zeros(len(values), np.int64)
    kinds: dict[int, str] = {}
    for key in np.unique(keys):
        places = np.flatnonzero(keys == key)
        spread = deviation(values[places])
        if len(places) < WINDOWS_MIN or spread == 0:
            continue
        long = min(LONG_MAX, max(LONG_MIN, len(places) // 10))
        at = max(len(places) // 4, 30) + int(rng.integers(0, long))
        while at + long < len(places):
            kind = KINDS[int(rng.integers(0, len(KINDS)))]
            chosen = places[at : at + (1 if kind == "spike" else long)]
            values[chosen] = faulty(values[chosen], kind, spread, rng)
            kinds[len(kinds) + 1] = kind
            of_window[chosen] = len(kinds)
            at += len(chosen) + max(4 * long, len(places) // 6) + int(rng.integers(0, long))
    return Faults(values, of_window, kinds)


def deviation(values: Numbers) -> float:
    """Return a robust standard deviation; the usual one where more than half of the values are one."""
    apart = float(np.median(np.abs(values - np.median(values))))
    return 1.4826 * apart or float(np.std(values))


def faulty(values: Numbers, kind: str, spread: float, rng: np.random.Generator) -> Numbers:
    """Return the values as a sensor with this fault gives them."""
    if kind == "stuck":
        return np.full(len(values), values[0])
    low, high = (3, 10) if kind == "spike" else (2, 6)
    size = spread * rng.uniform(low, high) * rng.choice([-1, 1])
    shape = np.linspace(0, 1, len(values)) if kind == "drift" else np.ones(len(values))
    return np.asarray(values + size * shape, np.float64)


def judge(spark: SparkSession, windows: pa.Table, directory: Path) -> tuple[npt.NDArray[np.bool_], float]:
    """Return which windows are outliers, in the order of the table, and the highest score."""
    path = directory / "windows.parquet"
    pq.write_table(windows.append_column("place", pa.array(range(len(windows)))), path)
    read = spark.read.parquet(str(path))
    for name in ("window_start", "window_end"):
        read = read.withColumn(name, fn.timestamp_micros(name))
    found = judged(read, Columns(("key",), "value")).select("place", "outlier", "score").toArrow()
    outliers = np.zeros(len(windows), bool)
    outliers[found["place"].to_numpy()] = found["outlier"].to_numpy(zero_copy_only=False)
    return outliers, float(pc.max(found["score"]).as_py() or 0.0)


def measured(spark: SparkSession, feed: str, seed: int, directory: Path) -> dict[str, Any]:
    """Judge one feed without and with faults."""
    windows = windows_of(feed)
    clean, highest = judge(spark, windows, directory)
    faults = with_faults(windows, seed)
    place = windows.schema.get_field_index("value")
    outliers, _ = judge(spark, windows.set_column(place, "value", pa.array(faults.values)), directory)
    hit = set(faults.of_window[outliers].tolist())
    of_kind = {kind: [one for one, name in faults.kinds.items() if name == kind] for kind in KINDS}
    return {
        "windows": len(windows),
        "outlier_share": round(float(clean.mean()), 5),
        "highest_score": round(highest, 1),
        "faults": len(faults.kinds),
        "precision": round(float((faults.of_window[outliers] > 0).mean()) if outliers.any() else 0.0, 3),
        "recall": round(sum(one in hit for one in faults.kinds) / max(len(faults.kinds), 1), 3),
        **{f"{kind}_recall": share(sum(one in hit for one in ones), len(ones)) for kind, ones in of_kind.items()},
    }


def share(part: int, whole: int) -> float | None:
    """Return part / whole; None without a whole."""
    return round(part / whole, 3) if whole else None


def main() -> int:
    """Measure all feeds; the last line has the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=11, help="the faults' seed (11)")
    options = parser.parse_args()
    if not DATA.exists():
        print(f"bench-scores: the recorded feeds are not in {DATA}", file=sys.stderr)
        return 2
    spark = session(name="bench-scores", master="local[2]", memory="2g")
    feeds: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="millpy-scores-") as directory:
        for feed in TABLES:
            feeds[feed] = measured(spark, feed, options.seed, Path(directory))
            print(feed, feeds[feed], flush=True)
    spark.stop()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    print(json.dumps({"workload": "scores", "commit": commit, "settings": {"seed": options.seed}, **feeds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
