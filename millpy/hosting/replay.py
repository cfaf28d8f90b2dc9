"""Replay: dead letters and late records go through a stage once more.

A request is an input like any other: the owner of the interval that rejected the record takes it in a turn, and the
commit of that turn stores its outcome under the same fence as its effects. So a crash at any point neither loses nor
doubles a record. An injector's records go through its intake again (`Intake.replay`). A stage's records come before
the turn's other input and are judged by the input watermark before the turn, so a late record is late again. Records
on which an operator failed are produced once more, for the one consumer behind that operator.

A record that a stage rejects again is matched by its content (input, event time, payload, whether it is a retraction):
two records that agree in all four are interchangeable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from millpy.graph import InjectorNode
from millpy.hosting.interval_state import IntervalState
from millpy.hosting.isolation import Isolation
from millpy.hosting.plan import ComputationPlan, OutgoingSubscription
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import SourceBatch
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, ExpectedRecord, LateRows, PastWindow, Request, RequestOutcome
from millpy.model.dead_letter import payload_of
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.stage import InputBundle, WindowCorrection
from millpy.model.time import INSTANT_MAX, Instant

NO_WINDOWS = "only windows can be corrected"
RecordId = tuple[int, int, bytes, bool]


@dataclass(frozen=True, slots=True)
class Replay:
    """The requests that one interval replays in one turn."""

    requests: tuple[Request, ...]
    arrived_at: Instant


def is_emission(request: Request, interval: IntervalState) -> bool:
    """Tell whether an operator behind this interval dead-lettered the record, and not the interval itself."""
    if interval.plan.stage is None:
        return not request.wire
    return any(subscription.stream == request.stream for subscription in interval.plan.outgoing)


class ExpectedRecords:
    """The records that a replayed dead letter becomes, if an operator wants it in windows that it is too late for."""

    def __init__(self, replay: Replay | None, computation: str = "", arrived: Sequence[InputBundle] = ()) -> None:
        first = None if replay is None else replay.requests[0]
        wanted = first is not None and first.table == "dead_letters" and first.into_window
        self._letter = first.id if first is not None and wanted else None
        self.found: list[ExpectedRecord] = []
        for arrival in arrived:  # the computation takes it again itself
            self.add(computation, arrival.bundle.input, arrival.bundle.records)

    def add(self, consumer: str, place: int, records: Records) -> None:
        """Note records that one input of a consumer gets."""
        if self._letter is None:
            return
        for record, at in zip(records.objects(), records.event_times.tolist(), strict=True):
            self.found.append(ExpectedRecord(self._letter, consumer, place, at, payload_of(record)))


@dataclass(slots=True)
class ReplayBatch:
    """Replay requests as records.

    Attributes:
        arrived: bundles for the stage itself.
        emitted: subscription -> records for the operators before its consumer.
        taken: the request of each record, and the record's identity.
        outcomes: those of requests that did not become records.
        corrections: records for finished windows of the stage.
        correcting: the request of each correction, by its number.
        expected: the records for windows that they may be too late for.
    """

    arrived: list[InputBundle] = field(default_factory=list)
    emitted: dict[int, Records] = field(default_factory=dict)
    taken: list[tuple[Request, RecordId]] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    corrections: list[WindowCorrection] = field(default_factory=list)
    correcting: dict[int, Request] = field(default_factory=dict)
    expected: ExpectedRecords = field(default_factory=lambda: ExpectedRecords(None))


def retake(interval: IntervalState, replay: Replay, hasher: KeyHasher, isolation: Isolation) -> ReplayBatch:
    """Make records of a stage's requests; dead-letter again those whose payload is not a valid record."""
    retaken = ReplayBatch()
    incoming = {subscription.input: subscription for subscription in interval.plan.incoming.values()}
    for place, requests in _by_input(replay.requests):
        subscription = incoming[place]
        records, asked = _read(retaken, interval, subscription.record_type, requests, isolation)
        keys = records.keys(subscription.key_fields, hasher)
        owned = interval.deployed.keys
        assert owned is not None
        ours = np.array([owned.lo <= hashed < owned.hi for hashed in keys.hashes.tolist()], bool)[keys.codes]
        for row in np.flatnonzero(~ours).tolist():
            detail = "the key belongs to another interval: replay the record unchanged"
            retaken.outcomes.append(_failed(interval, asked[row], "key", detail))
        rows = np.flatnonzero(ours)
        if len(rows):
            taken = records.take(rows)
            bundle = Bundle(place, interval.interval_id, 0, interval.input_watermark, taken, keys.take(rows))
            retaken.arrived.append(InputBundle(bundle, INSTANT_MAX))
            _remember(retaken, place, taken, [asked[row] for row in rows.tolist()])
    return retaken


