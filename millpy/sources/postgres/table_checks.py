"""What the changes of a table need: logical decoding, a primary key, a publication, a slot."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
import xxhash
from psycopg import sql

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import NAME_BYTES_MAX
from millpy.sources.postgres import column_json
from millpy.sources.postgres.column_json import ToJson
from millpy.sources.postgres.pgoutput import Begin
from millpy.sources.postgres.table import PostgresTable
from millpy.sources.postgres.table_position import TablePosition
from millpy.store.postgres.statements import statement

log = logging.getLogger(__name__)
Connection = psycopg.Connection[Any]
OWN, FAR = "millpy_own_", "millpy_far_"
"""Prefixes of slots in the workers' database, which are dropped with their source, and of those in others."""
_SLOTS_FULL = "53400"
_KINDS = {**dict.fromkeys(("smallint", "bigint"), "integer"), "character varying": "text"}
_INVALIDATED_BY = {"wal_removed": "max_slot_wal_keep_size", "idle_timeout": "idle_replication_slot_timeout"}
_OLDER_STATE = (
    "the database of the table is an older state (a backup was restored, or a standby without the last commits was"
    " promoted), so changes are missing"
)
_IDENTIFY = (
    "ALTER TABLE … REPLICA IDENTITY DEFAULT; with a primary key that is DEFERRABLE, REPLICA IDENTITY FULL; each"
    " partition has its own"
)
NEW_GENERATION = "deploy a new generation of the graph, which copies the table anew"
COPY_ANEW = f"{NEW_GENERATION}; or reset the source with all its readers: millpy deploy GRAPH.py --reset SOURCE …"


class SortColumn(NamedTuple):
    """A column of the order in which a table is read.

    Attributes:
        name: its name.
        type: its type in SQL, without a size, to which a cast would cut longer values.
        collation: its collation in SQL; None for a type without one.
        operators: the schema of the operators that compare its values as ORDER BY does.
    """

    name: str
    type: str
    collation: str | None
    operators: str

    @property
    def kind(self) -> str:
        """The type; one name for all whole numbers, and for all texts."""
        return _KINDS.get(self.type, self.type)

    @property
    def order(self) -> str:
        """The order of its values: it stays when a number or a text becomes longer."""
        return f"{self.name} {self.kind} {self.collation or ''}".rstrip()


