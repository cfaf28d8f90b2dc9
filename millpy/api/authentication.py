"""Find out who sends a request, and what that user may do: by a token, a session of the page, or a reverse proxy.

A browser sends the cookie of a session by itself, so an action with it also needs the CSRF token, which only the page
knows. It is derived from the cookie, which scripts cannot read: nothing more is stored. A browser also sends through a
reverse proxy by itself, so an identity can only read, and open a session. The identity takes precedence over a session
that has ended or is another user's, so that a user does not act as the one who was logged in at the proxy before.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from millpy.admin import tokens
from millpy.admin.queries import Admin
from millpy.admin.tokens import Principal, Role
from millpy.api.configuration import ApiConfiguration
from millpy.api.database import Databases
from millpy.api.failures import FailureLimit
from millpy.api.problems import ProblemError
from millpy.clock import Clock

COOKIE = "millpy_session"
CSRF_HEADER = "X-CSRF-Token"
KNOWN_S = 2.0
"""Seconds for which an answer of the database is believed: a revoked token works that much longer."""
KNOWN_MAX = 10_000
SECRET_CHARACTERS_MAX = 200
SAFE = ("GET", "HEAD", "OPTIONS")
_BEARER = HTTPBearer(auto_error=False, description="A token of `millpy token create`.")


class _SessionCookie(APIKeyCookie):
    """The secret of a session, which has another name on the machine of its user."""

    async def __call__(self, request: HTTPConnection) -> str | None:
        return session_of(request)


_COOKIE = _SessionCookie(
    name=COOKIE, auto_error=False, description=f"A session of `POST /v1/session`; actions need {CSRF_HEADER}, too."
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    Attributes:
        principal: the user.
        session: the secret of the session; empty for another way.
    """

    principal: Principal
    session: str = ""


def csrf_of(session: str) -> str:
    """Return the CSRF token of a session."""
    return hmac.new(session.encode(), b"csrf", hashlib.sha256).hexdigest()


