"""The input of a simulated graph: payloads, each with the reading that it encodes, so that the oracle need not decode.

Readings arrive roughly in the order of their event times. Some exceed the promised disorder, some arrive twice, some
are invalid, and some are from the future. Times are on a grid, so that records meet every bound exactly, not by luck.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace

from millpy.testing.simulation.graphs import (
    DISORDER_US,
    GROUPS,
    SITE_LAG_US,
    SITES,
    UNIQUE_US,
    Shape,
)
from millpy.testing.simulation.windowed import GAP_US, WINDOW_US

STEP_US = 40_000
GRID_US = 20_000
SKEW_US = 8_000_000
"""How far the last source partition may be ahead of the others in event time."""
FUTURE_US = 7_200_000_000
HISTORY_US = 3_600_000_000
"""The age of readings that are not live: no record is ahead of its arrival."""
AHEAD_US = 300_000_000
"""How far readings of devices with a fast clock are ahead of their arrival."""
DEVICES = SITES
CORRECTED, OTHERS = 100_000, 200_000
"""Added to the ids of readings that were rubbish first, and of those of the other source."""
OTHER_SHARE = 3
"""One of this number of readings has one of the other source beside it."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The true content of a reading."""

    device: str
    group: int
    seq: int
    at: int
    value: int

    @property
    def kind(self) -> int:
        """Return the identity of a reading: device and kind."""
        return self.value % 4


@dataclass(slots=True)
class Feed:
    """Payloads in order of publication, and the reading that each encodes; None for rubbish.

    Attributes:
        partitions: the source partition of each payload; all payloads of a device go to one.
        corrections: the true payloads of rubbish.
        live: whether event times are those of publication, from `stamped`.
        more: payload -> what a device behind the other source publishes at the same time.
    """

    payloads: tuple[bytes, ...]
    partitions: tuple[int, ...]
    truths: dict[bytes, Truth | None]
    corrections: dict[bytes, bytes]
    live: bool
    more: dict[bytes, bytes] = field(default_factory=dict)
    _stamped: dict[bytes, bytes] = field(default_factory=dict)

    def stamped(self, payload: bytes, now_us: int) -> bytes:
        """Return a payload as it is published at a moment; a duplicate keeps its first time."""
        truth = self.truths[payload]
        if not self.live or truth is None:
            return payload
        found = self._stamped.get(payload)
        if found is None:
            stamped = replace(truth, at=now_us - truth.at)
            found = self._stamped[payload] = encoded(stamped)
            self.truths[found] = stamped
        return found


def encoded(truth: Truth) -> bytes:
    """Return a reading as a device sends it."""
    return json.dumps(
        {
            "device": truth.device,
            "group": truth.group,
            "seq": truth.seq,
            "at": truth.at,
            "value": truth.value,
            "kind": truth.kind,
        }
    ).encode()


class Edges:
    """Makes some readings meet a bound exactly: one moves the watermark to it, the next is late by nothing."""

    def __init__(self, rng: random.Random, lateness_us: int) -> None:
        self._rng = rng
        self._lateness_us = lateness_us
        self._newest: dict[int, int] = {}
        self._late: dict[int, int] = {}

    def met(self, place: int, at: int) -> int:
        """Return the event time of the next reading of a partition or site: `at`, or one that meets a bound."""
        late = self._late.pop(place, None)
        if late is not None:
            return late
        newest = self._newest.get(place)
        if newest is not None and at < newest + FUTURE_US // 2:
            if self._rng.random() < 0.05:
                passed = newest - DISORDER_US - self._lateness_us
                end = -(-passed // WINDOW_US) * WINDOW_US
                self._late[place] = end - self._rng.choice((GRID_US, GRID_US, GAP_US, UNIQUE_US))
                at = end + self._lateness_us + DISORDER_US
            self._newest[place] = max(newest, at)
        elif newest is None:
            self._newest[place] = at
        return at


def feed(
    rng: random.Random,
    count: int,
    start_us: int,
    shape: Shape,
    *,
    ahead: bool,
) -> Feed:
    """Generate readings, with everything that goes wrong at devices.

    If `shape.idle`, readings get their event times when they are published, and none is late.

    Args:
        rng: decides everything.
        count: the number of readings, without duplicates and rubbish.
        start_us: the event time of the first reading.
        shape: the graph that reads them.
        ahead: whether the clocks of some devices are fast, if readings get their times when they are published.
    """
    live, partitions, skew = shape.idle, shape.partitions, shape.skew
    edges = Edges(rng, shape.lateness_us)
    payloads: list[tuple[int, bytes, int]] = []
    truths: dict[bytes, Truth | None] = {}
    corrections: dict[bytes, bytes] = {}
    for seq in range(count):
        jitter = int(rng.random() * DISORDER_US)
        if ahead and rng.random() < 0.05:
            jitter = -int(rng.random() * AHEAD_US)
        device = int(rng.random() * DEVICES)
        if (seq // 40 + device) % 4 == 0:  # devices fall silent
            device = (device + 1) % DEVICES
        partition = device % partitions
        at = jitter if live else start_us - HISTORY_US + seq * STEP_US + jitter + _misplaced(rng)
        if not live:
            at = at // GRID_US * GRID_US + (SKEW_US if skew and partition == partitions - 1 else 0)
            site = _site(shape, device)
            at = edges.met(partition, at) if site is None else edges.met(site, at - site * SITE_LAG_US)
        truth = Truth(f"d{device}", device % GROUPS, seq, at, int(rng.random() * 100))
        payload = encoded(truth)
        truths[payload] = truth
        payloads.append((seq * 10, payload, partition))
        if rng.random() < 0.08:
            payloads.append(((seq + int(rng.random() * 15)) * 10 + 5, payload, partition))
        if rng.random() < 0.03:
            rubbish = b'{"device": "d0", "seq": %d' % seq
            past = start_us - HISTORY_US + (0 if live else seq * STEP_US)
            meant = replace(truth, seq=CORRECTED + seq, at=past, value=truth.value // 33 * 33)  # both are valid
            truths[rubbish], corrections[rubbish] = None, encoded(meant)
            truths[corrections[rubbish]] = meant
            payloads.append((seq * 10 + 7, rubbish, partition))
    payloads.sort(key=lambda entry: entry[0])
    _, published, places = zip(*payloads, strict=True)
    more: dict[bytes, bytes] = {}
    for payload, known in list(truths.items()):
        if known is not None and known.seq < CORRECTED and known.seq % OTHER_SHARE == 0:
            other = replace(known, seq=OTHERS + known.seq, value=99 - known.value)
            more[payload] = encoded(other)
            truths[more[payload]] = other
    return Feed(published, places, truths, corrections, live, more)


def _site(shape: Shape, device: int) -> int | None:
    """Return the number of a device's site."""
    return {"": None, "group": device % GROUPS, "device": device}[shape.sites]


def _misplaced(rng: random.Random) -> int:
    """Return by how much to falsify an event time: 0 for most, back for some, into the future for a few."""
    chance = rng.random()
    if chance < 0.06:
        return -int(rng.random() * 8 * DISORDER_US)
    return FUTURE_US if chance < 0.07 else 0
