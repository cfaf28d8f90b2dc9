"""Replays: records set aside that people want taken again, on their way through a stage once more.

A request is an input like any other: the owner of the interval that set the record aside takes it in a turn, and the
commit of that turn says what became of it, under the same fence as its effects. So a crash at any point loses and
doubles nothing. An injector's records go through its intake again (`Intake.replay`). Those of a stage come before all
else that the turn brings, are judged by the input watermark before the turn, and so are late when they are late. Those
that an operator did not survive are produced once more, for the one consumer behind it.

A record that a stage sets aside again is found by what it is (input, event time, payload): two that agree in all of
that are one as good as the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile

import numpy as np

from millpy.graph import InjectorNode
from millpy.injectors.decode import Decoder
from millpy.injectors.protocol import Taken
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, LateRows, Request, Settled
from millpy.model.keys import KeyHasher
from millpy.model.quarantine import payload_of
from millpy.model.record import Records, RecordType
from millpy.model.stage import Arrived
from millpy.model.time import INSTANT_MAX, Instant
from millpy.runtime.isolation import Isolation
from millpy.runtime.plan import ComputationPlan, Outlet
from millpy.runtime.soft_state import Owned

Identity = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class Replay:
    """What one interval takes again in one turn."""

    requests: tuple[Request, ...]
    arrived_at: Instant


def is_emission(request: Request, interval: Owned) -> bool:
    """Whether it was an operator behind this interval that set the record aside, and not the interval itself."""
    if interval.plan.stage is None:
        return not request.wire
    return any(outlet.stream == request.stream for outlet in interval.plan.outlets)


def batch(interval: Owned, arrived_at: Instant, records_max: int) -> Replay | None:
    """What of the requests that wait at an interval can be taken in one turn, up to records_max; the others wait."""
    waiting = interval.requested
    if not waiting:
        return None
    first = waiting[0]

    def alike(request: Request) -> bool:
        return (is_emission(request, interval), request.wire) == (is_emission(first, interval), first.wire)

    taken = tuple(islice(takewhile(alike, waiting), records_max))
    del waiting[: len(taken)]
    return Replay(taken, arrived_at)


@dataclass(slots=True)
class Retaken:
    """Requests as records.

    Attributes:
        arrived: bundles for the stage itself.
        emitted: subscription -> records for the operators before it.
        taken: the request of each record, and its identity.
        settled: requests that did not get so far.
    """

    arrived: list[Arrived] = field(default_factory=list)
    emitted: dict[int, Records] = field(default_factory=dict)
    taken: list[tuple[Request, Identity]] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)


def retake(interval: Owned, replay: Replay, hasher: KeyHasher, isolation: Isolation) -> Retaken:
    """Make records of a stage's requests, and set those aside again that are none."""
    retaken = Retaken()
    inlets = {inlet.input: inlet for inlet in interval.plan.inlets.values()}
    for place, requests in _by_input(replay.requests):
        inlet = inlets[place]
        records, asked = _read(retaken, interval, inlet.record_type, requests, isolation)
        keys = records.keys(inlet.key_fields, hasher)
        owned = interval.deployed.keys
        assert owned is not None
        ours = np.array([owned.lo <= hashed < owned.hi for hashed in keys.hashes.tolist()], bool)[keys.codes]
        for row in np.flatnonzero(~ours).tolist():
            detail = "the key belongs to another interval: replay it as it was set aside"
            retaken.settled.append(_failed(interval, asked[row], "key", detail))
        rows = np.flatnonzero(ours)
        if len(rows):
            taken = records.take(rows)
            bundle = Bundle(place, interval.interval_id, 0, interval.input_watermark, taken, keys.take(rows))
            retaken.arrived.append(Arrived(bundle, INSTANT_MAX))
            _remember(retaken, place, taken, [asked[row] for row in rows.tolist()])
    return retaken


def retake_emission(interval: Owned, replay: Replay, isolation: Isolation) -> Retaken:
    """Make records of what operators behind this interval set aside; each goes to its one consumer again."""
    retaken = Retaken()
    for outlet in interval.plan.outlets:
        requests = [r for r in replay.requests if (r.stream, r.computation, r.input) == _target(outlet)]
        if not requests:
            continue
        records, asked = _read(retaken, interval, _produced_type(interval.plan, outlet.stream), requests, isolation)
        if interval.plan.stage is None:
            standing = np.full(len(records), interval.low_watermark, np.int64)
            records = Records(records.type, records.event_times, watermarks=standing, objects=records.objects())
        if len(records):
            retaken.emitted[outlet.subscription_id] = records
            _remember(retaken, outlet.input, records, asked)
    known = {_target(outlet) for outlet in interval.plan.outlets}
    for request in replay.requests:
        if (request.stream, request.computation, request.input) not in known:
            detail = f"{request.computation} does not consume {request.stream}"
            retaken.settled.append(_failed(interval, request, "refused", detail))
    return retaken


