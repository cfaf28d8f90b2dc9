"""One turn, from poll to commit. READ THIS FIRST.

    gather   what is waiting at the sources and in segments            (nothing changes)
    step     all local computations, in topological order              (soft state moves; pure data comes out)
    commit   every checkpoint in one transaction, fenced by every grant (I1, I2)
    acknowledge the sources, wake the others                            (never before the commit is known)

A crash at any line leaves all of a turn's effects or none: before the commit nothing has left the process, and after
it everything has. `Worker` overlaps: the next turn is gathered and stepped while this one commits; it sends nothing
before this one's outcome is known. A few quick records are stepped in no time: then nothing is gathered before the
outcome is known, and what arrives meanwhile goes along in one turn rather than in a turn of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from millpy.injectors.protocol import Injector
from millpy.model.checkpoint import Checkpoint
from millpy.model.keys import Key
from millpy.model.record import SMALL_RECORDS_MAX
from millpy.model.stage import Release
from millpy.model.time import Instant
from millpy.runtime.isolation import Isolation
from millpy.runtime.probe import Point, Probe
from millpy.runtime.replays import Replay, batch
from millpy.runtime.soft_state import Halt, Owned
from millpy.runtime.steps import Inbox, Steps
from millpy.store.protocol import Polled, Store, Want

log = logging.getLogger(__name__)
SMALL_BLOCK_BYTES = 8_192


@dataclass(frozen=True, slots=True)
class Turn:
    """A stepped turn: its inbox, what it commits, and whom to acknowledge afterwards.

    Attributes:
        records: input records met while stepping; this and the next for poison isolation.
        fired: interval -> key -> timers that fired at the end, where not all that were due did.
    """

    inbox: Inbox
    checkpoints: Sequence[Checkpoint]
    tokens: Sequence[tuple[Injector, Any]]
    records: int
    fired: Mapping[int, Mapping[Key, int]]


def wants(intervals: Mapping[int, Owned]) -> list[Want]:
    """What the worker's stages have to read: producers elsewhere, and local ones that they lag behind."""
    found = []
    for interval in intervals.values():
        for producer, subscription_ids in interval.plan.producers.items():
            local = intervals.get(producer)
            if local is not None and interval.is_current_with(local):
                continue
            after = interval.cursors[producer].seq
            found.append(Want(interval.interval_id, interval.deployed.index, producer, subscription_ids, after))
    return found


async def poll(store: Store, wanted: Sequence[Want], bytes_max: int) -> dict[int, list[Polled]]:
    """One poll for all intervals; answers by consumer."""
    by_consumer: dict[int, list[Polled]] = {}
    if wanted:
        for answer in await store.poll(wanted, bytes_max):
            by_consumer.setdefault(answer.want.consumer, []).append(answer)
    return by_consumer


def retake(intervals: Mapping[int, Owned], arrived_at: Instant, records_max: int) -> dict[int, Replay]:
    """What people want taken again, of each interval as much as goes into one turn, up to records_max."""
    replays = {}
    for interval in intervals.values():
        replay = None if interval.replaying else batch(interval, arrived_at, records_max)
        if replay is not None:
            interval.replaying = True
            replays[interval.interval_id] = replay
    return replays


def releases(intervals: Mapping[int, Owned]) -> dict[int, Sequence[Release]]:
    """Parked keys that people let go on."""
    found: dict[int, Sequence[Release]] = {}
    for interval in intervals.values():
        if interval.releases:
            found[interval.interval_id], interval.releases = interval.releases, []
    return found


