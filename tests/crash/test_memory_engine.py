"""The engine over the in-memory store: results equal a plain recomputation, whatever happens to the workers."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash.memory_world import (
    MAX_DISORDER_US,
    WINDOW_US,
    Reading,
    World,
    expected,
    land_for_ever,
    readings,
    two_stages,
    windows_over_several,
)

RECORDS = readings(3_000)


@pytest.mark.parametrize(
    "placement",
    [[()], [(), ()], [("readings",), ("totals", "largest")], [("readings", "largest"), ("totals",), ()]],
    ids=str,
)
async def test_results_do_not_depend_on_where_computations_run(
    tmp_path: Path, placement: list[tuple[str, ...]]
) -> None:
    world = World(two_stages(tmp_path / "in.ndjson", RECORDS))
    for only in placement:
        world.start(only)

    await world.finish()

    assert world.results() == expected(RECORDS)
    assert world.adds_up()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["at-once", "in-between"])
async def test_crashes_and_lost_commits_change_nothing(tmp_path: Path, seed: int, pause_s: float) -> None:
    rng = random.Random(seed)
    world = World(two_stages(tmp_path / "in.ndjson", RECORDS))
    for _ in range(2):
        world.start()
    await world.deployed.wait()  # before that there is nothing to add up

    await harass(world, rng, pause_s)

    assert world.results() == expected(RECORDS)
    assert world.adds_up()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("disorder_us", [5_000, 400_000], ids=["in order", "some late"])
async def test_several_source_partitions_lose_and_double_nothing(tmp_path: Path, seed: int, disorder_us: int) -> None:
    """Which of them is ahead is chance; that makes no record late that is in order in its own partition."""
    records = RECORDS if disorder_us <= MAX_DISORDER_US else shuffled(RECORDS, disorder_us)
    rng = random.Random(seed)
    world = World(windows_over_several(tmp_path, records, partitions=3))
    for _ in range(2):
        world.start()
    await world.deployed.wait()

    await harass(world, rng, 0.05)

    late = sum(len(rows) for _, _, rows in world.database.late_records)
    found = Counter({(row["device"], row["window_start"]): row["n"] for row in world.database.rows("windows")})
    possible = Counter((r.device, r.at // WINDOW_US * WINDOW_US) for r in records)
    assert found <= possible
    assert found.total() + late == len(records)
    assert (late > 0) == (records is not RECORDS)
    assert world.adds_up()


def shuffled(records: Sequence[Reading], disorder_us: int) -> list[Reading]:
    rng = random.Random(1)
    return sorted(records, key=lambda record: record.at + rng.randrange(disorder_us))


async def harass(world: World, rng: random.Random, pause_s: float) -> None:
    """Crash workers and lose commits, let the rest finish; the account adds up at any moment."""
    for _ in range(12):
        await asyncio.sleep(rng.uniform(0.0, pause_s))
        fault = rng.randrange(4)
        if fault == 0 and world.running:
            await world.crash(rng.choice(world.running))
            world.start()
        elif fault == 1:
            world.database.faults.lose_answer_of_next_commit(rng.choice(["before", "later", "never"]))
        elif fault == 2:
            world.database.faults.lose_connections(rng.randrange(3))
        else:
            world.database.faults.land_lost_commits()
        assert world.adds_up()
    landing = asyncio.create_task(land_for_ever(world))
    await world.finish()
    landing.cancel()


async def test_a_refused_row_dead_letters_only_its_record(tmp_path: Path) -> None:
    world = World(two_stages(tmp_path / "in.ndjson", RECORDS))
    world.start()
    await world.deployed.wait()
    world.database.constrain("largest", "not_42", lambda row: row["value"] != 42)

    await world.finish()

    assert world.results() == expected([record for record in RECORDS if record.value != 42])
    assert world.adds_up()
