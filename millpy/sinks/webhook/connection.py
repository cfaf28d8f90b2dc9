"""WebhookConnection: the HTTP client of one interval. It follows no redirect and no proxy of the environment.

Nothing of an answer is trusted: its body is read to a bound, its compression is not undone, cookies are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from yarl import URL

from millpy.config.access import text_of
from millpy.config.secrets import redacted
from millpy.config.tls_files import TlsFiles
from millpy.errors import ConfigError, SinkUnavailableError
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SinkSetup
from millpy.sinks.webhook.address import URL_CHARACTERS_MAX, Origin, parsed
from millpy.sinks.webhook.answers import Meaning, WebhookAnswer, answer_of
from millpy.sinks.webhook.delivery import WebhookDelivery
from millpy.sinks.webhook.endpoint import Webhook
from millpy.sinks.webhook.requests import RequestBuilder, WebhookRequest
from millpy.sinks.webhook.signing import RequestSecrets
from millpy.sinks.webhook.tls import tls_context

log = logging.getLogger(__name__)
ANSWER_BYTES_MAX = 4_000
"""The most bytes of an answer's body that are read; the connection of a longer one is closed."""
BODY_S_MAX = 1.0
"""Seconds to wait for the body of an answer: its status counts, and other messages of its key wait."""
REASON_CHARACTERS_MAX = 200
KEEPALIVE_S = 4.0
"""Seconds that a connection may be idle: less than servers allow, which would close it under a request."""


class AnsweredAfterRequest(aiohttp.ClientRequest):
    """A request that leaves by no connection on which an answer waits already: that would count as its own."""

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        """Send the request.

        Raises:
            ServerDisconnectedError: an answer without a request waits on the connection, which is closed then.
        """
        if conn.protocol is None or conn.protocol.should_close:
            raise aiohttp.ServerDisconnectedError("an answer came without a request")
        return await super().send(conn)


class StatusFirst(ResponseHandler):
    """Reads the head of an answer apart from its body: aiohttp forgets a status with which a malformed body arrives.

    Receivers count characters instead of bytes, or give an answer of 204 a body. The message would be posted for ever.
    """

    def data_received(self, data: bytes) -> None:
        """Take bytes of the receiver."""
        head, end, rest = data.partition(b"\r\n\r\n")
        super().data_received(head + end)
        if rest:
            super().data_received(rest)


