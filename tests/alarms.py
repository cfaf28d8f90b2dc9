"""A Computation whose rules are the rows of a table, for tests of lookups."""

from __future__ import annotations

from typing import Any

import msgspec

from millpy import Computation, Context, LookupTable, milliseconds


class Rule(msgspec.Struct, frozen=True):
    name: str
    above: float


class Alert(msgspec.Struct):
    device: str
    rule: str


class Alarms(Computation):
    """Alerts of each rule whose bound a record's value exceeds."""

    rules = LookupTable("rules", Rule, key="name", refresh=milliseconds(100))

    def process_record(self, context: Context, record: Any) -> None:
        for rule in context.table(Alarms.rules).values():
            if record.value > rule.above:
                context.produce(Alert(record.device, rule.name))
