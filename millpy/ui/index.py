"""The first page: the graphs that are deployed."""

from __future__ import annotations

from fastapi import Request, Response

from millpy.api.answers import databases_of
from millpy.api.graphs import graphs
from millpy.ui.rendering import page
from millpy.ui.routing import Visitor, page_router

router = page_router()


@router.get("/")
async def list_graphs(request: Request, caller: Visitor) -> Response:
    """List the graphs with their generations."""
    rows = await databases_of(request).reading.run(graphs, None, caller.principal.database_role)
    return page(request, caller, "index.html", rows=rows)
