"""The view of what is stored of a key: cells, timers and open windows, and the panes of its windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from millpy.admin.pages import RowPage, decoded, encoded
from millpy.admin.queries import Admin, Row
from millpy.admin.results import DeployedTable, RowFilter, panes
from millpy.admin.state import stored_page
from millpy.api.parameters import Cursor, GraphName, Key, Word
from millpy.errors import SlowQueryError, UsageError
from millpy.ui.rendering import shared_page
from millpy.ui.routing import Visitor, page_router
from millpy.ui.tables import tables_of, values_of_key
from millpy.ui.views import link

COMPUTATIONS = """
SELECT DISTINCT computation FROM millpy.watermarks WHERE graph = :graph AND computation IS NOT NULL
 ORDER BY computation LIMIT 1000
"""
EACH_MAX = 50
"""Rows of each list on the screen."""
EACH_S_MAX = 0.5
"""Of the statement of a list. One for all keys may read all that is stored."""
LISTS = {
    "state": ("Cells", (("key", "key"), ("cell", "cell"), ("subkey", "entry"), ("value", "value"))),
    "timers": (
        "Timers and holds",
        (("key", "key"), ("timer", "timer"), ("time_domain", "time"), ("fires_at", "fires at"), ("value", "value")),
    ),
    "windows": (
        "Open windows",
        (
            ("key", "key"), ("window_start", "from"), ("window_end", "to"), ("expires_at", "kept until"),
            ("value", "accumulators"),
        ),
    ),
}  # fmt: skip
router = page_router()


@router.get("/graphs/{graph}/state")
async def show_key_state(
    request: Request,
    caller: Visitor,
    graph: GraphName,
    computation: Word = None,
    key: Key | None = None,
    state: Cursor = "",
    timers: Cursor = "",
    windows: Cursor = "",
) -> Response:
    """Show what a computation stores of one key, or of all."""
    tables = await tables_of(request, caller, graph)
    cursors = {"state": state, "timers": timers, "windows": windows}

    def find(admin: Admin) -> dict[str, Any]:
        names = [row["computation"] for row in admin.ask(COMPUTATIONS, graph=graph)]
        chosen = computation or (names[0] if names else "")
        lists = {
            what: _stored(admin, what, graph, chosen, key or None, decoded(after))
            for what, after in cursors.items() if chosen
        }  # fmt: skip
        own = [one for one in tables if key and one.computation == chosen and one.keys]
        address = {"computation": chosen, "key": key}

        def next_cursor(what: str, cursor: list[str] | None) -> str:
            return "" if cursor is None else link("state", graph, **address, **{what: encoded(cursor)})

        def where_of(table: DeployedTable) -> list[str]:
            return [f"{name}={value}" for name, value in (values_of_key(key or "", table) or {}).items()]

        return {
            "names": names, "chosen": chosen, "key": key or "", "lists": lists, "titles": LISTS,
            "history": [(one, _panes(admin, one, key or "")) for one in own], "address": address, "cursors": cursors,
            "next_cursor": next_cursor, "pairs_of": lambda values: [(name, name) for name in values],
            "where_of": where_of,
        }  # fmt: skip

    return await shared_page(request, caller, find, "state.html", view="state", graph=graph, apart=repr(tables))


def _stored(
    admin: Admin, what: str, graph: str, computation: str, key: str | None, after: Sequence[str]
) -> RowPage | None:
    """Return a list of what is stored; None if it takes too long to read."""
    try:
        return stored_page(admin.limit_to(EACH_S_MAX), what, graph, computation, key, after, EACH_MAX)
    except SlowQueryError:
        return None


def _panes(admin: Admin, table: DeployedTable, key: str) -> list[Row]:
    """Return the newest panes of a key, which may be written as text or as JSON."""
    values = values_of_key(key, table)
    if values is None:
        return []
    try:
        return panes(admin, table, RowFilter(values=values, limit=EACH_MAX))
    except UsageError:
        return []  # the text is no key of this table
