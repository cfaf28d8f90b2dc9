"""The view "Dead letters"."""

from __future__ import annotations

from fastapi import Request, Response

from millpy.api.parameters import GraphName
from millpy.ui.rendering import page
from millpy.ui.routing import Visitor, check_deployed, page_router

router = page_router()


@router.get("/graphs/{graph}/set-aside")
async def show_left_out(request: Request, caller: Visitor, graph: GraphName) -> Response:
    """Show the view."""
    await check_deployed(request, graph)
    return page(request, caller, "missing.html", view="set-aside", graph=graph)
