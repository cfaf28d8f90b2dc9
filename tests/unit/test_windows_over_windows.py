"""Windows over panes: each window has one pane, or its mode says what further panes are; else the graph is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from millpy import (
    Accumulation,
    Combiner,
    Computation,
    Context,
    Count,
    EventTime,
    File,
    FixedWindows,
    Graph,
    Max,
    Mean,
    SessionWindows,
    SlidingWindows,
    Stream,
    Sum,
    Top,
    Variance,
    hours,
    minutes,
    seconds,
)
from millpy.errors import GraphError
from millpy.model.record import SMALL_RECORDS_MAX
from millpy.testing import GraphDriver, ManualSource

INNER = {
    "fixed": FixedWindows(minutes(1)),
    "sliding": SlidingWindows(minutes(2), every=minutes(1)),
    "sessions": SessionWindows(minutes(1)),
}
OUTER = {**INNER, "fixed": FixedWindows(hours(1))}


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


class Total(msgspec.Struct):
    device: str
    n: int


class Device(msgspec.Struct, frozen=True):
    device: str
    owner: str


class Newest(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.produce(Total(record.device, record.n))


def to_total(pane: Any) -> Total:
    return Total(pane.device, pane.n)


def anything(pane: Any) -> bool:
    return True


BETWEEN: dict[str, Callable[[Stream, Stream], Stream]] = {
    "nothing": lambda panes, other: panes,
    "map": lambda panes, other: panes.map(to_total, Total),
    "filter": lambda panes, other: panes.filter(anything),
    "split": lambda panes, other: panes.split(lambda pane: "a", into=["a", "b"])["b"],
    "deduplicate": lambda panes, other: panes.deduplicate("device", within=minutes(1), name="first"),
    "union": lambda panes, other: other.union(panes.map(to_total, Total)),
}


def panes_of(
    inner: Any, lateness: int, mode: Accumulation, between: Callable[[Stream, Stream], Stream]
) -> tuple[Graph, Stream]:
    graph = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(1))
    readings = graph.inject("readings", File("r"), schema=Reading, event_time=event_time)
    keyed = readings.key_by("device")
    windows = keyed.window(inner, allowed_lateness=minutes(lateness), accumulation=mode, name="inner")
    other = keyed.process(Newest(), name="other", output=Total)
    return graph, between(windows.aggregate(n=Count()), other)


def graph_of(
    inner: Any,
    lateness: int,
    between: Callable[[Stream, Stream], Stream],
    outer: Any,
    mode: Accumulation = Accumulation.ACCUMULATING,
) -> Graph:
    graph, panes = panes_of(inner, lateness, mode, between)
    panes.key_by("device").window(outer).aggregate(total=Sum("n")).to_table("outer")
    return graph


def amended(mode: Accumulation = Accumulation.RETRACTING) -> Stream:
    return panes_of(INNER["fixed"], 5, mode, BETWEEN["nothing"])[1]


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("inner", INNER)
def test_windows_over_panes_that_may_be_amended_are_refused(inner: str, between: str, outer: str) -> None:
    with pytest.raises(GraphError, match="each would count") as refused:
        graph_of(INNER[inner], 5, BETWEEN[between], OUTER[outer])

    assert "'inner'" in refused.value.message
    for choice in ("accumulation=Accumulation.RETRACTING", "Accumulation.DISCARDING", "omit its allowed_lateness"):
        assert choice in refused.value.hint
    assert graph_of(INNER[inner], 0, BETWEEN[between], OUTER[outer]).spec()


@pytest.mark.parametrize("lateness", [0, 5])
def test_panes_behind_a_lookup_still_repeat(lateness: int) -> None:
    def with_owner(panes: Stream, other: Stream) -> Stream:
        return panes.lookup("devices", Device, key="device", refresh=minutes(1), name="with_owner")

    if lateness:
        with pytest.raises(GraphError, match=r"cannot window the panes of 'inner'.* each would count"):
            graph_of(INNER["fixed"], lateness, with_owner, OUTER["fixed"])
    else:
        assert graph_of(INNER["fixed"], lateness, with_owner, OUTER["fixed"]).spec()


@pytest.mark.parametrize("inner", INNER)
def test_computation_in_between_decides_which_panes_count(inner: str) -> None:
    def through_a_computation(panes: Stream, other: Stream) -> Stream:
        kept: Stream = panes.key_by("device").process(Newest(), name="newest", output=Total)
        return kept

    assert graph_of(INNER[inner], 5, through_a_computation, OUTER["fixed"]).spec()


@pytest.mark.parametrize("mode", [Accumulation.RETRACTING, Accumulation.DISCARDING])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("inner", INNER)
def test_a_mode_that_says_what_further_panes_are_is_accepted(inner: str, between: str, mode: Accumulation) -> None:
    graph = graph_of(INNER[inner], 5, BETWEEN[between], OUTER["fixed"], mode)

    identity = next(found.identity for found in graph.spec().computations if found.name == "outer")
    assert identity.get("takes_retractions", False) == (mode is Accumulation.RETRACTING)


@pytest.mark.parametrize("between", BETWEEN)
def test_retractions_reach_sessions_by_no_way(between: str) -> None:
    with pytest.raises(GraphError, match="could not shrink again") as refused:
        graph_of(INNER["fixed"], 5, BETWEEN[between], SessionWindows(minutes(1)), Accumulation.RETRACTING)

    assert "use fixed or sliding windows" in refused.value.hint
    assert graph_of(INNER["fixed"], 5, BETWEEN[between], SessionWindows(minutes(1)), Accumulation.DISCARDING)
    assert graph_of(INNER["fixed"], 0, BETWEEN[between], SessionWindows(minutes(1)), Accumulation.RETRACTING)


@pytest.mark.parametrize("between", BETWEEN)
def test_aggregate_that_cannot_subtract_is_refused(between: str) -> None:
    _, panes = panes_of(INNER["fixed"], 5, Accumulation.RETRACTING, BETWEEN[between])
    with pytest.raises(GraphError, match=r"Max\('n'\) cannot subtract records that are retracted") as refused:
        panes.key_by("device").window(OUTER["fixed"]).aggregate(total=Sum("n"), most=Max("n"))

    assert (
        "use Count, Sum, Mean, Variance, StandardDeviation, or a Combiner that defines subtract" in refused.value.hint
    )
    assert amended(Accumulation.DISCARDING).key_by("device").window(OUTER["fixed"]).aggregate(most=Max("n"))


def test_increments_cannot_take_back_what_was_counted() -> None:
    with pytest.raises(GraphError, match="cannot take back what is old") as refused:
        amended().key_by("device").window(OUTER["fixed"], accumulation=Accumulation.DISCARDING)

    assert refused.value.hint == "use accumulation=Accumulation.RETRACTING"
    assert (
        amended(Accumulation.DISCARDING).key_by("device").window(OUTER["fixed"], accumulation=Accumulation.DISCARDING)
    )


class Subtracts(Newest):
    handles_retractions = True


@pytest.mark.parametrize("between", BETWEEN)
def test_computation_declares_that_it_handles_retractions(between: str) -> None:
    _, panes = panes_of(INNER["fixed"], 5, Accumulation.RETRACTING, BETWEEN[between])
    keyed = panes.key_by("device")
    with pytest.raises(GraphError, match="Newest would take retractions for new records") as refused:
        keyed.process(Newest(), name="newest", output=Total)

    assert "handles_retractions = True" in refused.value.hint
    made = keyed.process(Subtracts(), name="newest", output=Total)
    assert made.key_by("device").window(SessionWindows(minutes(1))).aggregate(most=Max("n")), "its output retracts none"
    assert amended(Accumulation.ACCUMULATING).key_by("device").process(Newest(), name="newest", output=Total)


def test_a_table_of_records_is_refused_where_no_row_could_be_found_again() -> None:
    once = amended().deduplicate("device", within=minutes(1), name="once")
    with pytest.raises(GraphError, match="a row does not say which record it is") as refused:
        once.to_table("once")

    assert "aggregate them first" in refused.value.hint
    assert amended(Accumulation.DISCARDING).deduplicate("device", minutes(1), name="once").to_table("once")


def test_a_mode_is_named_by_its_member() -> None:
    with pytest.raises(GraphError, match="accumulation='retracting' is not one of Accumulation") as refused:
        amended("retracting")  # type: ignore[arg-type]

    assert refused.value.hint == f"for example accumulation={Accumulation.RETRACTING!r}"


def test_takes_of_a_retracting_window_are_records_like_any_other() -> None:
    graph = graph_of(INNER["fixed"], 5, BETWEEN["nothing"], OUTER["fixed"], Accumulation.RETRACTING)
    graph.archive_takes()

    assert graph.spec()


class Large(msgspec.Struct):
    device: str
    group: str
    at: int
    value: int


@pytest.mark.parametrize("mode", [Accumulation.RETRACTING, Accumulation.DISCARDING])
@pytest.mark.parametrize("devices", [SMALL_RECORDS_MAX // 2, 2 * SMALL_RECORDS_MAX], ids=["records", "columns"])
def test_sums_of_sums_of_whole_numbers_are_whole_numbers(mode: Accumulation, devices: int) -> None:
    graph = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    source = graph.inject("readings", ManualSource(), schema=Large, event_time=event_time)
    panes = source.key_by("group", "device").window(
        FixedWindows(minutes(1)), allowed_lateness=hours(9), accumulation=mode, name="inner"
    )
    best = {"best": Top("total", n=1)} if mode is Accumulation.DISCARDING else {}
    middle = panes.aggregate(total=Sum("value")).key_by("group").window(FixedWindows(minutes(5)), name="middle")
    totals = middle.aggregate(
        total=Sum("total"), mean=Mean("total"), variance=Variance("total", population=True), **best
    )
    outer = totals.to_table("middle").key_by("group").window(FixedWindows(hours(1)))
    outer.aggregate(total=Sum("total"), variance=Sum("variance")).to_table("outer")
    driver = GraphDriver(graph)
    value = 2**63 - 1

    driver.feed("readings", [Large(str(device), "a", 0, value) for device in range(devices)])
    driver.advance_watermark("readings", datetime.fromtimestamp(120, UTC))
    driver.crash()
    driver.end()

    (row,) = driver.rows("middle")
    assert (row["total"], row["mean"], row["variance"]) == (devices * value, float(value), 0.0)
    assert row.get("best", [value]) == [value]
    assert [type(row[name]) for name in ("total", "mean", "variance")] == [int, float, float]
    (row,) = driver.rows("outer")
    assert (row["total"], row["variance"]) == (devices * value, 0.0)


class Share(Combiner[list[int]]):
    """The share of large values among the positive ones; without any it has no result."""

    accumulator = list[int]
    result_type = float

    def create(self) -> list[int]:
        return [0, 0]

    def add(self, accumulator: list[int], record: Large) -> list[int]:
        return [accumulator[0] + (record.value > 9), accumulator[1] + (record.value > 0)]

    def merge(self, one: list[int], other: list[int]) -> list[int]:
        return [one[0] + other[0], one[1] + other[1]]

    def result(self, accumulator: list[int]) -> float:
        return accumulator[0] / accumulator[1]


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("inner", [*INNER.values(), SlidingWindows(seconds(60), every=seconds(45))], ids=repr)
def test_what_is_new_waits_until_a_combiner_has_a_result_for_it(inner: Any, crashes: bool, graph_driver: Any) -> None:
    graph = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    source = graph.inject("readings", ManualSource(), schema=Large, event_time=event_time)
    windows = source.key_by("group").window(inner, allowed_lateness=hours(9), accumulation=Accumulation.DISCARDING)
    shares = windows.aggregate(n=Count(), share=Share()).to_table("shares")
    shares.key_by("group").window(FixedWindows(hours(1)), allowed_lateness=hours(9)).aggregate(n=Sum("n")).to_table(
        "outer"
    )
    driver = graph_driver(graph)

    def feed(value: int, at: int) -> tuple[set[int], set[int]]:
        driver.feed("readings", [Large("a", "a", at, value)])
        if crashes:
            driver.crash()
        return ({row["n"] for row in driver.rows("shares")}, {row["n"] for row in driver.rows("outer")})

    feed(10, 50)
    driver.advance_watermark("readings", datetime.fromtimestamp(7_200, UTC))
    copies = len(driver.rows("shares"))

    assert feed(-1, 51) == ({2}, {copies})
    assert {letter.detail for letter in driver.dead_letters()} == {"ZeroDivisionError: division by zero"}
    assert feed(20, 52) == ({3}, {3 * copies})


def test_branches_that_were_united_are_deduplicated_before_they_part() -> None:
    def branches_of(panes: Stream) -> tuple[Stream, Stream]:
        branches = panes.split(lambda pane: "odd" if pane.n % 2 else "even", into=["odd", "even"])
        return branches["odd"], branches["even"]

    odd, even = branches_of(amended())
    with pytest.raises(GraphError, match="by several ways") as refused:
        odd.union(even).deduplicate("device", within=minutes(1), name="once")
    assert "before the ways part" in refused.value.hint

    odd, even = branches_of(amended().deduplicate("device", within=minutes(1), name="once"))
    assert odd.union(even).key_by("device")
    assert odd.union(odd).deduplicate("device", within=minutes(1), name="twice")
    odd, even = branches_of(amended(Accumulation.DISCARDING))
    assert odd.union(even).deduplicate("device", within=minutes(1), name="once")
