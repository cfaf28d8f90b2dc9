"""The roles of a database: owner, worker and reader.

owner    creates and changes tables: migrations and deployments act as it, whichever member runs them
worker   reads everything and changes rows; creates no tables, and empties slots only through `mill.free_slot`
reader   reads the views in schema `millpy`, and result tables

Default privileges give worker and reader their rights on objects that the owner creates later. millpy neither repeats
nor revokes grants on a result table after that, because users may change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from millpy.errors import ConfigError
from millpy.store.postgres.statements import statement

Connection = psycopg.Connection[Any]
POLICY = "millpy_worker"
READ_ONLY = (
    "alembic_version",
    "roles",
    "computations",
    "streams",
    "subscriptions",
    "result_tables",
    "partitions",
    "schemas",
    "epochs",
    "tokens",
)
"""Tables that workers only read: the catalog of deployed graphs, the slots of the rings, the tokens of the API."""
_EVERYBODYS = sql.SQL(
    "mill.moment(bigint), mill.instant(timestamptz), mill.readable(bytea), mill.alive(timestamptz, double precision),"
    " millpy.as_of(anyelement, timestamptz, jsonb), millpy.as_of(text, timestamptz, jsonb), millpy.history_of(regclass)"
)
"""Functions that only compute, or read with their caller's rights."""
APPEND_ONLY = ("segments", "deltas", "dedupe_runs")
_SET_OPTION_SINCE = 160_000
_NAME_BYTES_MAX = 56


@dataclass(frozen=True, slots=True)
class Roles:
    """The names of a database's three roles."""

    owner: str
    worker: str
    reader: str

    @classmethod
    def named(cls, prefix: str) -> Roles:
        """Return PREFIX_owner, PREFIX_worker and PREFIX_reader.

        Raises:
            ConfigError: the prefix does not give valid names.
        """
        if not prefix or prefix.startswith("pg_") or len(prefix.encode()) > _NAME_BYTES_MAX or not prefix.isprintable():
            raise ConfigError(
                f"a role cannot be named {prefix + '_owner'!r}",
                hint=f"use a prefix of 1 to {_NAME_BYTES_MAX} bytes that does not begin with pg_",
            )
        return cls(f"{prefix}_owner", f"{prefix}_worker", f"{prefix}_reader")

    @property
    def all(self) -> tuple[str, str, str]:
        """Owner, worker, reader."""
        return self.owner, self.worker, self.reader


def act_as_owner(connection: Connection) -> None:
    """Take on the owner's role until the end of the transaction, if there are roles and this one may."""
    if has_roles(connection):
        connection.execute(statement("act_as_owner"))


def has_roles(connection: Connection) -> bool:
    """Tell whether the database can name roles: it was migrated."""
    return connection.execute("SELECT to_regclass('mill.roles')").fetchone() != (None,)


