"""Generations of a graph: several side by side, the switch between them, and dropping one.

Every generation is a separate graph with its own state, positions, result tables and workers. The current generation
has the graph's name; the others are called NAME_GENERATION. A switch gives the name, and with it the schema of the
result tables, to another generation, in one transaction:

    1. It locks the headers of both, which waits for the commits in flight, and raises both versions. From COMMIT on,
       the fence refuses every worker that knows the old names (I2); the worker looks up its graph again and continues.
    2. The tables change their schemas, and the graphs their names.

So a row of one generation never reaches a table of another, and readers see all tables of one generation or all of the
other. A switch changes no stored data, so the way back is another switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import psycopg
from psycopg import sql

from millpy.errors import GraphError, TransientError, UsageError
from millpy.model.deployment import GraphSpec, generation_name, permanent_name
from millpy.model.time import INSTANT_MIN, Instant
from millpy.model.versions import refuse_older
from millpy.store.postgres.arrays import Jsonbs, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.ddl import check_free, drop_tables, forget_intervals, with_history, with_views
from millpy.store.postgres.deployment.live_changes import LOCK_S, limit_lock_wait, lock_headers
from millpy.store.postgres.deployment.privileges import (
    Rights,
    copy_schema_grants,
    differences,
    give_rights,
    read_rights,
)
from millpy.store.postgres.statements import statement

RightsOf = Literal["current", "new"]
DIFFERENCES_SAID_MAX = 5


@dataclass(frozen=True, slots=True)
class Generation:
    """A deployed generation.

    Attributes:
        name: its present name: the graph's own name for the current generation.
        watermark: the lowest low watermark of its intervals.
        workers: the number of its live workers.
    """

    graph_id: int
    name: str
    generation: int
    version: int
    watermark: Instant
    workers: int


@dataclass(frozen=True, slots=True)
class SwitchResult:
    """The result of a switch. `left` describes what stays with the old generation: users' objects, and messages."""

    before: Generation
    after: Generation
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropResult:
    """The result of a drop: the result tables, and the numbers of unsettled dead letters and late records.

    Attributes:
        graph: its name.
        undelivered: the number of messages of its sinks that were not delivered.
        permanent_name: its name at brokers.
        secret: the secret from which its names at brokers are derived.
        sources: (stream, source partition, kind of the source) of each partition that it read.
    """

    graph: str
    permanent_name: str
    tables: tuple[str, ...]
    dead_letters: int
    late_records: int
    undelivered: int
    sources: tuple[tuple[str, str, str], ...]
    secret: str = field(repr=False)


async def read_generations(connection: Connection, family: str) -> list[Generation]:
    """Read all generations of a graph, oldest first."""
    return [Generation(*row) for row in await all_rows(connection, statement("read_generations"), {"family": family})]


async def name_of_new(connection: Connection, spec: GraphSpec) -> str:
    """Return the name of a generation that is not deployed yet.

    Raises:
        GraphVersionError: a newer generation is deployed, and this one is gone.
        GraphError: another graph has the name.
    """
    known = await read_generations(connection, spec.name)
    refuse_older(spec, known[-1].generation if known else 0)
    names = [spec.name]
    if spec.generation > 1:
        names += [generation_name(spec.name, n) for n in (*(g.generation for g in known), spec.generation)]
    claimed = await all_rows(connection, statement("find_claimed_names"), {"family": spec.name, "names": names})
    if claimed:
        raise GraphError(
            f"{claimed[0][0]!r} is the name of another graph, or of a generation of one",
            hint="give this graph another name, or this generation another number",
        )
    return generation_name(spec.name, spec.generation) if known else spec.name


async def begin_beside(connection: Connection, spec: GraphSpec, name: str) -> tuple[str, ...]:
    """Give the tables of a new generation the rights of the current one's. Return notes for the operator."""
    said = [f"generation {spec.generation} is new, beside the current one; its result tables are in schema {name}"]
    tables = [name for table in spec.tables for name in with_history(table)]
    said += await _copy_rights(connection, spec.name, name, tables)
    return tuple(said)