class Gate:
    """Authenticates requests."""

    def __init__(self, configuration: ApiConfiguration, databases: Databases, clock: Clock) -> None:
        self._configuration = configuration
        self._lane = databases.authenticating
        self._clock = clock
        self._failures = FailureLimit(clock)
        self._known: OrderedDict[tuple[str, bytes], tuple[Principal, float]] = OrderedDict()

    async def caller(
        self, request: Request, bearer: str | None, cookie: str | None, csrf: str = "", *, may_open: bool = False
    ) -> Caller:
        """Return who sends a request.

        Args:
            request: the request.
            bearer: the token; None for none.
            cookie: the secret of a session; None for none.
            csrf: the CSRF token of a form; empty for that of the header.
            may_open: whether the request opens a session, which an identity may do.

        Raises:
            ProblemError: the user is unknown, the CSRF token is missing, or the address has failed too often.
        """
        address = self.address_of(request)
        for name in ("Authorization", self._configuration.identity_header):
            if name and len(request.headers.getlist(name)) > 1:  # which of them a reverse proxy checked is unknown
                raise unauthorized(f"{name} is given twice")
        if bearer is not None:
            return Caller(await self._of_secret(address, "token", tokens.of_token, bearer))
        name = self._identity(request)
        caller = None if cookie is None else await self._of_session(address, cookie, name)
        if cookie is not None and caller is not None:
            given = csrf or request.headers.get(CSRF_HEADER, "")
            if request.method not in SAFE and not hmac.compare_digest(given.encode(), csrf_of(cookie).encode()):
                raise ProblemError(
                    HTTPStatus.FORBIDDEN, f"{CSRF_HEADER} is missing or wrong", hint="GET /v1/session returns it"
                )
            return caller
        if name:
            if request.method not in SAFE and not may_open:
                if cookie is not None:
                    raise unauthorized("the session has ended, or is another user's")
                raise ProblemError(
                    HTTPStatus.FORBIDDEN, "this needs a session", hint="open one with POST /v1/session, or use a token"
                )
            return Caller(await self._of_identity(address, name))
        raise unauthorized("no token is given")

    def address_of(self, request: Request) -> str:
        """Return the address of the client: behind a reverse proxy, the one that the proxy names last."""
        peer = request.client.host if request.client else ""
        if self._configuration.trusts(peer):
            try:
                return str(ipaddress.ip_address(_last(request, "X-Forwarded-For")))
            except ValueError:
                return peer
        return peer

    def is_encrypted(self, request: Request) -> bool:
        """Tell whether the browser reaches the API by HTTPS."""
        peer = request.client.host if request.client else ""
        said = _last(request, "X-Forwarded-Proto") if self._configuration.trusts(peer) else ""
        return request.url.scheme == "https" or said == "https"

    def cookie_of(self, request: HTTPConnection) -> str:
        """Return the name of the cookie that has the secret of a session."""
        return f"{COOKIE}_{request.scope['server'][1]}" if self._configuration.cookie_of_port else COOKIE

    def check_identity(self, request: Request, caller: Caller) -> None:
        """Check that a reverse proxy names no other user than the one who opens a session.

        Raises:
            ProblemError: it does.
        """
        if self._identity(request) not in ("", caller.principal.name):
            raise unauthorized("the reverse proxy names another user than the token")

    def forget(self, secret: str) -> None:
        """Forget a session that has ended."""
        self._known.pop(("session", tokens.digest(secret)), None)

    def _identity(self, request: Request) -> str:
        peer = request.client.host if request.client else ""
        header = self._configuration.identity_header
        return request.headers.get(header, "").strip() if header and self._configuration.trusts(peer) else ""

    async def _of_session(self, address: str, secret: str, identity: str) -> Caller | None:
        """Return the user of a session; None if the identity counts instead."""
        try:
            principal = await self._of_secret(address, "session", tokens.of_session, secret, counts=not identity)
        except ProblemError as error:
            if identity and error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS):
                return None
            raise
        return None if identity not in ("", principal.name) else Caller(principal, secret)

    async def _of_secret(
        self,
        address: str,
        kind: str,
        find: Callable[[Admin, bytes], Principal | None],
        secret: str,
        *,
        counts: bool = True,
    ) -> Principal:
        hashed = tokens.digest(secret[: SECRET_CHARACTERS_MAX + 1])
        wrong = f"the {kind} is not valid"
        return await self._found(address, (kind, hashed), lambda admin: find(admin, hashed), wrong, counts=counts)

    async def _of_identity(self, address: str, name: str) -> Principal:
        key = ("identity", tokens.digest(name[: SECRET_CHARACTERS_MAX + 1]))
        if "\0" in name:
            raise unauthorized("the identity cannot be read")
        find = partial(tokens.of_identity, name=name)
        return await self._found(address, key, find, "this identity is not known here")

    async def _found(
        self,
        address: str,
        key: tuple[str, bytes],
        find: Callable[[Admin], Principal | None],
        wrong: str,
        *,
        counts: bool = True,
    ) -> Principal:
        principal, until = self._known.get(key, (None, -math.inf))
        if principal is not None and self._clock.monotonic() < until:
            return principal
        # A secret that was right lately may still be looked up, so that one client does not lock out others.
        if principal is None and (wait_s := self._failures.wait_s(address)):
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many failed attempts from this address",
                hint="wait, then use a valid token",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )
        found = await self._lane.share(key, find, None)  # all streams of a token look it up at the same time
        self._known.pop(key, None)
        if found is None:
            if counts:
                self._failures.count(address)
            raise unauthorized(wrong)
        self._known[key] = (found, self._clock.monotonic() + KNOWN_S)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return found


def bearer_of(request: Request) -> str | None:
    """Return the token of a request; None for none, as with `Basic`, which a reverse proxy may ask for."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def session_of(request: HTTPConnection) -> str | None:
    """Return the secret of the session that a request has; None for none."""
    gate: Gate = request.app.state.gate
    return request.cookies.get(gate.cookie_of(request))


def _last(request: Request, name: str) -> str:
    """Return the last value of a header, which is the reverse proxy's: a client may have sent others before it."""
    return ",".join(request.headers.getlist(name)).rpartition(",")[2].strip()


def unauthorized(detail: str) -> ProblemError:
    """Return the error for a request of an unknown user."""
    return ProblemError(
        HTTPStatus.UNAUTHORIZED,
        detail,
        hint="`millpy token create` makes one; send it as Authorization: Bearer …",
        headers={"WWW-Authenticate": "Bearer"},
    )


def check_role(caller: Caller, role: Role) -> None:
    """Check that a user has at least a role.

    Raises:
        ProblemError: the role does not suffice.
    """
    if caller.principal.role < role:
        raise ProblemError(
            HTTPStatus.FORBIDDEN,
            f"this needs the role {role.name.lower()}, not {caller.principal.role.name.lower()}",
            hint="use a token with this role",
        )


def _caller_with(role: Role) -> Callable[..., Any]:
    async def authenticated(
        request: Request,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
        cookie: Annotated[str | None, Security(_COOKIE)],
    ) -> Caller:
        gate: Gate = request.app.state.gate
        caller = await gate.caller(request, None if bearer is None else bearer.credentials, cookie)
        check_role(caller, role)
        return caller

    return authenticated


Viewer = Annotated[Caller, Depends(_caller_with(Role.VIEWER))]
Operator = Annotated[Caller, Depends(_caller_with(Role.OPERATOR))]
Administrator = Annotated[Caller, Depends(_caller_with(Role.ADMIN))]
