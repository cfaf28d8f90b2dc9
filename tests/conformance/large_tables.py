"""A deployed graph whose tables have many rows, and how many of them a statement reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psycopg

ROWS = 20_000
"""Of each table that grows."""
TABLES = (
    "mill.archive_files", "mill.audits", "mill.corrected_windows", "mill.corrections", "mill.dead_letters",
    "mill.dedupe_runs", "mill.events", "mill.injected_records", "mill.keyed", "mill.late_records", "mill.outbox",
    "mill.refused_messages", "mill.releases", "factory.sums_1m", "factory.alarms",
)  # fmt: skip
"""Those that grow with records, time or operators' requests."""
FILL = """
INSERT INTO mill.dead_letters (interval_id, bundle, stream, computation, input, reason, detail, traceback,
                               source_position, key, event_time, wire, payload, dead_lettered_at)
SELECT {a}, n, 'readings', 'readings', 0, 'undecodable', 'not a number', '', '', '"k' || n || '"', n, 'json', 'payload',
       now() - {rows} * interval '1 min' + n * interval '1 min' FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.late_records (interval_id, bundle, stream, computation, input, key, event_time, watermark,
                               window_start, window_end, whole, payload, recorded_at)
SELECT {sums}, n, 'readings', 'sums', 0, '"k' || n || '"', n, n, 0, 60000000, true, 'payload',
       now() - {rows} * interval '1 min' + n * interval '1 min' FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.events (graph_id, kind, detail, at)
SELECT g.graph_id, CASE n % 2 WHEN 0 THEN 'source_disconnected' ELSE 'source_connected' END,
       '{{"stream": "readings", "partition": "a", "since": "", "until": "", "seconds": 1, "attempts": 1, "why": ""}}',
       now() - {rows} * interval '1 min' + n * interval '1 min' FROM mill.graphs AS g, generate_series(1, {rows}) AS n;
INSERT INTO mill.corrections (graph_id, table_name, key, window_start, window_end, old_row, new_row, why, requested_by,
                              corrected_at)
SELECT g.graph_id, 'sums_1m', '"k' || n || '"', n, n + 1, '{{"n": 1}}', '{{"n": 2}}', 'because', 'me',
       now() - {rows} * interval '1 min' + n * interval '1 min' FROM mill.graphs AS g, generate_series(1, {rows}) AS n;
INSERT INTO mill.corrected_windows (graph_id, table_name, key, window_start, window_end)
SELECT g.graph_id, 'sums_1m', '"k' || n || '"', n, n + 1 FROM mill.graphs AS g, generate_series(1, {rows}) AS n;
INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT {sums}, 'state', 'sum', '"k' || n || '"', '', n, 4611686018427387904, 1, '1.5'
  FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT {sums}, 'window', '', '"k' || n || '"', '0/60000000', n, 60000000, 1, '{{"values": [1]}}'
  FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT {sums}, 'timer', 'event', '"k' || n || '"', 'quiet', n, 60000000, 1, '{{}}'
  FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT {sums}, 'parked', '1', '"k' || n % 100 || '"', n, n, n, 1, '{{"record": {{}}}}'
  FROM generate_series(1, 1000) AS n;
INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT {a}, 'fleet', 'device', '"k' || n || '"', '', n, 4611686018427387904, 1, '[1, 0, 0, 0, 0, 0]'
  FROM generate_series(1, 100) AS n;
INSERT INTO mill.outbox (interval_id, position, records, bundle, checksum, payload)
SELECT {sums}, n, 1, n, 1, 'message' FROM generate_series(0, {rows} - 1) AS n;
INSERT INTO mill.refused_messages (interval_id, position, key, attempts, since, why, parked, record, checksum, payload)
SELECT {sums}, n, '"k' || n || '"', 1, now(), 'no', n % 2 = 0, '{{}}', 1, 'message'
  FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.releases (interval_id, key, ticket, discards)
SELECT 0, '"k' || n || '"', n, false FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.dedupe_runs (slot, interval_id, bundle, expires_at, clock, ids, times)
SELECT (n > {rows} / 2)::integer, {a}, n, 10000000 + n, n, 'ids', 'times' FROM generate_series(1, {rows}) AS n;
UPDATE mill.epochs SET state = CASE slot WHEN 0 THEN 'filled' ELSE 'current' END, started_at = now()
 WHERE ring = 'dedupe_runs' AND slot < 2;
INSERT INTO mill.archive_files (interval_id, bundle, path, records, bytes, event_time_lo, event_time_hi, partitions)
SELECT {alarms}, n, 'stream=s/hour=2026-11-01T00/' || n, 1, 1, 0, 1, '{{}}' FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.audits (graph_id, table_name, hour, engine, by_service, rows, differences, uncertain, examples,
                         audited_at)
SELECT g.graph_id, 'sums_1m', n * 3600000000, 'native', true, 1, 0, 0, '[]', now()
  FROM mill.graphs AS g, generate_series(1, {rows}) AS n;
INSERT INTO mill.injected_records (stream, xid, bytes, record)
SELECT 'orders', pg_current_xact_id(), 10, '{{}}' FROM generate_series(1, {rows}) AS n;
INSERT INTO mill.injection_readers (graph_id, source, stream, read_number)
SELECT graph_id, 'orders', 'orders', 0 FROM mill.graphs;
INSERT INTO factory.sums_1m (device, window_start, window_end, total, label, pane_index, pane_timing, late_count,
                             interval_id, bundle)
SELECT 'k' || n % 100, to_timestamp(60 * (n / 100)), to_timestamp(60 * (n / 100) + 60), 1, '', 0, 'on_time', 0,
       {sums}, n
  FROM generate_series(1, {rows}) AS n;
INSERT INTO factory.alarms (total, label, event_time, ordinal, interval_id, bundle)
SELECT 1, '', to_timestamp(n), 0, {alarms}, n FROM generate_series(1, {rows}) AS n;
"""
ROWS_OF = "pg_stat_get_xact_tuples_returned"
PAGES_OF = "pg_stat_get_xact_blocks_fetched"
"""Functions of the server: rows that scans of a table or index have returned, and pages that were looked at.

An index that is read whole for each of many things returns few rows, but has many pages.
"""
READ = f"""
SELECT t.name, ({{function}}(p.oid)
                + coalesce((SELECT sum({{function}}(i.indexrelid)) FROM pg_index AS i
                             WHERE i.indrelid = p.oid), 0))::bigint AS count
  FROM unnest(ARRAY['{"', '".join(TABLES)}']) AS t (name)
 CROSS JOIN LATERAL (SELECT t.name::regclass::oid AS oid
                      UNION SELECT relid FROM pg_partition_tree(t.name::regclass)) AS p
"""
"""Reads what this transaction has read of each table and its indexes, in functions, too. It begins with what earlier
transactions of the session have not reported yet."""