async def switch(
    connection: Connection, family: str, generation: int, *, behind_us_max: int | None, rights: RightsOf | None
) -> SwitchResult | None:
    """Make a generation the current one, in the caller's transaction. Return None when it already is.

    Args:
        connection: in a transaction of the owner.
        family: the graph's name.
        generation: number of the generation.
        behind_us_max: how far its watermark may be behind the current one's, in µs; None for any distance, and for one
            that has not all rows yet that it is to get.
        rights: whose rights the tables get; None requires that both have the same.

    Raises:
        UsageError: the graph, or the generation, does not exist.
        GraphError: the generation is too far behind, or lacks rows; the rights differ and `rights` is None; or another
            object has a table's name.
    """
    await connection.execute(statement("lock_deployment"), {"name": family})
    known = {found.generation: found for found in await read_generations(connection, family)}
    if not known:
        raise await _no_family(connection, family, generation)
    after = known.get(generation)
    if after is None:
        raise UsageError(f"graph {family!r} has no generation {generation}", hint=_listed(family, list(known.values())))
    before = next(found for found in known.values() if found.name == family)
    if after == before:
        return None
    if behind_us_max is not None:
        _check_watermarks(before, after, behind_us_max)
        await _check_copied(connection, after)
    beside = generation_name(family, before.generation)
    for graph in sorted((before, after), key=lambda g: g.graph_id):
        await lock_headers(connection, graph.graph_id)
        await connection.execute(statement("fence_graph"), {"graph_id": graph.graph_id})
    await limit_lock_wait(connection, LOCK_S)
    tables = {found: await _tables_of(connection, found) for found in (before, after)}
    await _settle_rights(connection, family, after.name, tables[after], rights)
    left = await _left_behind(connection, family, tables[before], after.name, tables[after])
    *_, undelivered = (await all_rows(connection, statement("count_open_records"), {"graph_id": before.graph_id}))[0]
    if undelivered:
        left.append(f"{undelivered} messages of its sinks are not delivered: its workers deliver them")
    await _move(connection, before, family, beside, tables[before], lacking=True)
    if tables[before]:
        await copy_schema_grants(connection, family, beside)
    await _move(connection, after, after.name, family, tables[after])
    if tables[after] and not tables[before]:
        await copy_schema_grants(connection, after.name, family)
    await _drop_if_empty(connection, after.name)
    ((actor,),) = await all_rows(connection, statement("read_actor"), {})
    detail = msgspec.json.encode({"from": before.generation, "to": after.generation, "by": actor})
    for graph in (before, after):
        await _tell(connection, graph.graph_id, "switched", detail)
    return SwitchResult(before, after, tuple(left))


async def drop(connection: Connection, name: str) -> DropResult:
    """Delete a graph, or one generation of it, with its data. Runs in the caller's transaction, as the owner.

    Raises:
        UsageError: the graph does not exist.
        GraphError: workers run it; it is the current one of several generations; or users' views read its tables.
    """
    family = await all_rows(connection, statement("read_family"), {"name": name})
    if not family:
        raise UsageError(f"no graph {name!r} is deployed", hint="`millpy graphs` lists the deployed graphs")
    await connection.execute(statement("lock_deployment"), {"name": family[0][0]})
    await connection.execute(statement("hold_graph"), {"name": name})  # from here on no worker can register
    known = await read_generations(connection, family[0][0])
    dropped = next((found for found in known if found.name == name), None)
    if dropped is None:
        raise TransientError(f"graph {name!r} has just been switched or dropped", hint="check with `millpy graphs`")
    if name == family[0][0] and len(known) > 1:
        raise GraphError(
            f"cannot drop generation {dropped.generation}: it is the current one of graph {name!r}",
            hint=f"first make another one current ({_listed(name, known)}), or drop the others",
        )
    ids = {"graph_id": dropped.graph_id}
    if dropped.workers:
        raise GraphError(
            f"cannot drop graph {name!r}: live workers run it: {dropped.workers}",
            hint="stop them; `millpy status` lists them",
        )
    await lock_headers(connection, dropped.graph_id)
    await limit_lock_wait(connection, LOCK_S)
    tables = await _tables_of(connection, dropped)
    dead_letters, late_records, waiting = (await all_rows(connection, statement("count_open_records"), ids))[0]
    sources = await all_rows(connection, statement("read_partitions"), ids)
    (secret,) = (await all_rows(connection, statement("read_secret"), ids))[0]
    await drop_tables(connection, name, tables)
    await _drop_if_empty(connection, name)
    intervals = [row[0] for row in await all_rows(connection, statement("read_intervals"), ids)]
    await forget_intervals(connection, intervals)
    await connection.execute(statement("forget_graph"), ids)
    known_as = permanent_name(family[0][0], dropped.generation)
    return DropResult(name, known_as, tuple(tables), dead_letters, late_records, waiting, tuple(sources), secret)


def _check_watermarks(before: Generation, after: Generation, behind_us_max: int) -> None:
    """Raise GraphError for a generation that has not caught up: its tables would show less than the current ones."""
    hint = "wait until it has caught up (see `millpy watermarks`), or switch with --anyway"
    if after.watermark == INSTANT_MIN < before.watermark:
        raise GraphError(f"generation {after.generation} has no watermark yet", hint=hint)
    behind_us = before.watermark - after.watermark
    if behind_us > behind_us_max:
        raise GraphError(
            f"generation {after.generation} is {behind_us / 1_000_000:.0f} s behind generation {before.generation}",
            hint=hint,
        )


async def _check_copied(connection: Connection, after: Generation) -> None:
    """Raise GraphError while rows of finished windows are still to be copied to a generation."""
    left = await all_rows(connection, statement("read_copies_left"), {"graph_id": after.graph_id})
    if left:
        raise GraphError(
            f"generation {after.generation} has not got all rows of {', '.join(row[0] for row in left)} yet",
            hint="its copy has not ended: run `millpy deploy FILE --copy-results` again, or switch with --anyway",
        )


def _listed(family: str, known: Sequence[Generation]) -> str:
    numbers = [f"{g.generation}{' (current)' if g.name == family else ''}" for g in known]
    return f"there are: {', '.join(numbers)}"


