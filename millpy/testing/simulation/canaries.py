"""Canaries: the engine broken on purpose, each in a place where such a mistake could be made.

A checker that never finds anything proves nothing. For every checker there is at least one broken store, worker or part
of a step, written without looking at the checker, that it must find within a few seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millpy.errors import CommitUnknownError
from millpy.ingest.intake import Intake
from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant
from millpy.model.due_timers import DueTimers
from millpy.model.time import INSTANT_MIN, Instant
from millpy.operators import timers
from millpy.operators.join_reach import IntervalReach
from millpy.operators.join_rows import BufferedSide
from millpy.runtime import owned_interval, ownership
from millpy.runtime.outbox_drain import OutboxDrain
from millpy.runtime.turn import Turn, TurnCycle
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryStore
from millpy.store.memory.tables import Header, overlaid
from millpy.store.protocol import PollResult, SegmentQuery
from millpy.testing.simulation.windowed import EARLY
from millpy.windowing import fixed, operator
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.closed_windows import ClosedWindows
from millpy.windowing.firing import Alarms, PaneTriggers
from millpy.windowing.group_by import Groups
from millpy.windowing.panes import Emission
from millpy.windowing.triggered_state import TriggeredWindows
from millpy.windowing.unfired_windows import NextPanes, UnfiredWindows
from millpy.windowing.unread_panes import UnreadPanes


class CommitsTwice(MemoryStore):
    """Repeats a commit whose answer was lost, under the next bundle number."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit; if the outcome is unknown, commit again."""
        try:
            await super().commit(checkpoints, **options)
        except CommitUnknownError:
            await super().commit([_numbered_anew(self, checkpoint) for checkpoint in checkpoints], **options)


def _numbered_anew(store: MemoryStore, checkpoint: Checkpoint) -> Checkpoint:
    header = store.database.headers[checkpoint.grant.interval_id]
    bundle = header.bundle + 1
    segments = [
        replace(segment, seq=bundle, previous_seq=header.last_segments[segment.subscription_id])
        for segment in checkpoint.segments
    ]
    grant = Grant(header.interval.interval_id, header.sequencer)
    return replace(checkpoint, grant=grant, bundle=bundle, segments=segments)


class CommitsInParts(MemoryStore):
    """Commits each interval of a turn separately."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit one by one."""
        for checkpoint in checkpoints:
            await super().commit([checkpoint], **options)


class IgnoresSequencer(MemoryStore):
    """Lets every former owner of an interval commit: the commit becomes the present owner's next one."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit under the present sequencer and number."""
        await super().commit([_numbered_anew(self, checkpoint) for checkpoint in checkpoints], **options)


class KeepsSequencer(MemoryStore):
    """Gives an interval to another worker without raising the sequencer."""

    def _grant(self, header: Header, worker_id: Any) -> Grant:
        header.owner = worker_id
        header.sequencer = max(1, header.sequencer)
        return Grant(header.interval.interval_id, header.sequencer)


class ReadsHeadsLater(MemoryStore):
    """Reads segments and the watermarks of headers in two statements."""

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Poll, then read the headers."""
        found = await super().poll(queries, bytes_max)
        await asyncio.sleep(0)
        headers = self.database.headers
        return [replace(answer, head_watermark=headers[answer.query.producer].low_watermark) for answer in found]


class SkipsSegment(MemoryStore):
    """Returns pages that end one segment too early."""

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Poll, then drop the last segment of each page."""
        pages = await super().poll(queries, bytes_max)
        return [replace(page, segments=page.segments[:-1]) if len(page.segments) > 1 else page for page in pages]


class FreesTooEarly(MemoryStore):
    """Frees a slot of segments that still has readers."""

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Free every slot that is not current."""
        freed = self.database.segments.free(lambda stored: True)
        return freed + await super().turn_rings(epoch_s=epoch_s, epoch_bytes=epoch_bytes)


class FoldsOldValues(MemoryStore):
    """Folds the newest delta first, so that an older one overwrites it."""

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Fold in reverse order."""
        await asyncio.sleep(0)
        self._check_current([grant])
        header = self.database.headers[grant.interval_id]
        for delta in reversed(self.database.unfolded(header)):
            header.keyed = overlaid({name: replace(row, bundle=0) for name, row in header.keyed.items()}, [delta])
        header.folded_bundle = header.bundle
        return header.folded_bundle


class SavesWatermarksWhenFolding(MemoryStore):
    """Writes the low watermark when it folds, where a new owner finds it."""

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Fold, and save the watermark."""
        folded = await super().fold(grant, bytes_max=bytes_max)
        header = self.database.headers[grant.interval_id]
        self._saved()[grant.interval_id] = header.low_watermark
        return folded

    def _grant(self, header: Header, worker_id: Any) -> Grant:
        header.low_watermark = self._saved().get(header.interval.interval_id, INSTANT_MIN)
        return super()._grant(header, worker_id)

    def _saved(self) -> dict[int, Instant]:
        saved: dict[int, Instant] = vars(self.database).setdefault("saved", {})
        return saved


class ForgetsDedupeIds(MemoryStore):
    """Does not load the newest dedupe run at a takeover."""

    async def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Load all runs but one."""
        return (await super().load_dedupe_runs(grant))[:-1]


