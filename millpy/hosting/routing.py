"""Routing of a bundle's productions to their consumers: in memory or as segments.

A bundle goes in memory only to a consumer that has consumed all earlier segments of that producer; every other
consumer gets its slice in a segment, in the same commit. An archive takes only large bundles in memory. It says of each
bundle which one was before it, so its bundles have segments in any case, without records if these go in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millpy.hosting.interval_state import IntervalState
from millpy.hosting.plan import OutgoingSubscription
from millpy.hosting.replay import ExpectedRecords
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, Segment, StoredSlice
from millpy.model.dead_letter import dead_letter_of, payload_of
from millpy.model.keys import KeyColumn, KeyHasher
from millpy.model.record import Records, concat, retractions_of
from millpy.model.sites import SiteProgress
from millpy.model.step_progress import StepProgress
from millpy.model.time import Instant
from millpy.operators.kept_site import with_kept_sites
from millpy.operators.stateless import ChainOutput, Chains
from millpy.store.codec import encode_slice
from millpy.store.protocol import SegmentQuery

Observe = Callable[[IntervalState, Mapping[str, Records]], None]
"""Called with an interval, and with what its new bundle produces by stream, before operators and consumers."""


@dataclass(slots=True)
class Delivery:
    """What reaches a consumer of one producer's bundle: the records of one subscription, a position, or both.

    The last delivery of a bundle moves the cursor.

    Attributes:
        producer: interval that made them.
        seq, watermark: the bundle's number, and the producer's low watermark there.
        bundle: the records; None if only the position moves.
        moves_cursor: whether the consumer's cursor moves to `seq` and `watermark`, after the records.
        polled: whether the records are input of the turn and not made in it, so that poison isolation counts them.
    """

    producer: int
    seq: int
    watermark: Instant
    bundle: Bundle | None
    moves_cursor: bool
    polled: bool = False


class Router:
    """Routes the productions of one worker's intervals to their consumers, here and in other workers."""

    def __init__(
        self, limits: Limits, hasher: KeyHasher, progress: StepProgress, observe: Observe | None = None
    ) -> None:
        self._observe = observe
        self._progress = progress
        self._limits = limits
        self._hasher = hasher

    def emit(
        self,
        producer: IntervalState,
        productions: Mapping[str, Records],
        emitted: Mapping[str, int],
        intervals: Mapping[int, IntervalState],
        deliveries: dict[int, list[Delivery]],
        again: Mapping[int, Records],
        expected: ExpectedRecords,
    ) -> tuple[list[Segment], list[DeadLetter]]:
        """Route a bundle's productions: in memory to current local consumers, to all others as segments.

        On the way the records go through the operators of each consumer; a record on which an operator fails becomes a
        dead letter. `emitted` is the number of records per stream, as their producer counted them (I8). `again` holds
        replayed records that operators had dead-lettered, by subscription. `expected` gets what a replayed dead letter
        becomes for each consumer.
        """
        if self._observe is not None:
            self._observe(producer, productions)
        current = _consumers_in_memory(producer, productions, intervals, deliveries)
        segments = []
        letters: list[DeadLetter] = []
        sites_by_stream = {stream: made.sites for stream, made in productions.items() if made.sites is not None}
        chains = Chains(productions, self._limits.record_attempts_max, self._progress)
        for subscription in producer.plan.outgoing:
            producer.count("produced", str(subscription.subscription_id), emitted.get(subscription.stream, 0))
            parts = self._through(producer, subscription, chains, productions, letters)
            replayed = list(parts) if producer.plan.stage is None else []
            if (retried := again.get(subscription.subscription_id)) is not None:
                producer.count("dead_lettered", str(subscription.subscription_id), -len(retried))
                before = {subscription.stream: retried}
                again_through = Chains(before, self._limits.record_attempts_max, self._progress)
                passed = self._through(producer, subscription, again_through, before, letters)
                parts, replayed = [*parts, *passed], [*replayed, *passed]
            for part in replayed:
                expected.add(subscription.consumer, subscription.input, part)
            progress = sites_by_stream.get(subscription.stream) if subscription.watermarked else None
            if not parts and progress is None:
                continue
            segments += self._send(producer, subscription, parts, progress, current, deliveries)
        for consumer in current:
            deliveries[consumer].append(
                Delivery(producer.interval_id, producer.bundle, producer.low_watermark, None, True)
            )
        return segments, letters

    def _send(
        self,
        producer: IntervalState,
        subscription: OutgoingSubscription,
        parts: Sequence[Records],
        progress: SiteProgress | None,
        current: Collection[int],
        deliveries: dict[int, list[Delivery]],
    ) -> list[Segment]:
        """Deliver the records of one subscription to its consumers in memory; return the segment of the others."""
        records = concat(parts) if parts else Records.empty(subscription.record_type)
        slices: list[StoredSlice | None] = [None] * len(subscription.consumer_ids)
        previous = producer.last_segments.get(subscription.subscription_id, 0)
        split = _split(records, records.keys(subscription.key_fields, self._hasher), subscription) if parts else []
        if progress is not None:
            split = _with_sites(split, subscription, progress)
        for index, part, keys in split:
            consumer = subscription.consumer_ids[index]
            if consumer in current:
                bundle = Bundle(
                    subscription.input, producer.interval_id, producer.bundle, producer.low_watermark, part, keys,
                    previous if subscription.archived else None,
                )  # fmt: skip
                deliveries[consumer].append(
                    Delivery(producer.interval_id, producer.bundle, producer.low_watermark, bundle, False)
                )
            else:
                slices[index] = encode_slice(part)
        if subscription.archived or any(part is not None for part in slices):
            return [_segment(producer, subscription, records, slices, previous)]
        return []

    def _through(
        self,
        producer: IntervalState,
        subscription: OutgoingSubscription,
        chains: Chains,
        before: Mapping[str, Records],
        letters: list[DeadLetter],
    ) -> list[Records]:
        """Return the records that pass a subscription's operators, if any do; add dead letters for those that fail."""
        passed = chains.output_of(subscription.stream, subscription.operators)
        if passed is None:
            return []
        if subscription.site:
            passed = with_kept_sites(before[subscription.stream], passed, subscription.site, self._hasher)
        producer.count("filtered", str(subscription.subscription_id), passed.filtered)
        producer.count("added", str(subscription.subscription_id), passed.added)
        if passed.failures:
            letters.extend(_failed(producer, subscription, before[subscription.stream], passed))
        return [passed.records] if len(passed.records) else []


