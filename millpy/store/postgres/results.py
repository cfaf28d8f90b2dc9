"""Result tables: their statements, and their rows as arrays or for COPY.

Small results go through one INSERT from arrays, in the pipeline of the commit. First panes in bulk go through binary
COPY (`copy_rows.py`), key by key, because the table's index is by key. For a later pane, the statement checks the
stored row: it must be absent (users delete old rows) or hold the previous pane (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from millpy.model.checkpoint import DeletedRows, ResultRows
from millpy.model.delta import encode_value
from millpy.model.deployment import ColumnSpec, TableSpec
from millpy.model.time import instant
from millpy.store.postgres.arrays import (
    Bigints,
    Booleans,
    Byteas,
    Dates,
    Decimals,
    Doubles,
    Jsonbs,
    Numerics,
    PgArray,
    Texts,
    Timestamps,
    Uuids,
    decimal_bytes,
    numeric_bytes,
)
from millpy.store.postgres.copy_rows import (
    Field,
    bytes_field,
    copy_rows,
    day_field,
    moment_field,
    numeric_field,
    packed_field,
)
from millpy.store.postgres.history import HistoryTable
from millpy.store.postgres.partitions import KnownPartitions, Times, hours_of

COPY_ROWS_MIN = 200
"""From this number of first panes, COPY pays for its extra round trips."""

_ARRAYS: dict[str, type[PgArray]] = {
    "text": Texts,
    "bigint": Bigints,
    "numeric": Numerics,
    "decimal": Decimals,
    "date": Dates,
    "double precision": Doubles,
    "boolean": Booleans,
    "bytea": Byteas,
    "timestamptz": Timestamps,
    "uuid": Uuids,
    "jsonb": Jsonbs,
}
_COPIED: dict[str, tuple[pa.DataType, Callable[[pa.Array], Field]]] = {
    "text": (pa.string(), bytes_field),
    "bigint": (pa.int64(), partial(packed_field, wire_type=">i8")),
    "numeric": (pa.decimal128(38, 0), numeric_field),
    "decimal": (pa.binary(), bytes_field),
    "date": (pa.date32(), day_field),
    "double precision": (pa.float64(), partial(packed_field, wire_type=">f8")),
    "boolean": (pa.bool_(), partial(packed_field, wire_type="?")),
    "bytea": (pa.binary(), bytes_field),
    "timestamptz": (pa.int64(), moment_field),
    "uuid": (pa.binary(), bytes_field),
    "jsonb": (pa.binary(), bytes_field),
}
"""SQL type -> the Arrow type of a column, and the function that encodes it for the wire."""
_CONVERTED: dict[str, Callable[[Any], bytes]] = {
    "uuid": lambda value: UUID(str(value)).bytes,
    "jsonb": lambda value: b"\x01" + value,
    "decimal": decimal_bytes,
}
_FIXED_WIDTH = ("bigint", "double precision", "timestamptz")
SQL_TYPES = frozenset(_ARRAYS)
# A stored row is replaced when it holds the previous pane, or an older pane if a trigger may have kept panes from being
# written. The statement compares only when rows are left unwritten: a trigger may have left them out, or a row is in
# the way, which is millpy's (MW004) or the user's (MW009). `stored` is as it was before this statement.
_UPSERT = """
WITH sent AS MATERIALIZED (
    SELECT * FROM unnest({values}) AS e ({columns})
), written AS (
    INSERT INTO {table} AS stored ({columns}) SELECT * FROM sent
    ON CONFLICT ({identity}) DO UPDATE SET {changes}, emitted_at = now()
     WHERE stored.pane_index = excluded.pane_index - 1
        OR (stored.pane_index < excluded.pane_index AND mill.has_filter({relation}))
    RETURNING 1
)
SELECT CASE WHEN (SELECT count(*) FROM written) < %s THEN (
       SELECT mill.check_panes({name}, count(*) FILTER (WHERE stored.interval_id = sent.interval_id
                                                          AND stored.bundle BETWEEN 1 AND sent.bundle), count(*))
         FROM sent JOIN {table} AS stored ON {same}
        WHERE stored.pane_index >= sent.pane_index
           OR (stored.pane_index < sent.pane_index - 1 AND NOT mill.has_filter({relation}))) END