def read_roles(connection: Connection) -> Roles | None:
    """Read the roles of this database; None when it has none."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement("read_roles")).fetchone()
    return None if row is None else Roles(*row)


def create_roles(connection: Connection, roles: Roles) -> None:
    """Create the missing roles, and give existing objects to the owner. Runs as the login, in a transaction.

    Raises:
        ConfigError: the database has other roles, or this login lacks rights; the hint is for an administrator.
    """
    connection.execute("SET LOCAL ROLE NONE")
    before = read_roles(connection)
    if before is not None and before != roles:
        raise ConfigError(
            f"the roles of this database are {', '.join(before.all)}", hint="omit --role-prefix, or pass their prefix"
        )
    login = str(connection.info.user)
    _create(connection, roles, login)
    _join_owner(connection, roles, login)
    _join_worker(connection, roles)
    _open_database(connection, roles)
    for kind, named in connection.execute(statement("find_foreign"), {"owner": roles.owner}).fetchall():
        change = sql.SQL("ALTER {} {} OWNER TO {}").format(sql.SQL(kind), sql.SQL(named), sql.Identifier(roles.owner))
        _or_refuse(connection, change, f"cannot give {named} to {roles.owner}", "run this as the role that owns it")
    connection.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(roles.owner)))
    connection.execute(
        statement("record_roles"), {"owner": roles.owner, "worker": roles.worker, "reader": roles.reader}
    )


def grant(connection: Connection, roles: Roles) -> None:
    """Grant worker and reader their rights, on existing objects and on those that the owner creates later.

    Runs as the owner. Grants on a result table that workers can write to already do not change.
    """
    worker, reader = sql.Identifier(roles.worker), sql.Identifier(roles.reader)
    rings = [name for ring in APPEND_ONLY for name in (ring, *(f"{ring}_{slot}" for slot in range(16)))]
    for text, tables in (
        ("GRANT USAGE ON SCHEMA mill TO {worker}", ()),
        ("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA mill TO {worker}", ()),
        ("REVOKE INSERT, UPDATE, DELETE ON {tables} FROM {worker}", READ_ONLY),
        # A graph's name is that of a schema, which migrations trust: workers only change what a new partition changes.
        ("REVOKE INSERT, UPDATE, DELETE ON {tables} FROM {worker}", ("graphs",)),
        ("GRANT UPDATE (version, description, deployed_at) ON {tables} TO {worker}", ("graphs",)),
        ("GRANT UPDATE (used_on) ON {tables} TO {worker}", ("tokens",)),
        ("REVOKE DELETE ON {tables} FROM {worker}", ("intervals", "cursors", "last_segments")),
        ("REVOKE UPDATE, DELETE ON {tables} FROM {worker}", rings),
        ("REVOKE ALL ON ALL TABLES IN SCHEMA mill FROM {reader}, PUBLIC", ()),
        ("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mill, millpy FROM {reader}, PUBLIC", ()),
        ("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA mill, millpy TO {worker}", ()),
        ("GRANT EXECUTE ON FUNCTION {everybodys} TO PUBLIC", ()),
        ("GRANT USAGE ON SCHEMA millpy TO {worker}, {reader}", ()),
        ("GRANT SELECT ON ALL TABLES IN SCHEMA millpy TO {worker}, {reader}", ()),
        ("ALTER DEFAULT PRIVILEGES GRANT USAGE ON SCHEMAS TO {worker}, {reader}", ()),
        ("ALTER DEFAULT PRIVILEGES GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {worker}", ()),
        ("ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO {reader}", ()),
    ):
        named = sql.SQL(", ").join(sql.Identifier("mill", name) for name in tables)
        connection.execute(sql.SQL(text).format(worker=worker, reader=reader, tables=named, everybodys=_EVERYBODYS))
    # A view runs its functions with its reader's rights.
    for (function,) in connection.execute(statement("find_functions_of_views")).fetchall():
        connection.execute(sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(sql.SQL(function), reader))
    ungranted = {"worker": roles.worker, "policy": POLICY}
    for schema, table, has_view in connection.execute(statement("find_ungranted"), ungranted).fetchall():
        live = sql.Identifier(schema, f"{table}_live")
        both = [sql.Identifier(schema, name) for name in (table, f"{table}_status")[: 1 + has_view]]
        if connection.execute("SELECT to_regclass(%s)", [live.as_string(connection)]).fetchone() != (None,):
            both.append(live)
        for text in (
            "GRANT USAGE ON SCHEMA {schema} TO {worker}, {reader}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {worker}",
            "GRANT SELECT ON {both} TO {worker}, {reader}",
        ):
            connection.execute(
                sql.SQL(text).format(
                    schema=sql.Identifier(schema),
                    table=both[0],
                    both=sql.SQL(", ").join(both),
                    worker=worker,
                    reader=reader,
                )
            )
        dropped = sql.SQL("DROP POLICY IF EXISTS {} ON {}")  # a table whose grants are gone may have it
        connection.execute(dropped.format(sql.Identifier(POLICY), both[0]))
        connection.execute(worker_policy(schema, table, roles))


def worker_policy(schema: str, table: str, roles: Roles) -> sql.Composed:
    """Compose the policy that lets workers continue when a user enables row-level security on a result table."""
    return sql.SQL("CREATE POLICY {} ON {} TO {}, {} USING (true) WITH CHECK (true)").format(
        sql.Identifier(POLICY),
        sql.Identifier(schema, table),
        sql.Identifier(roles.worker),
        sql.Identifier(roles.owner),
    )


def _create(connection: Connection, roles: Roles, login: str) -> None:
    found = connection.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY (%s)", [list(roles.all)]).fetchall()
    missing = [role for role in roles.all if (role,) not in found]
    wanted = [sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)) for role in missing]
    grants = [(roles.worker, roles.owner), (roles.owner, login)]
    joined = [sql.SQL("GRANT {} TO {}").format(*map(sql.Identifier, pair)) for pair in grants]
    commands = "; ".join(query.as_string(connection) for query in (*wanted, *joined))
    for query in wanted:
        _or_refuse(
            connection,
            query,
            f"login {login} may not create roles",
            f"as an administrator: {commands}; then retry",
        )


def _join_owner(connection: Connection, roles: Roles, login: str) -> None:
    """Let the login act as the owner role. Since PostgreSQL 16, creating a role does not permit this."""
    option = "SET" if connection.info.server_version >= _SET_OPTION_SINCE else "MEMBER"
    asked = "SELECT pg_has_role(current_user, %s, %s)"
    if connection.execute(asked, [roles.owner, option]).fetchone() != (True,):
        query = sql.SQL("GRANT {} TO {}").format(sql.Identifier(roles.owner), sql.Identifier(login))
        _or_refuse(
            connection,
            query,
            f"login {login} is not a member of {roles.owner}",
            f"as an administrator: {query.as_string(connection)}",
        )


def _join_worker(connection: Connection, roles: Roles) -> None:
    """Make the owner role a member of worker, so that a deployment may end the commit of a frozen worker."""
    asked = "SELECT pg_has_role(%s, %s, 'USAGE')"
    if connection.execute(asked, [roles.owner, roles.worker]).fetchone() != (True,):
        query = sql.SQL("GRANT {} TO {}").format(sql.Identifier(roles.worker), sql.Identifier(roles.owner))
        _or_refuse(
            connection,
            query,
            f"{roles.owner} is not a member of {roles.worker}",
            f"as an administrator: {query.as_string(connection)}",
        )


def _open_database(connection: Connection, roles: Roles) -> None:
    """Let the owner create schemas in the database, and the other roles connect to it."""
    (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
    for role, right in ((roles.owner, "CREATE"), (roles.worker, "CONNECT"), (roles.reader, "CONNECT")):
        asked: Sequence[str] = (role, name, right)
        if connection.execute("SELECT has_database_privilege(%s, %s, %s)", asked).fetchone() == (True,):
            continue
        query = sql.SQL("GRANT {} ON DATABASE {} TO {}").format(
            sql.SQL(right), sql.Identifier(name), sql.Identifier(role)
        )
        refused = f"{role} has no right to {right} in database {name}"
        advice = f"as the database's owner: {query.as_string(connection)}"
        _or_refuse(connection, query, refused, advice)
        # When the login may not grant it, PostgreSQL may only warn.
        if connection.execute("SELECT has_database_privilege(%s, %s, %s)", asked).fetchone() != (True,):
            raise ConfigError(refused, hint=advice)


def _or_refuse(connection: Connection, query: sql.Composed, refused: str, advice: str) -> None:
    try:
        connection.execute(query)
    except psycopg.errors.InsufficientPrivilege as error:
        detail = error.diag.message_primary or ""
        raise ConfigError(f"{refused}: {detail}", hint=advice) from error
