"""Result tables, and what is stored of keys: open windows, state and timers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from millpy.admin.pages import decoded
from millpy.admin.queries import Admin
from millpy.admin.results import DeployedTable, RowFilter, page, result_tables
from millpy.admin.state import stored_page
from millpy.api.answers import ROWS, answer_shared, check_graph, databases_of, described, shown
from millpy.api.authentication import Caller, Viewer
from millpy.api.parameters import (
    KEY_CHARACTERS_MAX,
    LIMIT,
    TEXT,
    ComputationName,
    Cursor,
    End,
    GraphName,
    Key,
    Limit,
    Start,
    TableName,
)
from millpy.api.problems import not_found
from millpy.errors import UsageError

READABLE = """
SELECT graph || '.' || name AS name FROM millpy.result_tables
 WHERE graph = :graph AND has_table_privilege(:role, to_regclass(format('%I.%I', graph, name || '_status')), 'SELECT')
"""
TABLES = "SELECT * FROM millpy.result_tables WHERE graph = :graph ORDER BY name"
WHERE_MAX = 20
Where = Annotated[
    list[Annotated[str, Query(max_length=KEY_CHARACTERS_MAX, pattern=TEXT)]] | None,
    Query(max_length=WHERE_MAX, description="COLUMN=VALUE: only rows with this key or value. May be repeated."),
]
router = APIRouter(tags=["windows"])


def readable_tables(admin: Admin, graph: str, role: str | None) -> list[DeployedTable]:
    """Return the result tables of a graph that a role of the database may read; None for all.

    Names of tables and columns come through the login of the API: the role may have no right to the catalog.
    """
    readable = _readable(admin, graph, role)
    tables = [one for one in result_tables(admin) if one.graph == graph]
    return [one for one in tables if readable is None or f"{graph}.{one.name}" in readable]


def find_table(admin: Admin, graph: str, name: str, role: str | None) -> DeployedTable:
    """Return a result table that a role may read; None for any.

    Raises:
        ProblemError: there is none of this name.
    """
    found = [one for one in readable_tables(admin, graph, role) if one.name == name]
    if not found:
        raise not_found(f"graph {graph!r} has no result table {name!r}", f"GET /v1/graphs/{graph}/tables lists them")
    return found[0]


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Read COLUMN=VALUE, once for each column.

    Raises:
        UsageError: a word is not like this.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or name in found:
            raise UsageError(f"where={word!r} is not COLUMN=VALUE", hint="give each column once: where=device=pump-7")
        found[name] = value
    return found


@router.get("/v1/graphs/{graph}/tables", responses=described(ROWS, "Result tables"), response_class=Response)
async def list_tables(request: Request, caller: Viewer, graph: GraphName) -> Response:
    """List the result tables of a graph with their columns; with a role of the database, those that it may read."""
    role = caller.principal.database_role

    def read(admin: Admin) -> Mapping[str, object]:
        check_graph(admin, graph)
        readable = _readable(admin, graph, role)
        found = admin.ask(TABLES, graph=graph)
        rows = [row for row in found if readable is None or f"{graph}.{row['name']}" in readable]
        return {"rows": rows, "next": None}

    # Names of tables and columns come through the login of the API: the role may have no right to the catalog.
    return await answer_shared(request, caller, read, as_login=True)


@router.get("/v1/graphs/{graph}/tables/{table}/rows", responses=described(ROWS, "Rows"), response_class=Response)
async def list_rows(
    request: Request,
    caller: Viewer,
    graph: GraphName,
    table: TableName,
    where: Where = None,
    start: Start = None,
    end: End = None,
    final: Annotated[bool | None, Query(description="Only final windows, or only open ones as they stand.")] = None,
    after: Cursor = "",
    limit: Limit = LIMIT,
) -> Response:
    """List rows of a result table, the newest first, by key and time.

    A user with a role of the database sees the rows that its row-level security shows.
    """
    wanted = RowFilter(
        values=pairs(where or []), start=start or "", end=end or "", final=final, after=decoded(after), limit=limit
    )
    role = caller.principal.database_role
    own = None if role is None else await databases_of(request).reading.run(find_table, None, graph, table, role)

    def read(admin: Admin) -> str:
        return shown(page(admin, own or find_table(admin, graph, table, None), wanted))

    return await answer_shared(request, caller, read)


@router.get(
    "/v1/graphs/{graph}/computations/{computation}/open-windows",
    responses=described(ROWS, "Open windows"), response_class=Response,
)  # fmt: skip
async def list_open_windows(
    request: Request, caller: Viewer, graph: GraphName, computation: ComputationName,
    key: Key | None = None, after: Cursor = "", limit: Limit = LIMIT,
) -> Response:  # fmt: skip
    """List the windows that are not over, with the contents of their accumulators.

    Those of one `key` come the oldest first. Those of all keys come key by key, in no order of keys; a page that has
    `next` may have fewer rows than its limit, or none.
    """
    return await _stored(request, caller, "windows", graph, computation, key, after, limit)


@router.get(
    "/v1/graphs/{graph}/computations/{computation}/state",
    responses=described(ROWS, "Cells"), response_class=Response,
)  # fmt: skip
async def list_state(
    request: Request, caller: Viewer, graph: GraphName, computation: ComputationName,
    key: Key | None = None, after: Cursor = "", limit: Limit = LIMIT,
) -> Response:  # fmt: skip
    """List the cells of one key, or of all keys."""
    return await _stored(request, caller, "state", graph, computation, key, after, limit)


@router.get(
    "/v1/graphs/{graph}/computations/{computation}/timers",
    responses=described(ROWS, "Timers"), response_class=Response,
)  # fmt: skip
async def list_timers(
    request: Request, caller: Viewer, graph: GraphName, computation: ComputationName,
    key: Key | None = None, after: Cursor = "", limit: Limit = LIMIT,
) -> Response:  # fmt: skip
    """List the timers and holds that are set, the next to fire first."""
    return await _stored(request, caller, "timers", graph, computation, key, after, limit)


async def _stored(
    request: Request, caller: Caller, what: str, graph: str, computation: str, key: str | None, after: str, limit: int
) -> Response:  # fmt: skip
    cursor = decoded(after)

    def read(admin: Admin) -> str:
        check_graph(admin, graph)
        return shown(stored_page(admin, what, graph, computation, key, cursor, limit))

    return await answer_shared(request, caller, read)


def _readable(admin: Admin, graph: str, role: str | None) -> set[str] | None:
    """Return the tables that a role may read; None for all."""
    if role is None:
        return None
    return {row["name"] for row in admin.ask(READABLE, graph=graph, role=role)}