"""
_FIND_OWN = """
SELECT stored.bundle FROM unnest({values}) AS sent ({columns}) JOIN {table} AS stored ON {same}
 WHERE stored.interval_id = sent.interval_id AND stored.bundle BETWEEN 1 AND sent.bundle LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows for one table, with the interval and bundle that commit them."""

    rows: ResultRows
    interval_id: int
    bundle: int


@dataclass(slots=True)
class ResultTable:
    """A deployed result table and its statements, composed once.

    Attributes:
        history: its history, if it keeps one.
        time_place: the place of the column that it is partitioned by; None without partitions.
        partitions: what this process knows of its partitions.
        next_drop_us: when to look for expired partitions again.
        kept_because: why expired partitions stayed the last time; empty for none.
        kept_said: the reason that was logged last.
        copies: whether many rows go through COPY; false under row-level security, which a user may enable at any time.
        insert: inserts rows that must not exist.
        upsert: inserts the next panes of windows, and checks that they follow the stored panes.
        delete: deletes the rows of windows that are gone.
        copy: inserts rows that must not exist, from binary COPY.
        find_own: finds rows that this interval has stored under the keys of rows to insert.
    """

    schema: str
    name: str
    kind: str
    keys: tuple[ColumnSpec, ...]
    columns: tuple[ColumnSpec, ...]
    history: HistoryTable | None = None
    time_place: int | None = None
    partitions: KnownPartitions = field(init=False, default_factory=KnownPartitions)
    next_drop_us: int = field(init=False, default=0)
    kept_because: str = field(init=False, default="")
    kept_said: str = field(init=False, default="")
    copies: bool = field(init=False, default=True)
    insert: bytes = field(init=False)
    upsert: bytes = field(init=False)
    delete: bytes = field(init=False)
    copy: bytes = field(init=False)
    find_own: bytes = field(init=False)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns] + ["interval_id", "bundle"]
        table = sql.Identifier(self.schema, self.name)
        listed = sql.SQL(", ").join(map(sql.Identifier, names))
        arrays = sql.SQL(", ").join(sql.Placeholder() * len(names))
        insert = sql.SQL("INSERT INTO {} AS stored ({}) SELECT * FROM unnest({})").format(table, listed, arrays)
        self.insert = insert.as_bytes()
        self.copy = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(table, listed).as_bytes()
        identity = [column.name for column in self.keys] + ["window_start", "window_end"]
        placeholders = sql.SQL(", ").join(sql.Placeholder() * len(identity))
        named = sql.SQL(", ").join(map(sql.Identifier, identity))
        self.delete = (
            sql.SQL("DELETE FROM {} WHERE ({}) IN (SELECT * FROM unnest({}))")
            .format(table, named, placeholders)
            .as_bytes()
        )
        changed = [name for name in names if name not in identity]
        self.upsert = (
            sql.SQL(_UPSERT)
            .format(
                table=table,
                columns=listed,
                values=arrays,
                identity=named,
                changes=sql.SQL(", ").join(
                    sql.SQL("{} = {}").format(sql.Identifier(n), sql.Identifier("excluded", n)) for n in changed
                ),
                same=_same(identity),
                name=sql.Literal(self.name),
                relation=sql.Literal(self.relation),
            )
            .as_bytes()
        )
        self.find_own = (
            sql.SQL(_FIND_OWN)
            .format(
                table=table,
                values=sql.SQL(", ").join(sql.Placeholder() * (len(identity) + 2)),
                columns=sql.SQL(", ").join(map(sql.Identifier, (*identity, "interval_id", "bundle"))),
                same=_same(identity),
            )
            .as_bytes()
        )

    @classmethod
    def from_spec(cls, schema: str, spec: TableSpec) -> ResultTable:
        """Return the table of a spec, in a graph's schema."""
        history = HistoryTable(schema, spec) if spec.history else None
        names = [column.name for column in spec.columns()]
        time_place = None if spec.retention_us is None else names.index(spec.time)
        return cls(schema, spec.name, spec.kind, spec.keys, spec.columns(), history, time_place)

    @property
    def primary_key(self) -> str:
        """The name of the table's primary key constraint."""
        return f"{self.name}_pkey"

    @property
    def relation(self) -> str:
        """The table's name with its schema, quoted."""
        return sql.Identifier(self.schema, self.name).as_string()

    @property
    def writes(self) -> tuple[bytes, ...]:
        """The statements that run the user's triggers and constraints on the table."""
        own = self.insert, self.upsert, self.delete, self.copy
        return own if self.history is None else (*own, *self.history.writes)


