"""Device silence equals a plain loop over the records of each device: in any order and bundles, over crashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from millpy import AdvanceWithClock, EventTime, Graph, LookupTable, Wait, hours, minutes, seconds
from millpy.errors import GraphError
from millpy.model.time import instant
from millpy.operators import silence
from millpy.store.memory.database import MemoryDatabase
from millpy.testing import GraphDriver, ManualSource
from millpy.testing.clock import ManualClock
from millpy.testing.kit.state import ReadableMemory

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
DISORDER, AFTER = 2, 10
EXPECTED = ["a", "x", "y"]
Arrival = tuple[str, int]
Told = tuple[str, bool, int | None, int]


class Event(msgspec.Struct):
    device: str
    at: datetime


class Registered(msgspec.Struct, frozen=True):
    device: str


def graph_of(devices: Any = None, idle: Any = None, **options: Any) -> Graph:
    graph = Graph("plant")
    event_time = EventTime("at", max_disorder=seconds(DISORDER), **options)
    events = graph.inject("events", ManualSource(), schema=Event, event_time=event_time, idle=idle or Wait())
    tool = events.key_by("device").silent_after(seconds(AFTER), name="silences", devices=devices, intervals=2)
    tool.to_table("silences")
    return graph


def second(at: datetime | None) -> int | None:
    return None if at is None else round((at - NOON).total_seconds())


def told_of(driver: GraphDriver) -> list[Told]:
    rows = driver.rows("silences")
    return sorted(
        ((row["device"], row["silent"], second(row["since"]), second(row["at"])) for row in rows),
        key=lambda told: (told[3], told[0], told[1]),
    )


def check_signs(database: MemoryDatabase, told: Sequence[Told]) -> None:
    """Check that events and the gauge tell what the rows say: each silence and return once, and who is silent now."""
    noticed: Counter[bool] = Counter()
    for _, stored in database.events:
        if stored.kind in ("devices_silent", "devices_back"):
            noticed[stored.kind == "devices_silent"] += stored.detail["count"]  # type: ignore[call-overload]
            assert stored.detail["computation"] == "silences"
            assert {device for device, *_ in told}.issuperset(stored.detail["names"])  # type: ignore[call-overload]
    assert noticed == Counter(silent for _, silent, _, _ in told)
    assert database._count(database.headers, "silent", "") == noticed[True] - noticed[False]


def event(device: str, at: int) -> Event:
    return Event(device, NOON + seconds(at))


def expected_of(arrivals: Sequence[Arrival], expected: Sequence[str]) -> list[Told]:
    """The oracle: of each device, the time in which the feed was alive, counted second by second."""
    away: set[int] = set()  # second s stands for (s, s + 1]
    newest: int | None = None
    heard: dict[str, list[int]] = {device: [] for device in expected}
    for device, at in arrivals:
        watermark = None if newest is None else newest - DISORDER
        if watermark is not None and at - watermark > DISORDER + AFTER / 2:
            away |= set(range(watermark, at))
        if watermark is None or at >= watermark:
            heard.setdefault(device, []).append(at)
        newest = at if newest is None else max(newest, at)
    assert newest is not None
    found: list[Told] = []
    for device, times in heard.items():
        begin = arrivals[0][1]
        points: list[tuple[int, int | None]] = [(at, at) for at in sorted(times)]
        if device in expected and not any(at <= begin for at in times):
            points.insert(0, (begin, None))
        for (start, last), (after, _) in pairwise([*points, (10**6, None)]):
            alive, at = 0, start
            while alive < AFTER and at < after:
                alive, at = alive + (at not in away), at + 1
            if alive < AFTER or at >= min(after, newest - DISORDER):
                continue
            found.append((device, True, last, at))
            if after < 10**6 and after <= newest - DISORDER - 1:
                found.append((device, False, last, after))
    return sorted(found, key=lambda told: (told[3], told[0], told[1]))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    steps = st.sampled_from([0, 0, 1, 1, 1, 2, 3, 5, 9, 40])
    found, now = [], 0
    for device, step, behind in draw(
        st.lists(st.tuples(st.sampled_from("abcx"), steps, st.integers(0, DISORDER)), min_size=1, max_size=40)
    ):
        now += step
        found.append((device, now - behind))
    return [*found, ("z", now + 1), ("z", now + 2 + DISORDER)]


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@example([("a", 0), ("b", 0), ("a", 60), ("a", 62)], 9, False)  # a common gap
@example([("b", 0), ("b", 5), ("b", 9), ("b", 14), ("b", 19), ("a", 20), ("b", 25), ("b", 30)], 1, True)
@example(
    [("a", 0), ("b", 4), ("b", 8), ("a", 10), ("b", 12), ("b", 16), ("a", 20), ("b", 24)], 1, False
)  # just in time
@example([("b", 0), ("b", 5), ("x", 10), ("b", 12), ("b", 15), ("b", 17)], 1, False)  # the first record, just in time
@example([("a", 0), ("b", 4), ("b", 8), ("b", 12), ("b", 40), ("b", 44)], 1, False)  # silent when a gap begins
@given(arrivals(), st.integers(1, 9), st.booleans())
def test_silences_are_those_of_a_plain_loop(arrived: list[Arrival], bundle: int, crashes: bool) -> None:
    state = ReadableMemory(MemoryDatabase(ManualClock(instant(NOON))))
    driver = GraphDriver(graph_of(EXPECTED), state=state)
    for start in range(0, len(arrived), bundle):
        piece = [event(device, at) for device, at in arrived[start : start + bundle]]
        if crashes:
            with driver.crashing():
                driver.feed("events", piece)
            driver.crash()
        else:
            driver.feed("events", piece)

    assert told_of(driver) == expected_of(arrived, EXPECTED)
    check_signs(state.database, told_of(driver))
    driver.check_accounting()


def test_a_common_gap_makes_no_alarm_and_its_end_begins_the_count_anew() -> None:
    driver = GraphDriver(graph_of())
    devices = [f"pump-{number}" for number in range(50)]
    for at in (0, 4, 8):
        driver.feed("events", [event(device, at) for device in devices])

    driver.feed("events", [event(devices[0], 7_200)])
    driver.feed("events", [event(device, 7_204) for device in devices[1:-1]])
    for at in range(7_208, 7_222, 4):
        driver.feed("events", [event(device, at) for device in devices[:-1]])

    assert told_of(driver) == [(devices[-1], True, 8, 7_210)]


def test_silence_is_told_while_no_record_arrives_at_all_if_the_clock_moves_the_watermark() -> None:
    driver = GraphDriver(graph_of(idle=AdvanceWithClock(seconds(3))), now=NOON)
    driver.feed("events", [event("a", 0), event("b", 0)])
    for _ in range(20):
        driver.advance_clock(seconds(1))

    assert told_of(driver) == [("a", True, 0, AFTER), ("b", True, 0, AFTER)]


MANY_GAPS = [
    ("a", 0), ("b", 0), ("c", 0),
    *(("b", 20 * number + at) for number in range(1, 6) for at in (0, 4)),  # a gap, then 2 s without one
    *(("b", 105 + at) for at in range(1, 20, 2)),
]  # fmt: skip
TWO_GAPS_IN_ONE_SILENCE = [
    ("a", 0), ("b", 2), ("b", 8), ("b", 11), ("b", 17), ("b", 20), ("b", 22), ("a", 24), ("b", 26), ("b", 29)
]  # fmt: skip


@pytest.mark.parametrize("arrived", [MANY_GAPS, TWO_GAPS_IN_ONE_SILENCE])
def test_more_gaps_than_are_remembered_change_nothing(
    arrived: Sequence[Arrival], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GraphDriver(graph_of(EXPECTED))
    plain.feed("events", [event(*each) for each in arrived])
    monkeypatch.setattr(silence, "GAPS_MAX", 1)
    driver = GraphDriver(graph_of(EXPECTED))
    driver.feed("events", [event(*each) for each in arrived])

    assert told_of(driver) == told_of(plain) == expected_of(arrived, EXPECTED)
    assert all(len(state["gaps"]) <= 2 for state in driver.state("silences").values())


def test_devices_of_a_table_are_expected_as_long_as_they_are_in_it() -> None:
    table = LookupTable("registry.devices", Registered, key="device", refresh=seconds(1))
    driver = GraphDriver(graph_of(table))
    driver.set_table("registry.devices", [{"device": "a"}, {"device": "gone"}])
    driver.feed("events", [event("b", at) for at in range(0, 8, 2)])
    driver.set_table("registry.devices", [{"device": "a"}, {"device": "new"}])
    driver.feed("events", [event("b", at) for at in range(8, 40, 2)])

    assert [told[0] for told in told_of(driver)] == ["a", "new"]


def test_devices_that_are_expected_later_are_not_those_that_were_heard_of() -> None:
    state = ReadableMemory(MemoryDatabase(ManualClock(instant(NOON))))
    before = GraphDriver(graph_of(), state=state)
    before.feed("events", [event("a", 0), event("b", 0), *(event("c", at) for at in range(1, 40, 2))])
    driver = GraphDriver(graph_of(["a", "c", "x"]), state=state)
    driver.feed("events", [event("c", at) for at in range(41, 80, 2)])

    assert [told[:2] for told in told_of(driver)] == [("a", True), ("b", True), ("x", True)]


@pytest.mark.parametrize(("devices", "left"), [(["a", "x"], 1), ([], 0), (None, 0)])
def test_devices_that_are_not_expected_any_more_are_not_silent(devices: list[str] | None, left: int) -> None:
    database = MemoryDatabase(ManualClock(instant(NOON)))
    state = ReadableMemory(database)
    before = GraphDriver(graph_of(["a", "x", "y"]), state=state)
    before.feed("events", [event("a", 0), *(event("c", at) for at in range(1, 40, 2))])
    assert database._count(database.headers, "silent", "") == 3

    driver = GraphDriver(graph_of(devices), state=state)
    driver.feed("events", [event("a", 41), *(event("c", at) for at in range(41, 50)), event("a", 50), event("c", 55)])

    assert database._count(database.headers, "silent", "") == left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": seconds(0)}, "after must be positive"),
        ({"after": 30}, "after must be a duration"),
        ({"devices": "pump"}, "is not a list of devices"),
        ({"devices": [1]}, "which is no key"),
        ({"devices": ["a", "b\x00"]}, "cannot be stored"),
        ({"devices": ["a", "\ud800"]}, "half of a surrogate pair"),
        ({"devices": ["a"] * (silence.DEVICES_MAX + 1)}, "more than 100,000 devices"),
        ({"name": "No Name"}, "is not a plain name"),
    ],
)
def test_wrong_use_is_refused_and_leaves_the_graph_as_it_is(options: dict[str, Any], message: str) -> None:
    graph = Graph("plant")
    events = graph.inject("events", ManualSource(), schema=Event, event_time=EventTime("at", max_disorder=hours(1)))
    arguments = {"after": minutes(30), "name": "silences"} | options

    with pytest.raises(GraphError, match=message):
        events.key_by("device").silent_after(**arguments)
    assert [node.name for node in graph.nodes] == ["events"]


def test_only_a_source_tells_whether_its_feed_was_away() -> None:
    graph = graph_of()
    silences = graph.inject("more", ManualSource(), schema=Event, event_time=EventTime("at", max_disorder=seconds(1)))
    ordered = silences.key_by("device").in_order(name="ordered")

    with pytest.raises(GraphError, match="straight from a source"):
        ordered.silent_after(minutes(1), name="quiet")
