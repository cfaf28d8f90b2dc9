"""Cut a table by its key into pieces of bounded size, and read each by one statement, so in one short snapshot.

A piece is all rows between two keys, in the order that the server reads fastest: in the order of the key, a table
written in the order of time costs three times as much, one jump across the table for every row. The keys come from a
sample, so a piece may turn out larger than planned, or take too long. Then it is read in the order of its key after
all, as many rows at a time as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from math import ceil

import pyarrow as pa

from millpy.errors import TableSwitchedError
from millpy.spark.connection import (
    SNAPSHOT_S_MAX,
    RefusedError,
    SnapshotConnection,
    TooSlowError,
    connected,
    literal,
    quoted,
)
from millpy.spark.tables import RowCondition, SparkTable, finite

PIECE_BYTES = 32 << 20
"""The most bytes that a piece is planned to have."""
PIECE_BYTES_MAX = 4 * PIECE_BYTES
"""Above this a piece is abandoned; the driver's last batch, of a few MB or one row, comes on top."""
IN_ORDER_ROWS = 50_000
PIECE_ROWS_MIN = 100
OVERSIZE = 3
"""A piece may have this many times its planned rows."""
SMALL_ROWS = 20_000
"""A table with fewer rows, by the server's estimate, is not cut if it has few bytes, too."""
SAMPLES_MIN = 2_000
SAMPLES_A_PIECE = 20
SAMPLED_BLOCKS_MAX = 10_000
SAMPLED_LESS = (1, 8, 64, 512)
BLOCK_BYTES = 8192

Position = tuple[str, ...]
Bounds = tuple[Position | None, ...]
"""A piece is all keys above one bound, up to and including the next; None is before the first row or after the last."""

# A table with a retention has its rows in partitions.
_SIZE = """
SELECT sum(greatest(c.reltuples, pg_relation_size(c.oid) / 200.0))::float8, sum(pg_relation_size(c.oid))::bigint,
       sum(pg_table_size(c.oid))::bigint
  FROM pg_class AS c
 WHERE c.relkind IN ('r', 'm')
   AND (c.oid = {oid} OR c.oid IN (SELECT i.inhrelid FROM pg_inherits AS i WHERE i.inhparent = {oid}))
HAVING count(*) > 0
"""
_SWITCHED = ("millpy: another", " table")
"""The server's message has the text in one piece; the statement, which the driver quotes in errors, has it in two."""