def insert_parameters(table: ResultTable, blocks: Sequence[Block]) -> list[PgArray]:
    """Return the arrays of `table.insert`: one per column, then interval and bundle."""
    arrays = [
        _array(column.sql_type, [b.rows.columns[place] for b in blocks]) for place, column in enumerate(table.columns)
    ]
    counts = [block.rows.count for block in blocks]
    arrays.append(Bigints(np.repeat(np.array([b.interval_id for b in blocks], np.int64), counts)))
    arrays.append(Bigints(np.repeat(np.array([b.bundle for b in blocks], np.int64), counts)))
    return arrays


def identity_parameters(table: ResultTable, blocks: Sequence[Block]) -> list[PgArray]:
    """Return the arrays of `table.find_own`: key columns, window_start, window_end, interval, bundle."""
    arrays = insert_parameters(table, blocks)
    return [*arrays[: len(table.keys) + 2], *arrays[-2:]]


def hours_needed(table: ResultTable, blocks: Sequence[Block]) -> Times:
    """Return the hours for which a table with a retention needs partitions."""
    assert table.time_place is not None, table.name
    parts = [block.rows.columns[table.time_place] for block in blocks]
    hours = [hours_of(_numbers(p) if _plain(p) else np.array(_values("timestamptz", p), np.int64)) for p in parts]
    return np.unique(np.concatenate(hours))


def _same(identity: Sequence[str]) -> sql.Composed:
    """Return the condition that two rows have the same key and window; these columns are never null."""
    return sql.SQL(" AND ").join(
        sql.SQL("{} = {}").format(sql.Identifier("stored", name), sql.Identifier("sent", name)) for name in identity
    )


def retract_parameters(table: ResultTable, parts: Sequence[tuple[DeletedRows, int, int]]) -> list[PgArray]:
    """Return the arrays of `table.history.retract`, given rows with their interval and bundle."""
    counts = [part.count for part, _, _ in parts]
    return [
        *delete_parameters(table, [part for part, _, _ in parts]),
        Bigints(np.repeat(np.array([interval_id for _, interval_id, _ in parts], np.int64), counts)),
        Bigints(np.repeat(np.array([bundle for _, _, bundle in parts], np.int64), counts)),
    ]


def delete_parameters(table: ResultTable, parts: Sequence[DeletedRows]) -> list[PgArray]:
    """Return the arrays of `table.delete`: key columns, window_start, window_end."""
    types = [*(column.sql_type for column in table.keys), "timestamptz", "timestamptz"]
    return [_array(sql_type, [part.columns[place] for part in parts]) for place, sql_type in enumerate(types)]