def _target(outlet: Outlet) -> tuple[str, str, int]:
    return outlet.stream, outlet.consumer, outlet.input


def _produced_type(plan: ComputationPlan, stream: str) -> RecordType:
    if isinstance(plan.node, InjectorNode):
        return plan.node.record_type
    return next(output.record_type for output in plan.node.outputs if output.name == stream)


def _by_input(requests: Sequence[Request]) -> Iterator[tuple[int, list[Request]]]:
    for place, group in groupby(sorted(requests, key=lambda r: (r.input, r.pile, r.id)), lambda r: r.input):
        yield place, list(group)


def _read(
    retaken: Retaken, interval: Owned, record_type: RecordType, requests: Sequence[Request], isolation: Isolation
) -> tuple[Records, list[Request]]:
    """Those of the payloads that are records and that the database does not refuse, and their requests."""
    decoded = Decoder(record_type).decode(Taken("json", Instant(0), payloads=[r.payload for r in requests]))
    for refused in decoded.refused:
        retaken.settled.append(_failed(interval, requests[refused.row], refused.reason, refused.detail))
    asked = [requests[row] for row in decoded.rows.tolist()]
    times = np.array([request.event_time or 0 for request in asked], np.int64)
    records = Records(record_type, times, batch=decoded.batch, objects=decoded.objects)
    rows, blamed = isolation.admit(records)
    for blame in blamed:
        retaken.settled.append(_failed(interval, asked[blame.row], "refused", blame.detail))
    if rows is None:
        return records, asked
    return records.take(rows), [asked[row] for row in rows.tolist()]


def _remember(retaken: Retaken, place: int, records: Records, asked: Sequence[Request]) -> None:
    # Now, because user code may change a record before it raises.
    for request, record, at in zip(asked, records.objects(), records.event_times.tolist(), strict=True):
        retaken.taken.append((request, (place, at, payload_of(record))))


def _failed(interval: Owned, request: Request, reason: str, detail: str) -> Settled:
    """A request that is set aside again before it got anywhere; a late record stays a late record."""
    if request.pile == "late_records":
        return Settled(request, watermark=interval.input_watermark)
    return Settled(request, DeadLetter(reason, detail, request.payload, request.stream, request.computation))


def settle(
    retaken: Retaken, letters: Sequence[DeadLetter], late: Sequence[LateRows] = ()
) -> tuple[list[Settled], list[DeadLetter], list[LateRows]]:
    """What became of all requests, and the letters and late records that are not theirs."""
    if not retaken.taken:
        return retaken.settled, list(letters), [rows for rows in late if len(rows)]
    open_requests: dict[Identity, list[Request]] = defaultdict(list)
    for taken, identity in retaken.taken:
        open_requests[identity].append(taken)
    settled = list(retaken.settled)
    kept: list[DeadLetter] = []
    for letter in letters:
        identity = (letter.input, letter.event_time or 0, letter.payload)
        request = _find(open_requests, identity, "dead_letters") if letter.stream else None
        if request is None:
            kept.append(letter)
        else:
            settled.append(Settled(request, letter=letter))
    rest = [rows for rows in _without_settled(late, open_requests, settled) if len(rows)]
    settled.extend(Settled(left) for requests in open_requests.values() for left in requests)
    return settled, kept, rest


def _find(open_requests: dict[Identity, list[Request]], identity: Identity, pile: str) -> Request | None:
    for place, request in enumerate(open_requests.get(identity, ())):
        if request.pile == pile:
            return open_requests[identity].pop(place)
    return None


def _without_settled(
    late: Sequence[LateRows], open_requests: dict[Identity, list[Request]], settled: list[Settled]
) -> Iterator[LateRows]:
    """Late rows but for those of requests: such a record has a row for each window that it has missed already."""
    again: dict[int, tuple[Request, set[int | None], int]] = {}
    for rows in late:
        kept = []
        for row, (at, payload) in enumerate(zip(rows.event_times, rows.payloads, strict=True)):
            window = rows.window_starts[row]
            for request in open_requests.get((rows.input, at, payload), ()):
                _, windows, _ = again.setdefault(id(request), (request, set(), rows.watermarks[row]))
                if request.pile == "late_records" and window not in windows:
                    windows.add(window)
                    break
            else:
                kept.append(row)
        yield rows if len(kept) == len(rows) else rows.select(kept)
    for request, windows, watermark in again.values():
        if windows:
            settled.append(Settled(request, watermark=watermark))
            for requests in open_requests.values():
                requests[:] = [other for other in requests if other is not request]
