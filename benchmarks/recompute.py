"""The expected windows of W1, from the same file by DuckDB and a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

BOUND_MS = 2_000
SIZE_MS, EVERY_MS, GAP_MS = 10_000, 2_500, 3_000

Name = tuple[str, int, int]
"""(device, window start, window end), in ms."""

# Late for a window: the watermark before the record (largest event time so far - 2 s) has reached its end.
READ = f"""
WITH read AS (
    SELECT device, event_ms, temperature, row_number() OVER () AS line
    FROM read_json('{{path}}', format = 'newline_delimited',
                   columns = {{{{device: 'VARCHAR', event_ms: 'BIGINT', temperature: 'DOUBLE'}}}})
), judged AS (
    SELECT device, temperature, event_ms, line,
           max(event_ms) OVER (ORDER BY line ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) - {BOUND_MS}
               AS watermark_ms
    FROM read
)
"""
ALIGNED = f"""
, entries AS (
    SELECT device, temperature, watermark_ms, start_ms
    FROM (SELECT *, unnest(range(event_ms - event_ms % {{every}}, event_ms - {SIZE_MS}, -{{every}})) AS start_ms
          FROM judged)
), marked AS (
    SELECT *, coalesce(watermark_ms >= start_ms + {SIZE_MS}, false) AS late FROM entries
)
SELECT device, start_ms, start_ms + {SIZE_MS}, count(*) FILTER (NOT late) AS n, avg(temperature) FILTER (NOT late),
       min(temperature) FILTER (NOT late), max(temperature) FILTER (NOT late), count(*) FILTER (late)
FROM marked GROUP BY device, start_ms
"""
IN_ORDER = "SELECT device, event_ms, temperature, coalesce(watermark_ms, -1) FROM judged ORDER BY line"


def recomputed(path: Path, windows: str) -> tuple[dict[Name, tuple[Any, ...]], dict[Name, int]]:
    """Return (n, mean, low, high) and the number of late records, each by window."""
    with duckdb.connect() as duck:
        duck.execute("SET preserve_insertion_order = true")
        if windows == "session":
            return _sessions(duck.execute((READ + IN_ORDER).format(path=path)))
        every = SIZE_MS if windows == "fixed" else EVERY_MS
        rows = duck.execute((READ + ALIGNED).format(path=path, every=every)).fetchall()
    kept = {(device, start, end): (n, *rest) for device, start, end, n, *rest, _ in rows if n}
    return kept, {(device, start, end): late for device, start, end, *_, late in rows if late}


def _sessions(found: duckdb.DuckDBPyConnection) -> tuple[dict[Name, tuple[Any, ...]], dict[Name, int]]:
    """Return the same for sessions, record by record."""
    of_device: dict[str, list[list[Any]]] = {}  # [start, end, values], by start
    late: dict[Name, int] = {}
    while rows := found.fetchmany(100_000):
        for device, at, value, watermark in rows:
            sessions = of_device.setdefault(device, [])
            met = [s for s in sessions[-4:] if s[0] < at + GAP_MS and at < s[1] and s[1] > watermark]
            if not met and at + GAP_MS <= watermark:
                name = (device, at, at + GAP_MS)
                late[name] = late.get(name, 0) + 1
                continue
            merged = [min([at, *(s[0] for s in met)]), max([at + GAP_MS, *(s[1] for s in met)]), [value]]
            for session in met:
                merged[2] += session[2]
                sessions.remove(session)
            sessions.append(merged)
            sessions.sort(key=lambda s: s[0])
    kept = {
        (device, start, end): (len(values), sum(values) / len(values), min(values), max(values))
        for device, sessions in of_device.items()
        for start, end, values in sessions
    }
    return kept, late
