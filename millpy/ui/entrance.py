"""A link that logs a local user in: `millpy ui` prints it, and it is valid as long as that command runs."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from millpy.api.authentication import Gate
from millpy.api.parameters import NAME_CHARACTERS_MAX
from millpy.api.problems import ProblemError
from millpy.api.sessions import make_session, set_cookie
from millpy.ui.routing import page_router
from millpy.ui.site import add_site

# Not a redirect: a browser counts that as a part of what another program's page began, and sends no strict cookie.
ENTERED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/"><title>millpy</title></head>
<body><a href="/">Go to the page</a></body></html>
"""


def local_site(code: str, token: str) -> Callable[[FastAPI], None]:
    """Return a function that adds the page, and the path `/enter`, which opens a session for who knows a code.

    Args:
        code: the code, a secret.
        token: the token whose user the session has.
    """
    router = page_router()

    @router.get("/enter")
    async def enter(
        request: Request, given: Annotated[str, Query(alias="code", max_length=NAME_CHARACTERS_MAX)] = ""
    ) -> Response:
        if not hmac.compare_digest(given.encode(), code.encode()):
            raise ProblemError(
                HTTPStatus.FORBIDDEN, "this link is of another run", hint="use the link that `millpy ui` prints"
            )
        gate: Gate = request.app.state.gate
        caller = await gate.caller(request, token, None)
        secret, _ = await make_session(request, caller)
        response = Response(ENTERED, media_type="text/html")
        set_cookie(request, response, secret)
        return response

    def add(app: FastAPI) -> None:
        add_site(app)
        app.include_router(router)

    return add
