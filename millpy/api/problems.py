"""Errors as problem details (RFC 9457), without secrets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from millpy.admin.json_output import json_text
from millpy.config.secrets import redacted
from millpy.errors import GraphError, MillError, NotMigratedError, RightsError, TransientError, UsageError

log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"
CHARACTERS_MAX = 2_000
FAULTS_MAX = 10


class ProblemError(Exception):
    """An answer that is an error.

    Attributes:
        status: the status of HTTP.
        detail: what is wrong.
        hint: what to do; empty for nothing.
        headers: further headers of the answer.
    """

    def __init__(
        self, status: HTTPStatus, detail: str, *, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.hint = hint
        self.headers = dict(headers or {})


def not_found(detail: str, hint: str = "") -> ProblemError:
    """Return the error for what does not exist."""
    return ProblemError(HTTPStatus.NOT_FOUND, detail, hint=hint)


def busy() -> ProblemError:
    """Return the error for too many requests at once."""
    return ProblemError(
        HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait", hint="try again", headers={"Retry-After": "2"}
    )


def of_error(error: MillError) -> ProblemError:
    """Return the problem that an error of millpy is."""
    message, hint = redacted(error.message)[:CHARACTERS_MAX], redacted(error.hint)
    if isinstance(error, RightsError):
        return ProblemError(HTTPStatus.FORBIDDEN, message, hint=hint)
    if isinstance(error, GraphError):
        return ProblemError(HTTPStatus.CONFLICT, message, hint=hint)
    away = isinstance(error, TransientError | NotMigratedError)
    if isinstance(error, UsageError) and not away:
        return ProblemError(HTTPStatus.BAD_REQUEST, message, hint=hint)
    status = HTTPStatus.SERVICE_UNAVAILABLE if away else HTTPStatus.INTERNAL_SERVER_ERROR
    return ProblemError(status, message, hint=hint, headers={"Retry-After": "2"})


def answer(problem: ProblemError) -> Response:
    """Return the response of a problem."""
    body = {
        "type": "about:blank",
        "title": problem.status.phrase,
        "status": int(problem.status),
        "detail": problem.detail,
        **({"hint": problem.hint} if problem.hint else {}),
    }
    return Response(json_text(body, indent=0), int(problem.status), problem.headers, MEDIA_TYPE)


def of_validation(error: RequestValidationError) -> ProblemError:
    """Return the problem that wrong parameters are. The input is not quoted: it may be a secret."""
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:FAULTS_MAX]]
    detail = redacted("; ".join(faults))[:CHARACTERS_MAX]
    return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, detail, hint="see /v1/openapi.json")


def handle_problems(app: FastAPI) -> None:
    """Answer every error of an app with a problem."""

    async def of_problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return answer(error)

    async def of_mill_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, MillError)
        return answer(of_error(error))

    async def of_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        return answer(ProblemError(status, status.description or status.phrase, headers=error.headers))

    async def of_parameters(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(of_validation(error))

    async def of_any(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(ProblemError(HTTPStatus.INTERNAL_SERVER_ERROR, "the API failed", hint="its log says why"))

    app.add_exception_handler(ProblemError, of_problem)
    app.add_exception_handler(MillError, of_mill_error)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_parameters)
    app.add_exception_handler(Exception, of_any)
