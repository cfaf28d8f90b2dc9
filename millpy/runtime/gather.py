"""The input that waits for a worker's intervals: at sources, in segments, and in operators' requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from millpy.hosting.interval_state import PauseState
from millpy.hosting.replay import Replay, is_emission
from millpy.hosting.step import TurnInput
from millpy.ingest.dead_letters import is_message
from millpy.model.checkpoint import Request
from millpy.model.record import SMALL_RECORDS_MAX
from millpy.model.stage import Release
from millpy.model.time import Instant
from millpy.runtime.owned_interval import OwnedInterval
from millpy.store.protocol import PollResult, SegmentQuery, Store

SMALL_BLOCK_BYTES = 8_192
"""Bytes of undecoded input that a step may decode in the event loop."""


async def poll(store: Store, queries: Sequence[SegmentQuery], bytes_max: int) -> dict[int, list[PollResult]]:
    """Poll the store once for all intervals; return the answers by the consumer's interval id."""
    by_consumer: dict[int, list[PollResult]] = {}
    if queries:
        for answer in await store.poll(queries, bytes_max):
            by_consumer.setdefault(answer.query.consumer, []).append(answer)
    return by_consumer


def next_replay(interval: OwnedInterval, arrived_at: Instant, records_max: int) -> Replay | None:
    """Take the next waiting requests of an interval, at most `records_max`; return None when none waits.

    One replay has requests of one kind: the same payload format, and either all failed in an operator or none did.
    Corrections of finished windows come together: two of one window are computed from the same row. A dead letter that
    is wanted in its windows comes alone, so that all records of its bundle are its own.
    """
    waiting = interval.requested
    if not waiting:
        return None
    first = waiting[0]

    def alike(request: Request) -> bool:
        if (request.window is None, request.into_window) != (first.window is None, first.into_window):
            return False
        return (is_emission(request, interval), request.wire) == (is_emission(first, interval), first.wire)

    # A message of a payload format may become as many records as a turn may have.
    alone = is_message(first.wire) or (first.into_window and first.window is None)
    bound = 1 if alone else records_max if first.window is None else None
    taken = tuple(islice(takewhile(alike, waiting), bound))
    del waiting[: len(taken)]
    return Replay(taken, arrived_at)


def replays(intervals: Mapping[int, OwnedInterval], arrived_at: Instant, records_max: int) -> dict[int, Replay]:
    """Take one replay, of at most `records_max` requests, for each interval without one that is still uncommitted."""
    found = {}
    for interval in intervals.values():
        replay = None if interval.replaying else next_replay(interval, arrived_at, records_max)
        if replay is not None:
            interval.replaying = True
            found[interval.interval_id] = replay
    return found


def releases(intervals: Mapping[int, OwnedInterval]) -> dict[int, Sequence[Release]]:
    """Return the waiting releases of parked keys by interval, and remove them from the intervals.

    One that is held waits, but for the outbox of a sink, which a release may help to empty.
    """
    found: dict[int, Sequence[Release]] = {}
    for interval in intervals.values():
        if interval.releases and (interval.plan.delivers or not interval.held):
            found[interval.interval_id], interval.releases = interval.releases, []
    return found


async def take(
    intervals: Mapping[int, OwnedInterval], replays: Mapping[int, Replay], held_back: frozenset[int]
) -> tuple[dict[int, Any], frozenset[int]]:
    """Take the waiting input of the sources; return it by interval, and the intervals whose sources have nothing more.

    Skip sources that are paused, held back, finished or closed, or that replay records in this turn.
    """
    taken, quiet = {}, set()
    for interval in intervals.values():
        if interval.injector is None or interval.backpressured or interval.finished:
            continue
        if interval.pause is not PauseState.NO:
            continue
        if interval.interval_id in replays or interval.interval_id in held_back:
            continue
        waiting = await interval.injector.take()
        is_read_up = interval.injector.quiet()
        interval.quiet = waiting is None and is_read_up
        if waiting is not None:
            taken[interval.interval_id] = waiting
        if is_read_up:
            quiet.add(interval.interval_id)  # with input, too: sites that have none may be silent
    return taken, frozenset(quiet)


def is_empty(inbox: TurnInput) -> bool:
    """Tell whether the inbox has no input; a step may still be needed for progress or for due work."""
    return (
        not inbox.taken
        and not inbox.replays
        and not inbox.releases
        and not inbox.settlements
        and not any(
            answer.segments or answer.head_seq > answer.query.after
            for answers in inbox.polled.values()
            for answer in answers
        )
    )


def takers(intervals: Mapping[int, OwnedInterval], queries: Sequence[SegmentQuery]) -> int:
    """Return how many sources and consumers of segments share the records of a turn; at least one."""
    sources = sum(1 for i in intervals.values() if i.injector is not None and not (i.backpressured or i.finished))
    consumers = {query.consumer for query in queries}
    return max(1, sources + len(consumers))


def is_immediate(inbox: TurnInput, intervals: Mapping[int, OwnedInterval]) -> bool:
    """Tell whether to step in the event loop: few records and immediate operators, so a thread would cost more."""
    waiting = sum(len(taken.payloads) for taken in inbox.taken.values())
    waiting += sum(len(replay.requests) for replay in inbox.replays.values())
    waiting += sum(segment.records for found in inbox.polled.values() for a in found for segment in a.segments)
    return (
        waiting <= SMALL_RECORDS_MAX
        and all(taken.batch is None for taken in inbox.taken.values())
        and sum(len(taken.block) for taken in inbox.taken.values()) <= SMALL_BLOCK_BYTES
        and all(
            interval.plan.immediate and (interval.stage is None or interval.stage.immediate)
            for interval in intervals.values()
        )
    )


def next_processing_due(intervals: Mapping[int, OwnedInterval]) -> Instant | None:
    """Return when the next processing-time timer of an interval that is not held fires; None without stages."""
    dues = [i.stage.next_due()[1] for i in intervals.values() if i.stage is not None and not i.held]
    return min(dues, default=None)
