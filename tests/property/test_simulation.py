"""The simulator finds nothing in the engine, is the same every time, and finds what is broken on purpose."""

import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from millpy.hosting.failpoints import Failpoint
from millpy.testing.simulation.canaries import Canary
from millpy.testing.simulation.checkers import COMMIT_CHECKS
from millpy.testing.simulation.live_canaries import CANARIES
from millpy.testing.simulation.schedule import FEATURES, Schedule
from millpy.testing.simulator import FAULTS_MIN, STEPS_MIN, catch_canary, run_schedule, run_seed, search, shortest

SEEDS = int(os.environ.get("SEEDS") or 60)
"""`make sim` runs more: 2,000, or SEEDS=10000."""


@pytest.mark.timeout(1_200)
def test_invariants_hold_through_all_faults() -> None:
    statistics = search(SEEDS, processes=os.cpu_count() or 1)

    assert statistics.failures == []
    assert statistics.counted >= SEEDS
    assert statistics.steps / statistics.counted >= STEPS_MIN
    assert statistics.faults.total() / statistics.counted >= FAULTS_MIN
    assert {point.value for point in Failpoint} <= set(statistics.points)
    assert set(FEATURES) <= set(statistics.features)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.name.replace(" ", "-"))
def test_checker_catches_its_canary(canary: Canary) -> None:
    caught = catch_canary(canary.name)

    assert canary.checker in caught, f"only {caught}"


def test_every_checker_has_a_canary() -> None:
    found = {canary.checker for canary in CANARIES}

    assert found >= {*COMMIT_CHECKS, "I8", "acknowledgement", "names"}


def test_a_failure_shrinks_to_a_short_schedule_that_replays(tmp_path: Path) -> None:
    canary = next(canary for canary in CANARIES if canary.name == "folds an old value over a new one")
    failed = run_seed(1, tmp_path, canary)

    short = shortest(failed, tmp_path, canary)
    again = run_schedule(msgspec.json.decode(msgspec.json.encode(short.schedule), type=Schedule), tmp_path, canary)

    assert len(short.schedule.faults) < len(failed.schedule.faults) / 2
    assert short.violations[0].checker == failed.violations[0].checker
    assert again.trace == short.trace
    assert again.violations == short.violations


class Keeper(logging.Handler):
    """Keeps log records, and with their tracebacks all objects of the killed processes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._logger = logging.getLogger("millpy")
        self._level = self._logger.level

    def __enter__(self) -> "Keeper":
        """Listen at every level, whatever level was set before."""
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore handlers and level."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("canary", [None, "folds an old value over a new one"])
def test_a_killed_process_leaves_no_file_open_though_its_tracebacks_are_kept(
    tmp_path: Path, canary: str | None
) -> None:
    broken = next((found for found in CANARIES if found.name == canary), None)
    with Keeper() as keeper:
        for seed in range(3):
            run_seed(seed, tmp_path, broken)
            assert open_under(tmp_path) == [], seed

    assert any(isinstance(word, BaseException) for record in keeper.records for word in record.args or ())


def open_under(directory: Path) -> list[str]:
    """Files of this process in a directory."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            links.append(os.readlink(descriptor))
    return [link for link in links if Path(link).is_relative_to(directory)]


TRACES = """
import hashlib, logging, sys, tempfile
from pathlib import Path
from millpy.testing.simulator import run_seed
logging.disable(logging.CRITICAL)
with tempfile.TemporaryDirectory() as directory:
    for seed in range(3):
        outcome = run_seed(seed, Path(directory))
        print(seed, outcome.steps, hashlib.sha256("\\n".join(outcome.trace).encode()).hexdigest())
"""


def test_one_seed_gives_the_same_run_in_every_process() -> None:
    def traces(hash_seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run([sys.executable, "-c", TRACES], env=environment, capture_output=True, check=True).stdout

    first = traces("1")

    assert first.count(b"\n") == 3
    assert traces("2") == first
