"""The simulator runs seeds and reports violations. `python -m millpy.testing.simulator --help`.

Real workers, maintenance and intakes over the in-memory store, on one simulated clock and one event loop, with
crashes, frozen machines, lost answers, broker outages and clocks that jump. One seed is one run, in every process.
The checkers look for I1 to I9 after every step, an oracle at the end (see `simulation/checkers.py`, `oracle.py`).

    a run counts   if it has at least 200 steps and 5 faults that took effect; other runs are checked, too
    a failure      prints its seed, which replays it exactly; the replay prints the shortest schedule that still fails
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

import msgspec

from millpy.clock import SystemClock
from millpy.testing.simulation.canaries import Canary
from millpy.testing.simulation.live_canaries import CANARIES
from millpy.testing.simulation.schedule import Schedule, draw
from millpy.testing.simulation.shrink import shrink
from millpy.testing.simulation.world import RunOutcome, World

STEPS_MIN = 200
FAULTS_MIN = 5
CANARY_SEEDS = 100
"""A canary must be found within this number of seeds."""
SHARE = 25
"""Seeds that a process takes at a time."""


@dataclass(slots=True)
class RunStatistics:
    """Counts over many runs.

    Attributes:
        counted: runs with enough steps and faults; `steps`, `commits`, `faults` and `points` are of these.
        features: how often the graphs had each of `schedule.FEATURES`.
        failures: (seed, first violations).
    """

    runs: int = 0
    counted: int = 0
    steps: int = 0
    commits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, outcome: RunOutcome) -> None:
        """Add a run."""
        self.runs += 1
        if outcome.violations:
            self.failures.append(
                (outcome.schedule.seed, "; ".join(f"{v.checker}: {v.what}" for v in outcome.violations))
            )
        if not counts(outcome):
            return
        self.counted += 1
        self.steps += outcome.steps
        self.commits += outcome.commits
        self.faults += outcome.faults
        self.points += outcome.points
        self.features.update(outcome.schedule.features)

    def merge(self, other: RunStatistics) -> None:
        """Add the findings of another process."""
        self.runs += other.runs
        self.counted += other.counted
        self.steps += other.steps
        self.commits += other.commits
        self.faults += other.faults
        self.points += other.points
        self.features += other.features
        self.failures += other.failures


def counts(outcome: RunOutcome) -> bool:
    """Tell whether a run has enough steps and faults to count; a failed run always counts."""
    return bool(outcome.violations) or (outcome.steps >= STEPS_MIN and outcome.faults.total() >= FAULTS_MIN)


def run_seed(seed: int, directory: Path, canary: Canary | None = None) -> RunOutcome:
    """Run one seed, with its input file in `directory`. A canary breaks the engine during the run."""
    return run_schedule(draw(seed), directory, canary)


def run_schedule(schedule: Schedule, directory: Path, canary: Canary | None = None) -> RunOutcome:
    """Run a schedule, as drawn from a seed or as shrunk."""
    path = directory / f"{os.getpid()}.ndjson"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a killed machine leaves its files open
        if canary is None:
            outcome = World(schedule, path).run()
        else:
            with canary.alive():
                outcome = World(schedule, path, canary.store_type, canary.worker_type).run()
        gc.collect()
    return outcome


def catch_canary(name: str, seeds: int = CANARY_SEEDS) -> Counter[str]:
    """Run seeds with a canary until its checker finds it. Seeds without the feature that it needs are left out.

    Returns:
        Checker -> the number of runs in which it found something, up to then.
    """
    canary = next(canary for canary in CANARIES if canary.name == name)
    caught: Counter[str] = Counter()
    with silence(), tempfile.TemporaryDirectory() as directory:
        fitting = (seed for seed in count(canary.first) if canary.needs in draw(seed).features)
        for seed in islice(fitting, seeds):
            caught.update({violation.checker for violation in run_seed(seed, Path(directory), canary).violations})
            if canary.checker in caught:
                break
    return caught


@contextmanager
def silence() -> Iterator[None]:
    """Silence millpy's log, which would be full of the injected faults."""
    logger = logging.getLogger("millpy")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def collecting_garbage_between_runs() -> Iterator[None]:
    """Collect garbage only between runs, when few objects are alive."""
    enabled = gc.isenabled()
    gc.freeze()  # objects from before the first run stay
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def run_seeds(seeds: Iterable[int]) -> RunStatistics:
    """Run seeds in this process; return their statistics."""
    statistics = RunStatistics()
    with silence(), collecting_garbage_between_runs(), tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            try:
                statistics.add(run_seed(seed, Path(directory)))
            except BaseException as error:
                error.add_note(f"seed={seed}")
                raise
    return statistics


