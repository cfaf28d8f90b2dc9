"""The view of the accounting: the sums of every source partition, subscription and result table, and the verdict.

The pattern of all views: the functions of the API read, a template shows, the address has the state.
"""

from __future__ import annotations

from typing import Literal

from fastapi import Request, Response

from millpy.admin.queries import Admin
from millpy.api.live import ACCOUNTS
from millpy.api.parameters import Cursor, GraphName, Word
from millpy.api.workers import VIEWS
from millpy.ui.rendering import page
from millpy.ui.routing import Visitor, page_router, read, read_page
from millpy.ui.views import ROWS_MAX

COUNTS = (
    "injected", "accepted", "duplicate", "dead_lettered", "produced", "added", "filtered", "consumed", "late", "parked",
    "pending",
)  # fmt: skip
router = page_router()


@router.get("/graphs/{graph}/accounting")
async def show_accounting(
    request: Request,
    caller: Visitor,
    graph: GraphName,
    stream: Word = None,
    balanced: Literal["true", "false", ""] = "",
    after: Cursor = "",
) -> Response:
    """Show the accounts of a graph."""
    words = {"stream": stream or None, "balanced": balanced or None}
    found = await read_page(request, caller, VIEWS["accounting"][0], graph, after, ROWS_MAX, words=words)

    def count(admin: Admin) -> tuple[int, int]:
        rows = [row for row in admin.ask(ACCOUNTS) if row["graph"] == graph]
        return (rows[0]["accounts"], rows[0]["unbalanced"]) if rows else (0, 0)

    accounts, unbalanced = await read(request, caller, count)
    return page(
        request, caller, "accounting.html", view="accounting", graph=graph, rows=found.rows, next=found.next,
        accounts=accounts, unbalanced=unbalanced, counts=COUNTS, stream=stream or "", balanced=balanced, after=after,
    )  # fmt: skip
