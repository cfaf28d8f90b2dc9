"""What user code raises is its record's end, never the worker's: whatever the class, wherever it is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpy.clock import SystemClock
from millpy.computation import Computation, Context
from millpy.graph import Graph, Stream
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import milliseconds
from millpy.model.timer import Timer
from millpy.sources.files.source import File
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.windowing.aggregates.combiner import Combiner
from millpy.windowing.triggers import AfterCount
from millpy.windowing.window import FixedWindows
from millpy.windowing.window_function import WindowFunction
from tests.crash import memory_world

BAD, RECORDS = 7, 40
EVENT_TIME = EventTime("at", unit="us", sorted=True)


class OwnError(BaseException):
    """No Exception."""


class Silent(Exception):  # noqa: N818
    """Raises in `__str__`."""

    def __str__(self) -> str:
        raise SystemExit(4)


class Nameless(type):
    @property
    def __name__(cls) -> str:
        raise SystemExit(6)


class WithoutName(Exception, metaclass=Nameless):  # noqa: N818
    """Raises when its class is asked for its name."""


class Unreadable(Exception):  # noqa: N818
    """Raises when it is asked for its cause."""

    @property
    def __cause__(self) -> BaseException | None:
        raise ConnectionError("gone")


ERRORS: list[Callable[[], BaseException]] = [
    asyncio.CancelledError,
    lambda: SystemExit(3),
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    OwnError,
    Silent,
    MemoryError,
    WithoutName,
    Unreadable,
]
raised: list[Callable[[], BaseException]] = [RuntimeError]


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int

    def __repr__(self) -> str:
        raise SystemExit(5)


class Hooked(msgspec.Struct):
    device: str
    at: int
    value: int

    def __post_init__(self) -> None:
        check(self.value)


class Out(msgspec.Struct):
    device: str
    value: int


def name_of(error: BaseException) -> str:
    name: str = type.__dict__["__name__"].__get__(type(error))
    return name


def check(value: int) -> None:
    if value == BAD:
        raise raised[0]()


class OfRecord(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        check(record.value)
        context.produce(Out(record.device, record.value))


class Immediate(OfRecord):
    immediate = True


class OfTimer(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.set_timer(str(record.value), at=context.event_time_us + 3)

    def process_timer(self, context: Context, timer: Timer) -> None:
        check(int(timer.name))
        context.produce(Out(context.key, int(timer.name)))


class Async(Computation):
    async def process_record(self, context: Context, record: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        check(record.value)
        context.produce(Out(record.device, record.value))


class InTask(Computation):
    """Raise in a separate task, where asyncio passes some classes through the whole loop."""

    async def process_record(self, context: Context, record: Any) -> None:  # type: ignore[override]
        async def inner() -> None:
            check(record.value)

        await asyncio.create_task(inner())
        context.produce(Out(record.device, record.value))


class Passes(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.produce(Out(record.device, record.value))


class Sum(Combiner[int]):
    accumulator = int
    result_type = int
    where = "add"

    def create(self) -> int:
        return 0

    def add(self, accumulator: int, record: Any) -> int:
        if self.where == "add":
            check(record.value)
        return accumulator + record.value

    def merge(self, one: int, other: int) -> int:
        if self.where == "merge":
            check(other)
        return one + other

    def result(self, accumulator: int) -> int:
        if self.where == "result":
            check(accumulator)
        return accumulator


def windowed(where: str, windows: Any = None, **rules: Any) -> Callable[[Stream], None]:
    combiner = Sum()
    combiner.where = where

    def build(stream: Stream) -> None:
        # One record a window, so that the accumulator is its value.
        stepped = stream.key_by("device").window(windows or FixedWindows(milliseconds(1)), **rules)
        stepped.aggregate(value=combiner).to_table("out")

    return build


def computed(computation: Computation) -> Callable[[Stream], None]:
    return lambda stream: stream.key_by("device").process(computation, name="stage", output=Out).to_table("out")


class Own(WindowFunction):
    """A window for each record, by a function that is asked about it."""

    def assign(self, record: Any, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        check(record.value)
        return [(at, at + milliseconds(1))]


def through(operator: Callable[[Stream], Stream]) -> Callable[[Stream], None]:
    return lambda stream: computed(Passes())(operator(stream))


def filtered(record: Any) -> bool:
    check(record.value)
    return True


def filtered_columns(batch: pa.RecordBatch) -> pa.Array:
    for value in batch["value"].to_pylist():
        check(value)
    return pa.array([True] * len(batch))


def mapped(record: Any) -> Reading:
    check(record.value)
    return Reading(record.device, record.at, record.value)


PLACES: dict[str, tuple[type[msgspec.Struct], Callable[[Stream], None]]] = {
    "process_record": (Reading, computed(OfRecord())),
    "process_record on the event loop": (Reading, computed(Immediate())),
    "process_timer": (Reading, computed(OfTimer())),
    "async": (Reading, computed(Async())),
    "task of an async one": (Reading, computed(InTask())),
    "filter": (Reading, through(lambda stream: stream.filter(filtered))),
    "filter by columns": (Reading, through(lambda stream: stream.filter(filtered_columns, columns=True))),
    "map": (Reading, through(lambda stream: stream.map(mapped, Reading))),
    "flat_map": (Reading, through(lambda stream: stream.flat_map(lambda record: [mapped(record)], Reading))),
    "split": (Reading, through(lambda s: s.split(lambda r: "all" if filtered(r) else None, into=["all"])["all"])),
    "Combiner.add": (Reading, windowed("add")),
    "Combiner.result": (Reading, windowed("result")),
    "Combiner.result of a trigger": (Reading, windowed("result", trigger=AfterCount(1))),
    "WindowFunction.assign": (Reading, windowed("", Own())),
    "hook of the record class": (Hooked, computed(Passes())),
}
CASES = [
    pytest.param(error, place, id=f"{name_of(error())}-{place}")
    for error in ERRORS
    for place in PLACES
    # In the main thread it is Ctrl-C, which has to work.
    if not (place.endswith("event loop") and error is KeyboardInterrupt)
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python warns about closed coroutines
@pytest.mark.parametrize(("error", "place"), CASES)
async def test_only_its_record_is_dead_lettered(tmp_path: Path, place: str, error: Callable[[], BaseException]) -> None:
    schema, build = PLACES[place]
    raised[0] = error
    lines = [json.dumps({"device": f"dev-{n % 3}", "at": 1_000 * n, "value": n}) + "\n" for n in range(RECORDS)]
    (tmp_path / "in").write_text("".join(lines))
    graph = Graph("errors")
    source = graph.inject("readings", File(tmp_path / "in"), schema=schema, event_time=EVENT_TIME)
    build(source)
    database = MemoryDatabase()
    worker = await memory_world.started(MemoryStore(database), graph, Limits(lease_ttl_s=60), SystemClock())

    async with asyncio.timeout(60):
        await worker.run(asyncio.Event())

    assert sorted(row["value"] for row in database.rows("out")) == [n for n in range(RECORDS) if n != BAD]
    (_, _, dead_letter) = database.dead_letters[0]
    assert len(database.dead_letters) == 1
    assert dead_letter.reason in ("user_error", "undecodable")
    assert name_of(error()) in dead_letter.detail or isinstance(error(), StopIteration)


class Cancels(Computation):
    """Cancels its own task, at once or before it waits."""

    waits = False

    async def process_record(self, context: Context, record: Any) -> None:  # type: ignore[override]
        task = asyncio.current_task()
        assert task is not None
        if record.value == BAD:
            task.cancel()
            if self.waits:
                await asyncio.sleep(0)
        context.produce(Out(record.device, record.value))


@pytest.mark.parametrize("waits", [False, True])
async def test_a_callback_that_cancels_its_own_task_ends_its_record(tmp_path: Path, waits: bool) -> None:
    computation = Cancels()
    computation.waits = waits
    lines = [json.dumps({"device": "one", "at": 1_000 * n, "value": n}) + "\n" for n in range(RECORDS)]
    (tmp_path / "in").write_text("".join(lines))
    graph = Graph("cancels")
    source = graph.inject("readings", File(tmp_path / "in"), schema=Reading, event_time=EVENT_TIME)
    computed(computation)(source)
    database = MemoryDatabase()
    worker = await memory_world.started(MemoryStore(database), graph, Limits(lease_ttl_s=60), SystemClock())

    async with asyncio.timeout(60):
        await worker.run(asyncio.Event())

    assert sorted(row["value"] for row in database.rows("out")) == [n for n in range(RECORDS) if n != BAD]
    assert [dead_letter.detail.split(":")[0] for _, _, dead_letter in database.dead_letters] == ["CancelledError"]
