"""Records that the database refuses, more of them than a search is for: each costs itself, none costs the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy.clock import SystemClock
from millpy.computation import Computation, Context
from millpy.errors import StoreUnavailableError
from millpy.graph import Graph, Stream
from millpy.ingest.settings import EventTime
from millpy.limits import KEY_BYTES_MAX, Limits
from millpy.model.checkpoint import Checkpoint
from millpy.model.time import milliseconds
from millpy.model.timer import Timer
from millpy.sources.files.source import File
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows, SessionWindows
from tests.crash.memory_world import World, readings, started, two_stages

LIMITS = Limits(
    lease_ttl_s=5,
    bundle_records_max=4_096,
    poison_records_max=5,
    retry_s_min=0.001,
    retry_s_max=0.01,
    fold_every_s=0.05,
)


@pytest.mark.parametrize("of_ten", [1, 9, 10], ids=lambda share: f"{share} of 10")
async def test_more_refused_records_than_one_search_finds_reject_only_themselves(tmp_path: Path, of_ten: int) -> None:
    records = readings(60)
    world = World(two_stages(tmp_path / "in", records), LIMITS)
    world.start()
    await world.deployed.wait()
    world.database.constrain("largest", "few", lambda row: row["value"] % 10 >= of_ten)

    await world.finish()

    assert len(world.database.rows("largest")) == sum(record.value % 10 >= of_ten for record in records)
    assert len(world.database.dead_letters) == sum(record.value % 10 < of_ten for record in records)
    kinds = {event.kind for _, event in world.database.events}
    assert "refused" in kinds and "results_refused" not in kinds, "a smaller turn helps, so none waits for a minute"


async def test_a_small_turn_that_is_refused_for_too_much_is_not_searched_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = replace(LIMITS, bundle_records_max=65_536, poison_records_max=1)
    world = World(two_stages(tmp_path / "in", readings(2)), limits)
    world.start()
    await world.deployed.wait()
    world.database.constrain("largest", "none", lambda row: False)

    await world.finish()

    assert len(world.database.dead_letters) == 2
    assert sum("recovery failed" in line for line in caplog.messages) <= 1


class CutOff(MemoryStore):
    """Loses its connection at the first trial of a search."""

    trials = 0

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        if options.get("trial"):
            self.trials += 1
            if self.trials == 1:
                raise StoreUnavailableError("away")
        await super().commit(checkpoints, **options)


async def test_lost_connection_in_a_search_does_not_shrink_turns(tmp_path: Path) -> None:
    store = CutOff(MemoryDatabase())
    worker = await started(store, two_stages(tmp_path / "in", readings(5)), LIMITS, SystemClock())
    store.database.constrain("largest", "none", lambda row: False)

    while not store.trials:
        await worker.step()

    assert worker.context.budget.factor == 1
    await worker.abandon()


class Reading(msgspec.Struct):
    device: str
    at: int
    length: int


class Out(msgspec.Struct):
    device: str
    length: int


class Passes(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.produce(Out("x" * record.length, record.length))


class Notes(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.set_timer("t" * record.length, at=context.event_time_us)

    def process_timer(self, context: Context, timer: Timer) -> None:
        pass


class Reread(Reading):
    """Another record class, behind a map."""


def fixed(stream: Stream) -> None:
    stream.key_by("device").window(FixedWindows(milliseconds(1))).aggregate(n=Count()).to_table("out")


def sessions(stream: Stream) -> None:
    stream.key_by("device").window(SessionWindows(milliseconds(1))).aggregate(n=Count()).to_table("out")


def keyed(stream: Stream) -> None:
    stream.key_by("device").process(Passes(), name="stage", output=Out).to_table("out")


def two_fields(stream: Stream) -> None:
    stream.key_by("device", "length").window(FixedWindows(milliseconds(1))).aggregate(n=Count()).to_table("out")


def after_map(stream: Stream) -> None:
    fixed(stream.map(lambda r: Reread("é" * (r.length // 2), r.at, r.length), Reread))


def after_produce(stream: Stream) -> None:
    made = stream.key_by("length").process(Passes(), name="stage", output=Out)
    made.key_by("device").window(FixedWindows(milliseconds(1))).aggregate(n=Count()).to_table("out")


def timers(stream: Stream) -> None:
    stream.key_by("length").process(Notes(), name="stage", output=Out).to_table("out")


PLACES: dict[str, Callable[[Stream], None]] = {
    found.__name__: found for found in (fixed, sessions, keyed, two_fields, after_map, after_produce, timers)
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_key_too_long_for_an_index_is_dead_lettered_anywhere(tmp_path: Path, place: str) -> None:
    lengths = [10, KEY_BYTES_MAX // 2, KEY_BYTES_MAX - 20, KEY_BYTES_MAX + 1, 3 * KEY_BYTES_MAX, 4_000] * 10
    lines = [
        json.dumps(
            {"device": "x" * n if place not in ("after_produce", "timers") else "x", "at": 1_000 * at, "length": n}
        )
        for at, n in enumerate(lengths)
    ]
    (tmp_path / "in").write_text("\n".join(lines))
    graph = Graph("keys")
    PLACES[place](
        graph.inject(
            "readings", File(tmp_path / "in"), schema=Reading, event_time=EventTime("at", unit="us", sorted=True)
        )
    )
    world = World(graph, LIMITS)

    world.start()
    await world.finish()

    long = sum(n > KEY_BYTES_MAX for n in lengths)
    assert len(world.database.dead_letters) == long
    assert {dead_letter.reason for _, _, dead_letter in world.database.dead_letters} == {
        "refused" if place == "timers" else "key"
    }
    if place != "timers":
        assert len(world.database.rows("out")) == len(lengths) - long
