"""Lookups equal a loop over dicts: for any tables, changes, bundles, crashes and policies."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import EventTime, Graph, seconds
from millpy.operators.lookup import POLICIES
from millpy.testing import GraphDriver, ManualSource

START = datetime(2026, 11, 20, tzinfo=UTC)


class Reading(msgspec.Struct):
    device: str
    line: int
    at: datetime


class Place(msgspec.Struct, frozen=True):
    line: int
    device: str
    name: str | None
    weight: float = 0.0


def driven(missing: str, intervals: int) -> GraphDriver:
    graph = Graph("plant")
    event_time = EventTime("at", max_disorder=seconds(0))
    readings = graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)
    readings.lookup(
        "places",
        Place,
        key=("device", "line"),
        refresh=seconds(1),
        missing=missing,
        intervals=intervals,  # type: ignore[arg-type]
    ).to_table("known")
    return GraphDriver(graph)


@pytest.mark.parametrize("missing", POLICIES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.sampled_from([0, 3, 400]), intervals=st.sampled_from([1, 3]))
def test_records_get_the_rows_that_a_loop_finds(missing: str, seed: int, rows: int, intervals: int) -> None:
    rng = random.Random(seed)
    driver = driven(missing, intervals)
    expected: Counter[tuple[Any, ...]] = Counter()
    unmatched = fed = 0
    for _ in range(rng.randrange(1, 4)):
        keys = rng.sample([(f"d{i}", line) for i in range(200) for line in (1, 2)], rows)
        table = {key: (rng.choice([None, "é", f"n{rng.random()}"]), float(i)) for i, key in enumerate(keys)}
        driver.set_table("places", [Place(line, device, *row) for (device, line), row in table.items()])
        for size in rng.sample([1, 2, 30, 300], 2):
            bundle = [Reading(f"d{rng.randrange(220)}", rng.choice([1, 2]), START) for _ in range(size)]
            with driver.crashing() if rng.random() < 0.3 else nullcontext():
                driver.feed("readings", bundle)
            fed += size
            for record in bundle:
                row = table.get((record.device, record.line))
                unmatched += row is None
                if row is not None or missing == "null":
                    expected[(record.device, record.line, *(row or (None, None)))] += 1
        driver.advance_watermark("readings", START + timedelta(seconds=1))

    found = Counter((row["device"], row["line"], row["name"], row["weight"]) for row in driver.rows("known"))
    assert found == expected
    assert len(driver.dead_letters()) == (unmatched if missing == "dead_letter" else 0)
    assert found.total() + (0 if missing == "null" else unmatched) == fed
    driver.check_accounting()
