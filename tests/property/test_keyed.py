"""Laws of the keyed stage: the effect is that of one record at a time, whatever the bundles, restarts and failures."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.computation import Computation, Context, ListCell, MapCell, Value
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.model.timer import Timer
from millpy.operators.keyed import ComputationLogic
from tests.stage_driver import StageDriver


class Act(msgspec.Struct):
    key: str
    what: str
    name: str
    at: int


class Seen(msgspec.Struct):
    key: str
    what: str
    state: str


class Tally(msgspec.Struct):
    count: int = 0
    mean: float = 0.0


class Everything(Computation):
    """Uses every part of the context, and produces everything that it saw."""

    tally = Value(Tally)
    log = ListCell(str)
    places = MapCell(str, int)

    def process_record(self, context: Context, record: Act) -> None:
        tally = context[Everything.tally]
        tally.count += 1
        tally.mean += (record.at - tally.mean) / tally.count
        match record.what:
            case "timer":
                context.set_timer(record.name, at=record.at)
            case "delete":
                context.delete_timer(record.name)
            case "hold":
                context.hold(record.name, record.at)
            case "release":
                context.release(record.name)
            case "put":
                context[Everything.places][record.name] = record.at
            case "drop":
                context[Everything.places].pop(record.name, None)
            case "log":
                context[Everything.log].append(record.name)
            case "reset":
                del context[Everything.tally]
            case "refused":
                tally.mean = float("nan")
            case "bad":
                context[Everything.places].clear()
                context.set_timer("a", at=0)
                raise ValueError(record.name)
        self.tell(context, record.what + (" late" if context.late else ""))

    def process_timer(self, context: Context, timer: Timer) -> None:
        context[Everything.log].append(timer.name)
        if timer.name == "b":
            context.set_timer("c", at=timer.at_us + 3)
        if timer.name == "d":
            raise ValueError
        self.tell(context, f"timer {timer.name}")

    def tell(self, context: Context, what: str) -> None:
        tally, places = context[Everything.tally], dict(context[Everything.places])
        context.produce(Seen(context.key, what, f"{tally.count} {tally.mean} {context[Everything.log]} {places}"))


class EverythingAsync(Everything):
    async def process_record(self, context: Context, record: Act) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        Everything.process_record(self, context, record)
        await asyncio.sleep(0)

    async def process_timer(self, context: Context, timer: Timer) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        Everything.process_timer(self, context, timer)


WHATS = ["timer", "delete", "hold", "release", "put", "drop", "log", "reset", "refused", "bad", "read"]
acts = st.lists(
    st.tuples(
        st.builds(
            Act,
            key=st.sampled_from("xyz"),
            what=st.sampled_from(WHATS),
            name=st.sampled_from("abcd"),
            at=st.integers(0, 60),
        ),
        st.integers(0, 50),
    ),
    max_size=40,
)
BREAKS = ["none", "none", "none", "cut", "cut", "fold", "restart", "partial"]


def outcome(computation: Computation, rows: list[Any], breaks: list[str], *, limits: Limits | None = None) -> Any:
    subject = StageDriver(
        ComputationLogic(computation), Act, outputs={"seen": RecordType(Seen)}, max_disorder=10, limits=limits
    )
    bundle: list[Any] = []
    for row, after in zip(rows, [*breaks, *["none"] * len(rows)], strict=False):
        bundle.append(row)
        if after != "none":
            subject.feed(bundle)
            bundle = []
        if after in ("restart", "partial"):
            subject.restart(state_complete=after == "restart")
        if after == "fold":
            subject.fold()
    subject.feed(bundle)
    subject.finish()
    state = {name: value for name, (value, _, _) in subject.stored.items() if name[0] is Kind.STATE}
    holds = {name: fire_at for name, (_, _, fire_at) in subject.stored.items() if name[0] is Kind.TIMER}
    produced: dict[str, list[Any]] = {}
    for record, at in subject.produced("seen"):
        produced.setdefault(record.key, []).append((record.what, record.state, at))
    dead_letters = sorted(
        (dead_letter.key, dead_letter.reason, dead_letter.payload)
        for r in subject.results
        for dead_letter in r.dead_letters
    )
    return state, holds, produced, dead_letters, subject.interval.oldest_work()


@settings(max_examples=150, deadline=None)
@given(acts, st.lists(st.sampled_from(BREAKS), max_size=40))
def test_effects_do_not_depend_on_bundling_or_restarts(rows: list[Any], breaks: list[str]) -> None:
    one_at_a_time = outcome(Everything(), rows, ["fold"] * len(rows))

    assert outcome(Everything(), rows, breaks) == one_at_a_time
    assert outcome(Everything(), rows, []) == one_at_a_time


@settings(max_examples=60, deadline=None)
@given(acts, st.lists(st.sampled_from(BREAKS), max_size=40), st.sampled_from([300, 700, 1_100]))
def test_a_small_cache_changes_nothing(rows: list[Any], breaks: list[str], size: int) -> None:
    small = Limits(state_cache_bytes_max=size)

    assert outcome(Everything(), rows, breaks, limits=small) == outcome(Everything(), rows, breaks)


@settings(max_examples=60, deadline=None)
@given(acts, st.lists(st.sampled_from(BREAKS), max_size=40))
def test_async_callbacks_have_the_same_effects_as_plain_ones(rows: list[Any], breaks: list[str]) -> None:
    assert outcome(EverythingAsync(), rows, breaks) == outcome(Everything(), rows, breaks)
