"""Put the rows of a result table right, in one statement: all or nothing, and an event says who did it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millpy.admin.queries import Admin, Row
from millpy.errors import TableSwitchedError
from millpy.model.deployment import TableSpec
from millpy.model.retention import RETENTION_MIN
from millpy.model.time import microseconds

OF_GRAPH = "SELECT graph_id FROM mill.graphs WHERE name = :graph"
# The lock makes a switch, a drop, a deployment and another repair wait, but no commit of a worker. A graph that was
# switched meanwhile has another name, and is not held. No worker writes a final window, so rows need no fence.
REPAIR = """
WITH held AS (
    SELECT graph_id FROM mill.graphs WHERE name = :graph AND graph_id = :graph_id FOR NO KEY UPDATE
), given AS (
    SELECT r ->> 0 AS kind, {columns}
      FROM held, jsonb_array_elements(CAST(:rows AS jsonb)) AS r
), deleted AS (
    DELETE FROM {table} AS t USING given AS g WHERE g.kind = 'added' AND {same} RETURNING 1
), written AS (
    INSERT INTO {table} AS t ({names}, pane_index, pane_timing, late_count, interval_id, bundle)
    SELECT {places}, 0, 'on_time', 0,
           (SELECT min(i.interval_id) FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
             WHERE c.graph_id = :graph_id AND c.name = :computation), 0
      FROM given AS g WHERE g.kind <> 'added'
    ON CONFLICT ({identity}) DO UPDATE SET {changes}, emitted_at = now()
    RETURNING {is_new} AS is_new
){history}, counted AS (
    SELECT (SELECT count(*) FROM written WHERE NOT is_new) AS replaced,
           (SELECT count(*) FROM written WHERE is_new) AS added, (SELECT count(*) FROM deleted) AS deleted
), noted AS (
    INSERT INTO mill.events (graph_id, kind, detail)
    SELECT graph_id, 'repaired',
           jsonb_build_object('table', CAST(:name AS text), 'by', session_user, 'replaced', replaced, 'added', added,
                              'deleted', deleted, 'from', CAST(:start AS text), 'to', CAST(:end AS text))
      FROM held, counted WHERE replaced + added + deleted > 0
)
SELECT replaced, added, deleted, EXISTS (SELECT FROM held) AS is_held FROM counted
"""
# A row of a partition does not tell: then repairs at once may all count a row as added.
OF_PARTITION = "NOT EXISTS (SELECT FROM {table} AS s WHERE {own})"
MAKE_PARTITIONS = """
SELECT count(*) AS partitions
  FROM mill.result_tables AS t
 CROSS JOIN LATERAL mill.make_partitions(t.table_id, CAST(:times AS bigint[]))
 WHERE t.graph_id = :graph_id AND t.name = :name
