"""The simulator: seeds in, violations out. `python -m millpy.testing.simulator --help`.

Real workers, housekeeping and intakes over the in-memory store, on one simulated clock and one event loop, with
crashes, frozen machines, lost answers, broker outages and clocks that jump. One seed is one run, in every process.
The checkers look for I1 to I9 after every step, an oracle at the end (see `simulation/checkers.py`, `oracle.py`).

    a run counts   when it had at least 200 steps and 5 faults that took effect; others are run and checked too
    a failure      prints its seed, which replays it exactly, and the shortest schedule found that still fails
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
from millpy.testing.simulation.edges import CANARIES
from millpy.testing.simulation.schedule import Schedule, draw
from millpy.testing.simulation.shrink import shrink
from millpy.testing.simulation.world import Outcome, World

STEPS_MIN = 200
FAULTS_MIN = 5
CANARY_SEEDS = 100
"""Within so many seeds a canary has to be found."""
SHARE = 25
"""Seeds that a process takes at a time."""


@dataclass(slots=True)
class Tally:
    """What many runs have shown.

    Attributes:
        counted: runs with enough steps and faults; `steps`, `commits`, `faults` and `points` are of these.
        features: what graphs they had: how often each of `schedule.FEATURES`.
        failures: (seed, what was found first).
    """

    runs: int = 0
    counted: int = 0
    steps: int = 0
    commits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
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

    def merge(self, other: Tally) -> None:
        """Add what another process has found."""
        self.runs += other.runs
        self.counted += other.counted
        self.steps += other.steps
        self.commits += other.commits
        self.faults += other.faults
        self.points += other.points
        self.features += other.features
        self.failures += other.failures


def counts(outcome: Outcome) -> bool:
    """Whether a run had enough steps and faults to count; one that failed always does."""
    return bool(outcome.violations) or (outcome.steps >= STEPS_MIN and outcome.faults.total() >= FAULTS_MIN)


def run_seed(seed: int, directory: Path, canary: Canary | None = None) -> Outcome:
    """One run; the directory is for its input file. With a canary alive, what it breaks is broken."""
    return run_schedule(draw(seed), directory, canary)


def run_schedule(schedule: Schedule, directory: Path, canary: Canary | None = None) -> Outcome:
    """The same for a schedule that was drawn before, or cut down."""
    path = directory / f"{os.getpid()}.ndjson"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of a machine that is killed the files stay open
        if canary is None:
            outcome = World(schedule, path).run()
        else:
            with canary.alive():
                outcome = World(schedule, path, canary.store_type, canary.worker_type).run()
        gc.collect()
    return outcome


def hunt(name: str, seeds: int = CANARY_SEEDS) -> Counter[str]:
    """Run with a canary until the checker that should find it does, on graphs that have what it breaks.

    Returns:
        Checker -> runs in which it found something, in the seeds up to then.
    """
    canary = next(canary for canary in CANARIES if canary.name == name)
    caught: Counter[str] = Counter()
    with silence(), tempfile.TemporaryDirectory() as directory:
        fitting = (seed for seed in count() if canary.needs in draw(seed).features)
        for seed in islice(fitting, seeds):
            caught.update({violation.checker for violation in run_seed(seed, Path(directory), canary).violations})
            if canary.checker in caught:
                break
    return caught


@contextmanager
def silence() -> Iterator[None]:
    """Log nothing of millpy meanwhile: in a simulation everything goes wrong all the time."""
    logger = logging.getLogger("millpy")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def gathering_rarely() -> Iterator[None]:
    """Collect garbage after runs only: then little is alive, in the middle of one much."""
    enabled = gc.isenabled()
    gc.freeze()  # what is there before the first run stays
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def run_seeds(seeds: Iterable[int]) -> Tally:
    """Several runs, in this process."""
    tally = Tally()
    with silence(), gathering_rarely(), tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            try:
                tally.add(run_seed(seed, Path(directory)))
            except BaseException as error:
                error.add_note(f"seed={seed}")
                raise
    return tally


def search(wanted: int, *, first: int = 0, processes: int = 2) -> Tally:
    """Run seeds from `first` on until so many runs count, in several processes; stops early at a failure."""
    tally = Tally()
    shares = (range(start, start + SHARE) for start in _steps_from(first, SHARE))
    if processes == 1:
        while tally.counted < wanted and not tally.failures:
            tally.merge(run_seeds(next(shares)))
        return tally
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(run_seeds, next(shares)) for _ in range(processes + 1)]
        while running:
            tally.merge(running.pop(0).result())
            promised = tally.counted + len(running) * SHARE
            if promised < wanted and not tally.failures:
                running.append(pool.submit(run_seeds, next(shares)))
    return tally


def _steps_from(start: int, step: int) -> Iterator[int]:
    while True:
        yield start
        start += step


def main(arguments: Sequence[str] | None = None) -> int:
    """Search seeds, or replay one; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m millpy.testing.simulator", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2_000, help="how many runs that count")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one and print its trace")
    parser.add_argument("--schedule", help="replay this one: JSON, as a failure prints it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    if chosen.schedule is not None:
        return _replay(msgspec.json.decode(chosen.schedule, type=Schedule))
    if chosen.seed is not None:
        return _replay(draw(chosen.seed))
    clock = SystemClock()
    started = clock.monotonic()
    tally = search(chosen.seeds, first=chosen.first, processes=chosen.processes)
    elapsed = clock.monotonic() - started
    caught = sum(canary.checker in hunt(canary.name) for canary in CANARIES)
    _describe(tally)
    summary = {
        "seeds": tally.counted,
        "steps": tally.steps,
        "faults": tally.faults.total(),
        "violations": len(tally.failures),
        "canaries": len(CANARIES),
        "canaries_caught": caught,
        "runs_per_minute": round(tally.runs / elapsed * 60),
    }
    print(json.dumps(summary))
    return 1 if tally.failures or caught < len(CANARIES) else 0


def _describe(tally: Tally) -> None:
    runs = max(1, tally.counted)
    print(
        f"{tally.counted} runs count (of {tally.runs}): on average {tally.steps / runs:.0f} steps, "
        f"{tally.commits / runs:.0f} bundles committed, {tally.faults.total() / runs:.1f} faults"
    )
    counts = (("graphs", tally.features), ("faults", tally.faults), ("died or froze at", tally.points))
    for what, found in counts:
        print(f"{what}: " + ", ".join(f"{name} {times}" for name, times in found.most_common()))
    for seed, violation in tally.failures:
        print(f"seed={seed} (replay and shrink: make sim SEED={seed}): {violation[:500]}")


def shortest(outcome: Outcome, directory: Path, canary: Canary | None = None) -> Outcome:
    """The shortest run found that fails as this one did: its first violation is by the same checker."""
    checker = outcome.violations[0].checker

    def fails(schedule: Schedule) -> bool:
        found = run_schedule(schedule, directory, canary).violations
        return bool(found) and found[0].checker == checker

    return run_schedule(shrink(outcome.schedule, fails), directory, canary)


def _replay(schedule: Schedule) -> int:
    """Run once, tell all; a failure is made as short as can be."""
    with silence(), tempfile.TemporaryDirectory() as directory:
        outcome = run_schedule(schedule, Path(directory))
        print("\n".join(outcome.trace))
        _tell(outcome)
        if outcome.violations:
            short = shortest(outcome, Path(directory))
            print(f"\nthe shortest schedule that fails so, {len(short.schedule.faults)} faults:\n")
            print("\n".join(short.trace))
            _tell(short)
            print(f"replay: --schedule '{msgspec.json.encode(short.schedule).decode()}'")
    print(json.dumps({"seed": schedule.seed, "steps": outcome.steps, "violations": len(outcome.violations)}))
    return 1 if outcome.violations else 0


def _tell(outcome: Outcome) -> None:
    print(outcome.schedule)
    for violation in outcome.violations:
        print(f"{violation.checker}: {violation.what}")


if __name__ == "__main__":
    raise SystemExit(main())