class WebhookConnection:
    """Posts the messages of one interval.

    Raises:
        ConfigError: a secret or a file of TLS is missing or unusable.
    """

    def __init__(self, webhook: Webhook, setup: SinkSetup) -> None:
        self._webhook = webhook
        self._setup = setup
        self._builder = RequestBuilder(webhook, setup)
        self._url = URL(webhook.url, encoded=True) if webhook.url is not None else None
        self._secrets = RequestSecrets(webhook.access.signing, webhook.access.headers, setup.clock)
        tls = webhook.access.tls
        self._files = TlsFiles(map(text_of, (tls.ca, tls.certificate, tls.key)), setup.clock)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make a client; it connects with the first request. An endpoint knows no position.

        Raises:
            SinkUnavailableError: a file of TLS is missing or unusable, or our grant has ended.
        """
        if not self._setup.trusted():
            raise SinkUnavailableError("this worker does not own the interval any more")
        try:
            self._session = await self._client()
        except ConfigError as error:
            raise SinkUnavailableError(error.message, hint=error.hint) from error

    async def _client(self) -> aiohttp.ClientSession:
        """Return a client. Raises ConfigError."""
        tls = await asyncio.to_thread(tls_context, self._webhook.access.tls)  # it reads hundreds of certificates
        connector = aiohttp.TCPConnector(
            limit=self._webhook.in_flight, ssl=tls, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=int(KEEPALIVE_S)
        )
        connector._factory = partial(StatusFirst, loop=asyncio.get_running_loop())  # type: ignore[assignment]
        times = self._webhook.timeouts
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=times.answer_s, connect=times.connect_s),
            headers={"User-Agent": _user_agent(), "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=AnsweredAfterRequest,
            auto_decompress=False,
            trust_env=False,
        )

    async def send(self, messages: SinkMessages) -> None:
        """Post messages.

        Raises:
            SinkUnavailableError: nothing has arrived, as far as is known.
            MessagesRefusedError: the endpoint refuses some.
        """
        if self._files.replaced():
            await self._renew()
        delivery = WebhookDelivery(self.post, self._setup, self._webhook.in_flight)
        if self._webhook.batch:
            await delivery.send_batch(self._builder, messages)
        else:
            await delivery.send_singly(self._builder, messages)

    async def _renew(self) -> None:
        """Make a client with the files as they are now: a receiver may answer an old certificate with a status."""
        try:
            renewed = await self._client()
        except ConfigError as error:  # perhaps only one of the files has been replaced yet
            log.warning("%s; the files read before stay in use", error.message, extra={"hint": error.hint})
            return
        await self.close()
        self._session = renewed

    async def close(self) -> None:
        """Close the client, and its connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, request: WebhookRequest) -> WebhookAnswer:
        """Make one attempt at a request."""
        assert self._session is not None, "open the connection first"
        url = self._url if request.url is None else _given(request.url)
        origin = parsed(url) if url is not None else None
        if url is None or origin not in self._webhook.hosts:
            return WebhookAnswer(Meaning.FINAL, f"the URL in {self._webhook.url_field!r} has no host of hosts=(…)")
        headers = {**request.headers, **self._secrets.headers(request.id, request.body)}
        try:
            async with self._session.post(
                url, data=BytesIO(request.body), headers=headers, allow_redirects=False
            ) as response:
                return await self._answer(origin, response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return WebhookAnswer(Meaning.AGAIN, _reason(origin, error, self._webhook.timeouts.answer_s))

    async def _answer(self, origin: Origin, response: aiohttp.ClientResponse) -> WebhookAnswer:
        """Judge an answer by its status; its body is the reason of a refusal, if it arrives."""
        status = response.status
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S_MAX):
                while len(body) <= ANSWER_BYTES_MAX and (chunk := await response.content.readany()):
                    body += chunk
        except (aiohttp.ClientError, OSError, TimeoutError):
            response.close()  # the status counts
        if not response.content.at_eof():
            response.close()
        said = _visible(body[:ANSWER_BYTES_MAX].decode("utf-8", "replace"))
        if 300 <= status < 400:
            said = "a redirect is not followed; name its target in the graph"
        why = f"{origin} answers {status} {_visible(response.reason or '')}".rstrip()
        now_s = self._setup.clock.now_us() / 1e6
        return answer_of(status, f"{why}: {said}" if said else why, response.headers.get("Retry-After"), now_s)


def _given(text: str) -> URL | None:
    """Return a URL from a field; None if it is none."""
    if len(text) > URL_CHARACTERS_MAX:
        return None
    try:
        return URL(text)
    except (ValueError, TypeError):
        return None


def _reason(origin: Origin, error: Exception, within_s: float) -> str:
    """Describe a failed attempt without path, query and headers of the request."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection to {origin} in time"
    if isinstance(error, TimeoutError):
        return f"{origin} did not answer within {within_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the certificate of {origin} is not trusted: {_visible(str(error.certificate_error))}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection to {origin}: {_visible(str(error.os_error))}"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{origin} does not speak HTTP: {_visible(error.message)}"
    if isinstance(error, ssl.SSLError):
        return f"TLS with {origin} fails: {_visible(str(error))}"
    return f"the connection to {origin} broke: {_visible(str(error)) or type(error).__name__}"


def _visible(text: str) -> str:
    """Return the beginning of a foreign text on one line, without secrets."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * REASON_CHARACTERS_MAX]).split())
    return redacted(line)[:REASON_CHARACTERS_MAX]


def _user_agent() -> str:
    try:
        return f"millpy/{version('millpy')}"
    except PackageNotFoundError:
        return "millpy"