async def _no_family(connection: Connection, name: str, generation: int) -> UsageError:
    """Return the error for an unknown graph. A switch takes a graph's name; operators may pass a generation's."""
    found = await all_rows(connection, statement("read_family"), {"name": name})
    if found:
        family = found[0][0]
        return UsageError(
            f"{name!r} is a generation of graph {family!r}, not its name", hint=f"millpy switch {family} {generation}"
        )
    return UsageError(f"no graph {name!r} is deployed", hint="`millpy graphs` lists the deployed graphs")


async def _tables_of(connection: Connection, graph: Generation) -> list[str]:
    rows = await all_rows(connection, statement("read_table_names"), {"graph_id": graph.graph_id})
    return [row[0] for row in rows]


async def _both_rights(
    connection: Connection, current: str, new: str, tables: Sequence[str]
) -> tuple[dict[str, Rights], dict[str, Rights]]:
    """Read the rights of the current and of the new generation, on the tables and columns of the new one."""
    relations = with_views(tables)
    theirs = await read_rights(connection, current, relations)
    ours = await read_rights(connection, new, relations)
    for relation, rights in theirs.items():
        parameters = {"schema": new, "relation": relation}
        columns = [row[0] for row in await all_rows(connection, statement("read_columns"), parameters)]
        theirs[relation] = rights.on_columns(columns)
    return theirs, ours


async def _copy_rights(connection: Connection, current: str, new: str, tables: Sequence[str]) -> list[str]:
    theirs, ours = await _both_rights(connection, current, new, tables)
    if not ours:
        return []
    if await all_rows(connection, statement("find_tables"), {"name": current}):  # else it may have no schema
        await copy_schema_grants(connection, current, new)
    missing = []
    for relation in sorted(theirs.keys() & ours.keys()):
        is_table = relation in tables
        wanted = theirs[relation]
        missing += await give_rights(connection, new, relation, ours[relation], wanted, is_table=is_table)
    return missing


async def _settle_rights(
    connection: Connection, current: str, new: str, tables: Sequence[str], rights: RightsOf | None
) -> None:
    if rights == "current":
        missing = await _copy_rights(connection, current, new, tables)
        if missing:
            raise GraphError(_some(missing), hint=f"create it on the table in schema {new}, and use --rights new")
    elif rights is None:
        found = differences(*await _both_rights(connection, current, new, tables))
        if found:
            raise GraphError(
                f"rights differ between the tables in schemas {current} (current) and {new} (new): {_some(found)}",
                hint="--rights current copies those of the current tables, --rights new keeps those of the new ones",
            )


def _some(words: Sequence[str]) -> str:
    more = len(words) - DIFFERENCES_SAID_MAX
    return "; ".join([*words[:DIFFERENCES_SAID_MAX], *([f"and {more} more"] if more > 0 else [])])


async def _left_behind(
    connection: Connection, current: str, tables: Sequence[str], new: str, new_tables: Sequence[str]
) -> list[str]:
    """Describe the users' objects that stay with the old tables, and the tables that only the old generation has."""
    found = [f"table {table} exists only in the old generation" for table in tables if table not in new_tables]
    old = {"schema": current, "names": with_views(tables)}
    found += [f"view {row[0]} still reads it" for row in await all_rows(connection, statement("find_readers"), old)]
    there = await all_rows(connection, statement("find_extras"), {"schema": new, "names": list(new_tables)})
    for row in await all_rows(connection, statement("find_extras"), old):
        if row not in there:
            table, what, name = row
            found.append(f"{what} {name} of table {table} stays with it")
    return found


async def _move(
    connection: Connection, graph: Generation, source: str, target: str, tables: Sequence[str], *, lacking: bool = False
) -> None:
    """Rename a graph, and move its tables into the schema of that name. `lacking` permits tables to be missing."""
    if tables:
        await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(target)))
        await check_free(connection, target, tables)
    await connection.execute(statement("rename_graph"), {"graph_id": graph.graph_id, "name": target})
    for table in tables:
        for kind, relation in (("TABLE", table), ("VIEW", f"{table}_status"), ("VIEW", f"{table}_live")):
            query = sql.SQL("ALTER {} {}{} SET SCHEMA {}")
            gone = sql.SQL("IF EXISTS " if lacking or kind == "VIEW" else "")  # not each table has both
            await connection.execute(
                query.format(sql.SQL(kind), gone, sql.Identifier(source, relation), sql.Identifier(target))
            )


async def _drop_if_empty(connection: Connection, schema: str) -> None:
    """Drop a graph's schema unless it contains users' objects or belongs to a user."""
    try:
        async with connection.transaction():  # a savepoint
            await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} RESTRICT").format(sql.Identifier(schema)))
    except (psycopg.errors.DependentObjectsStillExist, psycopg.errors.InsufficientPrivilege):
        pass


async def _tell(connection: Connection, graph_id: int, kind: str, detail: bytes) -> None:
    events: dict[str, Any] = {"graph_id": graph_id, "kinds": Texts([kind]), "details": Jsonbs([detail])}
    await connection.execute(statement("append_events"), events)
