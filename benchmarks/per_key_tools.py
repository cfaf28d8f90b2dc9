"""The tools per key, without a database: 200,000 readings of 1,000 devices, 10,000 a bundle, decoding included.

python benchmarks/per_key_tools.py [TOOL...]    prints records a CPU second of each tool, and how many it makes
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, KeyedStream, Pattern, Stream, minutes, seconds
from millpy.testing import GraphDriver, ManualSource

RECORDS, DEVICES, BUNDLE = 200_000, 1_000, 10_000
START = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Reading(msgspec.Struct):
    device: str
    at: datetime
    kind: str
    value: float
    pulses: int


def kind_is(kind: str) -> Callable[[Reading], bool]:
    return lambda reading: reading.kind == kind


DOOR = Pattern("door", kind_is("door"))
TOOLS: Mapping[str, Callable[[KeyedStream], Any]] = {
    "in_order": lambda keyed: keyed.in_order(name="tool"),
    "match": lambda keyed: keyed.match(
        DOOR.then("alarm", kind_is("alarm"), within=seconds(30)).unless("reset", kind_is("reset")), name="tool"
    ),
    "match_absent": lambda keyed: keyed.match(DOOR.then_not("alarm", kind_is("alarm"), within=seconds(5)), name="tool"),
    "changes": lambda keyed: keyed.changes("value", by=1, name="tool"),
    "rates": lambda keyed: keyed.rates("pulses", name="tool"),
    "fill_gaps": lambda keyed: keyed.fill_gaps("value", every=seconds(1), limit=minutes(1), name="tool"),
    "fill_gaps_tenths": lambda keyed: keyed.fill_gaps("value", every=seconds(0.1), limit=minutes(1), name="tool"),
    "counts": lambda keyed: counts(keyed, "tool"),
    "top_n": lambda keyed: counts(keyed, "counts").top_n(10, by="n", name="tool"),
}


def counts(keyed: KeyedStream, name: str) -> Stream:
    return keyed.window(FixedWindows(seconds(10)), name=name).aggregate(n=Count())


def readings() -> list[bytes]:
    chance = random.Random(1)
    kinds = ["door", "alarm", *["reading"] * 4]
    found = []
    for number in range(RECORDS):
        second = number // DEVICES
        at = START + seconds(second + 3 * chance.random())
        device = f"device-{number % DEVICES}"
        found.append(msgspec.json.encode(Reading(device, at, chance.choice(kinds), chance.gauss(20, 1), 10 * second)))
    return found


def main(*names: str) -> None:
    given = readings()
    for name in names or TOOLS:
        graph = Graph("tools")
        event_time = EventTime("at", max_disorder=seconds(5))
        TOOLS[name](graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time).key_by("device"))
        driver = GraphDriver(graph)
        began = time.process_time()
        for start in range(0, RECORDS, BUNDLE):
            driver.feed("readings", given[start : start + BUNDLE])
        driver.end()
        took = time.process_time() - began
        print(f"{name:16} {RECORDS / took:10,.0f} records/s, makes {len(driver.records('tool')):,}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