async def take(
    intervals: Mapping[int, Owned], replays: Mapping[int, Replay], held_back: frozenset[int]
) -> tuple[dict[int, Any], frozenset[int]]:
    """Everything that is waiting at the sources, and which sources are proven idle.

    A source of which records are taken again in this turn brings no others in it.
    """
    taken, quiet = {}, set()
    for interval in intervals.values():
        if interval.injector is None or interval.paused or interval.finished:
            continue
        if interval.halt is not Halt.NO:
            continue
        if interval.interval_id in replays or interval.interval_id in held_back:
            continue
        waiting = await interval.injector.take()
        interval.quiet = waiting is None and interval.injector.quiet()
        if waiting is not None:
            taken[interval.interval_id] = waiting
        elif interval.quiet:
            quiet.add(interval.interval_id)
    return taken, frozenset(quiet)


async def step(
    steps: Steps,
    inbox: Inbox,
    intervals: Mapping[int, Owned],
    isolation: Isolation,
    executor: Executor | None,
    probe: Probe,
) -> Turn | None:
    """Step in the worker's thread, or here without one; None when nothing has to be committed."""
    stepped = dict(intervals)  # a step that was given up must not meet those that come after it

    def run() -> list[Checkpoint]:
        probe.reach_now(Point.AFTER_POLL)
        return steps.run(inbox, stepped, isolation)

    isolation.seen = 0
    steps.progress.stepping = True
    try:
        checkpoints = run() if executor is None else await asyncio.get_running_loop().run_in_executor(executor, run)
    finally:
        steps.progress.stepping = False
    await probe.reach(Point.AFTER_STEP)
    if not checkpoints:
        return None
    tokens = [
        (injector, taken.token)
        for interval_id, taken in inbox.taken.items()
        if (injector := intervals[interval_id].injector) is not None
    ]
    return Turn(inbox, checkpoints, tokens, isolation.seen, isolation.fired)


async def commit(store: Store, turn: Turn, graph_version: int, probe: Probe) -> None:
    """Commit a turn, then acknowledge its sources (I2). Raises what `Store.commit` raises."""
    await probe.reach(Point.BEFORE_COMMIT)

    async def inside() -> None:
        await probe.reach(Point.AFTER_FENCE)

    await store.commit(turn.checkpoints, graph_version=graph_version, inside=inside if probe.watches_fence else None)
    await probe.reach(Point.AFTER_COMMIT)
    for injector, token in turn.tokens:
        await injector.acknowledge(token)
    await probe.reach(Point.AFTER_ACKNOWLEDGE)


def landed(turn: Turn, intervals: Mapping[int, Owned]) -> None:
    """A turn is known to be committed: what people ask next may be looked for."""
    for interval_id in turn.inbox.replays:
        if interval_id in intervals:
            intervals[interval_id].replaying = False
    for checkpoint in turn.checkpoints:
        interval = intervals.get(checkpoint.grant.interval_id)
        if checkpoint.pause is not None and interval is not None:
            interval.halt = Halt.COMMITTED
            name = interval.plan.name
            log.warning("%s stands still: %s; `millpy sources resume %s`", name, checkpoint.pause.reason, name)


def inbox_is_empty(inbox: Inbox) -> bool:
    """Whether nothing has arrived: then a step is needed only for progress or for what is due."""
    return (
        not inbox.taken
        and not inbox.replays
        and not inbox.releases
        and not any(
            answer.segments or answer.head_seq > answer.want.after
            for answers in inbox.polled.values()
            for answer in answers
        )
    )


def takers(intervals: Mapping[int, Owned]) -> int:
    """How many sources and consumers of segments share the records of a turn, at most; at least one."""
    sources = sum(1 for i in intervals.values() if i.injector is not None and not (i.paused or i.finished))
    consumers = {want.consumer for want in wants(intervals)}
    return max(1, sources + len(consumers))


def is_immediate(inbox: Inbox, intervals: Mapping[int, Owned]) -> bool:
    """Whether stepping is a handful of records in memory: then a hop to a thread would cost more than the step."""
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


def next_processing_due(intervals: Mapping[int, Owned]) -> Instant | None:
    """When the next processing-time timer of any interval fires."""
    dues = [interval.stage.next_due()[1] for interval in intervals.values() if interval.stage is not None]
    return min(dues, default=None)
