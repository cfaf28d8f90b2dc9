"""The injector of one partition of an HTTP source: the requests that wait for a turn, and those in a turn.

    accepted -> waiting -> taken (token) -> committed -> answered

A request is taken as a whole, so all of its records are in one transaction, and its client gets the answer after the
commit. When a turn fails or the partition leaves this worker, the injector refuses the requests that it still has: it
does not know of those in the turn whether they are committed. Their clients send them again, and `Dedupe` drops what is
a duplicate.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from millpy.formats import Message
from millpy.ingest.expansion import EXPANDED_RECORDS_MAX
from millpy.ingest.protocol import RejectedRow, SourceBatch, SourceSetup
from millpy.model.record import Instants
from millpy.model.time import Instant
from millpy.sources.http.answers import RETRY_S, AcceptedRecords, RefusedRequestError
from millpy.sources.http.body import BodyReader, PostedBody, PostedRecords

if TYPE_CHECKING:
    from millpy.sources.http.endpoint import Endpoint
    from millpy.sources.http.source import Http

REFUSED_LATELY_S = 10.0
"""Seconds after a refused request in which the source is not idle: its client will send it again."""
NOT_HERE = "this worker does not own the partition now: send the request again"
_UNKNOWN = "it is not known whether the records are committed: send the request again, with the same Idempotency-Key"


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request whose records wait for a commit.

    Attributes:
        number: its number among the requests of this partition in this process.
        answer: its answer, after the commit.
        bad: its records that the stream rejects; known when it is taken.
    """

    records: PostedRecords
    number: int
    arrived_at: Instant
    answer: asyncio.Future[AcceptedRecords]
    bad: Sequence[RejectedRow] = ()


