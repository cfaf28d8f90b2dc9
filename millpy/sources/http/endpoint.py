"""What answers the requests of one source in one worker: who sends, how much, for which partition, and where it is.

The order of checks is that of their cost: method, token, rate, size, room; only then the body is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING

import xxhash
from aiohttp import HttpVersion11, web

from millpy.config.addresses import client_of
from millpy.ingest.protocol import WorkerSetup
from millpy.ingest.request_traffic import RequestTraffic
from millpy.sources.http.answers import JSON_TYPE, REFUSAL_REASONS, RETRY_S, RefusedRequestError
from millpy.sources.http.body import PostedBody, idempotency_key, media_type
from millpy.sources.http.connections import await_commit
from millpy.sources.http.rates import RateLimiter
from millpy.sources.http.relay import NOT_OURS, PASSED_ON, REASON_HEADER, RELAYED_HEADER, PeerRelay
from millpy.sources.http.tokens import TokenList

if TYPE_CHECKING:
    from millpy.sources.http.injector import HttpInjector
    from millpy.sources.http.source import Http

log = logging.getLogger(__name__)

BODY_S_MAX = 30.0
"""Seconds in which a client must have sent the whole body."""
TELL_EVERY_S = 60.0
"""Seconds between two events about refused requests."""


class Endpoint:
    """The requests to one source in this worker.

    Args:
        source: the source.
        setup: the worker's setup of the source.
        tokens: the tokens of clients.
        relay: passes requests on to the owners of partitions.
        release: called by a user that no longer needs it.
        port: the port at which clients reach it.

    Attributes:
        injectors: the partitions that this worker owns.
        users: how many injectors and workers use it.
        traffic: what clients have sent, and what waits.
    """

    def __init__(
        self,
        source: Http,
        setup: WorkerSetup,
        tokens: TokenList,
        relay: PeerRelay,
        release: Callable[[Endpoint], Awaitable[None]],
        port: int,
    ) -> None:
        self.port = port
        self.source = source
        self.setup = setup
        self.injectors: dict[str, HttpInjector] = {}
        self.users = 0
        self._tokens = tokens
        self._relay = relay
        self._release = release
        self._partitions = source.partitions()
        self._rates = RateLimiter(source.bounds.requests_per_s)
        self._body_bytes_max = min(source.bounds.body_bytes, setup.limits.message_bytes_max)
        self.traffic = RequestTraffic.of_reasons(REFUSAL_REASONS)
        self._requests = self._turn = 0
        self._refused: Counter[str] = Counter()
        self._last_refusal = ""
        self._told_at = float("-inf")

    @property
    def peer_address(self) -> str:
        """Where other workers reach this one; empty if they cannot."""
        return self._relay.own_address

    @property
    def is_busy(self) -> bool:
        """Whether a request is being read or waits for its answer."""
        return self.traffic.waiting_requests > 0

    def refusals(self) -> dict[str, object] | None:
        """Return what was refused since the last call, for an event; None if nothing, or too soon after the last."""
        now = self.setup.clock.monotonic()
        if not self._refused or now - self._told_at < TELL_EVERY_S:
            return None
        self._told_at = now
        found: dict[str, object] = {"stream": self.setup.stream, "statuses": dict(self._refused)}
        self._refused.clear()
        return found | {"last": self._last_refusal}

    async def release(self) -> None:
        """Stop using it; the last user closes it."""
        await self._release(self)

    def note_refusal(self) -> None:
        """Note that a client was sent away and will come again, so that no partition of this worker is quiet."""
        for injector in self.injectors.values():
            injector.note_refusal()

    def count_answer(self, status: int, reason: str) -> None:
        """Count an answer to a client, and the reason of a refusal if it is one of REFUSAL_REASONS."""
        self.traffic.requests[status // 100] += 1
        if reason in self.traffic.refusals:
            self.traffic.refusals[reason] += 1

    async def respond(self, request: web.BaseRequest, *, of_peer: bool) -> web.Response:
        """Answer a request; `of_peer` says that another worker of this graph passes it on."""
        reason = ""
        try:
            answer = await self._accept(request, of_peer=of_peer)
            reason = answer.headers.popall(REASON_HEADER, [""])[0]  # of the owner
        except RefusedRequestError as error:
            answer, reason = self._refuse(request, error), error.reason
        if of_peer:
            self._relay.sign_answer(answer, request.headers.get(RELAYED_HEADER, ""), reason)
            return answer
        self.count_answer(answer.status, reason)
        return answer

    def _refuse(self, request: web.BaseRequest, error: RefusedRequestError) -> web.Response:
        log.debug("%s: answered %d: %s", self.source.path, error.status, error.detail)
        self._refused[str(error.status)] += 1
        self._last_refusal = error.detail
        if error.is_sent_again:
            self.note_refusal()
        answer = error.answer()
        if not request.content.at_eof():
            answer.force_close()
        return answer

    async def _accept(self, request: web.BaseRequest, *, of_peer: bool) -> web.Response:
        if request.method != "POST":
            raise RefusedRequestError(405, "send the records by POST", headers={"Allow": "POST"})
        _check_head(request)
        key = idempotency_key(request.headers.get("Idempotency-Key"))
        digest = self._relay.verify(request.headers.get(RELAYED_HEADER, ""), key) if of_peer else self._admit(request)
        self._check_requests()
        self.traffic.waiting_requests += 1
        try:
            content = await self._read_body(request)
            await_commit(request)
            self._requests += 1
            try:
                self._check_requests(but=1)
                if digest and sha256(content).hexdigest() != digest:
                    raise RefusedRequestError(401, NOT_OURS)
                if not of_peer:
                    self.traffic.bytes += len(content)
                return await self._deliver(request, content, key, of_peer=of_peer)
            finally:
                self._requests -= 1
                self.traffic.waiting_bytes -= len(content)
        finally:
            self.traffic.waiting_requests -= 1

    def _admit(self, request: web.BaseRequest) -> str:
        """Check who sends, and how often; return no digest, as a client signs nothing. Raises RefusedRequestError."""
        client = client_of(request.remote or "")
        if not self._tokens.is_empty:
            name = self._tokens.name_of(request.headers.get("Authorization"))
            if name is None:
                raise RefusedRequestError(
                    401, "the request needs a known token: Authorization: Bearer TOKEN",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
            client = name
        elif "Origin" in request.headers:
            raise RefusedRequestError(403, "pages in a browser may send records only with a token")
        delay_s = self._rates.delay_s(client, self.setup.clock.monotonic())
        if delay_s:
            why = "more requests a second than this source takes from one client"
            raise RefusedRequestError(429, why, retry_after_s=delay_s, reason="rate")
        return ""

    def _check_requests(self, but: int = 0) -> None:
        """Refuse a request if too many wait, not counting `but` of them. Raises RefusedRequestError."""
        if self._requests - but >= self.source.bounds.waiting_requests:
            raise _full("too many requests wait for their commit")

    @contextmanager
    def room(self, more: int) -> Iterator[None]:
        """Count the bytes by which records are larger than their body as waiting. Raises RefusedRequestError."""
        self.traffic.waiting_bytes += more
        try:
            if more and self.traffic.waiting_bytes > self.source.bounds.waiting_bytes:
                raise _full("too many bytes wait for their commit")
            yield
        finally:
            self.traffic.waiting_bytes -= more

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        """Return the body, whose bytes count as waiting until the caller subtracts them.

        Raises:
            RefusedRequestError: it is too large, too slow, or cut off, or there is no room.
        """
        if (request.content_length or 0) > self._body_bytes_max:
            raise self._too_large()
        if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_S_MAX):
                while chunk := await request.content.readany():
                    self.traffic.waiting_bytes += len(chunk)
                    content += chunk
                    if len(content) > self._body_bytes_max:
                        raise self._too_large()
                    if self.traffic.waiting_bytes > self.source.bounds.waiting_bytes:
                        raise _full("too many bytes wait for their commit")
        except BaseException as error:
            self.traffic.waiting_bytes -= len(content)
            if isinstance(error, TimeoutError):
                raise RefusedRequestError(408, f"the body has not arrived within {BODY_S_MAX:g} s") from None
            if isinstance(error, web.RequestPayloadError | ConnectionError):
                why = f"the body is cut off or malformed: {error}"
                raise RefusedRequestError(400, why, closes=True, reason="cut_off") from None
            raise
        return bytes(content)

    def _too_large(self) -> RefusedRequestError:
        return RefusedRequestError(413, f"a body may have {self._body_bytes_max} bytes: send fewer records")

    async def _deliver(
        self, request: web.BaseRequest, content: bytes, key: str | None, *, of_peer: bool
    ) -> web.Response:
        """Give the records to the partition's injector, here or in another worker, and return its answer."""
        partition = self._partition_of(content, key)
        injector = self.injectors.get(partition)
        if injector is None:
            if of_peer:
                raise RefusedRequestError(503, "the owner of the partition changes", retry_after_s=RETRY_S)
            return await self._relay.forward(request, partition, content, key, self.setup)
        kind, charset = media_type(request.headers.get("Content-Type"))
        body = PostedBody(
            content=content,
            content_type=kind,
            charset=charset,
            encoding=request.headers.get("Content-Encoding", "").strip().lower(),
            key=key,
            arrived_at=self.setup.clock.now_us(),
        )
        accepted = await injector.accept(body, self.source.bounds.answer_s)
        self.traffic.records += accepted.count
        return web.Response(body=accepted.body(), content_type=JSON_TYPE)

    def _partition_of(self, content: bytes, key: str | None) -> str:
        """Return the partition of a request: the same for all attempts at it, if duplicates are to be found."""
        if len(self._partitions) == 1:
            return self._partitions[0]
        if key is None and not self.setup.deduplicated and self.injectors:
            self._turn += 1
            own = tuple(self.injectors)
            return own[self._turn % len(own)]
        digest = xxhash.xxh3_64_intdigest(content if key is None else key.encode())
        return self._partitions[digest % len(self._partitions)]


def _check_head(request: web.BaseRequest) -> None:
    """Refuse a head that the next proxy or worker could read in another way. Raises RefusedRequestError."""
    coding = request.headers.get("Transfer-Encoding")
    if coding is not None and (coding.lower() != "chunked" or request.version < HttpVersion11):
        why = "the only Transfer-Encoding that is read is chunked, of HTTP/1.1"
        raise RefusedRequestError(400, why, closes=True, reason="malformed")
    for name in PASSED_ON:
        given = request.headers.getall(name, [])
        if len(given) > 1 or not all(value.isascii() for value in given):
            raise RefusedRequestError(400, f"the header {name} is there twice, or is not ASCII", reason="malformed")


def _full(why: str) -> RefusedRequestError:
    return RefusedRequestError(429, f"{why}: send the request again later", retry_after_s=RETRY_S)
