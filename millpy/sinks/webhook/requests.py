"""The requests of messages: their ids, bodies and headers.

An id is `GRAPH-SINK-NUMBER-SECRET-FIRST`, and `…-FIRST-LAST` for a batch, of the positions of its messages; a batch has
no gaps. So an id names one content for ever. It has no full stop, which delimits what is signed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SinkSetup

if TYPE_CHECKING:
    from millpy.sinks.webhook.endpoint import Webhook

SECRET_CHARACTERS = 12
HEADERS_BYTES_MAX = 6_000
"""Bytes of the headers that fields fill; servers refuse requests with more than about 8,000."""
_VISIBLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """A request, without what differs from attempt to attempt.

    Attributes:
        places: the places of its messages in the `send`.
        url: the URL, if a field has it.
        refused: why it cannot be sent; "" if it can.
    """

    id: str
    places: range
    body: bytes
    headers: dict[str, str]
    url: str | None = None
    refused: str = ""


def header_text(value: bytes) -> str:
    """Return bytes as the value of a header: what is not visible ASCII, %, and outer spaces are percent-encoded."""
    text = quote(value, safe=_VISIBLE)
    inner = text.strip(" ")
    if len(inner) == len(text):
        return text
    before = len(text) - len(text.lstrip(" ")) if inner else 0
    return "%20" * before + inner + "%20" * (len(text) - len(inner) - before)


class RequestBuilder:
    """Makes the requests of one interval."""

    def __init__(self, webhook: Webhook, setup: SinkSetup) -> None:
        self._webhook = webhook
        # Two databases may have graphs of one name, which must not share ids.
        secret = hashlib.sha256(f"webhook:{setup.secret}".encode()).hexdigest()[:SECRET_CHARACTERS]
        self.prefix = f"{setup.graph}-{setup.sink}-{setup.number}-{secret}"
        self._common = {"Content-Type": webhook.content_type, **dict(webhook.fixed_headers)}

    def by_key(self, messages: SinkMessages) -> list[list[WebhookRequest]]:
        """Return a request for each message, those of each key in order."""
        found: dict[bytes, list[WebhookRequest]] = {}
        for place, key in enumerate(messages.keys):
            found.setdefault(key, []).append(self._single(messages, place))
        return list(found.values())

    def _single(self, messages: SinkMessages, place: int) -> WebhookRequest:
        id = f"{self.prefix}-{messages.positions[place]}"
        fields = dict(messages.headers_of(place))
        own = {name: header_text(fields[of]) for name, of in self._webhook.header_fields if of in fields}
        size = sum(len(name) + len(value) for name, value in own.items())
        refused = f"headers of {size:,} bytes; the limit is {HEADERS_BYTES_MAX:,}" if size > HEADERS_BYTES_MAX else ""
        url = None
        if self._webhook.url_field:
            url = fields.get(self._webhook.url_field, b"").decode()
        return self._request(id, range(place, place + 1), messages.values[place] or b"", own, url, refused)

    def batch(self, messages: SinkMessages, places: Sequence[int]) -> WebhookRequest:
        """Return a request of messages whose positions follow each other."""
        first, last = messages.positions[places[0]], messages.positions[places[-1]]
        values = [messages.values[place] or b"null" for place in places]
        body = b"[" + b",".join(values) + b"]" if self._webhook.batch == "json" else b"\n".join([*values, b""])
        return self._request(f"{self.prefix}-{first}-{last}", range(places[0], places[-1] + 1), body, {}, None, "")

    def _request(
        self, id: str, places: range, body: bytes, own: dict[str, str], url: str | None, refused: str
    ) -> WebhookRequest:
        headers = {**self._common, **own, "Idempotency-Key": id, "webhook-id": id}
        return WebhookRequest(id, places, body, headers, url, refused)


def runs(positions: Sequence[int], places: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places in pieces whose positions have no gaps."""
    piece: list[int] = []
    for place in places:
        if piece and positions[place] != positions[piece[-1]] + 1:
            yield piece
            piece = []
        piece.append(place)
    if piece:
        yield piece