@dataclass(frozen=True, slots=True)
class TableFacts:
    """The table as it is.

    Attributes:
        key: the columns of the order in which it is read, which end with those of its primary key.
        columns: the columns to read; () for all that the table has then.
        is_partitioned: whether its rows are in partitions; rows of tables that inherit from it are never read.
        published: the table's OID, and its place in the publication; another one if either was made anew.
        partition_keys: the columns of the replica identities of its partitions, () if all are FULL; None without any.
    """

    key: tuple[SortColumn, ...]
    columns: tuple[str, ...]
    is_partitioned: bool = True
    published: str = ""
    partition_keys: tuple[str, ...] | None = None

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the columns of the key."""
        return tuple(column.name for column in self.key)

    @property
    def oid(self) -> int:
        """The OID of the table, by which changes name it, whatever its name was then."""
        return int(self.published.partition("/")[0])

    @property
    def order(self) -> tuple[str, ...]:
        """The order in which the table is read."""
        return tuple(column.order for column in self.key)


def look_at_key(connection: Connection, schema: str, table: str, column: str | None = None) -> tuple[SortColumn, ...]:
    """Return the columns of the primary key, behind a given column."""
    named = {"schema": schema, "table": table, "column": column}
    return tuple(SortColumn(*row) for row in connection.execute(statement("look_at_key"), named).fetchall())


def slot_name(setup: SourceSetup, *, is_own: bool) -> str:
    """Return the name of the slot of a source, which no other source has."""
    digest = xxhash.xxh3_64_hexdigest(f"{setup.secret}/{setup.graph}/{setup.stream}".encode())
    return f"{slot_prefix(setup.graph, setup.stream, is_own=is_own)}{digest[:12]}"


def slot_prefix(graph: str, stream: str, *, is_own: bool) -> str:
    """Return what the name of the slot of a source begins with."""
    readable = re.sub(r"[^a-z0-9_]", "_", f"{graph}_{stream}".lower())[:32]
    return f"{OWN if is_own else FAR}{readable}_"


def publication_name(source: PostgresTable) -> str:
    """Return the name of the publication: the given one, or one for the table.

    PostgreSQL cuts a name of more than 63 bytes, and `a_b.c` and `a.b_c` would have the same one. So a longer name, and
    that of a table in a schema with an underscore, ends with a digest of the table.
    """
    if source.publication:
        return source.publication
    name = f"millpy_{source.schema}_{source.name}"
    if len(name.encode()) <= NAME_BYTES_MAX and "_" not in source.schema:
        return name
    digest = xxhash.xxh3_64_hexdigest(f"{source.schema}.{source.name}".encode())
    return f"{name.encode()[: NAME_BYTES_MAX - 13].decode(errors='ignore')}_{digest[:12]}"


def look_at_table(
    connection: Connection, source: PostgresTable, published: str = "", *, creates: bool = True
) -> TableFacts:
    """Check the server, the table and the publication, which is created if it is missing and nothing was read yet.

    Args:
        connection: to the database of the table.
        source: what to read.
        published: what was read before (`TableFacts.published`); "" for nothing.
        creates: whether to create a publication that is missing.

    Raises:
        ConfigError: an operator has to do something.
        SourceUnavailableError: the table is not there, or not published, any more.
    """
    table, publication = f"{source.schema}.{source.name}", publication_name(source)
    named = {"schema": source.schema, "table": source.name, "publication": publication}
    if (found := connection.execute(statement("look_at_table"), named).fetchone()) is None:
        raise SourceUnavailableError(
            f"there is no table {table}",
            hint="create it, or correct the name in the graph: views and foreign tables are not read",
        )
    wal_level, is_standby, is_partitioned, columns, is_filtered, operations, identity, keys, unlogged = found
    if is_standby:  # it may be promoted at any moment
        raise SourceUnavailableError(
            f"the database of table {table} is a standby, and is read when it is promoted",
            hint="give the URL of the primary; with several hosts, add target_session_attrs=read-write",
        )
    _check_logged(table, wal_level, unlogged, has_read=bool(published))
    key = look_at_key(connection, source.schema, source.name)
    if not key:
        raise (SourceUnavailableError if published else ConfigError)(  # it may get another one soon
            f"table {table} has no primary key",
            hint="add one, so that its rows can be copied piece by piece and its changes name them",
        )
    if operations is None:
        if published:
            raise _misses_changes(f"publication {publication} was dropped")
        _check_publishable(connection, source)
        if not creates:
            return TableFacts(key, (), is_partitioned)  # not published
        _create_publication(connection, source)
        return look_at_table(connection, source)
    if columns is None:
        as_one = " as one table (publish_via_partition_root)" if is_partitioned else ""
        # It still has its place there; a second look tells that from what a session alters at this moment.
        if published == identity and connection.execute(statement("look_at_table"), named).fetchone() == found:
            raise _misses_changes(f"publication {publication} does not publish table {table}{as_one} any more")
        raise SourceUnavailableError(
            f"publication {publication} does not have table {table}{as_one}", hint="ALTER PUBLICATION … ADD TABLE …"
        )
    if published not in ("", identity):
        raise _misses_changes(f"table {table} or its place in publication {publication} was made anew")
    lacking = [name for name in source.operations if name not in (*operations, "snapshot")]
    if published and lacking:
        raise _misses_changes(f"publication {publication} lacks each {' and '.join(lacking)} of table {table}")
    _check_publication(source, lacking, is_filtered, [column.name for column in key if column.name not in columns])
    partition_keys = tuple(keys or ()) if is_partitioned else None
    return TableFacts(key, tuple(columns), is_partitioned, identity, partition_keys)


def _check_logged(table: str, wal_level: str, unlogged: str | None, *, has_read: bool) -> None:
    """Check that the log has the changes of a table and its partitions. Raises ConfigError."""
    if wal_level != "logical":
        raise ConfigError(
            f"the changes of {table} are not in the log: wal_level is {wal_level}",
            hint="as an administrator: ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
        )
    if unlogged and has_read:
        raise _misses_changes(f"table {unlogged} is unlogged")
    if unlogged:
        raise ConfigError(
            f"table {unlogged} is unlogged, so its changes are not in the log",
            hint=f"ALTER TABLE {unlogged} SET LOGGED",
        )


def _misses_changes(why: str) -> ConfigError:
    return ConfigError(f"{why}, so changes are missing", hint=COPY_ANEW)


def _check_publication(source: PostgresTable, lacking: list[str], is_filtered: bool, unread: list[str]) -> None:
    """Check that a publication has all changes. Raises ConfigError."""
    table, publication = f"{source.schema}.{source.name}", publication_name(source)
    if lacking or is_filtered:
        of = f"each {' and '.join(lacking)}" if lacking else "the rows that its filter leaves out"
        raise ConfigError(
            f"publication {publication} lacks {of} of table {table}",
            hint="ALTER PUBLICATION … SET (publish = …), or filter the records in the graph (operations=, filter)",
        )
    if unread:
        raise ConfigError(
            f"changes of table {table} lack column {unread[0]} of its primary key",
            hint=f"add it to the columns of publication {publication}; a generated column cannot be read",
        )


def _create_publication(connection: Connection, source: PostgresTable) -> None:
    query = _publication_query(connection, source)
    try:
        connection.execute(query)
    except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
        return  # another worker was quicker
    except psycopg.errors.InsufficientPrivilege as error:
        raise may_not_publish(connection, source, error.diag.message_primary or "missing rights") from error


def _publication_query(connection: Connection, source: PostgresTable) -> sql.Composed:
    # Otherwise the server would refuse to update rows whose replica identity has a generated column.
    generated = ", publish_generated_columns = stored" if connection.info.server_version >= 180000 else ""
    return sql.SQL("CREATE PUBLICATION {} FOR TABLE ONLY {} WITH (publish_via_partition_root = true{})").format(
        sql.Identifier(publication_name(source)), sql.Identifier(source.schema, source.name), sql.SQL(generated)
    )


def may_not_publish(connection: Connection, source: PostgresTable, why: str) -> ConfigError:
    """Return the error of a role that may not create the publication of a table, with the statement for the owner."""
    return ConfigError(
        f"this role may not publish {source.schema}.{source.name}: {why}",
        hint="as the owner of the table, with CREATE on the database: "
        + _publication_query(connection, source).as_string(connection),
    )


def _check_publishable(connection: Connection, source: PostgresTable) -> None:
    """Check that a publication would neither lack the changes of a table nor forbid some.

    Raises:
        ConfigError: it would.
    """
    table = f"{source.schema}.{source.name}"
    unidentified, is_virtual, _ = _look_at_identity(connection, source)
    if unidentified:
        raise ConfigError(
            f"table {unidentified} has no replica identity: PostgreSQL would refuse to update its rows once it is"
            " published",
            hint=_IDENTIFY,
        )
    if is_virtual:
        raise ConfigError(
            f"table {table} has a virtual column and REPLICA IDENTITY FULL: PostgreSQL would refuse to update its rows"
            " once it is published",
            hint="ALTER TABLE … REPLICA IDENTITY DEFAULT, or make the column STORED",
        )


def _look_at_identity(connection: Connection, source: PostgresTable) -> tuple[str | None, bool, bool]:
    named = {"schema": source.schema, "table": source.name, "publication": publication_name(source)}
    return connection.execute(statement("look_at_identity"), named).fetchone() or (None, False, False)


def check_changeable(connection: Connection, source: PostgresTable) -> None:
    """Check that no publication forbids to update and delete rows of the table.

    Raises:
        ConfigError: one does: the table has no replica identity, or the publication lacks a generated column of that.
    """
    unidentified, _, is_published = _look_at_identity(connection, source)
    if unidentified and is_published:
        raise ConfigError(
            f"PostgreSQL refuses to update and delete rows of table {unidentified}: it has no replica identity",
            hint=_IDENTIFY,
        )
    named = {"schema": source.schema, "table": source.name}
    for publication, table, column, is_virtual in connection.execute(statement("find_unpublished_identity"), named):
        raise ConfigError(
            f"PostgreSQL refuses to update and delete rows of table {table}: generated column {column} of its replica"
            f" identity is not in publication {publication}",
            hint="ALTER TABLE … REPLICA IDENTITY DEFAULT, or make the column STORED"
            if is_virtual
            else f"ALTER PUBLICATION {publication} SET (publish_generated_columns = stored)",
        )


def ensure_slot(connection: Connection, setup: SourceSetup, slot: str, position: TablePosition | None) -> int:
    """Check the slot, and create it for a source that has read nothing yet.

    Args:
        connection: to the database of the table.
        setup: what the slot is for.
        slot: its name.
        position: what was read; None for a source that has read nothing.

    Returns:
        The position of the log from which the slot has changes.

    Raises:
        ConfigError: it cannot be created, is somebody else's, or lacks changes that were not read.
        SourceUnavailableError: a worker that has died had begun to create it, and the server has not finished yet.
    """
    found = connection.execute(statement("look_at_slot"), {"slot": slot}).fetchone()
    other, is_lost, confirmed, *_ = found or ("", False, 0)
    why = "" if position is None else _why_unfit(slot, found, position)
    if other:  # the workers' database is a copy, and what it was copied from has the slot
        why = f"replication slot {slot} is that of {other}"
    if why:
        raise ConfigError(f"{setup.stream}: {why}", hint=NEW_GENERATION if other else COPY_ANEW)
    if found is not None and confirmed is None:
        raise SourceUnavailableError(
            f"replication slot {slot} is still being created by the session of an earlier worker, which waits for older"
            " transactions"
        )
    if found is not None and not is_lost:
        return int(confirmed)
    return _create_slot(connection, setup, slot, is_there=found is not None)


def _why_unfit(slot: str, found: tuple[str, bool, int | None, int, str] | None, position: TablePosition) -> str:
    """Return why a slot lacks changes behind what was read; "" if it has them."""
    if found is None:
        return f"replication slot {slot} was dropped, so changes are missing"
    _, is_lost, confirmed, end, reason = found
    if is_lost:
        why = _INVALIDATED_BY.get(reason, reason)
        return f"replication slot {slot} has lost a part of the log ({why}), so changes are missing"
    if confirmed is not None and confirmed > position.lsn:
        return (
            f"replication slot {slot} begins at {as_lsn(confirmed)}, and changes are committed up to"
            f" {as_lsn(position.lsn)}, so some are missing: another program has read the slot, or the workers' database"
            " is an older state"
        )
    known = max(position.lsn, position.until)
    if end < known:
        return f"the log ends at {as_lsn(end)}, and was read up to {as_lsn(known)}: {_OLDER_STATE}"
    return ""


class LogContinuity:
    """The proof that a slot has the log that was read: its transactions are the same ones.

    A database that was restored from a backup, or a promoted standby that lacked commits, has another log from some
    place on. A slot begins at or before what is committed, and sends again what it has behind its begin. So the last
    commit that was read comes again, unless the slot begins behind it, and no other one comes up to `position.lsn`.

    Args:
        stream: the name of the source.
        position: what was read.
        begin: the position of the log from which the slot has changes.
    """

    def __init__(self, stream: str, position: TablePosition, begin: int) -> None:
        self._stream, self._committed_at = stream, position.committed_at
        self._commit = position.commit if position.commit >= begin else 0

    def check_begin(self, begin: Begin) -> None:
        """Check the next transaction. Raises ConfigError."""
        if self._commit and begin.lsn >= self._commit:
            if (begin.lsn, begin.committed_at) != (self._commit, self._committed_at):
                raise self._differs(self._commit)
            self._commit = 0

    def check_read(self, begin: Begin, position: TablePosition) -> None:
        """Check the transaction of a change that counts as read. Raises ConfigError."""
        if begin.lsn > position.commit:
            raise self._differs(begin.lsn)

    def check_reached(self, lsn: int) -> None:
        """Check up to where the server has looked, when all transactions before that have come. Raises ConfigError."""
        if self._commit and lsn > self._commit:
            raise self._differs(self._commit)

    def _differs(self, lsn: int) -> ConfigError:
        return ConfigError(
            f"{self._stream}: the log has another transaction at {as_lsn(lsn)} than the one that was read:"
            f" {_OLDER_STATE}",
            hint=COPY_ANEW,
        )


def _create_slot(connection: Connection, setup: SourceSetup, slot: str, *, is_there: bool) -> int:
    if is_there:
        connection.execute(statement("drop_slot"), {"slot": slot})
    if slot.startswith(OWN):
        of = {"graph": setup.graph, "generation": setup.generation, "source": setup.stream, "slot": slot}
        connection.execute(statement("note_slot"), of)
    try:
        (begin,) = connection.execute(statement("create_slot"), {"slot": slot}).fetchone() or (0,)
    except psycopg.errors.InsufficientPrivilege as error:
        role = connection.info.user
        raise ConfigError(
            f"role {role} may not read changes: {error.diag.message_primary}",
            hint=f'as an administrator: ALTER ROLE "{role}" REPLICATION',
        ) from error
    except psycopg.Error as error:
        if error.sqlstate != _SLOTS_FULL:
            raise
        raise ConfigError(
            f"no replication slot is free: {error.diag.message_primary}",
            hint="drop an unused one (`millpy doctor` lists them), or raise max_replication_slots",
        ) from error
    return int(begin)


def as_lsn(position: int) -> str:
    """Return a position of the log as PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def forms(connection: Connection) -> Callable[[int], ToJson]:
    """Return what finds the JSON form of a type, by its OID; the answers are kept."""
    known = dict(column_json.BY_OID)

    def form_of(type_oid: int) -> ToJson:
        if type_oid not in known:
            known[type_oid] = find(type_oid)
        return known[type_oid]

    def find(type_oid: int) -> ToJson:
        found = connection.execute(statement("look_at_type"), {"type_oid": type_oid}).fetchone()
        if found is None:
            return column_json.text
        kind, category, base, element, delimiter = found
        if kind == "d":
            return form_of(base)
        if category == "A" and element:
            return column_json.array_of(form_of(element), delimiter)
        return column_json.text

    return form_of
