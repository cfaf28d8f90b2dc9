"""The view of the accounting: the sums of every source partition, subscription and result table, and the verdict.

The pattern of all views: the functions of the API read, a template shows, the address has the state.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Request, Response

from millpy.admin.pages import decoded
from millpy.admin.queries import Admin
from millpy.api.answers import find_page
from millpy.api.live import ACCOUNTS
from millpy.api.parameters import Cursor, GraphName, Word
from millpy.api.workers import VIEWS
from millpy.ui.rendering import shared_page
from millpy.ui.routing import Visitor, page_router
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
    cursor, words = decoded(after), {"stream": stream or None, "balanced": balanced or None}

    def find(admin: Admin) -> dict[str, Any]:
        found = find_page(admin, VIEWS["accounting"][0], graph, cursor, ROWS_MAX, words=words)
        counts = [(row["accounts"], row["unbalanced"]) for row in admin.ask(ACCOUNTS) if row["graph"] == graph]
        accounts, unbalanced = counts[0] if counts else (0, 0)
        return {
            "rows": found.rows, "next": found.next, "accounts": accounts, "unbalanced": unbalanced, "counts": COUNTS,
            "stream": stream or "", "balanced": balanced, "after": after,
        }  # fmt: skip

    return await shared_page(request, caller, find, "accounting.html", view="accounting", graph=graph)
