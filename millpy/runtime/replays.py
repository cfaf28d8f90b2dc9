"""Replays: records set aside that people want taken again, on their way through a stage once more.

A request is an input like any other: the owner of the interval that set the record aside takes it in a turn, and the
commit of that turn says what became of it, under the same fence as its effects. So a crash at any point loses and
doubles nothing. An injector's records go through its intake again (`Intake.replay`). Those of a stage come before all
else that the turn brings, are judged by the input watermark before the turn, and so are late when they are late.

A record that a stage sets aside again is found by what it is (input, event time, payload): two that agree in all of
that are one as good as the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from millpy.injectors.decode import Decoder
from millpy.injectors.protocol import Taken
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, LateRows, Request, Settled
from millpy.model.keys import KeyHasher
from millpy.model.quarantine import payload_of
from millpy.model.record import Records
from millpy.model.stage import Arrived, StepResult
from millpy.model.time import INSTANT_MAX, Instant
from millpy.runtime.isolation import Isolation
from millpy.runtime.plan import Inlet
from millpy.runtime.soft_state import Owned

Identity = tuple[int, int, bytes]


@dataclass(frozen=True, slots=True)
class Replay:
    """What one interval takes again in one turn."""

    requests: tuple[Request, ...]
    arrived_at: Instant


@dataclass(slots=True)
class Retaken:
    """Requests of a stage as records.

    Attributes:
        arrived: bundles for the stage.
        taken: the request of each record, and its identity.
        settled: requests that did not get so far.
    """

    arrived: list[Arrived] = field(default_factory=list)
    taken: list[tuple[Request, Identity]] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)


def retake(interval: Owned, replay: Replay, hasher: KeyHasher, isolation: Isolation) -> Retaken:
    """Make records of a stage's requests, and set those aside again that are none."""
    retaken = Retaken()
    inlets = {inlet.input: inlet for inlet in interval.plan.inlets.values()}
    for place, group in groupby(sorted(replay.requests, key=lambda r: (r.input, r.pile, r.id)), lambda r: r.input):
        _retake_input(retaken, interval, inlets[place], list(group), hasher, isolation)
    return retaken


def _retake_input(
    retaken: Retaken,
    interval: Owned,
    inlet: Inlet,
    requests: Sequence[Request],
    hasher: KeyHasher,
    isolation: Isolation,
) -> None:
    def again(request: Request, reason: str, detail: str) -> None:
        letter = DeadLetter(reason, detail, request.payload, request.stream, interval.plan.name)
        retaken.settled.append(failed(request, letter))

    payloads = [request.payload for request in requests]
    decoded = Decoder(inlet.record_type).decode(Taken("json", Instant(0), payloads=payloads))
    for refused in decoded.refused:
        again(requests[refused.row], refused.reason, refused.detail)
    asked = [requests[row] for row in decoded.rows.tolist()]
    times = np.array([request.event_time or 0 for request in asked], np.int64)
    records = Records(inlet.record_type, times, batch=decoded.batch, objects=decoded.objects)
    keys = records.keys(inlet.key_fields, hasher)
    owned = interval.deployed.keys
    assert owned is not None
    ours = np.array([owned.lo <= hashed < owned.hi for hashed in keys.hashes.tolist()], bool)[keys.codes]
    for row in np.flatnonzero(~ours).tolist():
        again(asked[row], "key", "the key belongs to another interval now: replay it as it was set aside")
    admitted, blamed = isolation.admit(records)
    for blame in blamed:
        if ours[blame.row]:
            again(asked[blame.row], "refused", blame.detail)
    rows = np.flatnonzero(ours) if admitted is None else admitted[ours[admitted]]
    if not len(rows):
        return
    bundle = Bundle(inlet.input, interval.interval_id, 0, interval.input_watermark, records.take(rows), keys.take(rows))
    retaken.arrived.append(Arrived(bundle, INSTANT_MAX))
    for row, record in zip(rows.tolist(), bundle.records.objects(), strict=True):
        retaken.taken.append((asked[row], (inlet.input, int(times[row]), payload_of(record))))


def failed(request: Request, letter: DeadLetter) -> Settled:
    """A request whose record is set aside again: a late record that cannot be read stays a late record."""
    if request.pile == "late_records":
        return Settled(request, watermark=int(INSTANT_MAX))
    return Settled(request, letter=letter)


def settle(retaken: Retaken, result: StepResult) -> list[Settled]:
    """What became of all requests; takes those that were set aside again out of the result."""
    open_requests: dict[Identity, list[Request]] = defaultdict(list)
    for request, identity in retaken.taken:
        open_requests[identity].append(request)
    settled = list(retaken.settled)
    kept: list[DeadLetter] = []
    for letter in result.dead_letters:
        request = _find(open_requests, (letter.input, letter.event_time or 0, letter.payload), "dead_letters")
        if request is None or not letter.stream:
            kept.append(letter)
        else:
            settled.append(Settled(request, letter=letter))
    result.dead_letters = kept
    result.late = [rows for rows in _without_settled(result.late, open_requests, settled) if len(rows)]
    settled.extend(Settled(request) for requests in open_requests.values() for request in requests)
    return settled


def _find(open_requests: dict[Identity, list[Request]], identity: Identity, pile: str) -> Request | None:
    for place, request in enumerate(open_requests.get(identity, ())):
        if request.pile == pile:
            return open_requests[identity].pop(place)
    return None


def _without_settled(
    late: Sequence[LateRows], open_requests: dict[Identity, list[Request]], settled: list[Settled]
) -> Iterator[LateRows]:
    for rows in late:
        kept = []
        for row, (at, payload) in enumerate(zip(rows.event_times, rows.payloads, strict=True)):
            request = _find(open_requests, (rows.input, at, payload), "late_records")
            if request is None:
                kept.append(row)
            else:
                settled.append(Settled(request, watermark=rows.watermarks[row]))
        yield rows if len(kept) == len(rows) else _take(rows, kept)


def _take(rows: LateRows, kept: Sequence[int]) -> LateRows:
    return replace(
        rows,
        keys=[rows.keys[row] for row in kept],
        payloads=[rows.payloads[row] for row in kept],
        event_times=[rows.event_times[row] for row in kept],
        watermarks=[rows.watermarks[row] for row in kept],
        window_starts=[rows.window_starts[row] for row in kept],
        window_ends=[rows.window_ends[row] for row in kept],
    )
