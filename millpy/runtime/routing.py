"""Routing: a bundle's productions to its consumers, in memory to those that are current, to the others as segments.

A bundle goes in memory only to a consumer that has consumed all earlier segments of that producer; every other
consumer gets its slice in a segment, in the same commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, Segment, StoredSlice
from millpy.model.keys import KeyColumn, KeyHasher
from millpy.model.quarantine import dead_letter_of, payload_of
from millpy.model.record import Records, concat
from millpy.model.step_progress import StepProgress
from millpy.model.time import Instant
from millpy.runtime.operators import Chains, Passed
from millpy.runtime.plan import Outlet
from millpy.runtime.soft_state import Owned
from millpy.store.codec import encode_slice


@dataclass(slots=True)
class Mail:
    """Something that reaches a consumer: records, a position, or both."""

    producer: int
    seq: int
    watermark: Instant
    bundle: Bundle | None
    moves_cursor: bool
    polled: bool = False


class Router:
    """Hands on what the intervals of one worker produce."""

    def __init__(self, limits: Limits, hasher: KeyHasher, progress: StepProgress) -> None:
        self._progress = progress
        self._limits = limits
        self._hasher = hasher

    def emit(
        self,
        producer: Owned,
        productions: Mapping[str, Records],
        emitted: Mapping[str, int],
        intervals: Mapping[int, Owned],
        mail: dict[int, list[Mail]],
        again: Mapping[int, Records],
    ) -> tuple[list[Segment], list[DeadLetter]]:
        """Route a bundle's productions: to local consumers that are current in memory, to the others as segments.

        On the way they go through the operators of each consumer; what those do not survive is set aside. `emitted` is
        how many there are of each stream, by the word of who has made them (I8). `again` are records, by subscription,
        that were set aside by operators before.
        """
        current = {
            consumer
            for consumer in producer.plan.consumers
            if consumer in intervals and _takes_in_memory(intervals[consumer], producer, mail[consumer])
        }
        segments = []
        letters: list[DeadLetter] = []
        chains = Chains(productions, self._limits.record_attempts_max, self._progress)
        for outlet in producer.plan.outlets:
            producer.count("produced", str(outlet.subscription_id), emitted.get(outlet.stream, 0))
            parts = _through(producer, outlet, chains, productions, letters)
            if (retried := again.get(outlet.subscription_id)) is not None:
                producer.count("quarantined", str(outlet.subscription_id), -len(retried))
                before = {outlet.stream: retried}
                again_through = Chains(before, self._limits.record_attempts_max, self._progress)
                parts += _through(producer, outlet, again_through, before, letters)
            if not parts:
                continue
            records = concat(parts)
            slices: list[StoredSlice | None] = [None] * len(outlet.consumer_ids)
            for index, part, keys in _split(records, records.keys(outlet.key_fields, self._hasher), outlet):
                consumer = outlet.consumer_ids[index]
                if consumer in current:
                    bundle = Bundle(
                        outlet.input, producer.interval_id, producer.bundle, producer.low_watermark, part, keys
                    )
                    mail[consumer].append(
                        Mail(producer.interval_id, producer.bundle, producer.low_watermark, bundle, False)
                    )
                else:
                    slices[index] = encode_slice(part)
            if any(part is not None for part in slices):
                segments.append(_segment(producer, outlet, records, slices))
        for consumer in current:
            mail[consumer].append(Mail(producer.interval_id, producer.bundle, producer.low_watermark, None, True))
        return segments, letters


def _segment(producer: Owned, outlet: Outlet, records: Records, slices: Sequence[StoredSlice | None]) -> Segment:
    """What the bundle leaves for consumers elsewhere; the next one of this subscription follows it."""
    previous = producer.last_segments.get(outlet.subscription_id, 0)
    producer.last_segments[outlet.subscription_id] = producer.bundle
    lo, hi = Instant(int(records.event_times.min())), Instant(int(records.event_times.max()))
    return Segment(outlet.subscription_id, producer.bundle, previous, producer.low_watermark, tuple(slices), lo, hi)


def positions_of_local_producers(
    consumer: Owned, intervals: Mapping[int, Owned], inbound: Sequence[Mail]
) -> list[Mail]:
    """Where local producers stand that have nothing for this consumer above its cursor.

    It may have come to this worker after their last bundle, and a producer that has finished makes no other.
    """
    found = []
    for producer_id in consumer.plan.producers:
        producer = intervals.get(producer_id)
        if producer is None or producer.bundle == consumer.cursors[producer_id].seq:
            continue
        if _is_current(consumer, producer, inbound):
            at = max([consumer.cursors[producer_id].seq, *(m.seq for m in inbound if m.producer == producer_id)])
            if producer.bundle > at:
                found.append(Mail(producer_id, producer.bundle, producer.low_watermark, None, True))
    return found


def _takes_in_memory(consumer: Owned, producer: Owned, inbound: Sequence[Mail]) -> bool:
    """Whether the bundle that the producer has just made goes to this consumer in memory."""
    before = producer.bundle - 1
    return consumer.cursors[producer.interval_id].seq == before or _is_current(consumer, producer, inbound)


def _is_current(consumer: Owned, producer: Owned, inbound: Sequence[Mail]) -> bool:
    """Whether the consumer will have consumed every earlier segment of the producer when this turn's mail is read."""
    reached = [m.seq for m in inbound if m.producer == producer.interval_id and m.moves_cursor]
    return consumer.is_current_with(producer, at_least=max(reached, default=0))


