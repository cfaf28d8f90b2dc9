"""Make pages from templates. What a template writes is escaped; a name that it does not have is an error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from millpy.admin.queries import Admin
from millpy.admin.tokens import Role
from millpy.api.answers import read_shared
from millpy.api.authentication import Caller, csrf_of
from millpy.clock import SystemClock, random_id
from millpy.model.time import to_datetime
from millpy.ui.asset_files import asset
from millpy.ui.values import FILTERS, safe, shown
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
    csrf = csrf_of(caller.session) if caller is not None and caller.session else ""
    user = None if caller is None else caller.principal.name
    text = _text(caller, template, view=view, graph=graph, here=here(request), user=user, csrf=csrf, **context)
    return Response(text, int(status), media_type=MEDIA_TYPE)


async def shared_page(
    request: Request,
    caller: Caller,
    find: Callable[[Admin], Mapping[str, Any]],
    template: str,
    *,
    view: str,
    graph: str,
    apart: Hashable = None,
) -> Response:
    """Return a page that users share whose requests for the same address wait, if it differs in their names only.

    It is read and made once, in a thread of the database's lane, by `read_shared`: under the role of the database and
    for the role of the user, and apart for users with a session, whose pages have forms. Marks stand for the name and
    for the CSRF token, and are replaced for each user. They are random, so that no text of the database has one.

    Args:
        request: the request.
        caller: who sends it.
        find: reads what the template shows; depends on nothing but the address, the role of the database and `apart`.
        template: the name of the template, which extends `base.html`.
        view: the view's name in VIEWS.
        graph: the graph.
        apart: what was read for this request before; requests share only if it is equal.
    """
    address, has_session = here(request), bool(caller.session)

    def made(admin: Admin) -> tuple[bytes, str, str]:
        with admin.together() as connected:
            context = find(connected)
        user, csrf = random_id().hex, random_id().hex if has_session else ""
        text = _text(caller, template, view=view, graph=graph, here=address, user=user, csrf=csrf, **context)
        return text.encode(), user, csrf

    own = (caller.principal.role, has_session, apart)
    found, user, csrf = await read_shared(request, caller, made, apart=own, size=lambda answer: len(answer[0]))
    found = found.replace(shown(user).encode(), shown(caller.principal.name).encode())
    if csrf:
        found = found.replace(csrf.encode(), csrf_of(caller.session).encode())
    return Response(found, media_type=MEDIA_TYPE)


def _text(caller: Caller | None, template: str, *, csrf: str, **context: Any) -> str:
    role = Role.VIEWER if caller is None else caller.principal.role
    return TEMPLATES.get_template(template).render(
        role=role.name.lower(),
        follows=caller is not None and caller.principal.database_role is None,
        may_act=bool(csrf) and role >= Role.OPERATOR,
        may_switch=bool(csrf) and role >= Role.ADMIN,
        csrf=csrf,
        now=to_datetime(SystemClock().now_us()).replace(microsecond=0),
        **context,
    )


def here(request: Request) -> str:
    """Return the address of a request, without its host."""
    query = urlencode(request.query_params.multi_items())
    return quote(request.scope["path"]) + (f"?{query}" if query else "")
