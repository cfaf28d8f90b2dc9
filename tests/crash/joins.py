"""A graph of interval joins behind two sources, its input, and its results by plain loops."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, seconds
from millpy.ingest.protocol import Source
from tests.crash.checks import Fault
from tests.crash.graph_files import rows

BEFORE, AFTER, SIZE, DISORDER = 2, 5, 20, 12
NUMBER = 400


class Order(msgspec.Struct):
    customer: str
    number: int
    at: int
    amount: float


class Payment(msgspec.Struct):
    payer: str
    number: int
    at: int
    note: str | None = None


def graph_of(orders: Source, payments: Source) -> Graph:
    """Return the graph: joins of each kind, and windows over one with records that are alone, which needs its holds."""
    graph = Graph("shop")
    event_time = EventTime("at", unit="s", max_disorder=seconds(DISORDER))
    left = graph.inject("orders", orders, schema=Order, event_time=event_time).key_by("customer")
    right = graph.inject("payments", payments, schema=Payment, event_time=event_time).key_by("payer")
    within = (seconds(BEFORE), seconds(AFTER))
    left.join(right, within=within).to_table("pairs")
    whole = left.join(right, within=within, how="full", intervals=2).to_table("whole")
    whole.key_by("customer").window(FixedWindows(seconds(SIZE)), intervals=2).aggregate(n=Count()).to_table("counts")
    left.join(right, within=FixedWindows(seconds(SIZE)), how="left").to_table("of_windows")
    left.join_as_of(right, within=seconds(AFTER)).to_table("latest")
    return graph


def records(seed: int, number: int = NUMBER) -> tuple[list[Order], list[Payment]]:
    """Draw orders and payments, out of order, but not so much that one is late."""
    rng = random.Random(seed)
    orders, payments = [], []
    for step in range(number):
        at = max(0, step // 4 - rng.choice([0, 0, 0, 1, DISORDER - 1]))
        orders.append(Order(rng.choice("abcdef"), step, at, rng.random()))
        at = max(0, step // 4 - rng.choice([0, 0, 0, 2, DISORDER - 1]))
        payments.append(Payment(rng.choice("abcdefg"), step, at, rng.choice([None, "x"])))
    return orders, payments


def write(path: Path, seed: int, number: int = NUMBER) -> tuple[list[Order], list[Payment]]:
    """Write the files that `join_graph.py` reads."""
    orders, payments = drawn = records(seed, number)
    parts: list[tuple[Path, Sequence[msgspec.Struct]]] = [
        (path, orders),
        (path.with_name(path.name + ".right"), payments),
    ]
    for target, part in parts:
        target.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in part))
    return drawn


def expected(orders: Sequence[Order], payments: Sequence[Payment]) -> dict[str, Counter[tuple[Any, ...]]]:
    """Return the rows of each table, by a loop over all pairs."""
    pairs: list[tuple[Order | None, Payment | None]] = [
        (order, payment)
        for order in orders
        for payment in payments
        if order.customer == payment.payer and order.at - BEFORE <= payment.at <= order.at + AFTER
    ]
    met = {id(order) for order, _ in pairs} | {id(payment) for _, payment in pairs}
    alone: list[tuple[Order | None, Payment | None]] = [(order, None) for order in orders if id(order) not in met]
    alone += [(None, payment) for payment in payments if id(payment) not in met]
    of_windows: Counter[tuple[Any, ...]] = Counter()
    latest: Counter[tuple[Any, ...]] = Counter()
    for order in orders:
        mine = [payment for payment in payments if payment.payer == order.customer]
        same = [payment for payment in mine if payment.at // SIZE == order.at // SIZE]
        of_windows.update(_row(order, payment) for payment in same or [None])
        before = [payment for payment in mine if order.at - AFTER <= payment.at <= order.at]
        # One file is read in its order, so of equal times the last in it has come last.
        latest[_row(order, max(before, key=lambda payment: (payment.at, payment.number), default=None))] += 1
    counts: Counter[tuple[Any, ...]] = Counter()
    for order, payment in [*pairs, *alone]:
        at = max(one.at for one in (order, payment) if one is not None)
        counts[_key(order, payment), at // SIZE * SIZE] += 1
    return {
        "pairs": Counter(_row(*pair) for pair in pairs),
        "whole": Counter(_row(*pair) for pair in [*pairs, *alone]),
        "of_windows": of_windows,
        "latest": latest,
        "counts": Counter({(*name, n): 1 for name, n in counts.items()}),
    }


def _key(order: Order | None, payment: Payment | None) -> str:
    if order is not None:
        return order.customer
    assert payment is not None
    return payment.payer


def _row(order: Order | None, payment: Payment | None) -> tuple[Any, ...]:
    left = (None, None, None) if order is None else (order.number, order.at, order.amount)
    right = (None, None, None) if payment is None else (payment.number, payment.at, payment.note)
    return (_key(order, payment), *left, *right)


COLUMNS = "customer, number, at, amount, number_right, at_right, note"
QUERIES = {
    "pairs": f"SELECT {COLUMNS} FROM shop.pairs",
    "whole": f"SELECT {COLUMNS} FROM shop.whole",
    "of_windows": f"SELECT {COLUMNS} FROM shop.of_windows",
    "latest": f"SELECT {COLUMNS} FROM shop.latest",
    "counts": "SELECT customer, extract(epoch FROM window_start)::int, n FROM shop.counts",
}


def join_faults(url: str, drawn: tuple[Sequence[Order], Sequence[Payment]]) -> list[Fault]:
    """Compare the tables with the loop's, and the accounting with itself."""
    found = []
    for table, rows_of in expected(*drawn).items():
        stored = Counter(rows(url, QUERIES[table]))
        for kind, left in (("lost", rows_of - stored), ("doubled", stored - rows_of)):
            if left:
                found.append(Fault(kind, f"{table}: {sorted(left, key=str)[:3]}", left.total()))
    for row in rows(url, "SELECT * FROM millpy.accounting WHERE NOT balanced"):
        found.append(Fault("violation", f"accounting: {row}"))
    if rows(url, "SELECT count(*) FROM millpy.late_records") != [(0,)]:
        found.append(Fault("violation", "records were late"))
    return found
