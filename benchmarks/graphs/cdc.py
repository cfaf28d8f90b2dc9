"""Changes of pgbench's accounts, by logical decoding, into windows by branch and commit time."""

from datetime import datetime

import msgspec

from millpy import ChangeFields, Count, EventTime, FixedWindows, Graph, PostgresTable, Sum, seconds


class Account(msgspec.Struct):
    aid: int
    bid: int
    abalance: int
    at: datetime


graph = Graph("cdc")
accounts = graph.inject(
    "accounts",
    PostgresTable("pgbench_accounts", copy=False, operations=("update",), fields=ChangeFields(committed_at="at")),
    schema=Account,
    event_time=EventTime("at", max_disorder=seconds(0)),
)
accounts.key_by("bid").window(FixedWindows(seconds(1))).aggregate(n=Count(), total=Sum("abalance")).to_table(
    "by_branch"
)
