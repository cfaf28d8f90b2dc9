"""The view of the events: what happened, each as a sentence."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from millpy.admin.pages import decoded
from millpy.admin.queries import Admin
from millpy.api.events import find_events
from millpy.api.parameters import Cursor, GraphName
from millpy.ui.parameters import Choice, FromTime, ToTime
from millpy.ui.rendering import shared_page
from millpy.ui.routing import Visitor, page_router
from millpy.ui.views import ROWS_MAX

router = page_router()


@router.get("/graphs/{graph}/events")
async def show_events(
    request: Request,
    caller: Visitor,
    graph: GraphName,
    kind: Choice = "",
    start: FromTime = "",
    end: ToTime = "",
    after: Cursor = "",
) -> Response:
    """Show the events of a graph, the newest first."""
    cursor = decoded(after)

    def find(admin: Admin) -> dict[str, Any]:
        found = find_events(admin, graph, cursor, ROWS_MAX, kind=kind or None, start=start, end=end)
        return {"rows": found.rows, "next": found.next, "kind": kind, "start": start, "end": end, "after": after}

    return await shared_page(request, caller, find, "events.html", view="events", graph=graph)
