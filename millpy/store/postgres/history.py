"""The history of a windowed result table: every pane and retraction, with the time of their commit.

It is a second table beside the result table, with the same columns and `is_retraction`. Rows are only added, by the
transaction that writes the result table; `emitted_at` is its time. A retraction is a copy of the pane that it takes
back:

    a window or session vanishes        its newest pane is taken back, in every mode
    a retracting window has a new pane  the pane before it is taken back, unless it was already
    a vanished window comes back        it begins at pane 0 again; its panes from before get numbers below 0

`millpy.as_of` reads it, and `millpy.trim_history` bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from psycopg import sql

from millpy.model.deployment import TableSpec

ENDING = "_history"
"""Behind the name of a result table, that of its history."""
RETRACTION = "is_retraction"
_IDENTITY = ("window_start", "window_end")
_RECORD = "INSERT INTO {history} ({columns}) SELECT * FROM unnest({values})"
_RECORD_AND_RETRACT = """
WITH sent AS MATERIALIZED (
    SELECT * FROM unnest({values}) AS e ({columns})
), taken_back AS (
    INSERT INTO {history} ({columns}, is_retraction)
    SELECT {stored}, sent.interval_id, sent.bundle, true
      FROM sent JOIN {history} AS stored ON {same}
     WHERE stored.pane_index = sent.pane_index - 1 AND NOT stored.is_retraction
        ON CONFLICT DO NOTHING
)
INSERT INTO {history} ({columns}) SELECT * FROM sent
"""
_RETRACT = """
INSERT INTO {history} ({columns}, is_retraction)
SELECT {stored}, sent.interval_id, sent.bundle, true
  FROM unnest({values}) AS sent ({named})
 CROSS JOIN LATERAL (SELECT * FROM {history} AS stored WHERE {same}
                      ORDER BY stored.pane_index DESC, stored.is_retraction DESC LIMIT 1) AS stored
 WHERE NOT stored.is_retraction
"""
# The order is that of the numbers. Sorting makes all rows leave before the first one comes back. A name with spaces is
# not that of a user's column.
_RENUMBER = """
WITH returned AS (
    SELECT sent.*, newest.pane_index + 1 AS "number of panes"
      FROM (SELECT DISTINCT {identity} FROM unnest({values}) AS e ({columns})) AS sent
     CROSS JOIN LATERAL (SELECT pane_index, is_retraction FROM {history} AS stored WHERE {same}
                          ORDER BY stored.pane_index DESC, stored.is_retraction DESC LIMIT 1) AS newest
     WHERE newest.is_retraction
), gone AS (
    DELETE FROM {history} AS stored USING returned AS sent WHERE {same} RETURNING stored.*, sent."number of panes"
)
INSERT INTO {history} ({columns}, emitted_at, is_retraction)
SELECT {moved}, gone.interval_id, gone.bundle, gone.emitted_at, gone.is_retraction FROM gone ORDER BY gone.pane_index
"""
# By its number a table is found under the name that a switch has given it, together with its generation.
TRIM = b"""
SELECT p.deleted, p.finished, p.trimmed_to::text
  FROM mill.result_tables AS t
  JOIN mill.graphs AS g USING (graph_id)
  JOIN pg_namespace AS n ON n.nspname = g.name
  JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.name
 CROSS JOIN LATERAL millpy.trim_piece(c.oid::regclass, %(kept_s)s::double precision * interval '1 second', %(rows_max)s,
                                      %(since)s::text::timestamptz) AS p
 WHERE t.table_id = %(table_id)s
