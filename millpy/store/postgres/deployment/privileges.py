"""Rights on result tables: read from one generation's tables, and given to those of another.

Users grant these rights themselves. A table that takes the place of another one must not show any role more columns or
rows than that one did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psycopg
from psycopg import sql

from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.roles import POLICY
from millpy.store.postgres.statements import statement


@dataclass(frozen=True, slots=True)
class Privilege:
    """One right of one role, by its SQL name, on a relation or on one of its columns."""

    role: str
    privilege: str
    grantable: bool
    column: str = ""

    def __str__(self) -> str:
        on = f" column {self.column!r}" if self.column else ""
        return f"{self.role} may {self.privilege}{on}{' and pass it on' if self.grantable else ''}"


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy of row-level security, with expressions as the server prints them."""

    name: str
    permissive: str
    roles: tuple[str, ...]
    command: str
    using: str | None
    check: str | None

    def __str__(self) -> str:
        return f"policy {self.name!r} ({self.command} for {', '.join(self.roles)}: {self.using or self.check})"


@dataclass(slots=True)
class Rights:
    """All rights on one relation, except its owner's.

    Attributes:
        guarded: whether row-level security is enabled.
        forced: whether it applies to the owner, too.
    """

    grants: set[Privilege] = field(default_factory=set)
    guarded: bool = False
    forced: bool = False
    policies: set[Policy] = field(default_factory=set)

    def differences(self, other: Rights) -> Iterator[str]:
        """Describe how the rights on a new relation differ."""
        for word, mine, its in (("enabled", self.guarded, other.guarded), ("forced", self.forced, other.forced)):
            if mine != its:
                yield f"row-level security is {'' if its else 'not '}{word} (new)"
        for what in (*other.grants - self.grants, *other.policies - self.policies):
            yield f"{what} (new only)"
        for what in (*self.grants - other.grants, *self.policies - other.policies):
            yield f"{what} (current only)"

    def on_columns(self, columns: Sequence[str]) -> Rights:
        """Return the rights without those on columns other than `columns`."""
        grants = {grant for grant in self.grants if not grant.column or grant.column in columns}
        return Rights(grants, self.guarded, self.forced, self.policies)


async def read_rights(connection: Connection, schema: str, relations: Sequence[str]) -> dict[str, Rights]:
    """Read the rights on relations of a schema, by relation."""
    named = {"schema": schema, "names": list(relations)}
    found: dict[str, Rights] = {}
    for relation, guarded, forced in await all_rows(connection, statement("read_guards"), named):
        found[relation] = Rights(guarded=guarded, forced=forced)
    for relation, *rest in await all_rows(connection, statement("read_grants"), named):
        found[relation].grants.add(_grant(*rest))
    for rights in found.values():  # two roles may have granted the same right, one of them with grant option
        rights.grants -= {replace(grant, grantable=False) for grant in rights.grants if grant.grantable}
    for relation, name, permissive, roles, command, using, check in await all_rows(
        connection, statement("read_policies"), named
    ):
        if name != POLICY:
            found[relation].policies.add(Policy(name, permissive, tuple(roles), command, using, check))
    return found


async def copy_schema_grants(connection: Connection, source: str, target: str) -> None:
    """Replace the rights on schema `target` by those on schema `source`."""
    before, after = [
        {_grant(*row) for row in await all_rows(connection, statement("read_schema_grants"), {"schema": schema})}
        for schema in (target, source)
    ]
    await _regrant(connection, sql.SQL("SCHEMA {}").format(sql.Identifier(target)), before, after)


async def give_rights(
    connection: Connection, schema: str, relation: str, before: Rights, wanted: Rights, *, is_table: bool
) -> list[str]:
    """Change the rights on a relation.

    Args:
        connection: in a transaction of the owner.
        schema: the relation's schema.
        relation: a table or a view.
        before: its present rights.
        wanted: the rights that it gets, on its own columns only.
        is_table: false for a view, which has no policies.

    Returns:
        Descriptions of policies that could not be created; a missing policy never shows more than was wanted.
    """
    named = sql.Identifier(schema, relation)
    await _regrant(connection, sql.SQL("TABLE {}").format(named), before.grants, wanted.grants)
    if not is_table:
        return []
    for enabled, words in ((wanted.guarded, "ENABLE"), (not wanted.guarded, "DISABLE")):
        if enabled:
            await connection.execute(sql.SQL("ALTER TABLE {} {} ROW LEVEL SECURITY").format(named, sql.SQL(words)))
    forced = sql.SQL("FORCE" if wanted.forced else "NO FORCE")
    await connection.execute(sql.SQL("ALTER TABLE {} {} ROW LEVEL SECURITY").format(named, forced))
    for policy in sorted(before.policies - wanted.policies, key=str):
        await connection.execute(sql.SQL("DROP POLICY {} ON {}").format(sql.Identifier(policy.name), named))
    missing = []
    for policy in sorted(wanted.policies - before.policies, key=str):
        try:
            async with connection.transaction():  # a savepoint
                await connection.execute(_create_policy(named, policy))
        except psycopg.ProgrammingError as error:
            missing.append(f"cannot create {policy} on {relation!r}: {error.diag.message_primary}")
    return missing


def differences(before: Mapping[str, Rights], after: Mapping[str, Rights]) -> list[str]:
    """Describe how rights differ on the relations that both sides have."""
    return [
        f"{relation}: {words}"
        for relation in sorted(before.keys() & after.keys())
        for words in before[relation].differences(after[relation])
    ]


def _grant(role: str, everybody: bool, privilege: str, grantable: bool, column: str = "") -> Privilege:
    return Privilege("PUBLIC" if everybody else role, privilege, grantable, column)


async def _regrant(connection: Connection, on: sql.Composed, before: set[Privilege], wanted: set[Privilege]) -> None:
    if before == wanted:
        return
    for role in sorted({grant.role for grant in before}):
        await connection.execute(sql.SQL("REVOKE ALL ON {} FROM {} CASCADE").format(on, sql.SQL(role)))
    for grant in sorted(wanted, key=str):
        column = sql.SQL(" ({})").format(sql.Identifier(grant.column)) if grant.column else sql.SQL("")
        option = sql.SQL(" WITH GRANT OPTION" if grant.grantable else "")
        query = sql.SQL("GRANT {}{} ON {} TO {}{}")
        await connection.execute(query.format(sql.SQL(grant.privilege), column, on, sql.SQL(grant.role), option))


def _create_policy(named: sql.Identifier, policy: Policy) -> sql.Composed:
    roles = [sql.SQL("PUBLIC") if role == "public" else sql.Identifier(role) for role in policy.roles]
    query = sql.SQL("CREATE POLICY {} ON {} AS {} FOR {} TO {}").format(
        sql.Identifier(policy.name),
        named,
        sql.SQL(policy.permissive),
        sql.SQL(policy.command),
        sql.SQL(", ").join(roles),
    )
    for word, expression in (("USING", policy.using), ("WITH CHECK", policy.check)):
        if expression is not None:
            query += sql.SQL(" {} ({})").format(sql.SQL(word), sql.SQL(expression))
    return query