def retake_corrections(interval: IntervalState, replay: Replay, isolation: Isolation) -> ReplayBatch:
    """Decode the late records that are to be added to finished windows; the stage adds them."""
    retaken = ReplayBatch()
    incoming = {subscription.input: subscription for subscription in interval.plan.incoming.values()}
    for place, requests in _by_input(replay.requests):
        records, asked = _read(retaken, interval, incoming[place].record_type, requests, isolation)
        for request, record, at in zip(asked, records.objects(), records.event_times.tolist(), strict=True):
            assert request.window is not None, request.id
            retaken.correcting[request.id] = request
            correction = WindowCorrection(request.id, request.window, record, Instant(at), request.retracts)
            retaken.corrections.append(correction)
    return retaken


def corrected_outcomes(
    retaken: ReplayBatch, corrected: Mapping[int, str | None], windows: Mapping[int, PastWindow], watermark: Instant
) -> list[RequestOutcome]:
    """Return the outcomes of corrections. One that a later turn has to decide has none, and stays requested."""
    outcomes = []
    for number, request in retaken.correcting.items():
        detail = corrected.get(number, NO_WINDOWS)
        if detail:
            outcomes.append(RequestOutcome(request, watermark=watermark, detail=detail))
        elif detail is not None:
            outcomes.append(RequestOutcome(replace(request, window=windows.get(number, request.window))))
    return outcomes


def retake_emission(interval: IntervalState, replay: Replay, isolation: Isolation) -> ReplayBatch:
    """Decode the records that operators behind this interval dead-lettered; each goes to its one consumer again."""
    retaken = ReplayBatch()
    for subscription in interval.plan.outgoing:
        requests = [r for r in replay.requests if (r.stream, r.computation, r.input) == _target(subscription)]
        if not requests:
            continue
        records, asked = _read(
            retaken, interval, _produced_type(interval.plan, subscription.stream), requests, isolation
        )
        if interval.plan.stage is None:
            standing = np.full(len(records), interval.low_watermark, np.int64)
            records = Records(records.type, records.event_times, watermarks=standing, objects=records.objects())
        if len(records):
            retaken.emitted[subscription.subscription_id] = records
            _remember(retaken, subscription.input, records, asked)
    known = {_target(subscription) for subscription in interval.plan.outgoing}
    for request in replay.requests:
        if (request.stream, request.computation, request.input) not in known:
            detail = f"{request.computation} does not consume {request.stream}"
            retaken.outcomes.append(_failed(interval, request, "refused", detail))
    return retaken


def _target(subscription: OutgoingSubscription) -> tuple[str, str, int]:
    return subscription.stream, subscription.consumer, subscription.input


def _produced_type(plan: ComputationPlan, stream: str) -> RecordType:
    if isinstance(plan.node, InjectorNode):
        return plan.node.record_type
    return next(output.record_type for output in plan.node.outputs if output.name == stream)


def _by_input(requests: Sequence[Request]) -> Iterator[tuple[int, list[Request]]]:
    for place, group in groupby(sorted(requests, key=lambda r: (r.input, r.table, r.id)), lambda r: r.input):
        yield place, list(group)