def plan(
    url: str,
    table: SparkTable,
    names: Sequence[str],
    conditions: Sequence[RowCondition],
    *,
    partitions: int,
    batch_rows: int,
    sample_s_max: float = SNAPSHOT_S_MAX,
) -> list[Bounds]:
    """Plan pieces of about equal size, at most `batch_rows` and `PIECE_BYTES`, about equally many for each partition.

    A sample that takes longer than `sample_s_max` is repeated over fewer blocks; if even that does not help, the table
    is one piece.

    Raises:
        TableSwitchedError: the name means another table than when it was looked up.
        StoreUnavailableError: the database went away.
    """
    everything: list[Bounds] = [(None, None)]
    with connected(url, sample_s_max) as connection:
        sizes = connection.rows(_SIZE.format(oid=table.oid))
        if not sizes:
            return everything
        rows, heap_bytes, all_bytes = sizes[0]
        rows = max(rows, 1)  # an emptied table may still have the bytes of its long texts
        if _small(rows, all_bytes):
            return everything
        blocks = max(1, heap_bytes // BLOCK_BYTES)
        wanted = SAMPLES_A_PIECE * max(rows / batch_rows, all_bytes / PIECE_BYTES)
        samples = min(rows, max(SAMPLES_MIN, wanted))
        most = min(1.0, max(samples / blocks, SAMPLES_MIN / rows), SAMPLED_BLOCKS_MAX / blocks)
        for less in SAMPLED_LESS:
            share = most / less
            kept = min(1.0, samples / (rows * share))
            with one_table(table), suppress(TooSlowError):
                found = connection.rows(_sample_query(table, names, conditions, share, kept))
                break
        else:
            return everything
    rows_each = 1 / (share * kept)
    if _small(rows_each * len(found), rows_each * sum(row[-1] for row in found)):
        return everything
    sizes_in_pieces = [max(rows_each / batch_rows, rows_each * row[-1] / PIECE_BYTES) for row in found]
    return _cut([row[:-1] for row in found], sizes_in_pieces, partitions)


def read(  # noqa: PLR0913 - the last three bound a piece; tests lower them one by one
    url: str,
    table: SparkTable,
    schema: pa.Schema,
    conditions: Sequence[RowCondition],
    bounds: Bounds,
    *,
    batch_rows: int,
    piece_s_max: float = SNAPSHOT_S_MAX,
    piece_bytes_max: int = PIECE_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """Yield every row between the bounds once, in batches of `schema`.

    A piece is in memory before it is yielded, so that no snapshot waits for the caller. A piece that takes longer than
    `piece_s_max` is abandoned, and read again in smaller ones.

    Raises:
        TableSwitchedError: the name means another table than when it was looked up.
        StoreUnavailableError: the database went away, or even `PIECE_ROWS_MIN` rows take longer than that.
    """
    reader = _PieceReader(table, schema, tuple(conditions), batch_rows, piece_bytes_max)
    with connected(url, piece_s_max) as connection:
        for after, upto in pairwise(bounds):
            yield from reader.piece(connection, after, upto)


class _PieceReader:
    def __init__(
        self,
        table: SparkTable,
        schema: pa.Schema,
        conditions: tuple[RowCondition, ...],
        batch_rows: int,
        bytes_max: int,
    ) -> None:
        self._table = table
        self._schema = schema
        self._conditions = conditions
        self._batch_rows = batch_rows
        self._bytes_max = bytes_max

    def piece(
        self, connection: SnapshotConnection, after: Position | None, upto: Position | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows between two keys, by one statement if possible."""
        found = self._at_once(connection, after, upto)
        yield from self._in_order(connection, after, upto) if found is None else map(self._wanted, found)

    def _at_once(
        self, connection: SnapshotConnection, after: Position | None, upto: Position | None
    ) -> list[pa.RecordBatch] | None:
        limit = OVERSIZE * self._batch_rows
        try:
            found, complete = self._ask(connection, (), after, upto, f" LIMIT {limit}")
        except TooSlowError:
            return None
        return found if complete and sum(map(len, found)) < limit else None

    def _in_order(
        self, connection: SnapshotConnection, after: Position | None, upto: Position | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the same rows in the order of the key, as many at a time as fit, each time from the last key on."""
        key = self._table.key
        order = ", ".join(f"t.{quoted(name)}" for name in key)
        position = [f"t.{quoted(name)}::text" for name in key]  # text is exact, and Python has no year 10000
        rows = min(self._batch_rows, IN_ORDER_ROWS)
        while True:
            try:
                found, complete = self._ask(connection, position, after, upto, f" ORDER BY {order} LIMIT {rows}")
            except TooSlowError:
                if rows <= PIECE_ROWS_MIN:
                    raise
                rows = max(rows // 4, PIECE_ROWS_MIN)
                continue
            yield from map(self._wanted, found)
            count = sum(map(len, found))
            if complete and count < rows:
                return
            rows = count  # this many fit
            after = tuple(column[-1].as_py() for column in found[-1].columns[-len(key) :])

    def _ask(
        self,
        connection: SnapshotConnection,
        more: Sequence[str],
        after: Position | None,
        upto: Position | None,
        rest: str,
    ) -> tuple[list[pa.RecordBatch], bool]:
        wanted = map(self._table.expression, self._schema.names)
        selected = ", ".join([*wanted, *more]) or "true"  # `count()` selects no column
        wherever = where(self._table, self._conditions, after, upto)
        with one_table(self._table):
            return connection.batches(
                f"SELECT {selected} FROM {self._table.qualified()} AS t{wherever}{rest}",  # noqa: S608
                bytes_max=self._bytes_max,
            )

    def _wanted(self, found: pa.RecordBatch) -> pa.RecordBatch:
        if not self._schema.names:
            nothing = pa.StructArray.from_buffers(pa.struct([]), len(found), [None])
            return pa.RecordBatch.from_struct_array(nothing)
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(map(finite, found.columns), self._schema, strict=False)  # a position follows these
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _small(rows: float, size: float) -> bool:
    return rows < SMALL_ROWS and size < PIECE_BYTES


def _cut(keys: Sequence[Position], sizes: Sequence[float], partitions: int) -> list[Bounds]:
    """Return bounds from sampled keys in their order; `sizes` are the parts of a piece that each key stands for."""
    *_, total = accumulate(sizes)
    pieces = partitions * ceil(total / partitions)
    places = [int(reached / total * pieces) for reached in accumulate(sizes)]
    bounds = [key for key, (before, place) in zip(keys, pairwise([0, *places]), strict=True) if before < place < pieces]
    every = [None, *bounds, None]
    ends = sorted({(len(every) - 1) * number // partitions for number in range(partitions + 1)})
    return [tuple(every[start : end + 1]) for start, end in pairwise(ends)]


def _sample_query(
    table: SparkTable, names: Sequence[str], conditions: Sequence[RowCondition], share: float, kept: float
) -> str:
    """Write the query for keys in their order and the size of their rows; few per block: neighbors tell little."""
    keys = ", ".join(f"t.{quoted(name)}::text" for name in table.key)
    order = ", ".join(f"t.{quoted(name)}" for name in table.key)
    size = " + ".join(_bytes_of(table, name) for name in names) or "1"
    wherever = where(table, conditions, None, None)
    # With a seed, the same table is always cut in the same places.
    return (
        f"SELECT {keys}, ({size})::float8 FROM (SELECT setseed(0)) AS seeded,"  # noqa: S608
        f" {table.qualified()} AS t TABLESAMPLE SYSTEM ({100 * share:f}) REPEATABLE (0)"
        f"{wherever} AND random() < {kept:f} ORDER BY {order}"
    )


def _bytes_of(table: SparkTable, name: str) -> str:
    column = f"t.{quoted(name)}"
    if table.types[name] in ("text", "bytea"):
        return f"coalesce(octet_length({column}), 0)"  # the uncompressed size
    return f"coalesce(pg_column_size({column}), 0)"


def where(table: SparkTable, conditions: Sequence[RowCondition], after: Position | None, upto: Position | None) -> str:
    """Write conditions and bounds as SQL, with a check that the name still means the table that was looked up."""
    name = literal(table.qualified(), "regclass")
    switched = " || ".join(literal(part, "text") for part in _SWITCHED)
    # A constant, so rows do not pay for it. The server looks up the name here after it has done so for the FROM.
    parts = [f"CASE WHEN {name}::oid = {table.oid} THEN true ELSE ({switched})::boolean END"]
    parts += [condition.expression(table) for condition in conditions]
    columns = [f"t.{quoted(name)}" for name in table.key]
    for comparison, position in ((">", after), ("<=", upto)):
        if position is not None:
            given = [literal(value, table.types[column]) for column, value in zip(table.key, position, strict=True)]
            # The first column adds nothing, but the server estimates the rows by it.
            parts.append(f"{columns[0]} {comparison[0]}= {given[0]}")
            parts.append(f"({', '.join(columns)}) {comparison} ({', '.join(given)})")
    return f" WHERE {' AND '.join(parts)}"


@contextmanager
def one_table(table: SparkTable) -> Iterator[None]:
    """Raise TableSwitchedError when a statement of the block finds another table under the name, or none."""
    try:
        yield
    except RefusedError as error:
        if error.sqlstate in ("42P01", "3F000") or "".join(_SWITCHED) in error.message:
            raise TableSwitchedError(
                f"{table.schema}.{table.name} was switched to another table, or dropped, while it was read",
                hint="read it again",
            ) from error
        raise
