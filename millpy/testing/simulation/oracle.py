"""The expected results, by plain loops that share no decoder, window or timer with the engine.

The input is the committed one, in its order: batches of payloads with their time of arrival, each payload with its
truth. `SourceOracle` decides which readings are accepted and the watermark before each; `WatchOracle` and those of
`recount.py` follow it to the position that a consumer has reached (I9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millpy.testing.simulation.graphs import CANCELS, DISORDER_US, EVERY, QUIET_US
from millpy.testing.simulation.input import Truth

BEGINNING = -(2**62)
END = 2**62
FUTURE_TOLERANCE_US = 600_000_000

Judged = tuple[Truth, int]
"""An accepted reading and the watermark before it."""
MarkRow = tuple[str, str, int, int, int]
"""(device, kind, number, total, event time)."""


class Arrival(NamedTuple):
    """When a bundle arrived.

    Attributes:
        at: the time of arrival.
        unsure_us: the payloads may have arrived later by this much.
        shift_us: the distance from the time of arrival to the dedupe clock, unless that is the readings' own time.
    """

    at: int
    unsure_us: int
    shift_us: int


@dataclass(slots=True)
class SourceOracle:
    """The expected counts, dedupe ids and watermark of a source.

    Attributes:
        disorder_us: the disorder that the source promises.
        floor: ids that were last seen before it were forgotten when the horizon last changed.
        begun: the watermark at which the source began.
        by_bundle: bundle number -> (accepted readings, watermark after it).
        overtaken: ids of readings that were older than the watermark when they were accepted.
    """

    truths: Mapping[bytes, Truth | None]
    by_arrival: bool
    within_us: int
    injected: int = 0
    accepted: int = 0
    duplicate: int = 0
    dead: int = 0
    newest: int = BEGINNING
    watermark: int = BEGINNING
    clock: int = BEGINNING
    disorder_us: int = DISORDER_US
    floor: int = BEGINNING
    begun: int = BEGINNING
    overtaken: list[int] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    by_bundle: dict[int, tuple[list[Judged], int]] = field(default_factory=dict)

    def change(self, within_us: int, disorder_us: int) -> None:
        """Change the horizon of dedupe ids, and the promised disorder."""
        if within_us != self.within_us:
            self.floor = max(self.floor, self.clock - self.within_us)
        self.within_us, self.disorder_us = within_us, disorder_us

    def take(
        self,
        bundle: int,
        payloads: Sequence[bytes],
        arrival: Arrival,
        *,
        finished: bool,
        refused: Counter[int],
        again: Sequence[bytes] = (),
    ) -> None:
        """Judge the input of a bundle, in order.

        Args:
            bundle: its number.
            payloads: the payloads that it read.
            arrival: when they arrived.
            finished: whether the source has ended.
            refused: the ids of the readings that the database refused, with their number.
            again: replayed records: each is judged by the present watermark, and does not move it.
        """
        arrived_at, shift_us = arrival.at, arrival.shift_us
        judged: list[Judged] = []
        for payload in again:
            truth = self.truths[payload]
            assert truth is not None, payload
            clock_us = arrived_at + shift_us if self.by_arrival else min(truth.at, arrived_at)
            self.dead -= 1
            if self._seen_before(truth, clock_us):
                self.duplicate += 1
            else:
                self.accepted += 1
                judged.append((truth, self.mark_again(truth, arrived_at)))
        for payload in payloads:
            self.injected += 1
            truth = self.truths[payload]
            latest = arrived_at + arrival.unsure_us + FUTURE_TOLERANCE_US
            if truth is None or (not self.by_arrival and truth.at > latest):
                self.dead += 1
                continue
            clock_us = arrived_at + shift_us if self.by_arrival else min(truth.at, arrived_at)
            if self._seen_before(truth, clock_us):
                self.duplicate += 1
            elif truth.at > latest:
                self.dead += 1
            else:
                if refused[truth.seq]:
                    refused[truth.seq] -= 1
                    self.dead += 1
                else:
                    self.accepted += 1
                    judged.append((truth, self.mark_of(truth)))
                if truth.at < self.mark_of(truth):
                    self.overtaken.append(truth.seq)
                self.move(truth, min(truth.at, arrived_at))
        if finished:
            self.watermark = END
        self.end_bundle(bundle, judged)

    def advance(self, bundle: int, watermark: int) -> None:
        """Add a bundle without input, in which the clock has moved the watermark."""
        self.watermark = max(self.watermark, watermark)
        self.end_bundle(bundle, [])

    def follow_clock(self, bundle: int, stored: Mapping[Any, int], allowed: int) -> None:
        """Let the clock move sites; only a source with sites has any."""

    def watermark_after(self, bundle: int) -> int:
        """Return the watermark after a bundle; 0 is before the first one."""
        return self.by_bundle[bundle][1] if bundle else self.begun

    def mark_of(self, truth: Truth) -> int:
        """Return the watermark before a reading; a smaller disorder may have raised it."""
        if self.newest > BEGINNING:
            self.watermark = max(self.watermark, self.newest - self.disorder_us)
        return self.watermark

    def mark_again(self, truth: Truth, arrived_at: int) -> int:
        """Return the watermark that judges a replayed reading."""
        return self.watermark

    def move(self, truth: Truth, happened: int) -> None:
        """Move the watermark behind an accepted reading."""
        self.newest = max(self.newest, happened)
        self.watermark = max(self.watermark, self.newest - self.disorder_us)

    def end_bundle(self, bundle: int, judged: list[Judged]) -> None:
        """Keep what a bundle has accepted."""
        self.by_bundle[bundle] = (judged, self.watermark)

    def _seen_before(self, truth: Truth, clock_us: int) -> bool:
        self.clock = max(self.clock, clock_us)
        last = self.seen.get(truth.seq)
        self.seen[truth.seq] = self.clock
        return last is not None and self.clock - last <= self.within_us and last >= self.floor


@dataclass(slots=True)
class _DeviceModel:
    group: int = 0
    number: int = 0
    total: int = 0
    last_us: int = 0
    timer_us: int | None = None


@dataclass(slots=True)
class WatchOracle:
    """The expected state and marks of the watcher at one position, without pings, which follow the clock.

    Attributes:
        refused: ids of readings that the database has refused here.
    """

    source: SourceOracle
    refused: Counter[int] = field(default_factory=Counter)
    bundle: int = 0
    devices: dict[str, _DeviceModel] = field(default_factory=dict)
    marks: Counter[MarkRow] = field(default_factory=Counter)

    def advance(self, bundle: int) -> None:
        """Consume the source up to a bundle."""
        for number in range(self.bundle + 1, bundle + 1):
            judged, watermark = self.source.by_bundle[number]
            for truth, before in judged:
                self._take(truth, before)
            for name, device in self.devices.items():
                self._fire(name, device, watermark)
        self.bundle = max(self.bundle, bundle)

    def _take(self, truth: Truth, watermark: int) -> None:
        if self.refused[truth.seq]:
            self.refused[truth.seq] -= 1
            return
        device = self.devices.setdefault(truth.device, _DeviceModel())
        self._fire(truth.device, device, watermark)
        device.group = truth.group
        device.number += 1
        device.total += truth.value
        device.last_us = max(device.last_us, truth.at)
        if device.number % EVERY == 0:
            self.marks[truth.device, "every", device.number, device.total, truth.at] += 1
        if truth.value % CANCELS == 0:
            device.timer_us = None
        elif truth.at >= watermark:
            device.timer_us = device.last_us + QUIET_US

    def _fire(self, name: str, device: _DeviceModel, watermark: int) -> None:
        if device.timer_us is not None and device.timer_us <= watermark:
            self.marks[name, "quiet", device.number, device.total, device.timer_us] += 1
            device.timer_us = None


def grouped(marks: Iterable[tuple[int, str, int]], size_us: int, *, pings: bool) -> Counter[tuple[int, int]]:
    """Count marks (group, kind, event time) by group and span: the expected state behind the watcher."""
    return Counter((group, at // size_us) for group, kind, at in marks if pings or kind != "ping")