def _read(
    retaken: ReplayBatch,
    interval: IntervalState,
    record_type: RecordType,
    requests: Sequence[Request],
    isolation: Isolation,
) -> tuple[Records, list[Request]]:
    """Return the records that decode and that the database does not refuse, and their requests."""
    decoded = Decoder(record_type).decode(SourceBatch("json", Instant(0), payloads=[r.payload for r in requests]))
    for refused in decoded.refused:
        retaken.outcomes.append(_failed(interval, requests[refused.row], refused.reason, refused.detail))
    asked = [requests[row] for row in decoded.rows.tolist()]
    times = np.array([request.event_time or 0 for request in asked], np.int64)
    retracts = None
    if any(request.retracts for request in asked):
        retracts = np.array([request.retracts for request in asked], np.bool_)
    records = Records(record_type, times, retracts=retracts, batch=decoded.batch, objects=decoded.objects)
    rows, blamed = isolation.admit(records)
    for blame in blamed:
        retaken.outcomes.append(_failed(interval, asked[blame.row], "refused", blame.detail))
    if rows is None:
        return records, asked
    return records.take(rows), [asked[row] for row in rows.tolist()]


def _remember(retaken: ReplayBatch, place: int, records: Records, asked: Sequence[Request]) -> None:
    # Encode the payload now, because user code may change a record before it raises.
    for request, record, at in zip(asked, records.objects(), records.event_times.tolist(), strict=True):
        retaken.taken.append((request, (place, at, payload_of(record), request.retracts)))


def _failed(interval: IntervalState, request: Request, reason: str, detail: str) -> RequestOutcome:
    """Return the outcome of a request that fails before the step; a late record stays a late record."""
    if request.table == "late_records":
        return RequestOutcome(request, watermark=interval.input_watermark, detail=detail)
    letter = DeadLetter(reason, detail, request.payload, request.stream, request.computation, retracts=request.retracts)
    return RequestOutcome(request, letter)


def match_outcomes(
    retaken: ReplayBatch, letters: Sequence[DeadLetter], late: Sequence[LateRows] = ()
) -> tuple[list[RequestOutcome], list[DeadLetter], list[LateRows]]:
    """Return the outcomes of all requests, and the dead letters and late records that do not belong to any of them."""
    if not retaken.taken:
        return retaken.outcomes, list(letters), [rows for rows in late if len(rows)]
    open_requests: dict[RecordId, list[Request]] = defaultdict(list)
    for taken, identity in retaken.taken:
        open_requests[identity].append(taken)
    outcomes = list(retaken.outcomes)
    kept: list[DeadLetter] = []
    for letter in letters:
        identity = (letter.input, letter.event_time or 0, letter.payload, letter.retracts)
        request = _find(open_requests, identity, "dead_letters") if letter.stream else None
        if request is None:
            kept.append(letter)
        else:
            outcomes.append(RequestOutcome(request, dead_letter=letter))
    rest = [rows for rows in _without_requested(late, open_requests, outcomes) if len(rows)]
    outcomes.extend(RequestOutcome(left) for requests in open_requests.values() for left in requests)
    return outcomes, kept, rest


def _find(open_requests: dict[RecordId, list[Request]], identity: RecordId, table: str) -> Request | None:
    for place, request in enumerate(open_requests.get(identity, ())):
        if request.table == table:
            return open_requests[identity].pop(place)
    return None


def _without_requested(
    late: Sequence[LateRows], open_requests: dict[RecordId, list[Request]], outcomes: list[RequestOutcome]
) -> Iterator[LateRows]:
    """Return the late rows that do not belong to requests; a requested record has a row for each window it missed."""
    again: dict[int, tuple[Request, set[int | None], int]] = {}
    for rows in late:
        kept = []
        for row, (at, payload) in enumerate(zip(rows.event_times, rows.payloads, strict=True)):
            window = rows.window_starts[row]
            retracts = bool(rows.retracts and rows.retracts[row])
            for request in open_requests.get((rows.input, at, payload, retracts), ()):
                _, windows, _ = again.setdefault(id(request), (request, set(), rows.watermarks[row]))
                if request.table == "late_records" and window not in windows:
                    windows.add(window)
                    break
            else:
                kept.append(row)
        yield rows if len(kept) == len(rows) else rows.select(kept)
    outcomes.extend(RequestOutcome(request, watermark=at) for request, windows, at in again.values() if windows)
    late_again = {id(request) for request, windows, _ in again.values() if windows}
    for requests in open_requests.values():
        requests[:] = [request for request in requests if id(request) not in late_again]
