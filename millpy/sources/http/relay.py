"""Requests that reach a worker which does not own their partition: it passes them on to the owner, and back the answer.

Each worker listens at a second address, for the other workers of its graph, and the database says which worker owns a
partition and where that worker listens. A request that is passed on carries a signature, made with the secret of the
deployment, over the time, the path, the key and the body. It shows that a worker has checked who sends; only the owner
judges the records. The answer is signed as well: the port of a worker that has ended may belong to another program,
whose 200 says nothing about our records. Otherwise exactness never depends on this way: the owner commits under its
fence, and a request whose answer is lost is sent again by its client.

By default workers pass requests on within one machine. MILLPY_INGEST_PEER names the address at which the workers of
other machines reach this one, in a network that you trust with the records: this way is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from millpy.clock import Clock
from millpy.config.secrets import secret as read_secret
from millpy.errors import ConfigError, TransientError
from millpy.ingest.protocol import WorkerSetup
from millpy.sources.http.answers import PROBLEM_TYPE, RETRY_S, RefusedRequestError

if TYPE_CHECKING:
    from millpy.sources.http.source import Http

PEER_VARIABLE = "MILLPY_INGEST_PEER"
RELAYED_HEADER = "Millpy-Relay"
REASON_HEADER = "Millpy-Reason"
_KNOWN_S = 1.0
"""Seconds for which the owners of partitions are remembered."""
OWNER_CHECK_S = 1.0
"""Seconds after which a request that waits for its owner looks whether it is still the owner."""
_ANSWER_BYTES_MAX = 1_000_000
"""The most bytes that are read of an owner's answer."""
_SIGNED_S_MAX = 60.0
"""Seconds for which a signature is valid: the clocks of two machines may differ."""
_SIGNED = re.compile(r"([0-9]{1,12}) ([0-9a-f]{64}) [0-9a-f]{64}")
NOT_OURS = "the request does not come from a worker of this graph"
PASSED_ON = ("Content-Type", "Content-Encoding", "Idempotency-Key")
_NO_OWNER = "no worker owns the partition now, or its owner is on another machine: send the request again"


def peer_address() -> tuple[str, int, str]:
    """Return host and port for the other workers, and the name by which they know the machine; "" for any.

    Raises:
        ConfigError: MILLPY_INGEST_PEER is not an address.
    """
    given = read_secret(PEER_VARIABLE)
    if given is None:
        return "127.0.0.1", 0, socket.gethostname()
    host, _, port = given.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535 or host in ("0.0.0.0", "[::]"):
        raise ConfigError(
            f"{PEER_VARIABLE}={given!r} is not an address of this machine and a port",
            hint="for example 10.0.0.7:8082; port 0 lets the system choose one",
        )
    return host.strip("[]"), int(port), ""


