"""The hub of live updates: it survives any error, says when trouble has ended, and is read while it looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse

from millpy.admin.tokens import Principal, Role
from millpy.api import live
from millpy.api.authentication import Caller
from millpy.api.database import Databases
from millpy.api.live import CROWD, SAMPLES_MAX, Hub, watch
from millpy.api.problems import ProblemError
from millpy.clock import SystemClock
from millpy.errors import StoreUnavailableError


class Database:
    """Stands for the database: no rows, and a list that changes the hub when it is read."""

    url = "postgresql://127.0.0.1:1/nowhere"

    def __init__(self) -> None:
        self.while_read: Callable[[], None] = lambda: None

    def ask(self, statement: str, **_: Any) -> list[dict[str, Any]]:
        return [{"xid": 0}] if " AS xid" in statement else Rows(self)


class Rows(list[dict[str, Any]]):
    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._database.while_read()
        return super().__iter__()


class Lane:
    """Answers, one after another; errors are raised."""

    def __init__(self, *answers: dict[str, str] | Exception) -> None:
        self.admin = Database()
        self.is_crowded = False
        self._answers = list(answers)

    async def run(self, *_: Any, **__: Any) -> dict[str, str]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def hub_of(lane: Lane) -> Hub:
    return Hub(cast("Databases", SimpleNamespace(reading=lane)), SystemClock())


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), ValueError("an unknown one")])
async def test_the_topics_come_again_after_trouble_of_any_kind(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("LOOK_S", "PAUSE_S"):
        monkeypatch.setattr(live, name, 0.01)
    state = {"progress": "[1]", "workers": "[2]"}
    hub = hub_of(Lane(state, error, {"progress": "[1]"}))
    stream = hub.connect()
    told = []
    hub.start()
    try:
        with caplog.at_level(logging.WARNING, live.__name__):
            async with asyncio.timeout(20):
                async for chunk in stream.chunks(b""):
                    told += [line.decode() for line in chunk.splitlines() if line.startswith(b"event:")]
                    if len(told) == 5:
                        break
    finally:
        await hub.stop()

    assert told[:3] == ["event: progress", "event: workers", "event: trouble"]
    assert sorted(told[3:]) == ["event: progress", "event: workers"]
    assert ("Traceback" in caplog.text) == isinstance(error, ValueError)


@pytest.mark.parametrize("error", [ProblemError(HTTPStatus.UNAUTHORIZED, "revoked"), StoreUnavailableError("away")])
async def test_a_stream_whose_user_cannot_be_checked_ends(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gate:
        async def caller(self, *_: Any) -> None:
            raise error

    monkeypatch.setattr(live, "BEAT_S", 0.01)
    hub = hub_of(Lane({}))
    app = SimpleNamespace(state=SimpleNamespace(hub=hub, gate=Gate()))
    answer = await watch(
        Request({"type": "http", "headers": [], "app": app}), Caller(Principal(1, "a", Role.VIEWER, None))
    )
    assert isinstance(answer, StreamingResponse)

    async with asyncio.timeout(5):
        chunks = [chunk async for chunk in answer.body_iterator]

    assert b"".join(cast("list[bytes]", chunks)).replace(b": no news\n\n", b"") == b""


def test_the_series_are_read_while_a_look_adds_to_them() -> None:
    lane = Lane({})
    hub = hub_of(lane)

    def look() -> None:
        lane.admin.while_read = lambda: None
        hub._look(cast("Any", lane.admin), slow=True)  # as the thread of the lane does

    for _ in range(SAMPLES_MAX + 1):
        look()
    lane.admin.while_read = look

    assert len(hub.series("plant")["ages_s"]) == SAMPLES_MAX


def test_a_crowd_of_viewers_lets_answers_be_kept() -> None:
    lane = Lane({})
    hub = hub_of(lane)
    streams = [hub.connect() for _ in range(CROWD)]
    before = lane.is_crowded
    one_more = hub.connect()
    crowded = lane.is_crowded
    hub.disconnect(one_more)

    assert (before, crowded, lane.is_crowded) == (False, True, False)
    assert len(streams) == CROWD
