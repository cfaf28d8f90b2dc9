"""Canaries: the engine broken on purpose, each at the place where such a mistake would be made.

A checker that never finds anything proves nothing. So for every one of them there is at least one broken store, worker
or part of a step, made without looking at the checker, that it has to find within a few seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millpy.errors import CommitUnknownError
from millpy.injectors.intake import Intake
from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant
from millpy.model.due_timers import DueTimers
from millpy.model.time import INSTANT_MIN, Instant
from millpy.runtime import holdings, soft_state, timers
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker
from millpy.store.memory import MemoryStore
from millpy.store.memory_tables import Header, overlaid
from millpy.store.protocol import Polled, Want
from millpy.windowing import aligned, interval


class CommitsTwice(MemoryStore):
    """Sends a commit again when its answer is lost, under whatever number comes next."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit; again if in doubt."""
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
    """Commits each interval of a turn by itself."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit one by one."""
        for checkpoint in checkpoints:
            await super().commit([checkpoint], **options)


class IgnoresSequencer(MemoryStore):
    """Lets anybody commit who has ever owned the interval: the commit becomes the next one of whoever owns it now."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit under the sequencer and number that stand."""
        await super().commit([_numbered_anew(self, checkpoint) for checkpoint in checkpoints], **options)


class KeepsSequencer(MemoryStore):
    """Gives an interval to another worker under the sequencer that it has."""

    def _grant(self, header: Header, worker_id: Any) -> Grant:
        header.owner = worker_id
        header.sequencer = max(1, header.sequencer)
        return Grant(header.interval.interval_id, header.sequencer)


class ReadsHeadsLater(MemoryStore):
    """Reads segments and the watermarks of headers in two statements."""

    async def poll(self, wants: Sequence[Want], bytes_max: int) -> Sequence[Polled]:
        """Poll, then look at the headers."""
        found = await super().poll(wants, bytes_max)
        await asyncio.sleep(0)
        headers = self.database.headers
        return [replace(answer, head_watermark=headers[answer.want.producer].low_watermark) for answer in found]


class SkipsSegment(MemoryStore):
    """A page that ends one segment too early."""

    def _poll(self, want: Want, bytes_left: int) -> Polled:
        found = super()._poll(want, bytes_left)
        return replace(found, segments=found.segments[:-1]) if len(found.segments) > 1 else found


class FreesTooEarly(MemoryStore):
    """Frees a slot of segments without asking who has read them."""

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Free whatever is not current."""
        freed = self.database.segments.free(lambda stored: True)
        return freed + await super().turn_rings(epoch_s=epoch_s, epoch_bytes=epoch_bytes)


class FoldsOldValues(MemoryStore):
    """Folds the newest delta first, so that an older one overwrites it."""

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Fold from the wrong end."""
        await asyncio.sleep(0)
        self._check_current([grant])
        header = self.database.headers[grant.interval_id]
        for delta in reversed(self.database.unfolded(header)):
            header.keyed = overlaid({name: replace(row, bundle=0) for name, row in header.keyed.items()}, [delta])
        header.folded_bundle = header.bundle
        return header.folded_bundle


class SavesWatermarksWhenFolding(MemoryStore):
    """Writes the low watermark when it folds; a new owner finds that one."""

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
    """Does not load the newest run at a takeover."""

    async def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """All but one."""
        return (await super().load_dedupe_runs(grant))[:-1]


class ReadsFoldedOnly(MemoryStore):
    """Opens an interval from its rows, without the deltas that are not folded."""

    async def read(self, grants: Sequence[Grant], *, state_rows_max: int) -> Any:
        """Read rows only."""
        headers = [self.database.headers[grant.interval_id] for grant in grants]
        folded = [header.folded_bundle for header in headers]
        for header in headers:
            header.folded_bundle = header.bundle
        try:
            return [self._opened(header, state_rows_max) for header in headers]
        finally:
            for header, bundle in zip(headers, folded, strict=True):
                header.folded_bundle = bundle