class ReadsFoldedOnly(MemoryStore):
    """Opens an interval from its rows, without the unfolded deltas."""

    async def read(self, grants: Sequence[Grant], *, state_rows_max: int, **closed: Any) -> Any:
        """Read rows only."""
        headers = [self.database.headers[grant.interval_id] for grant in grants]
        folded = [header.folded_bundle for header in headers]
        for header in headers:
            header.folded_bundle = header.bundle
        try:
            return [self._state.read(grant, state_rows_max=state_rows_max) for grant in grants]
        finally:
            for header, bundle in zip(headers, folded, strict=True):
                header.folded_bundle = bundle


class _EarlyAcknowledgement(TurnCycle):
    async def _commit_when_trusted(self, turn: Turn, stepped: tuple[float, float]) -> None:
        for injector, token in turn.tokens:
            await injector.acknowledge(token)
        await super()._commit_when_trusted(turn, stepped)


class AcknowledgesEarly(Worker):
    """Acknowledges when a turn is stepped."""

    cycle_type = _EarlyAcknowledgement


class KeepsSoftState(Worker):
    """Keeps its windows and state after a failed commit."""

    async def recover(self) -> None:
        """Read again, and restore the old state."""
        kept = {interval_id: owned.stage for interval_id, owned in self.owned.intervals.items()}
        await super().recover()
        for interval_id, owned in self.owned.intervals.items():
            owned.stage = kept.get(interval_id) or owned.stage


def _forgets_counters(owned: Any) -> Any:
    def opened(*arguments: Any) -> Any:
        interval = owned(*arguments)
        interval.counters.clear()
        return interval

    return opened


def _next_early(next_due: Any) -> Any:
    def early(self: DueTimers, pending: Any, watermark: Instant, now_us: Instant | None) -> Any:
        return next_due(self, pending, Instant(watermark + 200_000), now_us)

    return early


def _without_tombstones(take_entries: Any) -> Any:
    def taken(self: Any, texts: Sequence[bytes], hashes: Sequence[int]) -> list[Entries]:
        found = []
        for entries in take_entries(self, texts, hashes):
            kept = Entries(entries.kind, entries.namespace)
            for place, value in enumerate(entries.values):
                if value is not None:
                    kept.add(
                        entries.keys[place],
                        entries.key_hashes[place],
                        entries.subkeys[place],
                        value,
                        entries.fire_ats[place],
                    )
            found.append(kept)
        return found

    return taken


def _judged_by_the_turn(_: Any) -> Any:
    def judged(arrived: Any, work: Any) -> Any:
        return np.full(len(arrived.bundle), work.watermark, np.int64)

    return judged


def _always_quiet(step: Any) -> Any:
    def stepped(self: Intake, taken: Any, *, clock: Any, quiet: bool) -> Any:
        quiet_since = self._quiet_since
        result = step(self, taken, clock=clock, quiet=True)
        if quiet_since is not None:  # records do not end the silence either
            self._quiet_since = quiet_since
        return result

    return stepped


def _ahead_of_arrival(row_watermarks: Any) -> Any:
    def moved(self: Intake, times: Any, arrived_at: Instant) -> Any:
        return row_watermarks(self, times, Instant(2**62))

    return moved


def _never_too_late(initialize: Any) -> Any:
    def initialized(self: Any, *arguments: Any) -> None:
        initialize(self, *arguments)
        self._allowed_us = 2**60

    return initialized


def _added(_: Any) -> Any:
    return AccumulatorSet.add


def _only_values(_: Any) -> Any:
    return lambda self, rows: np.ones(len(rows), np.int64)


def _leaves_early(left_before: Any) -> Any:
    return lambda self, side, watermark: left_before(self, side, watermark) + 200_000


def _counted_never(_: Any) -> Any:
    return lambda self, numbers, change: (np.empty(0, np.int64), np.empty(0, np.int64))


def _nothing(_: Any) -> Any:
    return lambda self, *_: None


def _never(_: Any) -> Any:
    return lambda *_arguments: []


def _no_panes(_: Any) -> Any:
    def next_panes(self: UnfiredWindows, start: int, *_: Any) -> NextPanes:
        del self.unread[start]
        return NextPanes([], True)

    return next_panes


def _all_read(_: Any) -> Any:
    def recover_window(self: UnreadPanes, start: int, *, closed: bool) -> None:
        self.stored.add(start)

    return recover_window


def _from_anew(recover: Any) -> Any:
    def recovered(self: TriggeredWindows, *arguments: Any) -> None:
        recover(self, *arguments)
        for panes in self.panes.values():
            for pane in panes.values():
                assert pane.firing is not None
                pane.firing.trigger = EARLY.fresh()

    return recovered