def _through(
    producer: Owned, outlet: Outlet, chains: Chains, before: Mapping[str, Records], letters: list[DeadLetter]
) -> list[Records]:
    """What comes through an outlet's operators, if anything does; adds letters for what they do not survive."""
    passed = chains.behind(outlet.stream, outlet.operators)
    if passed is None:
        return []
    producer.count("filtered", str(outlet.subscription_id), passed.filtered)
    producer.count("added", str(outlet.subscription_id), passed.added)
    if passed.failures:
        letters.extend(_failed(producer, outlet, before[outlet.stream], passed))
    return [passed.records] if len(passed.records) else []


def _failed(producer: Owned, outlet: Outlet, records: Records, passed: Passed) -> list[DeadLetter]:
    """Dead letters for what operators did not survive, as it was before them."""
    producer.count("quarantined", str(outlet.subscription_id), len(passed.failures))
    failed = records.take(np.array([row for row, _ in passed.failures], np.int64))
    return [
        dead_letter_of(
            error,
            payload_of(record),
            stream=outlet.stream,
            computation=outlet.consumer,
            event_time=at,
            key=None,
            input=outlet.input,
        )
        for (_, error), record, at in zip(passed.failures, failed.objects(), failed.event_times.tolist(), strict=True)
    ]


def _split(records: Records, keys: KeyColumn, outlet: Outlet) -> list[tuple[int, Records, KeyColumn]]:
    """Cut records by the consumer interval that owns their key; order is kept within each part."""
    if len(outlet.los) == 1:
        return [(0, records, keys)]
    if records.small:
        return _split_few(records, keys, outlet)
    owners = np.searchsorted(outlet.los, keys.hashes, side="right") - 1
    used = np.unique(owners).tolist()
    if len(used) == 1:
        return [(used[0], records, keys)]
    per_row = owners[keys.codes]
    parts = []
    for index in used:
        rows = np.flatnonzero(per_row == index)
        parts.append((index, records.take(rows), keys.take(rows)))
    return parts


def _split_few(records: Records, keys: KeyColumn, outlet: Outlet) -> list[tuple[int, Records, KeyColumn]]:
    los = outlet.los.tolist()
    owners = [bisect_right(los, hashed) - 1 for hashed in keys.hashes.tolist()]
    rows: dict[int, list[int]] = {}
    for row, code in enumerate(keys.codes.tolist()):
        rows.setdefault(owners[code], []).append(row)
    if len(rows) == 1:
        return [(index, records, keys) for index in rows]
    parts = [(index, np.array(rows[index], np.int64)) for index in sorted(rows)]
    return [(index, records.take(places), keys.take(places)) for index, places in parts]