"""
PARTITIONS_AT_ONCE = 16
# What was wrong stays in the history, and what is right comes after it. Of repairs at once, the last one counts there,
# too, although it may not see the rows of the others.
HISTORY = """, newest AS (
    SELECT DISTINCT ON ({own}) t.* FROM {history} AS t JOIN given AS g ON {same}
     ORDER BY {own}, t.pane_index DESC, t.is_retraction DESC
), taken_back AS (
    INSERT INTO {history} ({names}, pane_index, pane_timing, late_count, interval_id, bundle, is_retraction)
    SELECT {stored}, t.pane_index, t.pane_timing, t.late_count, t.interval_id, 0, true
      FROM newest AS t JOIN given AS g ON {same} WHERE NOT t.is_retraction AND (g.kind = 'added' OR {retracts})
        ON CONFLICT DO NOTHING
), remembered AS (
    INSERT INTO {history} ({names}, pane_index, pane_timing, late_count, interval_id, bundle)
    SELECT {places}, coalesce(t.pane_index + 1, 0), coalesce(t.pane_timing, 'on_time'), coalesce(t.late_count, 0),
           (SELECT min(i.interval_id) FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
             WHERE c.graph_id = :graph_id AND c.name = :computation), 0
      FROM given AS g LEFT JOIN newest AS t ON {same} WHERE g.kind <> 'added'
    ON CONFLICT ({identity}, pane_index, is_retraction) DO UPDATE SET {changes}, emitted_at = now()
)"""


def graph_id(admin: Admin, graph: str) -> int:
    """Return the number of a deployed graph, which another generation under the same name does not have."""
    return int(admin.ask(OF_GRAPH, graph=graph)[0]["graph_id"])


def repair_rows(
    admin: Admin,
    graph: tuple[str, int],
    table: TableSpec,
    rows: Sequence[tuple[str, Sequence[Any]]],
    span: tuple[str, str] = ("", ""),
) -> Row:
    """Replace, add and delete rows of a table of windows; return how many as `replaced`, `added` and `deleted`.

    Args:
        admin: the database; its role may write the table.
        graph: name and number of the graph when the rows were compared.
        table: a table of windows.
        rows: of each "missing", "changed" or "added", and its columns as text: keys, start and end of the window in
            µs, and the values that are right.
        span: what the event says of the time range.

    Raises:
        TableSwitchedError: another generation has the name now; nothing was changed.
    """
    if not rows:
        return {"replaced": 0, "added": 0, "deleted": 0}
    identity = [(key.name, key.sql_type) for key in table.keys]
    identity += [("window_start", "timestamptz"), ("window_end", "timestamptz")]
    columns = [*identity, *((value.name, value.sql_type) for value in table.values)]
    parts = {
        "same": " AND ".join(f"t.{_quoted(name)} = g.c{place}" for place, (name, _) in enumerate(identity, 1)),
        "names": ", ".join(_quoted(name) for name, _ in columns),
        "places": ", ".join(f"g.c{place}" for place in range(1, len(columns) + 1)),
        "identity": ", ".join(_quoted(name) for name, _ in identity),
        "changes": ", ".join(f"{_quoted(value.name)} = excluded.{_quoted(value.name)}" for value in table.values),
    }
    relation = f"{_quoted(graph[0])}.{_quoted(table.name)}"
    own = " AND ".join(f"s.{_quoted(name)} = t.{_quoted(name)}" for name, _ in identity)
    statement = REPAIR.format(
        table=relation,
        is_new="xmax = 0" if table.retention_us is None else OF_PARTITION.format(table=relation, own=own),
        history=_history(graph[0], table, [name for name, _ in identity], parts) if table.history else "",
        columns=", ".join(_read(place, kind) for place, (_, kind) in enumerate(columns, 1)),
        **parts,
    )
    if table.retention_us is not None:
        _make_partitions(admin, graph[1], table, sorted({int(values[len(table.keys) + 1]) for _, values in rows}))
    (done,) = admin.change(
        statement,
        graph=graph[0],
        graph_id=graph[1],
        name=table.name,
        computation=table.computation,
        rows=json.dumps([[kind, *values] for kind, values in rows]),
        start=span[0] or None,
        end=span[1] or None,
    )
    if not done["is_held"]:
        raise TableSwitchedError(
            f"{graph[0]}.{table.name} was switched to another table, or dropped, before the repair",
            hint="nothing was changed: repair it again",
        )
    return {what: done[what] for what in ("replaced", "added", "deleted")}


def _make_partitions(admin: Admin, number: int, table: TableSpec, ends: Sequence[int]) -> None:
    """Make the partitions that rows of windows with these ends need."""
    hour_us = microseconds(RETENTION_MIN)  # bounds of partitions are whole hours
    ends = list({end // hour_us: end for end in ends}.values())
    for start in range(0, len(ends), PARTITIONS_AT_ONCE):
        times = ends[start : start + PARTITIONS_AT_ONCE]
        admin.change(MAKE_PARTITIONS, graph_id=number, name=table.name, times=times)


def _history(schema: str, table: TableSpec, identity: Sequence[str], parts: Mapping[str, str]) -> str:
    """Return the part of the statement that adds to the history of a table."""
    names = [*identity, *(value.name for value in table.values)]
    return HISTORY.format(
        history=f"{_quoted(schema)}.{_quoted(f'{table.name}_history')}",
        own=", ".join(f"t.{_quoted(name)}" for name in identity),
        stored=", ".join(f"t.{_quoted(name)}" for name in names),
        retracts=str(table.retracts).lower(),
        **parts,
    )


def _read(place: int, kind: str) -> str:
    if kind == "timestamptz":
        return f"mill.moment(CAST(r ->> {place} AS bigint)) AS c{place}"
    return f"CAST(r ->> {place} AS {kind}) AS c{place}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
