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
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.model.timer import Timer
from millpy.sources.files.source import File
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
    """Produces each device's number at the end of the input, at varying speed."""

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


async def reported(path: Path, computation: Computation, limits: Limits, refused: int) -> World:
    """A world in which each device has a number, and every n-th number is refused."""
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
async def test_refused_rows_of_a_step_cut_by_time_reject_only_themselves(
    tmp_path: Path, computation: type[Computation]
) -> None:
    world = await reported(tmp_path / "in", computation(), LIMITS, refused=10)

    payloads = [msgspec.json.decode(dead_letter.payload) for _, _, dead_letter in world.database.dead_letters]
    refused = [int(found["device"]) if isinstance(found, dict) else found[1] for found in payloads]
    assert sorted(refused) == list(range(0, COUNT, 10))


async def test_first_refused_rows_are_kept_too(tmp_path: Path) -> None:
    world = await reported(tmp_path / "in", Sleepy(), replace(LIMITS, dead_letter_records_max=1), refused=4)

    # Records are one cause and rows another, in each of four intervals; 20 are refused.
    assert 1 <= len(world.database.dead_letters) <= 8
