"""The finished windows of late records: their rows, and the records that are and are not in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millpy.admin.queries import Admin, Row
from millpy.model.deployment import TableSpec

_ASKED = """
SELECT l.late_record_id AS id, l.computation, l.key, l.window_start, l.window_end
  FROM mill.late_records AS l
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g USING (graph_id)
 WHERE l.late_record_id = ANY (CAST(:ids AS bigint[])) AND g.name = :graph AND l.state = 'open'
   AND l.window_start IS NOT NULL
 ORDER BY l.late_record_id
"""
_ROWS = """
SELECT l.late_record_id AS id, CAST(to_jsonb(t.*) AS text) AS row
  FROM mill.late_records AS l JOIN {table} AS t ON {same}
 WHERE l.late_record_id = ANY (CAST(:ids AS bigint[]))
"""
_LATE = """
SELECT l.key, l.window_start, l.window_end, l.event_time, sha256(l.payload) AS digest, l.state = 'replayed' AS added,
       count(*) AS records
  FROM mill.late_records AS l
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g USING (graph_id)
  JOIN unnest(CAST(:keys AS text[]), CAST(:starts AS bigint[]), CAST(:ends AS bigint[])) AS w (key, starts, ends)
    ON l.key = w.key AND l.window_start = w.starts AND l.window_end = w.ends
 WHERE g.name = :graph AND l.computation = :computation
 GROUP BY 1, 2, 3, 4, 5, 6
"""
_LETTERS = """
SELECT d.event_time, sha256(d.payload) AS digest, count(*) AS records
  FROM mill.dead_letters AS d
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g USING (graph_id)
 WHERE g.name = :graph AND d.computation = :computation AND d.stream <> '' AND d.state <> 'replayed'
   AND d.event_time >= :first AND d.event_time < :end
 GROUP BY 1, 2 ORDER BY 1
"""
# Late records that were counted and are not stored: not kept, deleted by age, or settled long ago and deleted.
_MISSING = """
SELECT coalesce((SELECT sum(seen) FROM millpy.retention
                  WHERE graph = :graph AND computation = :computation AND table_name = 'late_records'), 0)::bigint
       - (SELECT count(*) FROM mill.late_records AS l JOIN mill.intervals AS i USING (interval_id)
            JOIN mill.graphs AS g USING (graph_id) WHERE g.name = :graph AND l.computation = :computation) AS missing
"""
_CURSORS = """
SELECT s.producer, max(s.seq) AS seq
  FROM mill.cursors AS s JOIN mill.places AS p ON p.interval_id = s.consumer
 WHERE p.graph = :graph AND p.computation = :computation GROUP BY s.producer
"""
_BEHIND = """
SELECT count(*) AS n
  FROM unnest(CAST(:producers AS bigint[]), CAST(:seqs AS bigint[])) AS w (producer, seq)
  JOIN mill.places AS p ON p.graph = :graph AND p.computation = :archive
  LEFT JOIN mill.cursors AS c ON c.consumer = p.interval_id AND c.producer = w.producer
 WHERE coalesce(c.seq, 0) < w.seq
"""
Name = tuple[str, int, int]
"""A window: its key as JSON, its start and its end in µs."""


@dataclass(frozen=True, slots=True)
class LateRecords:
    """Late records of one window, or dead letters of its computation, with one event time and one payload.

    Attributes:
        event_time: the event time, µs.
        digest: SHA-256 of the payload.
        added: whether they were replayed, and so are in the window.
        records: their number.
    """

    event_time: int
    digest: bytes
    added: bool
    records: int


def asked_windows(admin: Admin, graph: str, ids: Sequence[int]) -> list[Row]:
    """Return id, computation, key, window_start and window_end of the open late records among these."""
    return admin.ask(_ASKED, ids=list(ids), graph=graph)


def rows_of(admin: Admin, graph: str, table: TableSpec, ids: Sequence[int]) -> dict[int, str]:
    """Return the rows, as JSON, of the finished windows of these late records; those without a row are left out."""
    key = "CAST(l.key AS jsonb)" if len(table.keys) > 1 else "jsonb_build_array(CAST(l.key AS jsonb))"
    same = ["t.window_start = mill.moment(l.window_start)", "t.window_end = mill.moment(l.window_end)"]
    for place, column in enumerate(table.keys):
        text = f"{key} ->> {place}"
        bytes_or_text = f"decode({text}, 'base64')" if column.sql_type == "bytea" else f"({text})"
        same.append(f"t.{_quoted(column.name)} = CAST({bytes_or_text} AS {column.sql_type})")
    query = _ROWS.format(table=f"{_quoted(graph)}.{_quoted(table.name)}", same=" AND ".join(same))
    return {row["id"]: row["row"] for row in admin.ask(query, ids=list(ids))}


def late_records_of(
    admin: Admin, graph: str, computation: str, windows: Sequence[Name]
) -> Mapping[Name, list[LateRecords]]:
    """Return what is stored of the late records of windows."""
    found: dict[Name, list[LateRecords]] = {}
    keys, starts, ends = (list(part) for part in zip(*windows, strict=True))
    for row in admin.ask(_LATE, graph=graph, computation=computation, keys=keys, starts=starts, ends=ends):
        name = (row["key"], row["window_start"], row["window_end"])
        late = LateRecords(row["event_time"], bytes(row["digest"]), row["added"], row["records"])
        found.setdefault(name, []).append(late)
    return found


def dead_letters_of(admin: Admin, graph: str, computation: str, span: tuple[int, int]) -> list[LateRecords]:
    """Return the records of a time that a computation has dead-lettered, and not replayed since, by event time."""
    first, end = span
    rows = admin.ask(_LETTERS, graph=graph, computation=computation, first=first, end=end)
    return [LateRecords(row["event_time"], bytes(row["digest"]), False, row["records"]) for row in rows]


def missing_late_records(admin: Admin, graph: str, computation: str) -> int:
    """Return how many late records of a computation were counted, and are not stored (any more)."""
    return int(admin.ask(_MISSING, graph=graph, computation=computation)[0]["missing"])


def consumed(admin: Admin, graph: str, computation: str) -> dict[int, int]:
    """Return how far a computation has read: producing interval -> number of a bundle."""
    return {row["producer"]: row["seq"] for row in admin.ask(_CURSORS, graph=graph, computation=computation)}


def is_archived(admin: Admin, graph: str, archive: str, through: Mapping[int, int]) -> bool:
    """Tell whether an archive has everything up to these bundles."""
    parameters = {"producers": list(through), "seqs": list(through.values())}
    return not admin.ask(_BEHIND, graph=graph, archive=archive, **parameters)[0]["n"]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