def _segment(
    producer: IntervalState,
    subscription: OutgoingSubscription,
    records: Records,
    slices: Sequence[StoredSlice | None],
    previous: int,
) -> Segment:
    """Make the segment of a bundle for consumers elsewhere; the next segment of the subscription follows it."""
    producer.last_segments[subscription.subscription_id] = producer.bundle
    times = records.event_times if len(records) else np.zeros(1, np.int64)  # only sites have moved
    lo, hi = Instant(int(times.min())), Instant(int(times.max()))
    return Segment(
        subscription.subscription_id, producer.bundle, previous, producer.low_watermark, tuple(slices), lo, hi
    )


def segment_queries(intervals: Mapping[int, IntervalState]) -> list[SegmentQuery]:
    """Return what local stages have to poll: producers elsewhere, and local producers that they lag behind."""
    found = []
    for interval in intervals.values():
        for producer, subscription_ids in interval.plan.producers.items():
            local = intervals.get(producer)
            if local is not None and interval.is_current_with(local):
                continue
            after = interval.cursors[producer].seq
            found.append(SegmentQuery(interval.interval_id, interval.deployed.index, producer, subscription_ids, after))
    return found


def positions_of_local_producers(
    consumer: IntervalState, intervals: Mapping[int, IntervalState], inbound: Sequence[Delivery]
) -> list[Delivery]:
    """Return the positions of local producers that are ahead of the consumer's cursor without records for it.

    The consumer may have come to this worker after the producer's last bundle, and a finished producer makes no other.
    """
    found = []
    for producer_id in consumer.plan.producers:
        producer = intervals.get(producer_id)
        if producer is None or producer.bundle == consumer.cursors[producer_id].seq:
            continue
        if _is_current(consumer, producer, inbound):
            at = max(
                [
                    consumer.cursors[producer_id].seq,
                    *(delivery.seq for delivery in inbound if delivery.producer == producer_id),
                ]
            )
            if producer.bundle > at:
                found.append(Delivery(producer_id, producer.bundle, producer.low_watermark, None, True))
    return found


def _consumers_in_memory(
    producer: IntervalState,
    productions: Mapping[str, Records],
    intervals: Mapping[int, IntervalState],
    deliveries: Mapping[int, Sequence[Delivery]],
) -> set[int]:
    """Return the local consumers that take the producer's new bundle in memory; count what waits for archives."""
    found = set()
    for consumer_id in producer.plan.consumers:
        if (consumer := intervals.get(consumer_id)) is None:
            continue
        size = _size(consumer, producer, productions) if consumer.memory_bytes_min else None
        is_large = size is None or size >= consumer.memory_bytes_min
        if is_large and _has_consumed_all(consumer, producer, deliveries[consumer_id]):
            found.add(consumer_id)
        else:
            consumer.waiting_bytes += size or 0
    return found