def fill(connection: psycopg.Connection[Any], *, analyzed: bool) -> None:
    """Fill the tables of the graph `factory`; without ANALYZE, the planner knows their sizes alone."""
    found = connection.execute("SELECT computation, min(interval_id) FROM millpy.watermarks GROUP BY 1").fetchall()
    intervals = dict(found)
    places = {"a": intervals["readings"], "sums": intervals["sums"], "alarms": intervals["alarms"], "rows": ROWS}
    for table in TABLES:
        if table != "mill.dedupe_runs":
            connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
    connection.execute(FILL.format(**places).encode())
    # Other processes would count for themselves.
    connection.execute(f"ALTER DATABASE {connection.info.dbname} SET max_parallel_workers_per_gather = 0".encode())
    if analyzed:
        connection.execute("ANALYZE")


def rows_read(
    ask: Callable[[str], Iterable[Sequence[Any]]], work: Callable[[], object], *, function: str = ROWS_OF
) -> dict[str, int]:
    """Return how many rows (or pages) of each table some work reads, in the transaction in which `ask` runs a query."""
    query = READ.format(function=function)
    before = _counted(ask(query))
    work()
    return {name: count - before[name] for name, count in _counted(ask(query)).items() if count > before[name]}


def _counted(rows: Iterable[Sequence[Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, count in rows:
        counts[name] = counts.get(name, 0) + count
    return counts
