"""Orders per customer and ten seconds, injected by an application in the transaction that stores the order.

    millpy run examples/orders.py
    python examples/orders_app.py "$MILLPY_DATABASE_URL"
    millpy sql "SELECT customer, orders, cents FROM shop.revenue ORDER BY window_start, customer"

Kill the application at any time: an order that its table has counts once, and one that it lacks does not.
"""

from datetime import datetime

import msgspec

from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, InjectedStream, Sum, hours, seconds


class Order(msgspec.Struct):
    id: str
    customer: str
    ordered_at: datetime
    cents: int


graph = Graph("shop")
orders = graph.inject(
    "orders",
    InjectedStream("orders", id_field="id"),
    schema=Order,
    event_time=EventTime("ordered_at", max_disorder=seconds(10)),
    dedupe=Dedupe("id", within=hours(1)),
)
revenue = orders.key_by("customer").window(FixedWindows(seconds(10)), name="revenue", allowed_lateness=hours(1))
revenue.aggregate(orders=Count(), cents=Sum("cents")).to_table("revenue")