def _has_consumed_all(consumer: IntervalState, producer: IntervalState, inbound: Sequence[Delivery]) -> bool:
    """Tell whether a consumer will have consumed all that came before the bundle that the producer has just made."""
    before = producer.bundle - 1
    return consumer.cursors[producer.interval_id].seq == before or _is_current(consumer, producer, inbound)


def _size(consumer: IntervalState, producer: IntervalState, productions: Mapping[str, Records]) -> int | None:
    """Return the bytes of a bundle's records for an archive; 0 for a few objects, None without records."""
    streams = {o.stream for o in producer.plan.outgoing if o.subscription_id in consumer.plan.incoming}
    found = [records for stream, records in productions.items() if stream in streams and len(records)]
    return sum(0 if records.small else int(records.batch().nbytes) for records in found) if found else None


def _is_current(consumer: IntervalState, producer: IntervalState, inbound: Sequence[Delivery]) -> bool:
    """Tell whether the consumer will have consumed all earlier segments of the producer with this turn's deliveries."""
    reached = [
        delivery.seq for delivery in inbound if delivery.producer == producer.interval_id and delivery.moves_cursor
    ]
    return consumer.is_current_with(producer, at_least=max(reached, default=0))


def _failed(
    producer: IntervalState, subscription: OutgoingSubscription, records: Records, passed: ChainOutput
) -> list[DeadLetter]:
    """Make dead letters of the records on which operators failed, as they were before the operators."""
    producer.count("dead_lettered", str(subscription.subscription_id), len(passed.failures))
    failed = records.take(np.array([row for row, _ in passed.failures], np.int64))
    return [
        dead_letter_of(
            error,
            payload_of(record),
            stream=subscription.stream,
            computation=subscription.consumer,
            event_time=at,
            key=None,
            input=subscription.input,
            retracts=retracts,
        )
        for (_, error), record, at, retracts in zip(
            passed.failures,
            failed.objects(),
            failed.event_times.tolist(),
            retractions_of(failed).tolist(),
            strict=True,
        )
    ]


def _split(
    records: Records, keys: KeyColumn, subscription: OutgoingSubscription
) -> list[tuple[int, Records, KeyColumn]]:
    """Cut records by the consumer interval that owns their key; order is kept within each part."""
    if len(subscription.los) == 1:
        return [(0, records, keys)]
    if records.small:
        return _split_few(records, keys, subscription)
    owners = np.searchsorted(subscription.los, keys.hashes, side="right") - 1
    used = np.unique(owners).tolist()
    if len(used) == 1:
        return [(used[0], records, keys)]
    per_row = owners[keys.codes]
    parts = []
    for index in used:
        rows = np.flatnonzero(per_row == index)
        parts.append((index, records.take(rows), keys.take(rows)))
    return parts


def _with_sites(
    split: list[tuple[int, Records, KeyColumn]], subscription: OutgoingSubscription, progress: SiteProgress
) -> list[tuple[int, Records, KeyColumn]]:
    """Give the progress of sites to every consumer interval, with its records or without any."""
    parts = {index: (records.slice(0, len(records)), keys) for index, records, keys in split}
    nothing = KeyColumn(np.empty(0, np.int32), [], np.empty(0, np.int64))
    for index in range(len(subscription.consumer_ids)):
        records, _ = parts.setdefault(index, (Records.empty(subscription.record_type), nothing))
        records.sites = progress
    return [(index, *parts[index]) for index in range(len(subscription.consumer_ids))]


def _split_few(
    records: Records, keys: KeyColumn, subscription: OutgoingSubscription
) -> list[tuple[int, Records, KeyColumn]]:
    los = subscription.los.tolist()
    owners = [bisect_right(los, hashed) - 1 for hashed in keys.hashes.tolist()]
    rows: dict[int, list[int]] = {}
    for row, code in enumerate(keys.codes.tolist()):
        rows.setdefault(owners[code], []).append(row)
    if len(rows) == 1:
        return [(index, records, keys) for index in rows]
    parts = [(index, np.array(rows[index], np.int64)) for index in sorted(rows)]
    return [(index, records.take(places), keys.take(places)) for index, places in parts]