class HttpInjector:
    """Collects the requests of one partition in this worker, and answers them.

    Args:
        setup: the setup of the source.
        source: the source.
        acquire: begins to listen, if this worker does not yet, and returns the endpoint of the source.
    """

    def __init__(self, setup: SourceSetup, source: Http, acquire: Callable[[], Any]) -> None:
        assert setup.record_type is not None
        self._setup = setup
        self._source = source
        self._acquire = acquire
        self._endpoint: Endpoint | None = None
        self._dead_letters = source.bad_records == "dead_letter"
        self._read = BodyReader(
            source.format, setup.record_type, setup, source.key_field, replays=self._dead_letters
        ).read
        self._check = setup.make_check() if setup.make_check is not None else None
        self._waiting: deque[_WaitingRequest] = deque()
        self._taken: dict[_WaitingRequest, None] = {}
        self._number = self._total = 0
        self._refused_at = setup.clock.monotonic()

    async def open(self, position: bytes | None) -> None:
        """Accept requests. Raises ConfigError: this worker cannot listen, or the tokens cannot be read."""
        del position
        connection = self._setup.connection
        connection.managed = True
        self._endpoint = await self._acquire()
        self._endpoint.injectors[self._setup.partition] = self
        connection.address = self._endpoint.peer_address
        connection.connected()

    async def accept(self, body: PostedBody, answer_s_max: float) -> AcceptedRecords:
        """Return what is committed of a request, after the commit.

        Raises:
            RefusedRequestError: a record is bad, or the commit has failed or takes too long.
        """
        records = self._read(body)
        if not records.payloads:
            return AcceptedRecords(0)
        endpoint = self._endpoint
        if not self._setup.trusted() or endpoint is None:
            raise RefusedRequestError(503, NOT_HERE, retry_after_s=RETRY_S, closes=True)
        with endpoint.room(max(0, records.bytes - len(body.content))):
            return await self._answer(records, Instant(body.arrived_at), answer_s_max)

    async def _answer(self, records: PostedRecords, arrived_at: Instant, answer_s_max: float) -> AcceptedRecords:
        self._number += 1
        answer = asyncio.get_running_loop().create_future()
        waiting = _WaitingRequest(records, self._number, arrived_at, answer)
        self._waiting.append(waiting)
        self._setup.ready.set()
        try:
            async with asyncio.timeout(answer_s_max):
                return await waiting.answer
        except TimeoutError:
            if waiting in self._taken:
                raise RefusedRequestError(503, _UNKNOWN, retry_after_s=RETRY_S, reason="uncommitted") from None
            with suppress(ValueError):  # the injector was closed at the same moment
                self._waiting.remove(waiting)
            why = "the worker has taken nothing in time: send the request again"
            raise RefusedRequestError(503, why, retry_after_s=RETRY_S, reason="uncommitted") from None

    def note_refusal(self) -> None:
        """Note that a client of this worker was sent away and will come again."""
        self._refused_at = self._setup.clock.monotonic()

    async def take(self) -> SourceBatch | None:
        """Return the waiting requests, at most a bundle; a request is taken whole.

        Those with a bad record are answered now, unless their bad records become dead letters.
        """
        if self._endpoint is not None and (refused := self._endpoint.refusals()) is not None:
            self._setup.tell("requests_refused", refused)
        taken = self._next()
        if self._waiting:
            self._setup.ready.set()
        batch = self._judged(taken) if taken else None
        if batch is None:
            return None
        self._taken |= dict.fromkeys(batch.token)
        self._total += batch.records
        batch.total = self._total
        return batch

    def _next(self) -> list[_WaitingRequest]:
        """Return requests from the front until the next would exceed a bound; the event loop must not stop for long."""
        taken: list[_WaitingRequest] = []
        bound, count, size = self._setup.take_bound, 0, 0
        records_max = min(bound.records, EXPANDED_RECORDS_MAX)
        while self._waiting:
            records = self._waiting[0].records
            count += len(records.payloads)
            size += records.bytes
            if taken and (count > records_max or size > bound.bytes):
                break
            taken.append(self._waiting.popleft())
        return taken

    def _judged(self, taken: list[_WaitingRequest]) -> SourceBatch | None:
        """Check the records of all requests at once; return a batch of the requests that are taken, if any."""
        batch = self._batch_of(taken, self._setup.clock.now_us())
        bad: dict[int, list[RejectedRow]] = {}
        begins = list(accumulate((len(request.records.payloads) for request in taken), initial=0))
        for refused in batch.refused if self._check is None else self._check(batch):
            place = bisect_right(begins, refused.row) - 1
            row = refused.row - begins[place]
            bad.setdefault(place, []).append(RejectedRow(row, refused.reason, refused.detail))
        for place, rows in bad.items():
            taken[place].bad = rows
        if self._dead_letters or not bad:
            return batch
        for request in (taken[place] for place in bad):
            why = f"{len(request.bad)} of {len(request.records.payloads)} records are bad, and none is taken"
            _refuse(request, RefusedRequestError(400, why, records=request.bad))
        good = [request for request in taken if not request.bad]
        return self._batch_of(good, batch.arrived_at) if good else None

    def _batch_of(self, taken: Sequence[_WaitingRequest], arrived_at: Instant) -> SourceBatch:
        begins = list(accumulate((len(request.records.payloads) for request in taken), initial=0))
        refused: list[RejectedRow] = []
        messages: dict[int, Message] = {}
        for begin, request in zip(begins, taken, strict=False):
            refused += [RejectedRow(begin + bad.row, bad.reason, bad.detail) for bad in request.records.refused]
            messages |= {begin + row: message for row, message in request.records.messages.items()}

        def describe(row: int) -> str:
            place = bisect_right(begins, row) - 1
            return f"{self._setup.partition} (request {taken[place].number})[{row - begins[place]}]"

        def arrivals() -> Instants:
            times = np.array([request.arrived_at for request in taken], np.int64)
            return np.repeat(times, np.diff(begins))

        return SourceBatch(
            format="json",
            arrived_at=arrived_at,
            payloads=[payload for request in taken for payload in request.records.payloads],
            refused=refused,
            messages=messages,
            describe=describe,
            arrivals=arrivals,
            token=taken,
            records=begins[-1],
        )

    async def acknowledge(self, token: Any) -> None:
        """Answer the requests of a committed batch."""
        for request in token:
            self._taken.pop(request, None)
            if not request.answer.done():
                request.answer.set_result(
                    AcceptedRecords(len(request.records.payloads) - len(request.bad), request.bad)
                )

    def quiet(self) -> bool:
        """Tell whether no request waits or is being read, and none was sent away a short time ago."""
        if self._endpoint is None or self._waiting or self._taken or self._endpoint.is_busy:
            return False
        return self._setup.clock.monotonic() - self._refused_at > REFUSED_LATELY_S

    async def close(self) -> None:
        """Refuse the requests that are not known to be committed, and accept no more."""
        for request in self._waiting:
            _refuse(request, RefusedRequestError(503, NOT_HERE, retry_after_s=RETRY_S, closes=True))
        for request in self._taken:
            unknown = RefusedRequestError(503, _UNKNOWN, retry_after_s=RETRY_S, closes=True, reason="uncommitted")
            _refuse(request, unknown)
        self._waiting.clear()
        self._taken.clear()
        endpoint, self._endpoint = self._endpoint, None
        self._setup.connection.address = ""
        if endpoint is not None:
            if endpoint.injectors.get(self._setup.partition) is self:
                del endpoint.injectors[self._setup.partition]
            await endpoint.release()


def _refuse(request: _WaitingRequest, error: RefusedRequestError) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)
