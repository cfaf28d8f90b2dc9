"""Read lookup tables: a user's table as JSON text, in one statement, so that all rows are of one moment.

The server counts the rows and bytes first, and sends no row of a table beyond its bounds. What the table's owner has
done to it (dropped, renamed, altered, locked it, revoked rights) is a `TableLoadError`: the version before stays.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

from millpy.errors import MillError, TableLoadError, TransientError
from millpy.model.lookup import LookupTable
from millpy.model.record import without_none
from millpy.model.time import Instant
from millpy.store.postgres.connection import Channel
from millpy.store.postgres.errors import translate
from millpy.store.protocol import TableText

_READ = sql.SQL(
    # Whitespace of a json column may have line ends; inside of texts they are escaped.
    "WITH lines AS MATERIALIZED ("
    "SELECT replace(row_to_json(r.*)::text, chr(10), ' ') AS line, row_number() OVER () AS place"
    " FROM (SELECT {columns} FROM {table} ORDER BY {key} LIMIT {rows_max} + 1) AS r"
    "), size AS MATERIALIZED ("
    "SELECT count(*) AS rows, coalesce(sum(octet_length(line) + 1), 0)::bigint AS bytes FROM lines)"
    " SELECT size.rows, size.bytes, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint,"
    " (SELECT convert_to(string_agg(line, chr(10) ORDER BY place), 'UTF8') FROM lines"
    " WHERE size.rows <= {rows_max} AND size.bytes <= {bytes_max}) FROM size"
)
_HINTS = {
    "42P01": "create the table, or name its schema in the graph: a table without a schema is looked up in public",
    "3F000": "create the schema, or name another one in the graph",
    "42703": "the class of the rows has a field that the table lacks: change one of them",
    "42501": "GRANT SELECT on the table, and USAGE on its schema, to the role of the workers",
    "57014": "the read took longer than MILLPY_STATEMENT_S: look who locks the table, or look up in a smaller view",
    "54000": "look up in a view with the rows and columns that are needed",
}
"""SQLSTATE -> what an operator can do."""


async def read_table(channel: Channel, table: LookupTable, *, rows_max: int, bytes_max: int) -> TableText:
    """Read a lookup table; see `Store.read_lookup_table`."""
    query = _READ.format(
        columns=sql.SQL(", ").join(_column(table, name, alias) for name, alias in _aliases(table).items()),
        table=sql.Identifier(table.schema, table.table),
        key=sql.SQL(", ").join(sql.Identifier(_aliases(table)[field]) for field in table.key),
        rows_max=sql.Literal(rows_max),
        bytes_max=sql.Literal(bytes_max),
    )
    try:
        async with channel.use_raw() as connection:
            cursor = await connection.execute(query, prepare=False, binary=True)
            ((rows, size, read_at, text),) = await cursor.fetchall()
    except psycopg.Error as error:
        raise _load_error(table, error) from error
    return TableText(rows, size, Instant(read_at), text or b"")


def _aliases(table: LookupTable) -> dict[str, str]:
    """Return the fields of the rows with their names in JSON, which are the names of the columns."""
    return {field: table.record_type.alias(field) for field in table.record_type.fields}


def _column(table: LookupTable, field: str, name: str) -> sql.Composable:
    """Return a column as the decoder takes it: bytes as base64."""
    column = sql.Identifier(name)
    if without_none(table.record_type.annotations[field])[0] is bytes:
        return sql.SQL("translate(encode({0}, 'base64'), chr(10), '') AS {0}").format(column)
    return column


def _load_error(table: LookupTable, error: psycopg.Error) -> MillError:
    state = error.sqlstate or ""
    if state in _HINTS or state[:2] in ("22", "42", "0A", "54", "P0", "XX"):
        said = error.diag.message_primary or str(error)
        return TableLoadError(f"cannot read table {table.name}: {said}", hint=_HINTS.get(state, ""))
    translated = translate(error)
    if isinstance(translated, TransientError):
        return translated
    return TableLoadError(f"cannot read table {table.name}: {translated.message}", hint=translated.hint)