class PeerRelay:
    """Passes the requests of one source on to other workers, and verifies those of others.

    Args:
        source: the source.
        clock: tells when what is known of owners, and a signature, is too old.
        secret: the secret of the deployment.
        session: the connections to other workers.
        own_address: where other workers reach this one: `MACHINE host:port`, with "" for any machine.
    """

    def __init__(
        self, source: Http, clock: Clock, secret: str, session: aiohttp.ClientSession, own_address: str
    ) -> None:
        self._source = source
        self._clock = clock
        self._session = session
        self._key = blake2b(b"millpy http relay", key=secret.encode()[:64], digest_size=32).digest()
        self._owners: Mapping[str, str] = {}
        self._known_at = float("-inf")
        self._finding = asyncio.Lock()
        self.own_address = own_address

    def _signature(self, at: int, digest: str, key: str | None) -> str:
        """Return the header of a request at a time in seconds, whose body has a digest."""
        signed = hmac.new(self._key, digestmod="sha256")
        for part in (b"%d" % at, self._source.path.encode(), b"" if key is None else b"k" + key.encode()):
            signed.update(b"%d:" % len(part))
            signed.update(part)
        signed.update(digest.encode())
        return f"{at} {digest} {signed.hexdigest()}"

    def verify(self, header: str, key: str | None) -> str:
        """Check that a worker of this graph has passed a request on, and return the digest of its body.

        Raises:
            RefusedRequestError: it has not, or too long ago.
        """
        parts = _SIGNED.fullmatch(header)
        if parts is not None and abs(self._now() - int(parts[1])) <= _SIGNED_S_MAX:
            if hmac.compare_digest(self._signature(int(parts[1]), parts[2], key), header):
                return parts[2]
        raise RefusedRequestError(401, NOT_OURS)

    def sign_answer(self, answer: web.Response, signed: str, reason: str) -> None:
        """Show another worker that an answer to its request, signed with `signed`, is of a worker of this graph."""
        assert isinstance(answer.body, bytes)
        answer.headers[RELAYED_HEADER] = self._answer_signature(signed, answer.status, answer.body)
        if reason:
            answer.headers[REASON_HEADER] = reason

    def _answer_signature(self, signed: str, status: int, body: bytes) -> str:
        return hmac.new(self._key, b"answer %d %s\n%s" % (status, ascii(signed).encode(), body), sha256).hexdigest()

    async def forward(
        self, request: web.BaseRequest, partition: str, content: bytes, key: str | None, setup: WorkerSetup
    ) -> web.Response:
        """Send a request to the owner of its partition, and return the owner's answer.

        Raises:
            RefusedRequestError: there is no owner, or it does not answer.
        """
        address = await self._owner(setup, partition)
        if not address or address == self.own_address:
            raise RefusedRequestError(503, _NO_OWNER, retry_after_s=RETRY_S, closes=True)
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        signed = headers[RELAYED_HEADER] = self._signature(self._now(), sha256(content).hexdigest(), key)
        asking = asyncio.ensure_future(self._ask(address, content, headers))
        try:
            while not (await asyncio.wait({asking}, timeout=OWNER_CHECK_S))[0]:
                if await self._owner(setup, partition) != address:  # a frozen worker answers no more
                    raise self._no_answer("another worker owns it now")
            status, found, body = await asking
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._no_answer(type(error).__name__) from None
        finally:
            asking.cancel()
        given = found.get(RELAYED_HEADER, "")
        if not hmac.compare_digest(ascii(given), ascii(self._answer_signature(signed, status, body))):
            raise self._no_answer("something else answers at its address")
        if status == 503:
            self._known_at = float("-inf")  # its owner may have changed
        kept = {name: found[name] for name in ("Retry-After", REASON_HEADER) if name in found}
        kind = found.get("Content-Type", PROBLEM_TYPE)
        return web.Response(status=status, body=body, headers={**kept, "Content-Type": kind})

    async def _ask(self, address: str, content: bytes, headers: dict[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, headers and body of an owner's answer. Raises ClientError, OSError, TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=self._source.bounds.answer_s + 5, connect=2)
        url = f"http://{address.partition(' ')[2]}{self._source.path}"
        async with self._session.post(
            url, data=content, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            return answer.status, answer.headers, await _whole(answer.content)

    def _no_answer(self, why: str) -> RefusedRequestError:
        self._known_at = float("-inf")
        detail = f"the owner of the partition does not answer ({why}): send the request again, unchanged"
        return RefusedRequestError(503, detail, retry_after_s=RETRY_S, closes=True, reason="uncommitted")

    async def _owner(self, setup: WorkerSetup, partition: str) -> str:
        """Return the address of a partition's owner; "" if it has no owner that we can reach."""
        async with self._finding:  # one request asks the database, and the others wait for what it finds
            if self._clock.monotonic() - self._known_at >= _KNOWN_S:
                with suppress(TransientError):  # the owners may be the same, and commit; they have their fences
                    self._owners = await setup.addresses() if setup.addresses is not None else {}
                self._known_at = self._clock.monotonic()
        address = self._owners.get(partition, "")
        machine, _, _ = address.partition(" ")
        return address if machine in ("", socket.gethostname()) else ""

    def _now(self) -> int:
        return self._clock.now_us() // 1_000_000


async def _whole(content: aiohttp.StreamReader) -> bytes:
    """Read an answer. Raises ClientError: it is too long to be one of ours."""
    found = bytearray()
    async for chunk in content.iter_any():
        found += chunk
        if len(found) > _ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError("it is too long")
    return bytes(found)
