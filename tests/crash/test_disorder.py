"""A source that learns its disorder bound is killed around commits: row watermarks and counts stay what they were."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

from tests.crash.harness import Worker
from tests.property.test_disorder import by_loop, feed

GRAPH = Path(__file__).with_name("disorder_graph.py")
COUNTS = "SELECT records, late, late_by_percentile, beyond_bound, bound < max_disorder, p50 <= p99 FROM millpy.disorder"
LATE = """
SELECT (extract(epoch FROM event_time) * 1000000)::bigint, (extract(epoch FROM watermark) * 1000000)::bigint
  FROM millpy.late_records ORDER BY 1, 2
"""
ON_TIME = "SELECT sum(n) FROM disorder.by_ms"
HISTOGRAM = "SELECT max(share), sum(records) > 1000 FROM millpy.disorder_histogram"


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


def test_killed_source_goes_on_with_the_bound_that_it_had_learned(tmp_path: Path, database_url: str) -> None:
    times = feed(random.Random(5), 6_000)
    source = tmp_path / "in.ndjson"
    source.write_text("".join(f'{{"device":"d{k % 3}","at":{at}}}\n' for k, at in enumerate(times)))
    for failpoint in ("before_commit:9", "after_commit:14", "after_fence:11", ""):
        with Worker(tmp_path, database_url, source, graph=GRAPH, failpoint=failpoint) as worker:
            status = worker.process.wait(120)
            assert (status == 0) == (not failpoint), worker.log

    watermarks = list(by_loop(times, 0.9))
    assert watermarks == sorted(watermarks)
    behind = [(at, before) for at, before in zip(times, watermarks, strict=False) if at < before]
    missed = sorted((at, before) for at, before in behind if (at // 1_000 + 1) * 1_000 <= before)
    newest, by_promise = times[0], []
    for before, at in pairwise([times[0], *times]):
        by_promise.append(newest - 20_000_000)
        newest = max(newest, before, at)
    late_by_percentile = sum(
        promised <= at < before for at, before, promised in zip(times, watermarks, by_promise, strict=False)
    )
    ((records, late, late_by, _, is_learned, is_ordered),) = fetch(database_url, COUNTS)

    assert len(missed) > 100
    assert (records, late, late_by) == (len(times), len(behind), late_by_percentile)
    assert is_learned or watermarks[-1] >= max(times) - 20_000_000
    assert is_ordered
    assert fetch(database_url, ON_TIME) == [(len(times) - len(missed),)]
    stored = fetch(database_url, LATE)
    assert set(stored) <= set(missed)
    assert len(stored) >= 100
    assert fetch(database_url, HISTOGRAM) == [(1.0, True)]