def copy_data(table: ResultTable, blocks: Sequence[Block]) -> list[bytes]:
    """Return the rows as `table.copy` reads them, in pieces. Rows of a windowed table are sorted by key."""
    columns = [
        _joined(column.sql_type, [b.rows.columns[place] for b in blocks]) for place, column in enumerate(table.columns)
    ]
    fields = [_COPIED[spec.sql_type][1](column) for spec, column in zip(table.columns, columns, strict=True)]
    counts = [block.rows.count for block in blocks]
    for numbers in ([b.interval_id for b in blocks], [b.bundle for b in blocks]):
        fields.append(np.repeat(np.array(numbers, ">i8"), counts))
    return copy_rows(fields, _by_key(columns[: len(table.keys)]) if table.kind == "windowed" else None)


def _by_key(keys: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """Return the order of rows by ascending key; rows of equal keys keep their order."""
    ranks = np.zeros(len(keys[0]), np.int64)
    for column in keys:
        encoded = column.dictionary_encode()
        distinct = len(encoded.dictionary)
        rank_of = pc.rank(encoded.dictionary).to_numpy(zero_copy_only=False).astype(np.int64) - 1
        ranks = ranks * distinct + rank_of[encoded.indices.to_numpy(zero_copy_only=False)]
    # numpy sorts 16-bit numbers by radix, ten times as fast.
    return np.argsort(ranks.astype(np.uint16) if ranks.max() < 2**16 else ranks, kind="stable")


def _array(sql_type: str, parts: Sequence[pa.Array | list[Any]]) -> PgArray:
    kind = _ARRAYS[sql_type]
    if sql_type in _FIXED_WIDTH and all(_plain(part) for part in parts):
        return kind(np.concatenate([_numbers(part) for part in parts]))  # type: ignore[call-arg, arg-type]
    values = [value for part in parts for value in _values(sql_type, part)]
    return kind(values)  # type: ignore[call-arg, arg-type]


def _plain(part: pa.Array | list[Any]) -> bool:
    return isinstance(part, pa.Array | pa.ChunkedArray) and part.null_count == 0 and not pa.types.is_null(part.type)


def _numbers(part: pa.Array) -> Any:
    return (part.cast(pa.int64()) if pa.types.is_timestamp(part.type) else part).to_numpy(zero_copy_only=False)


def _values(sql_type: str, part: pa.Array | list[Any]) -> list[Any]:
    """Return the values of a column as the array of its SQL type accepts them."""
    if isinstance(part, pa.Array | pa.ChunkedArray):
        if pa.types.is_timestamp(part.type):
            part = part.cast(pa.int64())
        part = part.to_pylist(maps_as_pydicts="strict") if sql_type == "jsonb" else part.to_pylist()
    if sql_type == "jsonb":
        return [None if value is None else _json(value) for value in part]
    if sql_type == "timestamptz":
        return [instant(value) if isinstance(value, datetime) else value for value in part]
    return part


def _joined(sql_type: str, parts: Sequence[pa.Array | list[Any]]) -> pa.Array:
    """Return a column of all blocks, in the Arrow type from which its field is made."""
    target, _ = _COPIED[sql_type]
    convert = _CONVERTED.get(sql_type)
    if convert is not None:
        values = [value for part in parts for value in _values(sql_type, part)]
        return pa.array([None if value is None else convert(value) for value in values], target)
    try:
        arrays = [_array_of(sql_type, part, target) for part in parts]
    except pa.ArrowInvalid:
        if sql_type != "numeric":
            raise
        # Whole numbers of more than 38 digits.
        return pa.array([None if v is None else numeric_bytes(v) for part in parts for v in _values(sql_type, part)])
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _array_of(sql_type: str, part: pa.Array | list[Any], target: pa.DataType) -> pa.Array:
    if isinstance(part, pa.ChunkedArray):
        part = part.combine_chunks()
    if not isinstance(part, pa.Array):
        return pa.array(_values(sql_type, part), target)
    return part if part.type == target else part.cast(target)


def _json(value: Any) -> bytes:
    """Encode a value. Bytes are JSON text already."""
    return value if isinstance(value, bytes) else encode_value(value)
