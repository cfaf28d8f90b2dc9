"""The view of the events: what happened, each as a sentence."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from millpy.admin.pages import decoded
from millpy.api.answers import read_shared
from millpy.api.events import find_events
from millpy.api.parameters import Cursor, GraphName
from millpy.ui.parameters import Choice, FromTime, ToTime
from millpy.ui.rendering import page
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
    find = partial(
        find_events, graph=graph, cursor=decoded(after), limit=ROWS_MAX, kind=kind or None, start=start, end=end
    )
    found = await read_shared(request, caller, find)
    return page(
        request, caller, "events.html", view="events", graph=graph, rows=found.rows, next=found.next, kind=kind,
        start=start, end=end, after=after,
    )  # fmt: skip
