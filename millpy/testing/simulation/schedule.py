"""What one seed means: the graph, the feed, and which faults come when. A schedule can be cut down and run again."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from millpy.runtime.probe import Point
from millpy.testing.simulation.graphs import BRANCHES, SHAPES, SHORT_US, Branch, Feed, Shape

FAULT_KINDS = {
    "crash": 3,
    "crash_at": 8,
    "crash_in_doubt": 3,
    "freeze": 2,
    "freeze_at": 5,
    "slow": 1,
    "lease_lost": 4,
    "heart_stops": 1,
    "answer_lost_before": 2,
    "answer_lost_later": 2,
    "answer_lost_delayed": 2,
    "answer_lost_never": 2,
    "connections_lost": 2,
    "broker_away": 2,
    "broker_again": 2,
    "broker_shuffles": 2,
    "wall_jumps": 1,
    "clock_drifts": 1,
    "server_jumps": 1,
    "fold": 3,
    "rings_turn": 3,
    "join": 2,
    "leave": 2,
    "rows_deleted": 1,
    "mended": 1,
    "released": 3,
    "replayed": 3,
}
"""Kind -> weight."""
CLOCK_KINDS = {"wall_steps": 4, "server_steps": 6, "machine_steps": 2}
"""Besides, where clocks step far."""
POINTS = tuple(Point)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at which step, and numbers in [0, 1) that say whom it hits and how hard."""

    step: int
    kind: str
    pick: float
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A second generation of the graph, beside the first.

    Attributes:
        step: when it is deployed.
        lateness_us: what is changed in it: the allowed lateness of its windows.
    """

    step: int
    workers: int
    lateness_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run.

    Attributes:
        seed: decides whatever is not said here.
        records: readings that are published.
        placed: whether sources and stages run in different workers only, so that all goes through segments.
        clocks: whether clocks step far, for a while or for good.
        few_cells: whether state does not fit in memory and is loaded again and again.
        ahead: whether the clocks of some devices are fast.
        beside: the second generation; None in most runs.
    """

    seed: int
    shape: Shape
    workers: int
    records: int
    bundle_records: int
    ahead: bool
    placed: bool
    few_cells: bool
    clocks: bool
    faults: tuple[Fault, ...]
    beside: Beside | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """What it has, in words: `FEATURES` has them all."""
        flags = {"clocks": self.clocks, "generations": self.beside is not None}
        return (*self.shape.features, *(name for name, has in flags.items() if has))


FEATURES = (*SHAPES, "clocks", "generations")
"""One run of each is wanted at least."""
LATENESSES_US = (0, 400_000, 2_000_000)
BESIDE = 1 / 6
"""So many of the runs have a second generation."""
LONG_US = 600_000_000
"""Longer than any run."""


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    feed: Feed = rng.choices(("topic", "log", "file"), (5, 3, 3))[0]
    idle = feed != "file" and rng.random() < 0.3
    bundle_records = rng.choice((1, 2, 4) if feed == "file" else (3, 6, 12))
    clocks = rng.random() < 0.25
    shape = _draw_shape(rng, feed, idle, pings=not clocks)
    faults = []
    step = 20
    drawn = FAULT_KINDS | CLOCK_KINDS if clocks else FAULT_KINDS
    kinds, weights = list(drawn), list(drawn.values())
    for _ in range(8 + int(rng.random() * 8)):
        step += 5 + int(rng.random() * 90)
        kind = rng.choices(kinds, weights)[0]
        faults.append(Fault(step, kind, int(rng.random() * 10_000) / 10_000, int(rng.random() * 10_000) / 10_000))
    schedule = Schedule(
        seed=seed,
        shape=shape,
        workers=rng.choice((1, 2, 2, 2, 3, 3)),
        records=step // 10 * bundle_records if feed == "file" else 30 + int(rng.random() * 60),
        bundle_records=bundle_records,
        ahead=idle and rng.random() < 0.4,
        placed=rng.random() < 0.2,
        few_cells=rng.random() < 0.15,
        clocks=clocks,
        faults=tuple(faults),
    )
    return _with_generations(schedule, random.Random(f"generations of {seed}"))


def _with_generations(schedule: Schedule, rng: random.Random) -> Schedule:
    """Some have a second one, and switches to and fro. All others are what they would be without them."""
    if rng.random() >= BESIDE:
        return schedule
    last = schedule.faults[-1].step
    beside = Beside(
        step=int(rng.random() * 0.6 * last), workers=rng.choice((1, 1, 2)), lateness_us=rng.choice(LATENESSES_US)
    )
    switches = []
    for _ in range(1 + int(rng.random() * 5)):
        step = beside.step + int(rng.random() * (last - beside.step))
        kind = rng.choice(("switch", "switch_at"))
        switches.append(Fault(step, kind, int(rng.random() * 10_000) / 10_000, int(rng.random() * 10_000) / 10_000))
    faults = sorted([*schedule.faults, *switches], key=lambda fault: fault.step)
    return replace(schedule, beside=beside, faults=tuple(faults))


def _draw_shape(rng: random.Random, feed: Feed, idle: bool, *, pings: bool) -> Shape:
    """Which graph: half of them windows and the watcher, with whatever may be behind it; half any branches."""
    partitions = 1
    branches: tuple[Branch, ...] = ("fixed", "watcher")
    watched = rng.random() < 0.45
    if not watched:
        partitions = 1 if feed == "file" else rng.choice((1, 1, 2, 3))
        branches = tuple(rng.sample(BRANCHES, rng.choice((1, 2, 2, 3))))
    by_arrival = rng.random() < 0.5
    within_us = (4_000_000 if by_arrival else rng.choice((SHORT_US, 4_000_000))) if not idle else LONG_US
    return Shape(
        feed=feed,
        partitions=partitions,
        branches=branches,
        lateness_us=rng.choice(LATENESSES_US),
        by_arrival=by_arrival,
        within_us=within_us,
        idle=idle,
        deep=watched and rng.random() < 0.4,
        poison=watched and rng.random() < 0.3,
        skew=partitions > 1 and rng.random() < 0.5,
        columns=rng.random() < 0.3,
        pings=pings,
    )