"""


@dataclass(slots=True)
class HistoryTable:
    """The statements that add to a history, composed once.

    Attributes:
        schema: the graph's schema.
        spec: the result table.
        record: adds the panes of rows that the result table gets for the first time.
        record_later: adds later panes, with retractions of the panes before them if the windows retract.
        copy: adds first panes from the binary data of a COPY to the result table.
        retract: adds retractions of windows that are gone.
        renumber: gives numbers below 0 to the panes of those of the given windows that had vanished.
        trimmed_to: the commits up to which this process has deleted what they had replaced.
    """

    schema: str
    spec: TableSpec
    record: bytes = field(init=False)
    record_later: bytes = field(init=False)
    copy: bytes = field(init=False)
    retract: bytes = field(init=False)
    renumber: bytes = field(init=False)
    trimmed_to: str = field(init=False, default="-infinity")

    def __post_init__(self) -> None:
        columns = [column.name for column in self.spec.columns()]
        names = [*columns, "interval_id", "bundle"]
        identity = [column.name for column in self.spec.keys] + list(_IDENTITY)
        parts = {
            "history": sql.Identifier(self.schema, history_name(self.spec.name)),
            "columns": _listed(names),
            "values": sql.SQL(", ").join(sql.Placeholder() * len(names)),
            "stored": sql.SQL(", ").join(sql.Identifier("stored", name) for name in columns),
            "same": sql.SQL(" AND ").join(
                sql.SQL("{} = {}").format(sql.Identifier("stored", name), sql.Identifier("sent", name))
                for name in identity
            ),
        }
        parts["identity"] = _listed(identity)
        parts["moved"] = sql.SQL(", ").join(
            sql.SQL('gone.pane_index - gone."number of panes"')
            if name == "pane_index"
            else sql.Identifier("gone", name)
            for name in columns
        )
        self.record = sql.SQL(_RECORD).format(**parts).as_bytes()
        self.renumber = sql.SQL(_RENUMBER).format(**parts).as_bytes()
        self.record_later = sql.SQL(_RECORD_AND_RETRACT if self.spec.retracts else _RECORD).format(**parts).as_bytes()
        self.copy = sql.SQL("COPY {history} ({columns}) FROM STDIN (FORMAT binary)").format(**parts).as_bytes()
        named = [*identity, "interval_id", "bundle"]
        values = sql.SQL(", ").join(sql.Placeholder() * len(named))
        self.retract = sql.SQL(_RETRACT).format(**{**parts, "values": values, "named": _listed(named)}).as_bytes()

    @property
    def primary_key(self) -> str:
        """The name of the table's primary key constraint."""
        return f"{history_name(self.spec.name)}_pkey"

    @property
    def writes(self) -> tuple[bytes, ...]:
        """The statements that run the user's triggers and constraints on the table."""
        return self.record, self.record_later, self.retract, self.renumber, self.copy


def history_name(table: str) -> str:
    """Return the name of a result table's history."""
    return f"{table}{ENDING}"


def create_history(schema: str, table: TableSpec) -> sql.Composed:
    """Compose the statements that create the history of a result table, and an index of replacing rows."""
    name = history_name(table.name)
    identity = [column.name for column in table.keys] + [*_IDENTITY, "pane_index", RETRACTION]
    return sql.SQL(
        "CREATE TABLE {history} (LIKE {table} INCLUDING DEFAULTS, {retraction} boolean NOT NULL DEFAULT false,"
        " CONSTRAINT {key} PRIMARY KEY ({identity})) {partitioned};"
        " CREATE INDEX ON {history} (emitted_at) WHERE pane_index > 0 OR {retraction}"
    ).format(
        history=sql.Identifier(schema, name),
        table=sql.Identifier(schema, table.name),
        retraction=sql.Identifier(RETRACTION),
        key=sql.Identifier(f"{name}_pkey"),
        identity=_listed(identity),
        partitioned=sql.SQL("") if table.retention_us is None else partitioned_by(table),
    )


def partitioned_by(table: TableSpec) -> sql.Composed:
    """Compose the clause that partitions a result table with a retention, or its history."""
    return sql.SQL("PARTITION BY RANGE ({})").format(sql.Identifier(table.time))


def _listed(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
