"""Rows of timers that the database refuses: a slow step is cut by time, each time elsewhere, and no other row pays."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from millpy.computation import Computation, Context
from millpy.graph import Graph
from millpy.injectors.files import File
from millpy.injectors.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.model.timer import Timer
from tests.crash.memory_world import World

LIMITS = Limits(
    lease_ttl_s=5, step_s_max=0.01, progress_every_s=0.01, retry_s_min=0.001, retry_s_max=0.01, fold_every_s=0.05
)


class Reading(msgspec.Struct):
    device: str
    at: int


class Told(msgspec.Struct):
    device: str
    number: int


class Sleepy(Computation):
    """Tells each device's number at the end of the input, now faster, now slower."""

    rng = random.Random(1)

    def process_record(self, context: Context, record: Reading) -> None:
        context.set_timer("end", at=Instant(10**15))

    def process_timer(self, context: Context, timer: Timer) -> None:
        until = time.monotonic() + self.rng.choice([0.0, 0.0, 0.004])
        while time.monotonic() < until:
            pass
        context.produce(Told(context.key, int(context.key)))


class Waiting(Sleepy):
    """The same, many keys at a time."""

    async def process_timer(self, context: Context, timer: Timer) -> None:  # type: ignore[override]
        super().process_timer(context, timer)


COUNT = 80


async def told(path: Path, computation: Computation, limits: Limits, refused: int) -> World:
    """A world in which each device has told its number, of which every so manieth is refused."""
    readings = (msgspec.json.encode(Reading(str(n), n)).decode() for n in range(COUNT))
    path.write_text("\n".join(readings))
    graph = Graph("sleepy")
    source = graph.inject("readings", File(path), schema=Reading, event_time=EventTime("at", unit="us", sorted=True))
    source.key_by("device").process(computation, name="told", output=Told).to_table("told")
    world = World(graph, limits)
    world.start()
    await world.deployed.wait()
    world.database.constrain("told", "some", lambda row: row["number"] % refused != 0)
    await world.finish()
    assert sorted(row["number"] for row in world.database.rows("told")) == [n for n in range(COUNT) if n % refused]
    return world


@pytest.mark.parametrize("computation", [Sleepy, Waiting])
async def test_refused_rows_of_a_step_that_is_cut_by_time_cost_only_themselves(
    tmp_path: Path, computation: type[Computation]
) -> None:
    world = await told(tmp_path / "in", computation(), LIMITS, refused=10)

    payloads = [msgspec.json.decode(letter.payload) for _, _, letter in world.database.dead_letters]
    refused = [int(found["device"]) if isinstance(found, dict) else found[1] for found in payloads]
    assert sorted(refused) == list(range(0, COUNT, 10))


async def test_of_refused_rows_the_first_are_kept_too(tmp_path: Path) -> None:
    world = await told(tmp_path / "in", Sleepy(), replace(LIMITS, set_aside_records_max=1), refused=4)

    # Records are one cause and rows another, in each of four intervals; 20 are refused.
    assert 1 <= len(world.database.dead_letters) <= 8
