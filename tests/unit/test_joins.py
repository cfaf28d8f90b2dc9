"""Joins in graphs: what is refused when the graph is made, what a whole graph computes, and what may be deployed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from millpy import (
    Accumulation,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    KeyedStream,
    SessionWindows,
    SlidingWindows,
    Stream,
    Sum,
    minutes,
    seconds,
)
from millpy.errors import GraphError
from millpy.model.graph_changes import changes_between
from millpy.testing import GraphDriver, ManualSource

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
LATE = minutes(10)


class Order(msgspec.Struct):
    customer: str
    at: datetime
    amount: int
    tags: list[str] = []


class Payment(msgspec.Struct):
    payer: str
    at: datetime
    amount: int


class Numbered(msgspec.Struct):
    number: int
    at: datetime


def at(second: float) -> datetime:
    return NOON + seconds(second)


def inputs(graph: Graph, disorder: int = 0) -> tuple[Stream, Stream]:
    event_time = EventTime("at", max_disorder=seconds(disorder))
    orders = graph.inject("orders", ManualSource(), schema=Order, event_time=event_time)
    return orders, graph.inject("payments", ManualSource(), schema=Payment, event_time=event_time)


def joined(graph: Graph, **options: Any) -> Stream:
    orders, payments = inputs(graph)
    keyed = orders.key_by("customer")
    return keyed.join(payments.key_by("payer"), **{"within": (seconds(5), seconds(60)), **options}).to_table("paid")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"within": seconds(-5)}, "it ends before it begins"),
        ({"within": (minutes(-2), minutes(1))}, "it ends before it begins"),
        ({"within": 5}, "within=5 is not a duration"),
        ({"within": (seconds(1), 5)}, "is not a duration or a pair of durations"),
        ({"within": (seconds(1),)}, "is not a duration or a pair of durations"),
        ({"within": timedelta(days=1e6)}, "longer than a thousand years"),
        ({"how": "right"}, "unknown how='right'"),
        ({"within": SlidingWindows(minutes(2), every=minutes(1))}, "cannot join within SlidingWindows"),
        ({"within": SessionWindows(minutes(2))}, "cannot join within SessionWindows"),
        ({"allowed_lateness": seconds(-1)}, "allowed_lateness must not be negative"),
        ({"suffix": " "}, "suffix=' ' makes no field name"),
        ({"suffix": ""}, "two fields of the joined record are named 'amount'"),
        ({"name": "No Name"}, "No Name"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        joined(Graph("shop"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"within": seconds(-1)}, "is not a duration"),
        ({"within": (seconds(1), seconds(1))}, "is not a duration"),
        ({"within": timedelta(days=1e6)}, "longer than a thousand years"),
        ({"how": "full"}, "unknown how=.full. of a join"),
        ({"allowed_lateness": seconds(-1)}, "allowed_lateness must not be negative"),
        ({"suffix": ""}, "two fields of the joined record are named 'amount'"),
    ],
)
def test_an_as_of_join_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    orders, payments = inputs(Graph("shop"))

    with pytest.raises(GraphError, match=message):
        payments.key_by("payer").join_as_of(orders.key_by("customer"), **{"within": minutes(1), **options})


def test_keys_of_different_types_are_refused() -> None:
    graph = Graph("shop")
    orders, _ = inputs(graph)
    numbered = graph.inject("numbered", ManualSource(), schema=Numbered, event_time=EventTime("at", sorted=True))

    with pytest.raises(GraphError, match=r"customer. of Order: str and .number. of Numbered: int"):
        orders.key_by("customer").join(numbered.key_by("number"), within=seconds(1))


def test_streams_of_different_graphs_are_refused() -> None:
    one, _ = inputs(Graph("one"))
    other, _ = inputs(Graph("other"))

    with pytest.raises(GraphError, match="another graph"):
        one.key_by("customer").join(other.key_by("customer"), within=seconds(1))


def test_a_join_without_a_name_is_refused() -> None:
    graph = Graph("shop")
    orders, payments = inputs(graph)
    orders.key_by("customer").join(payments.key_by("payer"), within=seconds(1))

    with pytest.raises(GraphError, match="has no name"):
        graph.spec()


def totals(orders: Stream, mode: Accumulation) -> KeyedStream:
    windows = orders.key_by("customer").window(
        FixedWindows(minutes(1)), allowed_lateness=LATE, accumulation=mode, name="totals"
    )
    return windows.aggregate(total=Sum("amount")).key_by("customer")


def test_panes_that_repeat_are_refused() -> None:
    orders, payments = inputs(Graph("shop"))
    panes = totals(orders, Accumulation.ACCUMULATING)

    with pytest.raises(GraphError, match="cannot join the panes of 'totals'"):
        payments.key_by("payer").join(panes, within=seconds(1))


def test_a_table_of_joined_records_that_may_be_retracted_is_refused() -> None:
    orders, payments = inputs(Graph("shop"))
    panes = totals(orders, Accumulation.RETRACTING)

    with pytest.raises(GraphError, match="may be retracted"):
        panes.join(payments.key_by("payer"), within=seconds(1)).to_table("paid")


def order(second: float, customer: str = "ada", amount: int = 1) -> Order:
    return Order(customer, at(second), amount, ["new"])


def payment(second: float, payer: str = "ada", amount: int = 1) -> Payment:
    return Payment(payer, at(second), amount)


def rows(driver: GraphDriver, table: str = "paid") -> list[tuple[Any, ...]]:
    names = ("customer", "at", "amount", "at_right", "amount_right")
    return sorted((tuple(row[name] for name in names) for row in driver.rows(table)), key=str)


@pytest.mark.parametrize("how", ["inner", "left", "full"])
def test_each_way_to_join(how: str) -> None:
    graph = Graph("shop")
    joined(graph, how=how)
    driver = GraphDriver(graph)

    driver.feed("orders", [order(0, amount=5), order(0, "bob", 6)])
    driver.feed("payments", [payment(60, amount=7), payment(61, amount=8)])
    driver.crash()
    driver.end()

    pair = ("ada", at(0), 5, at(60), 7)
    alone = [("bob", at(0), 6, None, None)] if how != "inner" else []
    alone += [("ada", None, None, at(61), 8)] if how == "full" else []
    assert rows(driver) == sorted([pair, *alone], key=str)
    assert [row["tags"] for row in driver.rows("paid") if row["amount"] == 5] == [["new"]]
    driver.check_accounting()


def test_a_record_without_a_match_holds_the_watermark_until_it_passes() -> None:
    graph = Graph("shop")
    stream = joined(graph, how="left")
    windows = stream.key_by("customer").window(FixedWindows(minutes(1)))
    windows.aggregate(n=Count()).to_table("counts")
    driver = GraphDriver(graph)
    driver.feed("orders", [order(10), order(20)])
    driver.feed("payments", [payment(12)])

    for source in ("orders", "payments"):
        driver.advance_watermark(source, at(72))
    assert driver.watermarks("paid").low == at(20)  # the first order has a match and holds nothing
    assert driver.rows("counts") == []

    for source in ("orders", "payments"):
        driver.advance_watermark(source, at(81))
    assert [row["n"] for row in driver.rows("counts")] == [2]
    driver.check_accounting()


def test_a_join_within_windows_passes_what_is_alone_when_its_window_is_over() -> None:
    graph = Graph("shop")
    joined(graph, within=FixedWindows(minutes(1)), how="left")
    driver = GraphDriver(graph)
    driver.feed("payments", [payment(59, amount=7)])
    driver.feed("orders", [order(61), order(1, amount=5)])
    assert [row[2] for row in rows(driver)] == [5]

    driver.crash()
    for source in ("orders", "payments"):
        driver.advance_watermark(source, at(119))
    assert driver.watermarks("paid").low == at(119)
    for source in ("orders", "payments"):
        driver.advance_watermark(source, at(120))

    assert rows(driver) == [("ada", at(1), 5, at(59), 7), ("ada", at(61), 1, None, None)]
    assert [moment for moment, _ in driver.timed_records("paid")][-1] == at(120) - timedelta(microseconds=1)
    driver.check_accounting()


@pytest.mark.parametrize("crashes", [False, True])
def test_an_as_of_join_waits_for_the_record_between(crashes: bool) -> None:
    graph = Graph("shop")
    orders, payments = inputs(graph, disorder=60)
    left, right = payments.key_by("payer"), orders.key_by("customer")
    left.join_as_of(right, within=minutes(5), suffix="_of_order").to_table("paid")
    driver = GraphDriver(graph)
    driver.loses_turns = crashes
    driver.feed("payments", [payment(30, amount=7), payment(31, "bob", 8)])
    driver.feed("orders", [order(0, amount=1), order(40, amount=3), order(20, amount=2)])
    assert driver.rows("paid") == []
    assert driver.watermarks("paid").low < at(30)

    driver.end()

    found = [(row["payer"], row["amount"], row["amount_of_order"]) for row in driver.rows("paid")]
    assert found == [("ada", 7, 2), ("bob", 8, None)]
    assert [moment for moment, _ in driver.timed_records("paid")] == [at(30), at(31)]
    driver.check_accounting()


def test_a_corrected_pane_is_joined_as_it_is_when_it_is_used() -> None:
    graph = Graph("shop")
    orders, payments = inputs(graph)
    panes = totals(orders, Accumulation.RETRACTING)
    left = payments.key_by("payer")
    left.join_as_of(panes, within=minutes(5), allowed_lateness=LATE).to_table("paid")
    driver = GraphDriver(graph)
    driver.feed("orders", [order(0, amount=5)])
    driver.feed("payments", [payment(90)])
    for source in ("orders", "payments"):
        driver.advance_watermark(source, at(120))
    driver.feed("orders", [order(1, amount=2)])
    driver.end()

    assert [int(row["total"]) for row in driver.rows("paid")] == [7]
    driver.check_accounting()


def test_a_late_record_is_stored_and_one_within_the_lateness_is_joined() -> None:
    graph = Graph("shop")
    orders, payments = inputs(graph)
    left, right = orders.key_by("customer"), payments.key_by("payer")
    left.join(right, within=seconds(5)).to_table("strict")
    left.join(right, within=seconds(5), allowed_lateness=seconds(30)).to_table("patient")
    driver = GraphDriver(graph)
    driver.feed("payments", [payment(0)])
    for source in ("orders", "payments"):
        driver.advance_watermark(source, at(20))

    with driver.crashing():
        driver.feed("orders", [order(2)])

    assert rows(driver, "strict") == []
    assert rows(driver, "patient") == [("ada", at(2), 1, at(0), 1)]
    assert [(late.computation, late.record.customer) for late in driver.late_records()] == [("strict", "ada")]
    driver.check_accounting()


def test_a_stream_joins_itself() -> None:
    graph = Graph("shop")
    orders, _ = inputs(graph)
    keyed = orders.key_by("customer")
    keyed.join(keyed, within=(seconds(-1), seconds(10))).to_table("next_orders")
    driver = GraphDriver(graph)

    driver.feed("orders", [order(0), order(5), order(30)])
    driver.end()

    assert rows(driver, "next_orders") == [("ada", at(0), 1, at(5), 1)]
    driver.check_accounting()


def test_a_union_is_one_side() -> None:
    graph = Graph("shop")
    orders, payments = inputs(graph)
    others = graph.inject("others", ManualSource(), schema=Order, event_time=EventTime("at", sorted=True))
    both = orders.filter(lambda one: one.amount > 0).union(others).key_by("customer")
    payments.key_by("payer").join(both, within=seconds(5), suffix="_of_order").to_table("paid")
    driver = GraphDriver(graph)

    driver.feed("orders", [order(1), order(1, amount=0)])
    driver.feed("others", [order(2, amount=3)])
    driver.feed("payments", [payment(0)])

    assert sorted(row["amount_of_order"] for row in driver.rows("paid")) == [1, 3]
    driver.check_accounting()


@pytest.mark.parametrize("crashes", [False, True])
def test_a_corrected_pane_corrects_what_was_joined_with_it(crashes: bool) -> None:
    graph = Graph("shop")
    orders, payments = inputs(graph)
    panes = totals(orders, Accumulation.RETRACTING)
    late = panes.join(payments.key_by("payer"), within=minutes(2), allowed_lateness=LATE, name="paid_totals").key_by(
        "customer"
    )
    late.window(FixedWindows(minutes(60)), allowed_lateness=LATE).aggregate(n=Count(), due=Sum("total")).to_table("due")
    driver = GraphDriver(graph)
    driver.feed("orders", [order(0, amount=5)])
    driver.feed("payments", [payment(30)])
    for source in ("orders", "payments"):
        driver.advance_watermark(source, at(120))

    driver.loses_turns = crashes
    driver.feed("orders", [order(1, amount=2)])
    for source in ("orders", "payments"):
        driver.end(source)

    marks = [(int(pane.total), pane.amount) for _, pane in driver.timed_records("paid_totals")]
    assert marks == [(5, 1), (5, 1), (7, 1)]
    assert [(row["n"], row["due"]) for row in driver.rows("due")] == [(1, 7)]
    driver.check_accounting()


def test_an_interval_is_no_window_over_stored_records() -> None:
    changes = changes_between(description(), description(within=FixedWindows(minutes(1))))

    assert {change.kind for change in changes if change.subject == "paid"} == {"meaning"}


def description(**options: Any) -> Any:
    graph = Graph("shop")
    joined(graph, **options)
    return graph.spec().description()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"within": seconds(5)}, "after"),
        ({"how": "left"}, "how"),
        ({"allowed_lateness": seconds(1)}, "allowed_lateness"),
        ({"intervals": 2}, "the number of intervals"),
    ],
)
def test_another_join_over_stored_records_is_refused(options: dict[str, Any], words: str) -> None:
    changes = [change for change in changes_between(description(), description(**options)) if change.subject == "paid"]

    assert {change.kind for change in changes} == {"meaning"}
    assert any(words in str(change) for change in changes)
