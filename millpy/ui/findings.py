"""The view "Doctor"."""

from __future__ import annotations

from fastapi import Request, Response

from millpy.api.parameters import Word
from millpy.ui.rendering import page
from millpy.ui.routing import Visitor, page_router

router = page_router()


@router.get("/doctor")
async def show_findings(request: Request, caller: Visitor, graph: Word = None) -> Response:
    """Show the view."""
    return page(request, caller, "missing.html", view="doctor", graph=graph or "")