def search(wanted: int, *, first: int = 0, processes: int = 2) -> RunStatistics:
    """Run seeds from `first` on until `wanted` runs count, in several processes; stop early at a failure."""
    statistics = RunStatistics()
    shares = (range(start, start + SHARE) for start in _steps_from(first, SHARE))
    if processes == 1:
        while statistics.counted < wanted and not statistics.failures:
            statistics.merge(run_seeds(next(shares)))
        return statistics
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(run_seeds, next(shares)) for _ in range(processes + 1)]
        while running:
            statistics.merge(running.pop(0).result())
            promised = statistics.counted + len(running) * SHARE
            if promised < wanted and not statistics.failures:
                running.append(pool.submit(run_seeds, next(shares)))
    return statistics


def _steps_from(start: int, step: int) -> Iterator[int]:
    while True:
        yield start
        start += step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds, or replay one; return the exit status. The last line of the output is JSON."""
    parser = argparse.ArgumentParser(prog="python -m millpy.testing.simulator", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2_000, help="the number of runs that count")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this seed and print its trace")
    parser.add_argument("--schedule", help="replay this schedule: JSON, as a failure prints it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    if chosen.schedule is not None:
        return _replay(msgspec.json.decode(chosen.schedule, type=Schedule))
    if chosen.seed is not None:
        return _replay(draw(chosen.seed))
    clock = SystemClock()
    started = clock.monotonic()
    statistics = search(chosen.seeds, first=chosen.first, processes=chosen.processes)
    elapsed = clock.monotonic() - started
    caught = sum(canary.checker in catch_canary(canary.name) for canary in CANARIES)
    _describe(statistics)
    summary = {
        "seeds": statistics.counted,
        "steps": statistics.steps,
        "faults": statistics.faults.total(),
        "violations": len(statistics.failures),
        "canaries": len(CANARIES),
        "canaries_caught": caught,
        "runs_per_minute": round(statistics.runs / elapsed * 60),
    }
    print(json.dumps(summary))
    return 1 if statistics.failures or caught < len(CANARIES) else 0


def _describe(statistics: RunStatistics) -> None:
    runs = max(1, statistics.counted)
    print(
        f"{statistics.counted} runs count (of {statistics.runs}): on average {statistics.steps / runs:.0f} steps, "
        f"{statistics.commits / runs:.0f} bundles committed, {statistics.faults.total() / runs:.1f} faults"
    )
    counts = (("graphs", statistics.features), ("faults", statistics.faults), ("died or froze at", statistics.points))
    for what, found in counts:
        print(f"{what}: " + ", ".join(f"{name} {times}" for name, times in found.most_common()))
    for seed, violation in statistics.failures:
        print(f"seed={seed} (replay and shrink: make sim SEED={seed}): {violation[:500]}")


def shortest(outcome: RunOutcome, directory: Path, canary: Canary | None = None) -> RunOutcome:
    """Return the shortest run found that fails like this one: its first violation is by the same checker."""
    checker = outcome.violations[0].checker

    def fails(schedule: Schedule) -> bool:
        found = run_schedule(schedule, directory, canary).violations
        return bool(found) and found[0].checker == checker

    return run_schedule(shrink(outcome.schedule, fails), directory, canary)


def _replay(schedule: Schedule) -> int:
    """Run once, print the trace and the violations, and shrink a failure."""
    with silence(), tempfile.TemporaryDirectory() as directory:
        outcome = run_schedule(schedule, Path(directory))
        print("\n".join(outcome.trace))
        _print_outcome(outcome)
        if outcome.violations:
            short = shortest(outcome, Path(directory))
            print(f"\nthe shortest schedule that fails in the same way has {len(short.schedule.faults)} faults:\n")
            print("\n".join(short.trace))
            _print_outcome(short)
            print(f"replay: --schedule '{msgspec.json.encode(short.schedule).decode()}'")
    print(json.dumps({"seed": schedule.seed, "steps": outcome.steps, "violations": len(outcome.violations)}))
    return 1 if outcome.violations else 0


def _print_outcome(outcome: RunOutcome) -> None:
    print(outcome.schedule)
    for violation in outcome.violations:
        print(f"{violation.checker}: {violation.what}")


if __name__ == "__main__":
    raise SystemExit(main())
