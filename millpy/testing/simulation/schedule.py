"""A schedule is what a seed decides: the graph, the input, and the faults with their times.

It can be stored, shrunk and replayed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from millpy.hosting.failpoints import Failpoint
from millpy.testing.simulation.graphs import BRANCHES, CHANGEABLE, LEVELS, MORE, SHAPES, SHORT_US, Branch, Feed, Shape
from millpy.testing.simulation.other_side import SENT
from millpy.testing.simulation.per_key import TOOLS
from millpy.testing.simulation.windowed import WINDOWED

FAULT_KINDS = {
    "crash": 3,
    "crash_at": 8,
    "crash_in_doubt": 3,
    "freeze": 2,
    "freeze_at": 5,
    "slow": 1,
    "lease_lost": 4,
    "heartbeat_stops": 1,
    "answer_lost_before": 2,
    "answer_lost_later": 2,
    "answer_lost_delayed": 2,
    "answer_lost_never": 2,
    "connections_lost": 2,
    "broker_away": 2,
    "broker_redelivers": 2,
    "broker_shuffles": 2,
    "wall_jumps": 1,
    "clock_drifts": 1,
    "server_jumps": 1,
    "fold": 3,
    "rings_turn": 3,
    "join": 2,
    "leave": 2,
    "rows_deleted": 1,
    "trouble_pauses": 1,
    "released": 3,
    "replayed": 3,
}
"""Kind -> weight."""
CLOCK_KINDS = {"wall_steps": 4, "server_steps": 6, "machine_steps": 2}
"""The kinds that are added if clocks step far."""
CHANGE_KINDS = ("changed", "changed", "change_at", "reset")
"""The kinds that are added if users change the graph in place."""
REPAIR_KINDS = ("added_late", "added_late", "added_late", "corrected", "rows_dropped")
"""The kinds that are added if operators correct finished windows."""
POINTS = tuple(Failpoint)


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault: its step, and numbers in [0, 1) that decide the target and the severity."""

    step: int
    kind: str
    pick: float
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondGeneration:
    """A second generation of the graph beside the first.

    Attributes:
        step: the step at which it is deployed.
        lateness_us: the allowed lateness of its windows, which differs.
    """

    step: int
    workers: int
    lateness_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run.

    Attributes:
        seed: decides everything else.
        records: the number of published readings.
        placed: whether sources and stages run in different workers, so that all records pass segments.
        clocks: whether clocks step far, for a while or for good.
        few_cells: whether state does not fit in memory and is loaded again and again.
        ahead: whether the clocks of some devices are fast.
        second: the second generation; None in most runs.
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
    faults: tuple[ScheduledFault, ...]
    second: SecondGeneration | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of its features, of `FEATURES`."""
        kinds = {fault.kind for fault in self.faults}
        flags = {
            "clocks": self.clocks,
            "generations": self.second is not None,
            "changes": not kinds.isdisjoint(CHANGE_KINDS),
            "resets": "reset" in kinds,
            "corrections": not kinds.isdisjoint(REPAIR_KINDS),
            "retention": "rows_dropped" in kinds,
        }
        return (*self.shape.features, *(name for name, has in flags.items() if has))


FEATURES = (*SHAPES, "clocks", "generations", "changes", "resets", "corrections", "retention")
"""A search must have at least one run of each."""
LATENESSES_US = (0, 400_000, 2_000_000)
SECOND_SHARE = 1 / 6
"""The share of runs with a second generation."""
LEVELS_SHARE = 1 / 4
"""The share of runs with windows over panes that are retracted."""
PAIRS_SHARE = 1 / 4
"""The share of runs with a join."""
MORE_SHARE = 9 / 10
"""The share of runs with one of the branches `MORE`."""
BRANCHES_MAX = 3
"""With this many branches, it takes the place of one."""
IN_ORDER: tuple[Branch, ...] = ("earliest", "latest")
"""Branches whose results depend on the order in which partitions are consumed."""
HISTORIES_SHARE = 1 / 4
"""The share of runs in which the tables of windows keep a history."""
SITES_SHARE = 1 / 4
"""The share of runs with watermarks by site."""
BY_SITE: tuple[Branch, ...] = (
    *("fixed", "sliding", "session", *LEVELS),
    *(branch for branch in MORE if branch not in ("topped", "looked_up", *TOOLS)),
    "operators",
)
"""The branches that may be behind a source with sites."""
CHANGES_SHARE = 1 / 4
"""The share of runs with one generation and with `CHANGEABLE` in which users change the graph in place."""
SINK_SHARE = 1 / 6
"""The share of schedules with a sink."""
REPAIRS_SHARE = 1 / 3
"""The share of runs with one generation and with `REPAIRED` in which operators correct finished windows."""
REPAIRED: tuple[Branch, ...] = (*CHANGEABLE, "operators")
LONG_US = 600_000_000
"""Longer than any run."""


def draw(seed: int) -> Schedule:
    """Draw the schedule of a seed."""
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
        faults.append(
            ScheduledFault(step, kind, int(rng.random() * 10_000) / 10_000, int(rng.random() * 10_000) / 10_000)
        )
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
    schedule = _with_generations(schedule, random.Random(f"generations of {seed}"))
    schedule = _with_levels(schedule, random.Random(f"levels of {seed}"))
    schedule = _with_pairs(schedule, random.Random(f"pairs of {seed}"))
    schedule = _with_more(schedule, random.Random(f"more of {seed}"))
    schedule = _with_sites(schedule, random.Random(f"sites of {seed}"))
    schedule = _with_tables(schedule, random.Random(f"tables of {seed}"))
    schedule = _with_histories(schedule, random.Random(f"histories of {seed}"))
    schedule = _with_changes(schedule, random.Random(f"changes of {seed}"))
    schedule = _with_repairs(schedule, random.Random(f"repairs of {seed}"))
    return _with_sink(schedule, random.Random(f"sink of {seed}"))


def _with_levels(schedule: Schedule, rng: random.Random) -> Schedule:
    """Add windows over panes that are retracted to some schedules; the others do not change."""
    if rng.random() >= LEVELS_SHARE:
        return schedule
    branch = rng.choice(LEVELS)
    return replace(schedule, shape=replace(schedule.shape, branches=(*schedule.shape.branches, branch)))


def _with_pairs(schedule: Schedule, rng: random.Random) -> Schedule:
    """Add a join to some schedules; the others do not change."""
    if rng.random() >= PAIRS_SHARE:
        return schedule
    return replace(schedule, shape=replace(schedule.shape, branches=(*schedule.shape.branches, "pairs")))


def _with_more(schedule: Schedule, rng: random.Random) -> Schedule:
    """Give most schedules one of the other branches, in turn: beside few branches, or in the place of one."""
    shape = schedule.shape
    fitting = [branch for branch in MORE if shape.partitions == 1 or branch not in IN_ORDER]
    if rng.random() >= MORE_SHARE:
        return schedule
    branches, more = list(shape.branches), fitting[schedule.seed % len(fitting)]
    if len(branches) < BRANCHES_MAX:
        branches.append(more)
    else:
        branches[rng.choice([place for place, branch in enumerate(branches) if branch in BRANCHES])] = more
    return replace(schedule, shape=replace(shape, branches=tuple(branches)))


def _with_sites(schedule: Schedule, rng: random.Random) -> Schedule:
    """Give some schedules watermarks by site: their graphs have windows by site, and nothing else."""
    if rng.random() >= SITES_SHARE:
        return schedule
    shape = schedule.shape
    sites: Literal["group", "device"] = rng.choice(("group", "device", "device"))
    branches = [
        branch for branch in shape.branches if branch in BY_SITE and (branch != "operators" or sites == "group")
    ]
    branches = branches or [rng.choice(BY_SITE[:-1])]
    partitions = shape.partitions if shape.feed == "file" else rng.choice((1, 2, 3))
    bounded = partitions == 1 and sites == "device" and rng.random() < 0.6
    changed = replace(
        shape,
        branches=tuple(branches),
        partitions=partitions,
        sites=sites,
        sites_max=rng.choice((1, 2, 3)) if bounded else shape.sites_max,
        deep=False,
        poison=False,
        skew=shape.skew and partitions > 1,
    )
    return replace(schedule, shape=changed)


def _with_tables(schedule: Schedule, rng: random.Random) -> Schedule:
    """Let the table of a lookup change, and be away for a while."""
    if "looked_up" not in schedule.shape.branches:
        return schedule
    last = schedule.faults[-1].step
    changes = [
        ScheduledFault(
            int(rng.random() * last),
            rng.choice(("table_changes", "table_changes", "table_changes", "table_goes")),
            int(rng.random() * 10_000) / 10_000,
            int(rng.random() * 10_000) / 10_000,
        )
        for _ in range(2 + int(rng.random() * 8))
    ]
    return replace(schedule, faults=tuple(sorted([*schedule.faults, *changes], key=lambda fault: fault.step)))


def _with_histories(schedule: Schedule, rng: random.Random) -> Schedule:
    """Let the tables of windows keep a history in some schedules."""
    windowed = [branch for branch in schedule.shape.branches if branch in WINDOWED]
    if rng.random() >= HISTORIES_SHARE or not windowed:
        return schedule
    return replace(schedule, shape=replace(schedule.shape, histories=True))


def _with_changes(schedule: Schedule, rng: random.Random) -> Schedule:
    """Let users change the graph of some schedules in place."""
    changeable = not set(CHANGEABLE).isdisjoint(schedule.shape.branches)
    if rng.random() >= CHANGES_SHARE or schedule.second is not None or not changeable:
        return schedule
    changes = _drawn(rng, CHANGE_KINDS, 2 + int(rng.random() * 6), schedule.faults[-1].step)
    return replace(schedule, faults=tuple(sorted([*schedule.faults, *changes], key=lambda fault: fault.step)))


def _with_repairs(schedule: Schedule, rng: random.Random) -> Schedule:
    """Let operators correct finished windows, and retention drop old rows."""
    drawn = rng.random(), 5 + int(rng.random() * 8)
    if drawn[0] >= REPAIRS_SHARE or schedule.second is not None or set(REPAIRED).isdisjoint(schedule.shape.branches):
        return schedule
    repairs = _drawn(rng, REPAIR_KINDS, drawn[1], schedule.faults[-1].step)
    return replace(schedule, faults=tuple(sorted([*schedule.faults, *repairs], key=lambda fault: fault.step)))


def _with_sink(schedule: Schedule, rng: random.Random) -> Schedule:
    """Let the readings of some schedules leave by a sink; a generation beside the current one sends nothing."""
    if rng.random() >= SINK_SHARE or schedule.second is not None:
        return schedule
    return replace(schedule, shape=replace(schedule.shape, branches=(*schedule.shape.branches, SENT)))


def _drawn(rng: random.Random, kinds: Sequence[str], count: int, last: int) -> list[ScheduledFault]:
    """Return faults of these kinds, up to a step."""
    return [
        ScheduledFault(
            int(rng.random() * last),
            rng.choice(kinds),
            int(rng.random() * 10_000) / 10_000,
            int(rng.random() * 10_000) / 10_000,
        )
        for _ in range(count)
    ]


def _with_generations(schedule: Schedule, rng: random.Random) -> Schedule:
    """Add a second generation and switches to some schedules; the others do not change."""
    if rng.random() >= SECOND_SHARE:
        return schedule
    last = schedule.faults[-1].step
    second = SecondGeneration(
        step=int(rng.random() * 0.6 * last), workers=rng.choice((1, 1, 2)), lateness_us=rng.choice(LATENESSES_US)
    )
    switches = []
    for _ in range(1 + int(rng.random() * 5)):
        step = second.step + int(rng.random() * (last - second.step))
        kind = rng.choice(("switch", "switch_at"))
        switches.append(
            ScheduledFault(step, kind, int(rng.random() * 10_000) / 10_000, int(rng.random() * 10_000) / 10_000)
        )
    faults = sorted([*schedule.faults, *switches], key=lambda fault: fault.step)
    return replace(schedule, second=second, faults=tuple(faults))


def _draw_shape(rng: random.Random, feed: Feed, idle: bool, *, pings: bool) -> Shape:
    """Draw a graph: half have windows and the watcher with anything behind it, half any branches."""
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
