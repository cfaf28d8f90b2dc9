"""A batch that a step cannot read delays its own source: no other step, and no record is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpy.formats import Message
from millpy.ingest.protocol import RejectedRow, SourceBatch, SourceSetup
from millpy.ingest.settings import EventTime
from millpy.model.time import YEARS_HI
from tests.unit.runtime.numbers_source import EVENT_TIME, Numbers, NumbersInjector, Reading, check_beside_others

BAD, TIMES = 5, 2
REASON = "undecodable"


class Arrival(msgspec.Struct):
    value: int


@dataclass(frozen=True)
class Spoiled(Numbers):
    """The numbers; a batch from BAD on is spoiled TIMES times, or without `spoiled` what `quiet` returns."""

    spoiled: dict[str, Any] = field(default_factory=dict)
    quiet: Any = False
    told: set[str] = field(default_factory=set)

    def connect(self, setup: SourceSetup) -> SpoiledInjector:
        return SpoiledInjector(self, setup)


class SpoiledInjector(NumbersInjector):
    def __init__(self, source: Spoiled, setup: SourceSetup) -> None:
        super().__init__(setup)
        self.source = source

    async def open(self, position: bytes | None) -> None:
        await super().open(position)
        self.source.told.add(self.setup.connection.why)

    async def take(self) -> SourceBatch | None:
        batch = await super().take()
        if self.next > BAD and len(self.source.failures) < TIMES and self.source.spoiled:
            self.source.failures.append("take")
            for name, value in self.source.spoiled.items():
                setattr(batch, name, value)
        return batch

    def quiet(self) -> Any:
        if self.next > BAD and len(self.source.failures) < TIMES and not self.source.spoiled:
            self.source.failures.append("quiet")
            return self.source.quiet
        return False


def ints(*values: Any) -> Callable[[], Any]:
    return lambda: np.array(values)


def fails() -> Any:
    raise SystemExit(0)


def message(**spoiled: Any) -> dict[str, Any]:
    rejected = [RejectedRow(0, REASON, "why")]
    return {"refused": rejected, "messages": {0: Message(**{"payload": b"", **spoiled})}}


COLUMNS = pa.RecordBatch.from_pylist([{"at": 5_000, "value": 5}])
BATCHES: dict[str, dict[str, Any]] = {
    "format": {"format": "xml"},
    "format of columns": {"format": "columns"},
    "position of no JSON": {"position": b"x"},
    "position": {"position": {"line": 7}},
    "time of arrival": {"arrived_at": datetime(2026, 1, 1)},  # noqa: DTZ001
    "time of arrival of numpy": {"arrived_at": np.int64(5)},
    "float as time of arrival": {"arrived_at": 1e15},
    "time of arrival after the year 9999": {"arrived_at": int(YEARS_HI) + 1},
    "time of arrival beyond 64 bits": {"arrived_at": 2**70},
    "texts as payloads": {"payloads": ['{"at":5000,"value":5}']},
    "objects as payloads": {"payloads": [{"at": 5_000, "value": 5}]},
    "one payload": {"payloads": b"{}"},
    "no payloads": {"payloads": None},
    "generator as payloads": {"payloads": (b"{}" for _ in range(1))},
    "text as block": {"payloads": (), "block": "{}"},
    "payloads and block": {"block": b"{}"},
    "payloads and batch": {"batch": COLUMNS},
    "table": {"format": "columns", "payloads": (), "batch": pa.Table.from_batches([COLUMNS])},
    "rows": {"format": "columns", "payloads": (), "batch": [{"at": 5_000}]},
    "header": {"format": "csv", "header": None},
    "numbers as header": {"format": "csv", "header": [1, 2]},
    "half a character in a header": {"format": "csv", "header": ["\ud800"]},
    "finished": {"finished": "no"},
    "finished of no number": {"finished": np.array([1, 2])},
    "watermark": {"watermark": datetime(2026, 1, 1)},  # noqa: DTZ001
    "no watermark": {"watermark": None},
    "float as watermark": {"watermark": float("nan")},
    "watermark after the year 9999": {"watermark": int(YEARS_HI) + 1},
    "watermark beyond 64 bits": {"watermark": -(2**70)},
    "records": {"records": "1"},
    "records below 0": {"records": -5},
    "records beyond 64 bits": {"records": 2**70},
    "total": {"total": 1.5},
    "total beyond 64 bits": {"total": 2**70},
    "refused": {"refused": None},
    "pairs as refused": {"refused": [(0, "why")]},
    "row behind the last": {"refused": [RejectedRow(1, REASON, "why")]},
    "row before the first": {"refused": [RejectedRow(-1, REASON, "why")]},
    "text as row": {"refused": [RejectedRow("0", REASON, "why")]},  # type: ignore[arg-type]
    "no reason": {"refused": [RejectedRow(0, None, "why")]},  # type: ignore[arg-type]
    "error as detail": {"refused": [RejectedRow(0, REASON, ValueError())]},  # type: ignore[arg-type]
    "notes": {"notes": [1]},
    "note of no JSON": {"notes": {"seen": b"x"}},
    "text as note": {"notes": {"seen": "{}"}},
    "number as name of a note": {"notes": {1: b"{}"}},
    "NUL in the name of a note": {"notes": {"a\0": b"{}"}},
    "origin": {"origin": Path("a")},
    "messages": {"messages": None},
    "payload as message": {**message(), "messages": {0: b"{}"}},
    "headers of a message": message(headers={"a": 5}),
    "names of headers of a message": message(headers={5: b""}),
    "key of a message": message(key="a"),
    "time of a message": message(arrived_at=1.5),
}


@pytest.mark.parametrize("spoiled", BATCHES.values(), ids=BATCHES.keys())
async def test_batch_of_wrong_types_ends_no_worker(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    source = Spoiled(spoiled)

    await check_beside_others((source, EVENT_TIME, Reading), tmp_path / "in")

    assert source.failures == ["take"] * TIMES
    (why,) = source.told - {""}
    assert why.startswith("the source has a defect: take raises ")


ARRIVALS: dict[str, Any] = {
    "no function": 5,
    "list": lambda: [1],
    "floats": ints(1.0),
    "too many": ints(1, 2),
    "none": lambda: np.zeros(0, np.int64),
    "one number": lambda: np.int64(5),
    "exit": fails,
}


@pytest.mark.parametrize("arrivals", ARRIVALS.values(), ids=ARRIVALS.keys())
async def test_arrivals_of_wrong_types_end_no_worker(tmp_path: Path, arrivals: Any) -> None:
    source = Spoiled({"arrivals": arrivals})

    await check_beside_others((source, EventTime.arrival(), Arrival), tmp_path / "in")

    assert source.failures == ["take"] * TIMES
    assert len(source.told - {""}) == 1


async def test_arrivals_are_not_asked_for_without_need(tmp_path: Path) -> None:
    source = Spoiled({"arrivals": fails})

    await check_beside_others((source, EVENT_TIME, Reading), tmp_path / "in")

    assert source.told == {""}


@pytest.mark.parametrize("answer", [None, 1, np.array([1, 2])], ids=["None", "number", "array"])
async def test_quiet_that_is_no_bool_ends_no_worker(tmp_path: Path, answer: Any) -> None:
    source = Spoiled(quiet=answer)

    await check_beside_others((source, EVENT_TIME, Reading), tmp_path / "in")

    assert source.failures == ["quiet"] * TIMES
    (why,) = source.told - {""}
    assert why.startswith("the source has a defect: quiet raises TypeError: it returned ")
