"""Operators in a running graph produce the same as Computations with the same functions."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millpy.computation import Computation, Context
from millpy.graph import Graph, Stream
from millpy.ingest.settings import EventTime
from millpy.model.time import milliseconds, seconds
from millpy.sources.files.source import File
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows
from tests.crash.memory_world import Reading, World, land_for_ever, readings

RECORDS = readings(2_000)
FAILS = 42


class Piece(msgspec.Struct):
    device: str
    value: int
    part: int


def is_wanted(record: Reading) -> bool:
    return record.value % 7 != 0


def are_wanted(batch: pa.RecordBatch) -> pa.Array:
    sevens = pc.multiply(pc.divide(batch["value"], 7), 7)
    return pc.not_equal(batch["value"], sevens)


def pieces(record: Reading) -> list[Piece]:
    if record.value == FAILS + 2:
        raise ValueError(f"no {record.value}")
    return [Piece(record.device, record.value, part) for part in range(record.value % 3)]


def halved(piece: Piece) -> Piece:
    piece.value //= 2  # in place, and others have the same object
    return piece


def side(piece: Piece) -> str | None:
    return {0: "left", 1: "right"}[piece.part]


def through_operators(source: Stream) -> Stream:
    wanted = source.filter(are_wanted, columns=True)
    parts = wanted.flat_map(pieces, Piece)
    sides = parts.split(side, into=["left", "right"])
    return sides["left"].union(sides["right"].map(halved))


class Through(Computation):
    """The same functions, one record at a time."""

    def process_record(self, context: Context, record: Reading) -> None:
        if is_wanted(record):
            for piece in pieces(record):
                context.produce(halved(piece) if side(piece) == "right" else piece)


class Number(Computation):
    """Passes records on, so that they end up in a table."""

    def process_record(self, context: Context, record: Piece) -> None:
        context.produce(record)


def graph_of(path: Path, records: Sequence[Reading], *, fused: bool) -> Graph:
    path.write_text("".join(json.dumps(msgspec.to_builtins(r)) + "\n" for r in records))
    graph = Graph("world")
    source = graph.inject(
        "readings", File(str(path)), schema=Reading, event_time=EventTime("at", unit="us", max_disorder=milliseconds(5))
    )
    if fused:
        made = through_operators(source)
    else:
        made = source.key_by("device").process(Through(), name="through", output=Piece)
    made.key_by("device").process(Number(), name="number", output=Piece).to_table("pieces")
    return graph


def rows(world: World) -> Counter[tuple[str, int, int]]:
    return Counter((row["device"], row["value"], row["part"]) for row in world.database.rows("pieces"))


def expected() -> Counter[tuple[str, int, int]]:
    found: Counter[tuple[str, int, int]] = Counter()
    for record in RECORDS:
        if is_wanted(record) and record.value != FAILS + 2:
            for piece in pieces(record):
                piece = halved(piece) if side(piece) == "right" else piece
                found[(piece.device, piece.value, piece.part)] += 1
    return found


@pytest.mark.parametrize("fused", [True, False], ids=["operators", "computations"])
async def test_operators_equal_computations(tmp_path: Path, fused: bool) -> None:
    world = World(graph_of(tmp_path / "in.ndjson", RECORDS, fused=fused))
    world.start()

    await world.finish()

    assert rows(world) == expected()
    assert world.adds_up()


@pytest.mark.parametrize(
    "placement", [[(), ()], [("readings",), ("number",)], [("readings", "number"), ("number",)]], ids=str
)
async def test_operators_do_not_depend_on_where_their_consumers_run(
    tmp_path: Path, placement: list[tuple[str, ...]]
) -> None:
    world = World(graph_of(tmp_path / "in.ndjson", RECORDS, fused=True))
    for only in placement:
        world.start(only)

    await world.finish()

    assert rows(world) == expected()
    assert world.adds_up()
    failed = sum(1 for record in RECORDS if record.value == FAILS + 2)
    dead_letters = [dead_letter for *_, dead_letter in world.database.dead_letters]
    # Once for each of the two subscriptions behind the failing function.
    assert Counter(
        (dead_letter.stream, dead_letter.computation, dead_letter.reason) for dead_letter in dead_letters
    ) == {("readings", "number", "user_error"): 2 * failed}
    assert "no 44" in dead_letters[0].traceback


@pytest.mark.parametrize("seed", range(4))
async def test_crashes_change_nothing_behind_operators(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = World(graph_of(tmp_path / "in.ndjson", RECORDS, fused=True))
    for _ in range(2):
        world.start()

    for _ in range(8):
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        if rng.randrange(2) and world.running:
            await world.crash(rng.choice(world.running))
            world.start()
        else:
            world.database.faults.lose_answer_of_next_commit(rng.choice(["before", "later", "never"]))
    landing = asyncio.create_task(land_for_ever(world))
    await world.finish()
    landing.cancel()

    assert rows(world) == expected()
    assert world.adds_up()


def windowed_union(folder: Path, count: int) -> tuple[Graph, int]:
    """Two feeds whose times sometimes jump back, united, in windows."""
    graph = Graph("world")
    feeds = []
    for seed, name in enumerate(("north", "south")):
        rng = random.Random(seed)
        heard = [Reading("d", 1_000 * n - rng.choice([0] * 20 + [60_000]), 1) for n in range(100, count)]
        (folder / name).write_bytes(b"".join(msgspec.json.encode(reading) + b"\n" for reading in heard))
        event_time = EventTime("at", unit="us", max_disorder=milliseconds(5))
        feeds.append(graph.inject(name, File(str(folder / name)), schema=Reading, event_time=event_time))
    both = feeds[0].union(feeds[1].filter(lambda reading: reading.at >= 0))
    both.key_by("device").window(FixedWindows(milliseconds(20))).aggregate(n=Count()).to_table("windows")
    return graph, 2 * (count - 100)


async def test_a_union_has_one_set_of_windows_and_two_accounts(tmp_path: Path) -> None:
    graph, count = windowed_union(tmp_path, 2_100)
    world = World(graph)
    world.start()

    await world.finish()

    north, south = world.database.accounting(world.graph_id).subscriptions
    assert (north.stream, south.stream) == ("north", "south")
    assert sum(row["n"] for row in world.database.rows("windows")) == count - north.late - south.late
    late = Counter[tuple[str, int]]()
    for *_, rows in world.database.late_records:
        late[(rows.stream, rows.input)] += len(rows)
    assert late == +Counter({("north", 0): north.late, ("south", 1): south.late})
    assert world.adds_up()


class Copy(msgspec.Struct):
    id: str
    at: int
    gateway: str


class Pass(Computation):
    """Passes records on, so that they end up in a table."""

    def process_record(self, context: Context, record: Copy) -> None:
        context.produce(record)


def through_two_gateways(folder: Path, count: int) -> Graph:
    graph = Graph("world")
    feeds = []
    for gateway in ("north", "south"):
        rng = random.Random(gateway)
        heard = [Copy(f"n{n}", 1_000 * n, gateway) for n in range(count) for _ in range(rng.randrange(3))]
        path = folder / gateway
        path.write_bytes(b"".join(msgspec.json.encode(copy) + b"\n" for copy in heard))
        event_time = EventTime("at", unit="us", max_disorder=milliseconds(5))
        feeds.append(graph.inject(gateway, File(str(path)), schema=Copy, event_time=event_time))
    unique = feeds[0].union(feeds[1]).deduplicate(by="id", within=seconds(10), name="unique")
    unique.key_by("gateway").process(Pass(), name="passed", output=Copy).to_table("passed")
    unique.to_table("kept")
    return graph


@pytest.mark.parametrize("seed", range(3))
async def test_feeds_that_share_ids_count_once_through_crashes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    graph = through_two_gateways(tmp_path, 1_000)
    lines = [line for gateway in ("north", "south") for line in (tmp_path / gateway).read_bytes().splitlines()]
    heard = [msgspec.json.decode(line, type=Copy) for line in lines]
    world = World(graph)
    for _ in range(2):
        world.start()

    for _ in range(6):
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        if rng.randrange(2) and world.running:
            await world.crash(rng.choice(world.running))
            world.start()
        else:
            world.database.faults.lose_answer_of_next_commit(rng.choice(["before", "later", "never"]))
    landing = asyncio.create_task(land_for_ever(world))
    await world.finish()
    landing.cancel()

    for table in ("kept", "passed"):
        assert sorted(row["id"] for row in world.database.rows(table)) == sorted({copy.id for copy in heard})
    assert world.adds_up()
    unique = [
        account for account in world.database.accounting(world.graph_id).subscriptions if account.consumer == "unique"
    ]
    assert sum(account.duplicate for account in unique) == len(heard) - len({copy.id for copy in heard})
