"""What an endpoint's answer means for the messages of a request."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum

AGAIN = frozenset({408, 425, 429})
"""Statuses beside 5xx after which a request is repeated."""
FINAL = frozenset({400, 413, 422, 431})
"""Statuses that judge the content of a request, which never changes."""
BUSY = frozenset({425, 429, 503})
"""Statuses that tell of the endpoint's load, not of the message, although others may arrive meanwhile."""
RETRY_AFTER_S_MAX = 300.0
"""The longest wait that an endpoint can ask for."""


class Meaning(Enum):
    """What has become of a request."""

    DELIVERED = "delivered"
    AGAIN = "again"
    REFUSED = "refused"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class WebhookAnswer:
    """The answer to one attempt at a request.

    Attributes:
        why: the reason, if it is not delivered; it names no path and no secret.
        retry_after_s: the wait that the endpoint asks for; None if it does not.
        is_busy: whether the endpoint only wants to be asked later.
    """

    meaning: Meaning
    why: str = ""
    retry_after_s: float | None = None
    is_busy: bool = False


def answer_of(status: int, why: str, retry_after: str | None, now_s: float) -> WebhookAnswer:
    """Judge a status and its Retry-After header."""
    if 200 <= status < 300:
        return WebhookAnswer(Meaning.DELIVERED)
    wait_s = retry_after_s(retry_after, now_s)
    if status in AGAIN or status >= 500:
        return WebhookAnswer(Meaning.AGAIN, why, wait_s, status in BUSY or wait_s is not None)
    return WebhookAnswer(Meaning.FINAL if status in FINAL else Meaning.REFUSED, why, wait_s)


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None for none, or for what is neither."""
    text = (header or "").strip()
    if not text or len(text) > 100:
        return None
    if text.isascii() and text.isdigit():
        return min(float(text), RETRY_AFTER_S_MAX)
    try:
        at = parsedate_to_datetime(text)
        seconds = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() - now_s
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX)
