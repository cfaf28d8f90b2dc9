"""The engine over the in-memory store: results equal a plain recomputation, whatever happens to the workers."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.crash.memory_world import World, expected, readings, two_stages

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

    assert world.results() == expected(RECORDS)
    assert world.adds_up()


async def land_for_ever(world: World) -> None:
    while True:
        world.database.faults.land_lost_commits()
        await asyncio.sleep(0.01)


async def test_a_refused_row_costs_only_its_record(tmp_path: Path) -> None:
    world = World(two_stages(tmp_path / "in.ndjson", RECORDS))
    world.start()
    await world.deployed.wait()
    world.database.constrain("largest", "not_42", lambda row: row["value"] != 42)

    await world.finish()

    assert world.results() == expected([record for record in RECORDS if record.value != 42])
    assert world.adds_up()
