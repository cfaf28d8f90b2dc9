"""What all paths of the page share: errors as pages, the way to the login, forms, and the lanes of the database."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from millpy.admin.queries import Admin
from millpy.admin.tokens import Role
from millpy.api.answers import check_graph, databases_of
from millpy.api.authentication import Caller, Gate, bearer_of, check_role, session_of
from millpy.api.problems import ProblemError, of_error, of_validation
from millpy.api.sessions import delete_cookie
from millpy.errors import MillError
from millpy.ui.rendering import here, page

FIELDS_MAX = 1_000
CSRF_FIELD = "csrf"
OF_HTMX = "HX-Request"
T = TypeVar("T")


class PageRoute(APIRoute):
    """A path of the page: an error is a page, too, and who is unknown comes to the login."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that serves a request."""
        serve = super().get_route_handler()

        async def served(request: Request) -> Response:
            try:
                return await serve(request)
            except ProblemError as error:
                problem = error
            except MillError as error:
                problem = of_error(error)
            except RequestValidationError as error:
                problem = of_validation(error)
            if problem.status == HTTPStatus.UNAUTHORIZED:
                return to_login(request)
            return await error_page(request, problem)

        return served


def page_router() -> APIRouter:
    """Return a router for paths of the page, which the description of the API leaves out."""
    return APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=Response)


def to_login(request: Request) -> Response:
    """Send a browser to the login, which leads back."""
    back = here(request) if request.method == "GET" else "/"
    target = "/login" if back == "/" else f"/login?{urlencode({'next': back})}"
    response = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": target})
    if request.headers.get(OF_HTMX):
        response = Response(status_code=HTTPStatus.UNAUTHORIZED, headers={"HX-Redirect": target})
    if session_of(request) is not None:  # it has ended, or is another user's
        delete_cookie(request, response)
    return response


async def error_page(request: Request, problem: ProblemError) -> Response:
    """Return the page of an error."""
    caller: Caller | None
    try:
        caller = await visitor(request)
    except (ProblemError, MillError):
        caller = None
    graph = "" if problem.status == HTTPStatus.NOT_FOUND else request.path_params.get("graph", "")
    template = "fault.html" if request.headers.get(OF_HTMX) else "error.html"
    response = page(request, caller, template, graph=graph, status=problem.status, problem=problem)
    response.headers.update(problem.headers)
    return response


async def visitor(request: Request) -> Caller:
    """Return who reads a page.

    Raises:
        ProblemError: the user is unknown.
    """
    gate: Gate = request.app.state.gate
    return await gate.caller(request, bearer_of(request), session_of(request))


async def form_of(request: Request) -> dict[str, list[str]]:
    """Return the fields of a form.

    Raises:
        ProblemError: the body is not that of a form, or has too many fields.
    """
    found: dict[str, list[str]] = {}
    try:
        text = (await request.body()).decode()
        for name, value in parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX):
            found.setdefault(name, []).append(value)
    except ValueError:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "the form cannot be read") from None
    if any("\0" in value for values in found.values() for value in values):
        raise ProblemError(HTTPStatus.BAD_REQUEST, "the form has a NUL, which PostgreSQL cannot store")
    return found


class Form:
    """A form that a user has sent, with a valid CSRF token.

    Attributes:
        caller: the user.
        fields: name -> values.
    """

    def __init__(self, caller: Caller, fields: Mapping[str, list[str]]) -> None:
        self.caller = caller
        self.fields = fields

    def text(self, name: str) -> str:
        """Return the last value of a field; empty text if it is missing."""
        return self.fields.get(name, [""])[-1]

    def numbers(self, name: str) -> list[int]:
        """Return all values of a field as numbers.

        Raises:
            ProblemError: one is not a number of at most 18 digits.
        """
        values = self.fields.get(name, [])
        if not all(value.isascii() and value.isdigit() and len(value) <= 18 for value in values):
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} has to be numbers")
        return [int(value) for value in values]


async def _form(request: Request, role: Role) -> Form:
    fields = await form_of(request)
    gate: Gate = request.app.state.gate
    csrf = fields.get(CSRF_FIELD, [""])[-1]
    caller = await gate.caller(request, bearer_of(request), session_of(request), csrf)
    check_role(caller, role)
    return Form(caller, fields)


async def _viewer_form(request: Request) -> Form:
    return await _form(request, Role.VIEWER)


async def _operator_form(request: Request) -> Form:
    return await _form(request, Role.OPERATOR)


async def _administrator_form(request: Request) -> Form:
    return await _form(request, Role.ADMIN)


Visitor = Annotated[Caller, Depends(visitor)]
ViewerForm = Annotated[Form, Depends(_viewer_form)]
OperatorForm = Annotated[Form, Depends(_operator_form)]
AdministratorForm = Annotated[Form, Depends(_administrator_form)]


async def read(request: Request, caller: Caller, call: Callable[[Admin], T]) -> T:
    """Read from the database with the rights of a user."""
    return await databases_of(request).reading.run(call, caller.principal.database_role)


async def check_deployed(request: Request, graph: str) -> None:
    """Check that a graph is deployed.

    Raises:
        ProblemError: it is not.
    """
    await databases_of(request).reading.run(check_graph, None, graph=graph)


def done(request: Request, caller: Caller, text: str, back: str) -> Response:
    """Tell what an action did: a note for htmx, which then shows the view again, and else a page with a way back."""
    response = page(request, caller, "done.html", text=text, back=back, note=bool(request.headers.get(OF_HTMX)))
    response.headers["HX-Trigger"] = "refresh"
    return response
