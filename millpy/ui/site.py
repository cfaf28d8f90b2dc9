"""All paths of the page, for the app of the API."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from millpy.api.problems import not_found
from millpy.ui import (
    accounting,
    asset_files,
    event_list,
    findings,
    fleet,
    graph_view,
    index,
    key_state,
    left_out,
    login,
    windows,
    worker_list,
)
from millpy.ui.routing import Visitor, page_router

elsewhere = page_router()


@elsewhere.get("/graphs/{path:path}")
async def find_nothing(request: Request, caller: Visitor, path: str) -> Response:
    """Answer for an address that has no view."""
    raise not_found("there is no such view", "the menu has all of them")


def add_site(app: FastAPI) -> None:
    """Add the page to the app of the API."""
    for module in (
        asset_files, login, index, graph_view, windows, fleet, left_out, worker_list, key_state, event_list, accounting,
        findings,
    ):  # fmt: skip
        app.include_router(module.router)
    app.include_router(elsewhere)
