"""Sources with a watermark for each site: what is refused, what a hostile device can do, and what each bound costs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millpy import (
    AdvanceWithClock,
    Combiner,
    Computation,
    Context,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    SlidingWindows,
    Stream,
    Sum,
    minutes,
    seconds,
)
from millpy.errors import GraphError, UsageError
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.graph_changes import changes_between
from millpy.testing import GraphDriver, ManualSource
from tests.crash.memory_world import LIMITS, running_world, until
from tests.feed import Feed

START = datetime(2026, 1, 1, tzinfo=UTC)


class Reading(msgspec.Struct):
    site: str
    device: str
    at: datetime
    value: float = 1.0
    rack: int = 0
    id: UUID = UUID(int=1)
    note: str | None = None


class Short(msgspec.Struct):
    site: int
    device: str


class Labeled(msgspec.Struct):
    site: str
    device: str


class Silent(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        """Do nothing."""


def source(graph: Graph, name: str = "readings", watermark_by: str | None = "site", **more: Any) -> Stream:
    event_time = EventTime("at", max_disorder=seconds(5), watermark_by=watermark_by)
    return graph.inject(name, ManualSource(), schema=Reading, event_time=event_time, **more)


def per_minute(readings: Stream, *key: str, name: str = "panes") -> Stream:
    windowed = readings.key_by(*(key or ("site", "device"))).window(FixedWindows(minutes(1)), name=name, intervals=2)
    return windowed.aggregate(n=Count(), total=Sum("value") if "value" in readings.record_type.fields else Count())


def graph_of(**more: Any) -> Graph:
    graph = Graph("sites")
    per_minute(source(graph, **more)).to_table("panes")
    return graph


def reading(site: str, at_s: float, device: str = "d", **more: Any) -> Reading:
    return Reading(site, device, START + timedelta(seconds=at_s), **more)


def panes(driver: GraphDriver) -> list[tuple[str, int, int]]:
    rows = driver.rows("panes")
    return [(row["site"], int((row["window_start"] - START).total_seconds()), row["n"]) for row in rows]


REFUSED: dict[str, tuple[Callable[[Stream], Any], str, str]] = {
    "another key": (lambda s: per_minute(s, "device"), "'site', which is not in their key", "key_by('site', 'device')"),
    "a Computation": (lambda s: s.key_by("site").process(Silent(), name="c"), "only windows close by site", "omit"),
    "deduplicate": (lambda s: s.deduplicate("id", minutes(1), name="once"), "only windows close by site", "omit"),
    "a join": (
        lambda s: s.key_by("site").join(s.key_by("site"), within=seconds(1), name="j"),
        "only windows close by site",
        "omit",
    ),
    "a join without a name": (
        lambda s: s.key_by("site").join(s.key_by("site"), within=seconds(1)),
        "a step without a name takes 'readings', which has watermark_by='site'",
        "omit",
    ),
    "an as-of join": (
        lambda s: s.key_by("site").join_as_of(s.key_by("site"), within=seconds(1), name="j"),
        "only windows close by site",
        "omit",
    ),
    "windows over windows": (
        lambda s: per_minute(per_minute(s), "site", name="over"),
        "takes the panes of 'panes', which closes windows by site",
        "write the panes to a table",
    ),
    "a Computation of panes": (
        lambda s: per_minute(s).key_by("site").process(Silent(), name="c"),
        "takes the panes of 'panes'",
        "write the panes",
    ),
    "a union with another source": (
        lambda s: per_minute(s.union(source(s.graph, "other", None))),
        "takes 'other' together with a stream that has watermark_by='site'",
        "give the source of 'other' watermark_by='site'",
    ),
    "a map to another type of the field": (
        lambda s: per_minute(s.map(lambda r: Short(len(r.site), r.device), Short)),
        "is a str in 'readings' and a int behind its operators",
        "map the site to another field",
    ),
}


@pytest.mark.parametrize(("build", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_by_site_is_refused(build: Callable[[Stream], Any], message: str, hint: str) -> None:
    with pytest.raises(GraphError) as caught:
        build(source(Graph("sites")))

    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("field", ["value", "note", "nothing"])
def test_a_field_that_cannot_be_a_key_cannot_be_the_site(field: str) -> None:
    with pytest.raises(GraphError, match=r"watermark_by: .*"):
        source(Graph("sites"), watermark_by=field)


def test_percentile_and_takes_are_refused() -> None:
    with pytest.raises(GraphError, match="percentile= learns one bound"):
        EventTime("at", max_disorder=seconds(1), percentile=0.9, watermark_by="site")
    with pytest.raises(GraphError, match="cannot archive the takes of 'panes'"):
        graph_of().archive_takes()


def test_spark_refuses_the_graph(tmp_path: Any) -> None:
    pytest.importorskip("pyspark")
    from millpy.spark.job import _refuse_sites

    with pytest.raises(UsageError, match="which Spark cannot run"):
        _refuse_sites(graph_of())


@pytest.mark.parametrize(("before", "after"), [(None, "site"), ("site", None), ("site", "device")])
def test_another_watermark_by_changes_what_is_stored(before: str | None, after: str | None) -> None:
    old, new = (graph_of(watermark_by=by).spec().description() for by in (before, after))

    (change,) = changes_between(old, new)

    assert change.kind == "meaning"
    assert "watermark_by=" in str(change)


def test_an_archive_takes_records_of_a_source_with_sites() -> None:
    graph = Graph("sites")
    readings = source(graph)
    readings.key_by("device").archive()
    per_minute(readings).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("readings", [reading("oslo", 0), reading("oslo", 70)])

    assert panes(driver) == [("oslo", 0, 1)]


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [("rack", 1, 2), ("id", UUID(int=1), UUID(int=2)), ("device", 'a"\\é', "others"), ("site", "floor", "")],
)
def test_sites_of_every_type_of_key_close_their_own_windows(field: str, one: Any, other: Any) -> None:
    def at_site(value: Any, at_s: float) -> Reading:
        return msgspec.structs.replace(reading("x", at_s), **{field: value})

    graph = Graph("sites")
    per_minute(source(graph, watermark_by=field), *dict.fromkeys([field, "site"])).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("readings", [at_site(one, 0), at_site(one, 70)])
    driver.feed("readings", [at_site(other, 0), at_site(other, 30)])
    driver.crash()
    assert [row["n"] for row in driver.rows("panes")] == [1]
    driver.feed("readings", [at_site(other, 66)])

    assert sorted(row["n"] for row in driver.rows("panes")) == [1, 2]
    assert set(driver.site_watermarks("readings")) == {str(v) if isinstance(v, UUID) else v for v in (one, other)}


def test_a_map_that_changes_the_site_dead_letters_the_record() -> None:
    def renamed(record: Reading) -> Labeled:
        return Labeled("rome" if record.value < 0 else record.site, record.device)

    graph = Graph("sites")
    per_minute(source(graph).map(renamed, Labeled)).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("readings", [reading("oslo", 0), reading("oslo", 1, value=-1), reading("oslo", 70)])

    assert panes(driver) == [("oslo", 0, 1)]
    (letter,) = driver.dead_letters()
    assert "an operator has changed 'site'" in letter.detail
    assert not driver._state.unbalanced()


def test_a_flat_map_that_changes_the_site_once_fails_as_a_whole() -> None:
    def several(record: Reading) -> list[Labeled]:
        return [Labeled(record.site, "a"), Labeled("rome" if record.value < 0 else record.site, "b")]

    graph = Graph("sites")
    per_minute(source(graph).flat_map(several, Labeled)).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("readings", [reading("oslo", at, value=at - 30) for at in range(62)] + [reading("oslo", 90)])

    assert panes(driver) == [("oslo", 0, 30), ("oslo", 0, 30)]
    assert len(driver.dead_letters()) == 30
    assert not driver._state.unbalanced()


# What one device can do to the others.


def test_a_fast_clock_closes_the_windows_of_its_own_site_only() -> None:
    driver = GraphDriver(graph_of(), now=START)

    driver.feed("readings", [reading("oslo", -30), reading("rome", -30), reading("oslo", 500), reading("oslo", 700)])
    driver.feed("readings", [reading("oslo", -70), reading("rome", -20)])

    assert [letter.reason for letter in driver.dead_letters()] == ["future"]
    assert [late.key for late in driver.late_records()] == [("oslo", "d")]
    assert driver.site_watermarks("readings") == {"oslo": START - seconds(5), "rome": START - seconds(25)}


def test_invented_sites_share_one_watermark_and_harm_no_site_that_was_there() -> None:
    driver = GraphDriver(graph_of(), limits=Limits(sites_max=2))
    driver.feed("readings", [reading("oslo", 0), reading("rome", 0)])

    driver.feed("readings", [reading(f"invented {n}", 100 * n) for n in range(200)])
    before = driver.site_watermarks("readings")
    driver.crash()
    assert driver.site_watermarks("readings") == before
    driver.feed("readings", [reading("oslo", 30), reading("rome", 40), reading("late", 50)])

    assert list(driver.site_watermarks("readings")) == ["oslo", "rome", None]
    assert [late.record.site for late in driver.late_records()] == ["late"]
    assert len(panes(driver)) == 199
    driver.end()
    assert [row for row in panes(driver) if row[0] in ("oslo", "rome")] == [("oslo", 0, 2), ("rome", 0, 2)]


@pytest.mark.parametrize(("site", "reason"), [("x" * 2_000, "key"), ("a\x00b", "refused")])
def test_a_site_that_cannot_be_stored_is_a_dead_letter(site: str, reason: str) -> None:
    driver = GraphDriver(graph_of(device=()))

    driver.feed("readings", [reading("oslo", 0), reading(site, 0), reading("oslo", 70)])

    assert [letter.reason for letter in driver.dead_letters()] == [reason]
    assert list(driver.site_watermarks("readings")) == ["oslo"]
    assert panes(driver) == [("oslo", 0, 1)]


def test_all_sites_share_the_room_for_open_windows() -> None:
    driver = GraphDriver(graph_of(), limits=Limits(open_windows_bytes_max=100_000))

    for n in range(200):
        driver.feed("readings", [reading(f"site {n}", 0)])

    full = [letter for letter in driver.dead_letters() if letter.reason == "windows"]
    assert 30 < len(full) < 170
    assert len(driver.open_windows("panes")) == 200 - len(full)


@pytest.mark.parametrize("device", [(), ("device",)])
def test_sliding_windows_of_a_site_with_more_keys_than_a_turn_may_emit(device: tuple[str, ...]) -> None:
    graph = Graph("sites")
    keyed = source(graph).key_by("site", *device)
    windowed = keyed.window(SlidingWindows(minutes(1), every=seconds(30)), name="panes", intervals=1)
    windowed.aggregate(n=Count()).to_table("panes")
    driver = GraphDriver(graph)
    driver._host._steps._budget.panes = 3  # type: ignore[misc]
    sites = ["", "oslo"] if device else ["", *map(str, range(9))]

    for seconds_ in (0, 70, 90):
        driver.feed("readings", [reading(site, seconds_, f"d{n}") for site in sites for n in range(9)])
        driver.crash()
    driver.end()

    counts = {-30: 1, 0: 1, 30: 1, 60: 2, 90: 1}
    names = [f"d{n}" for n in range(9)] if device else [None]
    found = {
        (row["site"], row.get("device"), int((row["window_start"] - START).total_seconds())): row["n"]
        for row in driver.rows("panes")
    }
    assert found == {
        (site, name, start): n * 9 // len(names) for site in sites for name in names for start, n in counts.items()
    }


def test_a_sorted_source_is_sorted_by_site() -> None:
    graph = Graph("sites")
    event_time = EventTime("at", sorted=True, watermark_by="site")
    per_minute(graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("readings", [reading("oslo", 60), reading("rome", 10), reading("oslo", 59), reading("rome", 11)])
    driver.feed("readings", [reading("rome", 10), reading("oslo", 60)])

    assert [letter.reason for letter in driver.dead_letters()] == ["event_time", "event_time"]
    driver.end()
    assert panes(driver) == [("oslo", 60, 2), ("rome", 0, 2)]


def test_a_silent_site_follows_the_clock_only_after_its_own_silence() -> None:
    driver = GraphDriver(graph_of(idle=AdvanceWithClock(minutes(2))), now=START)

    driver.feed("readings", [reading("oslo", 0), reading("rome", 0)])
    for minute in range(1, 4):
        driver.advance_clock(minutes(1))
        driver.feed("readings", [reading("oslo", 60 * minute)])

    assert panes(driver) == [("oslo", 0, 1), ("oslo", 60, 1)]
    driver.advance_clock(seconds(5))
    assert ("rome", 0, 1) in panes(driver)
    driver.feed("readings", [reading("rome", 30)])
    assert [late.record.site for late in driver.late_records()] == ["rome"]


class Longest(Combiner[list[str]]):
    """The longest name of a device: user code, which runs in the step thread."""

    accumulator = list[str]
    result_type = str

    def create(self) -> list[str]:
        return []

    def add(self, accumulator: list[str], record: Reading) -> list[str]:
        return self.merge(accumulator, [record.device])

    def merge(self, one: list[str], other: list[str]) -> list[str]:
        return [max([*one, *other], key=lambda name: (len(name), name))] if one or other else []

    def result(self, accumulator: list[str]) -> str:
        if accumulator == ["bad"]:
            raise ValueError(accumulator)
        return accumulator[0]


def test_user_code_that_fails_in_one_site_leaves_the_others_alone() -> None:
    graph = Graph("sites")
    windowed = source(graph).key_by("site").window(FixedWindows(minutes(1)), name="panes")
    windowed.aggregate(n=Count(), longest=Longest()).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("readings", [reading("oslo", 0, "bad"), reading("rome", 0, "dd"), reading("rome", 1, "d")])
    driver.feed("readings", [reading("oslo", 70), reading("rome", 80)])

    assert panes(driver) == [("rome", 0, 2)]
    assert len(driver.dead_letters()) == 1


def test_records_that_come_by_two_ways_are_judged_before_their_bundle_moves_the_site() -> None:
    graph = Graph("sites")
    readings = source(graph)
    odd, even = (readings.filter(lambda r, rest=rest: r.rack % 2 == rest) for rest in (1, 0))
    per_minute(odd.union(even)).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("readings", [reading("oslo", 0, rack=2), reading("oslo", 70, rack=1), reading("oslo", 80, rack=4)])

    assert driver.late_records() == []
    assert panes(driver) == [("oslo", 0, 1)]


def test_a_site_of_two_sources_has_the_least_of_both_watermarks() -> None:
    graph = Graph("sites")
    per_minute(source(graph, "north").union(source(graph, "south"))).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("north", [reading("oslo", 0), reading("rome", 0)])
    driver.feed("south", [reading("oslo", 1)])
    driver.feed("north", [reading("oslo", 90), reading("rome", 90), reading("oslo", 50)])
    driver.crash()
    assert panes(driver) == [("rome", 0, 1)]
    driver.feed("south", [reading("oslo", 20), reading("oslo", 66)])

    assert panes(driver) == [("oslo", 0, 4), ("rome", 0, 1)]
    assert driver.late_records() == []


class Repair:
    """A fault in the code of operators, until it is repaired."""

    done = False


@pytest.mark.parametrize("crashes", [False, True])
def test_a_source_that_hears_of_a_site_later_cannot_open_what_is_closed(crashes: bool) -> None:
    graph = Graph("sites")
    per_minute(source(graph, "north").union(source(graph, "south"))).to_table("panes")
    driver = GraphDriver(graph)

    driver.feed("north", [reading("rome", 0), reading("rome", 90)])
    for at in (10, 20, 30):
        driver.feed("south", [reading("rome", at)])
        if crashes:
            driver.crash()

    assert panes(driver) == [("rome", 0, 1)]
    assert len(driver.late_records()) == 3
    assert len({late.watermark for late in driver.late_records()}) == 1


@pytest.mark.parametrize("crashes", [False, True])
def test_a_site_beyond_the_bound_of_one_source_waits_for_what_the_others_there_share(crashes: bool) -> None:
    graph = Graph("sites")
    per_minute(source(graph, "north").union(source(graph, "south"))).to_table("panes")
    driver = GraphDriver(graph, limits=Limits(sites_max=1))

    driver.feed("north", [reading("rome", 0)])
    driver.feed("south", [reading("oslo", 0), reading("rome", 1)])
    driver.feed("north", [reading("rome", 90)])
    if crashes:
        driver.crash()
    assert panes(driver) == []
    driver.feed("south", [reading("rome", 2), reading("ulm", 70)])

    assert panes(driver) == [("rome", 0, 3)]


def test_a_site_that_sends_old_records_is_not_silent() -> None:
    driver = GraphDriver(graph_of(idle=AdvanceWithClock(minutes(2))), now=START)

    for minute in range(6):
        driver.feed("readings", [reading("slow", 60 * minute - 3_600), reading("oslo", 60 * minute)])
        driver.advance_clock(minutes(1))

    assert driver.late_records() == []
    assert driver.site_watermarks("readings")["slow"] == START - seconds(3_600 - 300 + 5)


async def test_replayed_records_are_judged_by_their_site_which_may_begin_with_them() -> None:
    def careful(record: Reading) -> Reading:
        if record.note == "bug" and not Repair.done:
            raise ValueError("a bug")
        return record

    feed, graph = Feed(), Graph("world")
    event_time = EventTime("at", max_disorder=seconds(5), watermark_by="site")
    readings = graph.inject("readings", feed, schema=Reading, event_time=event_time)
    per_minute(readings.map(careful)).to_table("panes")
    records = [
        *(reading(site, 0, note="bug") for site in ("oslo", "rome")),
        *(reading(site, 70) for site in ("oslo",)),
    ]
    async with running_world(graph, LIMITS) as world:
        letters = world.database.dead_letters
        feed.push(*map(msgspec.json.encode, records), b'{"site": "ulm"}')
        await until(world, lambda: len(letters) == 3, "all are read")
        Repair.done = True
        requests = world.database.requests
        requests.replay("dead_letters", 1, msgspec.json.encode(reading("ulm", 5)))  # the one that does not decode
        assert all(requests.replay("dead_letters", number) for number in (2, 3))
        states = lambda: [requests.state_of("dead_letters", number).state for number in (1, 2, 3)]  # noqa: E731
        await until(world, lambda: "requested" not in states(), "all are replayed")
        assert states() == ["replayed"] * 3
        feed.push(msgspec.json.encode(reading("rome", 30)), msgspec.json.encode(reading("ulm", 1)))
        feed.end()
        await world.finish()

        found = sorted((row["site"], row["n"]) for row in world.database.rows("panes"))
        assert found == [("oslo", 1), ("rome", 2), ("ulm", 2)]
        assert world.adds_up()


@pytest.mark.parametrize("lateness", [0, 60])
@pytest.mark.parametrize("every", [30, 60], ids=["slices", "whole windows"])
def test_windows_that_wait_for_the_next_turn_survive_a_crash(every: int, lateness: int) -> None:
    graph = Graph("sites")
    windows = SlidingWindows(minutes(1), every=seconds(every))
    event_time = EventTime("at", max_disorder=minutes(10), watermark_by="site")
    readings = graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)
    keyed = readings.key_by("site", "device").window(windows, allowed_lateness=seconds(lateness), name="panes")
    keyed.aggregate(n=Count()).to_table("panes")
    driver = GraphDriver(graph)
    host = driver._host
    place = next(place for place, interval in host.intervals.items() if interval.intake is not None)
    for site in "abcdef":
        driver.feed("readings", [reading(site, at) for at in (0, 40, 100, 170)])
    host._steps._budget.panes = 2  # type: ignore[misc]

    host._commit(host.step({place: SourceBatch("json", host.now_us, finished=True)}))
    host.restart()
    turns = 0
    while turns < 60 and (checkpoints := host.step({})):
        host._commit(checkpoints)
        host.restart()
        turns += 1

    whole = 7 if every == 30 else 3
    assert [sum(row["site"] == site for row in driver.rows("panes")) for site in "abcdef"] == [whole] * 6
    assert not driver._state.unbalanced()
    assert 2 <= turns < 60
