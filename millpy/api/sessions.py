"""Sessions of the page: opened with a token, and ended."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from millpy.admin import tokens
from millpy.admin.tokens import Principal
from millpy.api.answers import OBJECT, as_json, databases_of, described
from millpy.api.authentication import SECRET_CHARACTERS_MAX, Caller, Gate, Viewer, csrf_of
from millpy.api.problems import ProblemError

router = APIRouter(tags=["session"])


class TokenGiven(BaseModel):
    """A token; empty for the identity that a reverse proxy names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: Annotated[str, Field(max_length=SECRET_CHARACTERS_MAX)] = ""


@router.post("/v1/session", responses=described(OBJECT, "The session"), response_class=Response)
async def open_session(request: Request, body: TokenGiven) -> Response:
    """Open a session, whose cookie the answer sets. Actions with it also need the CSRF token of the answer."""
    gate: Gate = request.app.state.gate
    # No cookie: an older session must not keep a user from opening a new one. A page of another site cannot send JSON.
    caller = await gate.caller(request, body.token or None, None, may_open=True)
    secret, ends = await make_session(request, caller)
    response = as_json({**_shown(caller.principal), "expires_at": ends, "csrf_token": csrf_of(secret)})
    set_cookie(request, response, secret)
    return response


async def make_session(request: Request, caller: Caller) -> tuple[str, object]:
    """Open a session for a user; return its secret, and when it ends.

    Raises:
        ProblemError: a reverse proxy names another user.
    """
    gate: Gate = request.app.state.gate
    gate.check_identity(request, caller)
    kept_s: float = request.app.state.configuration.session_s
    lane = databases_of(request).authenticating
    return await lane.run(partial(tokens.open_session, principal=caller.principal, kept_s=kept_s), None)


def set_cookie(request: Request, response: Response, secret: str) -> None:
    """Set the cookie of a session."""
    gate: Gate = request.app.state.gate
    response.set_cookie(
        gate.cookie_of(request),
        secret,
        max_age=int(request.app.state.configuration.session_s),
        path="/",
        httponly=True,
        samesite="strict",
        secure=gate.is_encrypted(request),
    )


def delete_cookie(request: Request, response: Response) -> None:
    """Delete the cookie of a session."""
    gate: Gate = request.app.state.gate
    response.delete_cookie(
        gate.cookie_of(request), path="/", httponly=True, samesite="strict", secure=gate.is_encrypted(request)
    )


async def forget_session(request: Request, caller: Caller, response: Response) -> None:
    """End the session of a user, and delete its cookie."""
    gate: Gate = request.app.state.gate
    hashed = tokens.digest(caller.session)
    await databases_of(request).authenticating.run(partial(tokens.end_session, hashed=hashed), None)
    gate.forget(caller.session)
    delete_cookie(request, response)


@router.get("/v1/session", responses=described(OBJECT, "The user"), response_class=Response)
async def show_session(caller: Viewer) -> Response:
    """Show who sends the request and what he may do, and for a session its CSRF token."""
    return as_json(_shown(caller.principal) | ({"csrf_token": csrf_of(caller.session)} if caller.session else {}))


@router.delete("/v1/session", status_code=204, responses=described(OBJECT, "Not used"), response_class=Response)
async def end_session(request: Request, caller: Viewer) -> Response:
    """End the session."""
    if not caller.session:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "the request has no session")
    response = Response(status_code=HTTPStatus.NO_CONTENT)
    await forget_session(request, caller, response)
    return response


def _shown(principal: Principal) -> dict[str, object]:
    return {"name": principal.name, "role": principal.role.name.lower(), "database_role": principal.database_role}
