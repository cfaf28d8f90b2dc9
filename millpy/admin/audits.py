"""Remember what audits have compared, hour by hour, and list it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millpy.admin.queries import Admin, Row
from millpy.errors import MillError
from millpy.model.changed_meaning import changed_since
from millpy.model.deployment import TableSpec
from millpy.model.graph_changes import Description
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, YEARS_LO

Span = tuple[int, int]
HOUR_US = 3_600_000_000
HOURS_OF_AN_AUDIT = 24
EXAMPLES_MAX = 10
EXAMPLES_BYTES_MAX = 16_384
"""Of one hour of a table."""
KEPT_FOR = "400 days"
LISTED_MAX = 1_000
MAY_RECORD = """
SELECT CASE WHEN has_schema_privilege('mill', 'USAGE') THEN has_table_privilege('mill.audits', 'INSERT')
            ELSE false END AS may
"""
# The event is in the statement that records the hours, and is raised for differences that are not recorded yet: once,
# however often an audit is tried or repeated. `differs_at` tells, because it is compared under the row's lock.
RECORD = """
WITH recorded AS (
    INSERT INTO mill.audits AS a
           (graph_id, table_name, hour, engine, by_service, rows, differences, uncertain, corrected, examples,
            audited_at, differs_at)
    SELECT g.graph_id, :table, h.hour, :engine, :by_service, h.rows, h.differences, h.uncertain,
           coalesce(h.corrected, 0), h.examples, t.now,
           CASE WHEN h.differences > 0 THEN t.now END
      FROM mill.graphs AS g,
           (SELECT clock_timestamp() AS now) AS t,
           jsonb_to_recordset(CAST(:hours AS jsonb))
               AS h(hour bigint, rows bigint, differences bigint, uncertain bigint, corrected bigint, examples jsonb)
     WHERE g.name = :graph
    ON CONFLICT (graph_id, table_name, hour) DO UPDATE
       SET engine = excluded.engine, by_service = a.by_service OR excluded.by_service, rows = excluded.rows,
           differences = excluded.differences, uncertain = excluded.uncertain, corrected = excluded.corrected,
           examples = excluded.examples,
           audited_at = excluded.audited_at,
           differs_at = CASE WHEN a.differences = excluded.differences AND a.examples = excluded.examples
                             THEN a.differs_at ELSE excluded.differs_at END
    RETURNING graph_id, hour, differences, differs_at = audited_at AS is_new
), noted AS (
    INSERT INTO mill.events (graph_id, kind, detail)
    SELECT graph_id, 'audit_differs',
           jsonb_build_object('table', CAST(:table AS text), 'differences', sum(differences), 'hours', count(*),
                              'first_hour', mill.moment(min(hour)), 'engine', CAST(:engine AS text))
      FROM recorded WHERE is_new GROUP BY graph_id
), expired AS (
    DELETE FROM mill.audits WHERE audited_at < clock_timestamp() - CAST(:kept_for AS interval)
)
SELECT count(*) AS hours FROM recorded
"""
TABLES = """
SELECT c.relname AS name, c.oid::bigint AS oid, row_security_active(c.oid) AS is_partial,
       ARRAY(SELECT a.attname::text FROM pg_attribute AS a
              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = :graph AND c.relkind IN ('r', 'p')
"""
DROPPED = """
SELECT name, (extract(epoch FROM dropped_to) * 1000000)::bigint AS dropped_us FROM millpy.result_tables
 WHERE graph = :graph AND dropped_to IS NOT NULL
"""
LIST = """
SELECT * FROM (
    SELECT graph, result_table, hour, engine, by_service, rows, differences, corrected, uncertain, audited_at
      FROM millpy.audits
     WHERE graph = :graph AND (CAST(:start AS timestamptz) IS NULL OR hour >= CAST(:start AS timestamptz))
       AND (CAST(:end AS timestamptz) IS NULL OR hour < CAST(:end AS timestamptz))
     ORDER BY hour DESC, result_table LIMIT :rows_max) AS newest
 ORDER BY hour, result_table
"""


POSITION = """
SELECT (SELECT (extract(epoch FROM max(hour)) * 1000000)::bigint FROM millpy.audits
         WHERE graph = :graph AND result_table = :table AND by_service) AS audited,
       (SELECT min(CASE low_watermark WHEN 'infinity' THEN 4611686018427387904
                   WHEN '-infinity' THEN -4611686018427387904
                   ELSE (extract(epoch FROM low_watermark) * 1000000)::bigint END)
          FROM millpy.watermarks WHERE graph = :graph AND computation = ANY (:computations)) AS final
"""
ARCHIVED = """
SELECT (extract(epoch FROM min(first_event_time)) * 1000000)::bigint AS begins,
       (extract(epoch FROM min(first_event_time) FILTER (WHERE is_read)) * 1000000)::bigint AS lo,
       (extract(epoch FROM max(last_event_time) FILTER (WHERE is_read)) * 1000000)::bigint AS hi
  FROM (SELECT *, last_event_time >= to_timestamp(0) + :after * interval '1 microsecond' AS is_read
          FROM millpy.archive_files WHERE graph = :graph) AS files
"""
STORED = """
SELECT (extract(epoch FROM min({time})) * 1000000)::bigint AS lo,
       (extract(epoch FROM max({time})) * 1000000)::bigint AS hi
  FROM {table} WHERE {time} > to_timestamp(0) + :after * interval '1 microsecond'
"""
FIRST_US = -555_555 * HOUR_US
"""The year 1906: the auditor looks at nothing before."""


def closed_hours(admin: Admin, graph: str, table: TableSpec, *, reach_us: int, archives: Sequence[str]) -> Span | None:
    """Return the next hours of a table that are final and that no service has audited, in µs; None for none.

    At most `HOURS_OF_AN_AUDIT`. Longer times without a record or row are passed over, and so is the time before the
    archive's first record.

    Args:
        admin: the database.
        graph: the graph's present name.
        table: the result table.
        reach_us: how long after a record its windows may end.
        archives: the archives from which the table is recomputed: what they do not hold yet is not final.
    """
    (position,) = admin.ask(POSITION, graph=graph, table=table.name, computations=[table.computation, *archives])
    if position["final"] is None or position["final"] <= INSTANT_MIN:
        return None
    after = FIRST_US if position["audited"] is None else position["audited"] + HOUR_US
    times = _stored(admin, graph, table, after)
    if archives:
        (files,) = admin.ask(ARCHIVED, graph=graph, after=max(YEARS_LO, after - reach_us))
        if files["begins"] is not None and any(lo < files["begins"] for lo, _ in times):
            # Rows are older than the archive: it was added later, or its retention has deleted their records.
            after = max(after, -(-(files["begins"] + reach_us) // HOUR_US) * HOUR_US)
        times += [(files["lo"], files["hi"])] if files["lo"] is not None else []
    dropped = dropped_before(admin, graph).get(table.name)
    if dropped is not None:
        after = max(after, -(-dropped // HOUR_US) * HOUR_US)
    since = changed_since(described(admin, graph), table.computation) if may_record(admin) else INSTANT_MIN
    if since > INSTANT_MIN:
        after = max(after, -(-(since + reach_us) // HOUR_US) * HOUR_US)  # earlier hours have two definitions
    closed = position["final"] - table.allowed_lateness_us * (table.kind == "windowed")
    if position["final"] >= INSTANT_MAX:  # the sources have ended
        if not times:
            return None
        closed = max(hi for _, hi in times) + reach_us + HOUR_US - 1
    closed -= closed % HOUR_US
    first = max(after, min((lo for lo, _ in times), default=closed))
    start, most = after, HOURS_OF_AN_AUDIT * HOUR_US
    if first - after > most:
        start = first - first % HOUR_US if first < closed else max(closed - most, after)
    end = min(start + most, closed)
    if start >= end or (not times and position["audited"] is None):
        return None
    return start, end


def _stored(admin: Admin, graph: str, table: TableSpec, after: int) -> list[Span]:
    """Return the times of the first and the last row after a time, if there are rows."""
    is_windowed = table.kind == "windowed"
    time = "window_end" if is_windowed else "event_time"
    schema, name = (part.replace('"', '""') for part in (graph, table.name))
    rows = admin.ask(STORED.format(time=time, table=f'"{schema}"."{name}"'), after=after)
    # A window that ends with an hour belongs to that hour.
    return [(row["lo"] - is_windowed, row["hi"]) for row in rows if row["lo"] is not None]


def may_record(admin: Admin) -> bool:
    """Tell whether this role may write what audits found."""
    return bool(admin.ask(MAY_RECORD)[0]["may"])


def tables_of(admin: Admin, graph: str) -> dict[str, Row]:
    """Return the tables of a graph's schema by name.

    Each has `oid`, the server's number of the table: after a switch or a drop, the name has another one, or none. With
    `is_partial`, row-level security hides rows from this role. `columns` has the names of its columns.
    """
    return {row["name"]: row for row in admin.ask(TABLES, graph=graph)}


def dropped_before(admin: Admin, graph: str) -> dict[str, int]:
    """Return table -> the time before which its retention has dropped rows, in µs; only tables of which it has."""
    return {row["name"]: row["dropped_us"] for row in admin.ask(DROPPED, graph=graph)}


def described(admin: Admin, graph: str) -> Description:
    """Return the description of a deployed graph; the role must be one that may record."""
    (found,) = admin.ask("SELECT description FROM mill.graphs WHERE name = :graph", graph=graph)
    return dict(found["description"])


def record_hours(
    admin: Admin, graph: str, table: str, hours: Sequence[Mapping[str, Any]], *, engine: str, by_service: bool
) -> int:
    """Record the hours of one table, over what was recorded of them before; return their number.

    Args:
        admin: the database; its role may write.
        graph: the graph's present name.
        table: the result table.
        hours: each with hour (µs), rows, differences, uncertain, corrected, and examples as values that JSON has.
        engine: what has recomputed the table.
        by_service: whether the auditor did it, which is expected to do the next hours as well.

    Raises:
        MillError: the graph was dropped.
    """
    if not hours:
        return 0
    bounded = [{**hour, "examples": _bounded(hour["examples"])} for hour in hours]
    document = json.dumps(bounded).replace("\\u0000", "\\ufffd")  # jsonb has no NUL
    found = admin.change(
        RECORD,
        graph=graph,
        table=table,
        engine=engine,
        by_service=by_service,
        hours=document,
        kept_for=KEPT_FOR,
    )
    if not found[0]["hours"]:
        raise MillError(f"graph {graph} is gone", hint="`millpy graphs` lists what is deployed")
    return int(found[0]["hours"])


def list_audits(admin: Admin, graph: str, start: str, end: str) -> list[Row]:
    """Return the audited hours of a graph from `start` to before `end`, oldest first: the newest `LISTED_MAX`."""
    return admin.ask(LIST, graph=graph, start=start or None, end=end or None, rows_max=LISTED_MAX)


def _bounded(examples: Sequence[Any]) -> list[Any]:
    kept: list[Any] = []
    size = 0
    for example in examples[:EXAMPLES_MAX]:
        size += len(json.dumps(example).encode())
        if size > EXAMPLES_BYTES_MAX:
            break
        kept.append(example)
    return kept
