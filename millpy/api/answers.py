"""Answers in JSON, and the paths that show a view page by page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from millpy.admin.json_output import json_text
from millpy.admin.pages import PagedView, RowPage, decoded, encoded, page_of
from millpy.admin.queries import Admin
from millpy.api.authentication import Caller, Viewer
from millpy.api.database import Databases
from millpy.api.parameters import LIMIT, Cursor, End, GraphName, Limit, Start, Word
from millpy.api.problems import MEDIA_TYPE, not_found

PROBLEM: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "hint": {"type": "string"},
    },
}
ROWS: Mapping[str, Any] = {
    "type": "object",
    "required": ["rows", "next"],
    "properties": {
        "rows": {"type": "array", "items": {"type": "object"}},
        "next": {"type": ["string", "null"], "description": "The cursor of the next page; null on the last one."},
    },
}
OBJECT: Mapping[str, Any] = {"type": "object"}
FRESH = {"no-cache", "no-store", "max-age=0"}
"""Words of Cache-Control (RFC 9111 section 5.2.1) with which a request asks for an answer that is not kept."""
T = TypeVar("T")
_STATUSES = {
    400: "A value that the database cannot read.",
    401: "No valid token or session.",
    403: "The role of the user, or of the database, does not suffice.",
    404: "Not found.",
    409: "Refused, and nothing was changed.",
    422: "A parameter that is missing, or out of its bounds.",
    429: "Too many failed attempts to authenticate from this address.",
    503: "The database is away or not migrated, or too many requests wait.",
}


def described(schema: Mapping[str, Any], text: str) -> dict[int | str, dict[str, Any]]:
    """Return the description of the answers of a path for OpenAPI."""
    found: dict[int | str, dict[str, Any]] = {
        status: {"description": meaning, "content": {MEDIA_TYPE: {"schema": PROBLEM}}}
        for status, meaning in _STATUSES.items()
    }
    found[200] = {"description": text, "content": {"application/json": {"schema": schema}}}
    return found


def databases_of(request: Request) -> Databases:
    """Return the databases of the app that serves a request."""
    found: Databases = request.app.state.databases
    return found


def as_json(value: object) -> Response:
    """Return an answer."""
    return Response(json_text(value, indent=0), media_type="application/json")


async def read_shared(
    request: Request,
    caller: Caller,
    call: Callable[[Admin], T],
    *,
    as_login: bool = False,
    apart: Hashable = None,
    size: Callable[[T], int] | None = None,
) -> T:
    """Read from the database for a GET; requests for the same address that wait share what is found.

    With `size`, so do later ones, as `ConnectionLane.share` says, unless they ask for a fresh answer
    (FRESH).

    Args:
        request: the request.
        caller: who sends it; the call runs under its role of the database.
        call: reads; depends on nothing but the address, that role and `apart`.
        as_login: whether it runs as the login of the API instead.
        apart: requests share only if it is equal.
        size: returns the bytes of what is found.
    """
    role = caller.principal.database_role
    wishes = {wish.strip() for wish in request.headers.get("cache-control", "").lower().split(",")}
    if wishes & FRESH:
        size = None
    key = (request.scope["path"], request.scope["query_string"], role, apart)
    return await databases_of(request).reading.share(key, call, None if as_login else role, size=size)


async def answer_shared(
    request: Request, caller: Caller, read: Callable[[Admin], object], *, as_login: bool = False
) -> Response:
    """Answer a GET with what a call reads, as JSON, and share it as `read_shared` does."""

    def text(admin: Admin) -> bytes:
        with admin.together() as connected:
            found = read(connected)
        return (found if isinstance(found, str) else json_text(found, indent=0)).encode()

    found = await read_shared(request, caller, text, as_login=as_login, size=len)
    return Response(found, media_type="application/json")


def shown(page: RowPage) -> str:
    """Return a page as JSON."""
    return json_text({"rows": page.rows, "next": encoded(page.next)}, indent=0)


def check_graph(admin: Admin, graph: str) -> None:
    """Check that a graph is deployed.

    Raises:
        ProblemError: it is not.
    """
    if not admin.ask("SELECT 1 FROM millpy.graphs WHERE graph = :graph", graph=graph):
        raise not_found(f"no graph {graph!r} is deployed", "GET /v1/graphs lists them")


def find_page(
    admin: Admin,
    view: PagedView,
    graph: str,
    cursor: Sequence[str],
    limit: int,
    *,
    words: Mapping[str, str | None] | None = None,
    start: str | None = None,
    end: str | None = None,
    **given: Any,
) -> RowPage:
    """Return a page of a view that has a column `graph`.

    Raises:
        ProblemError: the graph is not deployed.
    """
    wanted = {name: value for name, value in (words or {}).items() if value is not None}
    page = page_of(
        admin, view, wanted={"graph": graph, **wanted}, after=cursor, limit=limit,
        start=start or "", end=end or "", **given,
    )  # fmt: skip
    if not page.rows and not cursor:
        check_graph(admin, graph)
    return page


async def page_response(
    request: Request,
    caller: Caller,
    view: PagedView,
    graph: str,
    after: str,
    limit: int,
    *,
    words: Mapping[str, str | None] | None = None,
    start: str | None = None,
    end: str | None = None,
    **given: Any,
) -> Response:
    """Answer with a page of a view that has a column `graph`."""
    cursor = decoded(after)

    def read(admin: Admin) -> str:
        return shown(find_page(admin, view, graph, cursor, limit, words=words, start=start, end=end, **given))

    return await answer_shared(request, caller, read)


def add_pages(router: APIRouter, path: str, view: PagedView, text: str) -> None:
    """Add the path `/v1/graphs/{graph}/PATH`, which shows a view page by page.

    Its columns `view.equal` are parameters, and its time, if it has one, has the bounds `from` and `to`.
    """

    async def read(request: Request, caller: Caller, graph: str, after: str, limit: int, **more: Any) -> Response:
        start, end = more.pop("start", None), more.pop("end", None)
        return await page_response(request, caller, view, graph, after, limit, words=more, start=start, end=end)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("request", kind, annotation=Request),
        inspect.Parameter("caller", kind, annotation=Viewer),
        inspect.Parameter("graph", kind, annotation=GraphName),
        inspect.Parameter("after", kind, annotation=Cursor, default=""),
        inspect.Parameter("limit", kind, annotation=Limit, default=LIMIT),
        *(inspect.Parameter(name, kind, annotation=Word, default=None) for name in view.equal),
    ]
    if view.time:
        parameters += [
            inspect.Parameter("start", kind, annotation=Start, default=None),
            inspect.Parameter("end", kind, annotation=End, default=None),
        ]
    read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    name = path.replace("-", "_")
    router.add_api_route(
        f"/v1/graphs/{{graph}}/{path}", read, methods=["GET"], name=name, operation_id=f"list_{name}",
        summary=text, responses=described(ROWS, text), response_class=Response,
    )  # fmt: skip
