"""Make pages from templates. What a template writes is escaped; a name that it does not have is an error."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from millpy.admin.tokens import Role
from millpy.api.authentication import Caller, csrf_of
from millpy.clock import SystemClock
from millpy.model.time import to_datetime
from millpy.ui.asset_files import asset
from millpy.ui.values import FILTERS, safe
from millpy.ui.views import VIEWS, link, next_link

MEDIA_TYPE = "text/html"
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=safe,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
TEMPLATES.filters.update(FILTERS)
TEMPLATES.globals.update(asset=asset, link=link, next_link=next_link, views=VIEWS)


def page(
    request: Request,
    caller: Caller | None,
    template: str,
    *,
    view: str = "",
    graph: str = "",
    status: HTTPStatus = HTTPStatus.OK,
    **context: Any,
) -> Response:
    """Return a page.

    Args:
        request: the request.
        caller: who sends it; None before a login.
        template: the name of the template, which extends `base.html`.
        view: the view's name in VIEWS; empty for none.
        graph: the graph; empty for none.
        status: the status of HTTP.
        context: what else the template shows.
    """
    role = Role.VIEWER if caller is None else caller.principal.role
    session = "" if caller is None else caller.session
    text = TEMPLATES.get_template(template).render(
        view=view,
        graph=graph,
        here=here(request),
        user=None if caller is None else caller.principal.name,
        role=role.name.lower(),
        follows=caller is not None and caller.principal.database_role is None,
        may_act=bool(session) and role >= Role.OPERATOR,
        may_switch=bool(session) and role >= Role.ADMIN,
        csrf=csrf_of(session) if session else "",
        now=to_datetime(SystemClock().now_us()).replace(microsecond=0),
        **context,
    )
    return Response(text, int(status), media_type=MEDIA_TYPE)


def here(request: Request) -> str:
    """Return the address of a request, without its host."""
    query = urlencode(request.query_params.multi_items())
    return quote(request.scope["path"]) + (f"?{query}" if query else "")
