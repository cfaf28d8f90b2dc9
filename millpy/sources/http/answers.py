"""Answers to a client other than success: their status, their reasons, and when to send the request again.

The body is a problem document (RFC 9457). A reason quotes at most a few characters of what the client has sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web

from millpy.ingest.protocol import RejectedRow

PROBLEM_TYPE = "application/problem+json"
JSON_TYPE = "application/json"
SHOWN_RECORDS_MAX = 100
"""How many refused records an answer names; it counts the others."""
_DETAIL_CHARACTERS_MAX = 500
RETRY_S = 1
"""Seconds after which a client may send a request again that no worker could take."""
_REASONS: Final[Mapping[int, str]] = {
    400: "body", 401: "token", 403: "token", 404: "path", 405: "method", 408: "slow", 413: "size", 415: "type",
    429: "full", 500: "fault", 503: "no_owner",
}  # fmt: skip
REFUSAL_REASONS: Final = frozenset(
    {*_REASONS.values(), "bad_records", "connections", "cut_off", "malformed", "rate", "uncommitted"} - {"path"}
)
"""Why requests to a source are refused, for metrics."""


class RefusedRequestError(Exception):
    """A request is answered without its records being taken, or without knowing whether they are committed.

    Args:
        status: the HTTP status.
        detail: what is wrong, and what to do.
        records: the refused records, by their number in the request from 0.
        retry_after_s: seconds after which the client may try again; None if trying again does not help.
        closes: whether the connection ends, because another worker may answer the next one.
        headers: further headers of the answer.
        reason: one of REFUSAL_REASONS; by default that of the status.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        records: Sequence[RejectedRow] = (),
        retry_after_s: int | None = None,
        closes: bool = False,
        headers: Mapping[str, str] | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.records = records
        self.retry_after_s = retry_after_s
        self.closes = closes
        self.reason = reason or ("bad_records" if records else _REASONS[status])
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    @property
    def is_sent_again(self) -> bool:
        """Whether its client will send the request again; not if it is to be corrected first."""
        return self.status in (408, 429) or self.status >= 500 or self.reason == "cut_off"

    def answer(self) -> web.Response:
        """Return the answer to the client."""
        answer = web.Response(status=self.status, body=self.body(), content_type=PROBLEM_TYPE, headers=self.headers)
        if self.closes:
            answer.force_close()
        return answer

    def body(self) -> bytes:
        """Return the problem document."""
        detail = self.detail.encode(errors="backslashreplace").decode()  # headers may have bytes that are not text
        problem: dict[str, object] = {"status": self.status, "detail": detail}
        return msgspec.json.encode(problem | described(self.records) if self.records else problem)


@dataclass(frozen=True, slots=True)
class AcceptedRecords:
    """What a transaction has of a request.

    Attributes:
        count: the number of records, duplicates among them.
        refused: the records that became dead letters, which `count` does not contain.
    """

    count: int
    refused: Sequence[RejectedRow] = field(default=())

    def body(self) -> bytes:
        """Return the JSON of the answer."""
        found: dict[str, object] = {"records": self.count}
        if self.refused:
            found |= {"dead_lettered": len(self.refused), **described(self.refused)}
        return msgspec.json.encode(found)


def described(records: Sequence[RejectedRow]) -> dict[str, object]:
    """Return the reasons of refused records as JSON; of the first SHOWN_RECORDS_MAX, and the number of the others."""
    shown = [
        {"record": refused.row, "reason": refused.reason, "detail": refused.detail[:_DETAIL_CHARACTERS_MAX]}
        for refused in records[:SHOWN_RECORDS_MAX]
    ]
    more = len(records) - len(shown)
    return {"errors": shown, **({"more_errors": more} if more else {})}
