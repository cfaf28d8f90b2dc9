"""What a source serves in each worker may fail in any way: the worker takes its turns, and tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import Injector, Source, SourceSetup, WorkerSetup
from millpy.limits import Limits
from millpy.sources.files.source import File
from millpy.store.memory.store import MemoryDatabase
from tests.unit.runtime.numbers_source import EVENT_TIME, Read, Reading, check_run, worker_of, written

ERRORS: list[Callable[[], BaseException]] = [
    ValueError,
    lambda: SystemExit(0),
    asyncio.CancelledError,
    lambda: SourceUnavailableError("the port is in use"),
]


@dataclass(frozen=True)
class Served(Source):
    """A file, beside which something is served that fails `times` in a place."""

    path: Path
    where: str = ""
    error: Callable[[], BaseException] = ValueError
    times: int = 3
    gives: Any = None
    silent: bool = False
    hangs: str = ""
    calls: list[str] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    def identity(self) -> dict[str, Any]:
        return {"kind": "served"}

    def partitions(self) -> tuple[str, ...]:
        return File(self.path).partitions()

    def connect(self, setup: SourceSetup) -> Injector:
        return Silence(setup) if self.silent else File(self.path).connect(setup)

    def serve(self, setup: WorkerSetup) -> Any:
        self.check("serve")
        return Serving(self) if self.where != "class" else 5

    def check(self, where: str) -> None:
        if where == self.where and self.calls.count(where) < self.times:
            self.calls.append(where)
            raise self.error()


class Silence:
    """An injector that has nothing, and does not end."""

    def __init__(self, setup: SourceSetup) -> None:
        pass

    async def open(self, position: bytes | None) -> None:
        pass

    async def take(self) -> None:
        return None

    async def acknowledge(self, token: Any) -> None:
        pass

    def quiet(self) -> bool:
        return True

    async def close(self) -> None:
        pass


class Serving:
    def __init__(self, source: Served) -> None:
        self.source = source

    async def __aenter__(self) -> Any:
        self.source.check("enter")
        await self.hang("enter")
        self.source.calls.append("entered")
        self.source.entered.set()
        return self.source.gives

    async def __aexit__(self, *_: object) -> bool:
        self.source.calls.append("left")
        self.source.check("exit")
        await self.hang("exit")
        return True

    async def hang(self, where: str) -> None:
        if where == self.source.hangs:
            await asyncio.Event().wait()


def read(source: Served) -> dict[str, Read]:
    written(source.path)
    return {"numbers": (source, EVENT_TIME, Reading)}


@pytest.mark.parametrize("where", ["serve", "enter", "exit"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error()).__name__)
async def test_no_exception_of_a_server_ends_the_worker(
    tmp_path: Path, where: str, error: Callable[[], BaseException]
) -> None:
    source = Served(tmp_path / "in", where, error, times=1_000)

    await check_run(read(source))

    assert where in source.calls


@pytest.mark.parametrize("source", [Served(Path("in"), "class"), Served(Path("in"), gives=5)], ids=["class", "traffic"])
async def test_server_of_a_wrong_type_ends_no_worker(
    tmp_path: Path, source: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    await check_run(read(source))

    assert source.calls.count("entered") == source.calls.count("left")


@pytest.mark.parametrize("where", ["enter", "exit"])
async def test_server_that_does_not_return_keeps_no_worker_from_its_turns_or_its_end(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limits, "edge_call_s_max", 0.05)

    await check_run(read(Served(tmp_path / "in", hangs=where)))


@pytest.mark.parametrize("where", ["serve", "enter"])
async def test_server_is_tried_again_until_it_runs_and_left_once(tmp_path: Path, where: str) -> None:
    source = Served(tmp_path / "in", where, silent=True)
    worker, stop = await worker_of(read(source), MemoryDatabase()), asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(60):
        await source.entered.wait()
        stop.set()
        await running

    assert source.calls == [where, where, where, "entered", "left"]


async def test_setting_that_only_the_user_can_correct_ends_the_worker(tmp_path: Path) -> None:
    source = Served(tmp_path / "in", "enter", lambda: ConfigError("no port"))

    with pytest.raises(ConfigError, match="no port"):
        await check_run(read(source))
