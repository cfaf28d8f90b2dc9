"""Log in with a token, and out.

The form has a token of its own, derived from a cookie, so that a page of another site cannot log a browser in as
someone else: its request comes without this cookie.
"""

from __future__ import annotations

import hmac
import secrets
from http import HTTPStatus
from typing import Annotated

from fastapi import Query, Request, Response

from millpy.api.authentication import SECRET_CHARACTERS_MAX, Gate, csrf_of
from millpy.api.parameters import KEY_CHARACTERS_MAX, TEXT
from millpy.api.problems import ProblemError
from millpy.api.sessions import forget_session, make_session, set_cookie
from millpy.ui.rendering import page
from millpy.ui.routing import CSRF_FIELD, ViewerForm, form_of, page_router

LOGIN_COOKIE = "millpy_login"
LOGIN_S = 3_600
router = page_router()


@router.get("/login")
async def show_login(
    request: Request, next_: Annotated[str, Query(alias="next", max_length=KEY_CHARACTERS_MAX, pattern=TEXT)] = ""
) -> Response:
    """Show the form."""
    return await _form_page(request, own_path(next_))


@router.post("/login")
async def log_in(request: Request) -> Response:
    """Open a session with a token; without one, for the identity that a reverse proxy names."""
    fields = {name: values[-1] for name, values in (await form_of(request)).items()}
    back = own_path(fields.get("next", ""))
    cookie = request.cookies.get(LOGIN_COOKIE, "")
    if not cookie or not hmac.compare_digest(fields.get(CSRF_FIELD, "").encode(), csrf_of(cookie).encode()):
        return await _form_page(request, back, "The form is too old. Send it again.", HTTPStatus.FORBIDDEN)
    gate: Gate = request.app.state.gate
    token = fields.get("token", "").strip()[: SECRET_CHARACTERS_MAX + 1]
    response = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": back})
    try:
        caller = await gate.caller(request, token or None, None, may_open=True)
        secret, _ = await make_session(request, caller)
        set_cookie(request, response, secret)
    except ProblemError as error:
        if error.status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS):
            raise
        found = await _form_page(request, back, f"{error}.", error.status)
        found.headers.update({name: value for name, value in error.headers.items() if name == "Retry-After"})
        return found
    response.delete_cookie(LOGIN_COOKIE, path="/login", httponly=True, samesite="strict")
    return response


@router.post("/logout")
async def log_out(request: Request, form: ViewerForm) -> Response:
    """End the session."""
    response = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": "/login"})
    if form.caller.session:
        await forget_session(request, form.caller, response)
    return response


def own_path(path: str) -> str:
    """Return a path of this page, and "/" instead of an address elsewhere."""
    own = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if own and path.isascii() else "/"


async def _form_page(request: Request, back: str, fault: str = "", status: HTTPStatus = HTTPStatus.OK) -> Response:
    gate: Gate = request.app.state.gate
    identity = ""
    try:
        identity = (await gate.caller(request, None, None, may_open=True)).principal.name
    except ProblemError:
        pass
    cookie = request.cookies.get(LOGIN_COOKIE) or secrets.token_urlsafe(32)
    response = page(
        request, None, "login.html", back=back, fault=fault, status=status, identity=identity, form_csrf=csrf_of(cookie)
    )
    response.set_cookie(
        LOGIN_COOKIE, cookie, max_age=LOGIN_S, path="/login", httponly=True, samesite="strict",
        secure=gate.is_encrypted(request),
    )  # fmt: skip
    return response