class AcknowledgesEarly(Worker):
    """Acknowledges as soon as a turn is stepped."""

    async def _commit(self, turn: Turn, stepped: tuple[float, float]) -> None:
        for injector, token in turn.tokens:
            await injector.acknowledge(token)
        await super()._commit(turn, stepped)


class KeepsSoftState(Worker):
    """After a failed commit, goes on with the windows and state that it has."""

    async def _recover(self) -> None:
        kept = {interval_id: owned.stage for interval_id, owned in self.holdings.intervals.items()}
        await super()._recover()
        for interval_id, owned in self.holdings.intervals.items():
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


def _always_quiet(observe: Any) -> Any:
    def observed(self: Intake, now_us: Instant, quiet: bool) -> bool:
        return bool(observe(self, now_us, True))

    return observed


def _ahead_of_arrival(row_watermarks: Any) -> Any:
    def moved(self: Intake, times: Any, rows: Any, taken: Any) -> Any:
        return row_watermarks(self, times, rows, replace(taken, arrived_at=Instant(2**62)))

    return moved


def _never_too_late(initialize: Any) -> Any:
    def initialized(self: Any, *arguments: Any) -> None:
        initialize(self, *arguments)
        self._allowed_us = 2**60

    return initialized


Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class Canary:
    """Something broken, and the checker that has to find it.

    Attributes:
        patches: (where, name, what makes the broken one of the sound one).
        needs: what a schedule must have for it to show: a word of `schedule.FEATURES`; "readings" all have.
    """

    name: str
    checker: str
    store_type: type[MemoryStore] = MemoryStore
    worker_type: type[Worker] = Worker
    patches: tuple[Patch, ...] = ()
    needs: str = "readings"

    @contextmanager
    def alive(self) -> Iterator[None]:
        """While it is, the parts that it breaks are broken in this process."""
        sound = [(place, name, getattr(place, name)) for place, name, _ in self.patches]
        try:
            for (place, name, broken), (_, _, before) in zip(self.patches, sound, strict=True):
                setattr(place, name, broken(before))
            yield
        finally:
            for place, name, before in sound:
                setattr(place, name, before)


BROKEN = (
    Canary("ignores the sequencer", "I1", IgnoresSequencer),
    Canary("grants without raising the sequencer", "I1", KeepsSequencer),
    Canary("commits twice", "I2", CommitsTwice),
    Canary("commits in parts", "I2", CommitsInParts),
    Canary("folds an old value over a new one", "I2", FoldsOldValues),
    Canary("skips a segment", "I3", SkipsSegment),
    Canary("frees what is not read", "I3", FreesTooEarly),
    Canary("forgets a dedupe id", "I4", ForgetsDedupeIds),
    Canary("regresses a watermark", "I5", SavesWatermarksWhenFolding),
    Canary("uses a watermark ahead of its position", "I5", ReadsHeadsLater),
    Canary("lets the clock overtake a backlog", "I5", patches=((Intake, "observe", _always_quiet),)),
    Canary(
        "lets a record carry the watermark ahead of its arrival",
        "I5",
        patches=((Intake, "_row_watermarks", _ahead_of_arrival),),
    ),
    Canary("fires a timer early", "I6", patches=((DueTimers, "next", _next_early),)),
    Canary("forgets that a timer is deleted", "I6", patches=((timers.TimerBook, "take_entries", _without_tombstones),)),
    Canary("lets an expired window emit", "I7", patches=((aligned.AlignedInterval, "__init__", _never_too_late),)),
    Canary(
        "forgets its counters",
        "I8",
        patches=((soft_state, "owned", _forgets_counters), (holdings, "owned", _forgets_counters)),
    ),
    Canary("keeps soft state after a failed commit", "I9", worker_type=KeepsSoftState),
    Canary("reads folded rows only", "I9", ReadsFoldedOnly),
    Canary("judges lateness by the turn", "I9", patches=((interval, "judging_watermarks", _judged_by_the_turn),)),
    Canary("acknowledges early", "acknowledgement", worker_type=AcknowledgesEarly),
)
