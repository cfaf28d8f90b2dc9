"""What is fed to a simulated graph: payloads, and beside each the plain truth about it, so that nobody has to decode.

Readings in about the order of their event times; some beyond the promised disorder, some published twice, some rubbish,
some from the future.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace

from millpy.testing.simulation.graphs import DISORDER_US

STEP_US = 40_000
FUTURE_US = 7_200_000_000
HISTORY_US = 3_600_000_000
"""What is not live has happened so long ago: no record of it is ahead of its arrival."""
AHEAD_US = 300_000_000
"""As far ahead of their arrival as that are readings of devices whose clock is fast."""
DEVICES = 5
GROUPS = 2


@dataclass(frozen=True, slots=True)
class Truth:
    """A reading as it was meant."""

    device: str
    group: int
    seq: int
    at: int
    value: int


@dataclass(slots=True)
class Feed:
    """Payloads in order of publication, and what each means; None for rubbish.

    Attributes:
        live: event times are those of publication: `stamped` gives them.
    """

    payloads: tuple[bytes, ...]
    truths: dict[bytes, Truth | None]
    live: bool
    _stamped: dict[bytes, bytes] = field(default_factory=dict)

    def stamped(self, payload: bytes, now_us: int) -> bytes:
        """A payload as it is published at a moment; what is published twice keeps its first time."""
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
    """A reading as a device sends it."""
    return json.dumps(
        {"device": truth.device, "group": truth.group, "seq": truth.seq, "at": truth.at, "value": truth.value}
    ).encode()


def feed(rng: random.Random, count: int, start_us: int, *, live: bool, ahead: bool) -> Feed:
    """So many readings, with what goes wrong at the devices.

    Args:
        rng: decides everything.
        count: how many readings, duplicates and rubbish not counted.
        start_us: event time of the first.
        live: event times come with publication, and keep the promise: nothing is late.
        ahead: of a live feed, some devices' clocks are fast.
    """
    payloads: list[tuple[int, bytes]] = []
    truths: dict[bytes, Truth | None] = {}
    for seq in range(count):
        jitter = int(rng.random() * DISORDER_US)
        if ahead and rng.random() < 0.05:
            jitter = -int(rng.random() * AHEAD_US)
        device = int(rng.random() * DEVICES)
        if (seq // 40 + device) % 4 == 0:  # devices fall silent
            device = (device + 1) % DEVICES
        at = jitter if live else start_us - HISTORY_US + seq * STEP_US + jitter + _misplaced(rng)
        truth = Truth(f"d{device}", device % GROUPS, seq, at, int(rng.random() * 100))
        payload = encoded(truth)
        truths[payload] = truth
        payloads.append((seq * 10, payload))
        if rng.random() < 0.08:
            payloads.append(((seq + int(rng.random() * 15)) * 10 + 5, payload))
        if rng.random() < 0.03:
            rubbish = b'{"device": "d0", "seq": %d' % seq
            truths[rubbish] = None
            payloads.append((seq * 10 + 7, rubbish))
    payloads.sort(key=lambda entry: entry[0])
    return Feed(tuple(payload for _, payload in payloads), truths, live)


def _misplaced(rng: random.Random) -> int:
    """How far an event time breaks the promise: some are too old, a few from the future."""
    chance = rng.random()
    if chance < 0.06:
        return -int(rng.random() * 8 * DISORDER_US)
    return FUTURE_US if chance < 0.07 else 0
