"""Samples the database while workers run and die: the owners of intervals, and the progress of the input."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from millpy.clock import Clock
from millpy.errors import StoreUnavailableError
from millpy.testing.crash_test.database import Database, Interval, Snapshot

EVERY_S = 0.05
BATCH_IN_DOUBT = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """The progress of the input at a moment (monotonic seconds)."""

    at: float
    fed: int
    committed: int


@dataclass(frozen=True, slots=True)
class Takeover:
    """An interval that another process took over."""

    at: float
    computation: str
    interval_id: int
    from_pid: int
    to_pid: int


class Watch(threading.Thread):
    """Samples the database until it is stopped, and answers from the newest snapshot.

    Args:
        unique: the share of records that are not duplicates, if a broker may redeliver; then only those count
            as committed. None if every record is delivered once.

    Attributes:
        snapshot: None before the graph is deployed.
        fed: the number of records fed, set by the feeder.
        registered: process ids of registered workers, and since when.
        moved: monotonic seconds of the newest commit seen.
        answered: monotonic seconds at which the newest answered query was sent.
    """

    def __init__(self, url: str, clock: Clock, *, unique: float | None = None) -> None:
        super().__init__(name="watch", daemon=True)
        self._unique = unique
        self._database = Database(url)
        self._clock = clock
        self._stopped = threading.Event()
        self._owners: dict[int, int] = {}
        self._bundles = 0
        self.fed = 0
        self.snapshot: Snapshot | None = None
        self.samples: list[Sample] = []
        self.takeovers: list[Takeover] = []
        self.registered: dict[int, float] = {}
        self.moved = self.answered = clock.monotonic()

    def run(self) -> None:
        """Take samples until stopped."""
        while not self._stopped.wait(EVERY_S):
            self._look()
        self._database.close()

    def _look(self) -> None:
        fed, asked = self.fed, self._clock.monotonic()
        try:
            found = self._database.snapshot()
        except StoreUnavailableError:
            return
        now = self._clock.monotonic()
        if found is not None:
            self._note(found, now)
            self.snapshot = found
            self.samples.append(Sample(now, fed, self.committed))
        self.answered = asked

    def _note(self, found: Snapshot, now: float) -> None:
        self.registered = dict.fromkeys(found.workers, now) | self.registered
        bundles = sum(interval.bundle for interval in found.intervals)
        if bundles != self._bundles:
            self._bundles, self.moved = bundles, now
        for interval in found.intervals:
            if interval.pid is None:
                continue
            before = self._owners.get(interval.interval_id)
            if before is not None and before != interval.pid:
                self.takeovers.append(Takeover(now, interval.computation, interval.interval_id, before, interval.pid))
            self._owners[interval.interval_id] = interval.pid

    @property
    def committed(self) -> int:
        """The number of records committed, by the newest snapshot."""
        found = self.snapshot
        if found is None:
            return 0
        return found.injected if self._unique is None else int((found.injected - found.duplicates) / self._unique)

    def owned_by(self, pid: int) -> list[Interval]:
        """Return the intervals of a process, by the newest snapshot."""
        return [interval for interval in self.snapshot.intervals if interval.pid == pid] if self.snapshot else []

    def recovered(self, since: float, fed: int, lost_pid: int | None) -> bool:
        """Tell whether a snapshot from after `since` has an owner for every interval, other than `lost_pid`, and `fed`
        records committed.
        """
        found = self.snapshot
        slack = 0 if self._unique is None else max(BATCH_IN_DOUBT, fed // 50)  # duplicates are not spread evenly
        if found is None or self.answered <= since or self.committed < fed - slack:
            return False
        return all(i.finished or (i.live and i.pid is not None and i.pid != lost_pid) for i in found.intervals)

    def stop(self) -> None:
        """Stop sampling."""
        self._stopped.set()
        self.join()