Patch = tuple[Any, str, Any]


def _without_position(sound: Any) -> Any:
    return lambda self, known: sound(self, None)


def _behind_what_waits(sound: Any) -> Any:
    return lambda self, known: sound(self, self.waiting.head)


@dataclass(frozen=True, slots=True)
class Canary:
    """A broken engine, and the checker that must find it.

    Attributes:
        patches: (object, attribute, function from the sound one to the broken one).
        needs: the feature that a schedule must have to show it, of `schedule.FEATURES`; all have "readings".
        first: the seed from which on schedules are tried: one that shows it, if few do.
    """

    name: str
    checker: str
    store_type: type[MemoryStore] = MemoryStore
    worker_type: type[Worker] = Worker
    patches: tuple[Patch, ...] = ()
    needs: str = "readings"
    first: int = 0

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Apply the patches for the duration of a `with` block."""
        sound = [(place, name, getattr(place, name)) for place, name, _ in self.patches]
        try:
            for (place, name, broken), (_, _, before) in zip(self.patches, sound, strict=True):
                setattr(place, name, broken(before))
            yield
        finally:
            for place, name, before in sound:
                setattr(place, name, before)


BROKEN = (
    Canary("ignores the sequencer", "I1", IgnoresSequencer, first=7),
    Canary("grants without raising the sequencer", "I1", KeepsSequencer, first=2),
    Canary("commits twice", "I2", CommitsTwice, first=8),
    Canary("commits in parts", "I2", CommitsInParts),
    Canary("folds an old value over a new one", "I2", FoldsOldValues),
    Canary("skips a segment", "I3", SkipsSegment),
    Canary("frees an unread segment", "I3", FreesTooEarly),
    Canary("forgets a dedupe id", "I4", ForgetsDedupeIds, first=4),
    Canary("regresses a watermark", "I5", SavesWatermarksWhenFolding),
    Canary("uses a watermark ahead of its position", "I5", ReadsHeadsLater),
    Canary(
        "lets the clock overtake a backlog", "I5", patches=((Intake, "step", _always_quiet),), needs="idle", first=30
    ),
    Canary(
        "lets a record carry the watermark ahead of its arrival",
        "I5",
        patches=((Intake, "_row_watermarks", _ahead_of_arrival),),
        first=2,
    ),
    Canary("fires a timer early", "I6", patches=((DueTimers, "next_to_fire", _next_early),), first=6),
    Canary(
        "forgets that a timer is deleted",
        "I6",
        patches=((timers.TimerBook, "take_entries", _without_tombstones),),
        first=4,
    ),
    Canary("lets an expired window emit", "I7", patches=((fixed.AlignedInterval, "__init__", _never_too_late),)),
    Canary(
        "forgets its counters",
        "I8",
        patches=((owned_interval, "owned", _forgets_counters), (ownership, "owned", _forgets_counters)),
    ),
    Canary("keeps soft state after a failed commit", "I9", worker_type=KeepsSoftState, first=11),
    Canary("reads folded rows only", "I9", ReadsFoldedOnly, first=8),
    Canary("forgets windows in the store", "I7", patches=((ClosedWindows, "fetch", _nothing),), first=14),
    Canary(
        "takes panes of a trigger for read", "I9", patches=((UnreadPanes, "recover_window", _all_read),), first=1671
    ),
    Canary("reads no window that fires", "I9", patches=((UnfiredWindows, "next_panes", _no_panes),), first=7),
    Canary(
        "judges lateness by the turn", "I9", patches=((operator, "judging_watermarks", _judged_by_the_turn),), first=1
    ),
    Canary(
        "adds a retraction",
        "I9",
        patches=((AccumulatorSet, "subtract", _added), (Groups, "signs", _only_values)),
        needs="levels",
        first=45,
    ),
    Canary("drops a retraction", "I9", patches=((Emission, "_retract", _nothing),), needs="visits"),
    Canary("gives no empty pane", "I7", patches=((PaneTriggers, "_gives_empty", _never),), needs="early"),
    Canary("fires no pane by the clock", "I6", patches=((Alarms, "due", _never),), needs="early"),
    Canary(
        "loses the state of its triggers", "I6", patches=((TriggeredWindows, "recover", _from_anew),), needs="early"
    ),
    Canary(
        "lets a joined record leave early",
        "I9",
        patches=((IntervalReach, "left_before", _leaves_early),),
        needs="pairs",
    ),
    Canary("counts no match", "I9", patches=((BufferedSide, "add_matches", _counted_never),), needs="pairs"),
    Canary("forgets the newest records of a join", "I9", ForgetsDedupeIds, needs="pairs", first=11),
    Canary("sends what has arrived", "I9", patches=((OutboxDrain, "_begin", _without_position),), needs="sent"),
    Canary("skips what waits", "I9", patches=((OutboxDrain, "_begin", _behind_what_waits),), needs="sent"),
    Canary("acknowledges early", "acknowledgement", worker_type=AcknowledgesEarly, first=4),
)
