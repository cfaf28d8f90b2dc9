"""Every aggregate in a result table on PostgreSQL: by INSERT and by COPY, first panes and later ones, the same rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from millpy.errors import GraphError
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.record import SMALL_RECORDS_MAX
from millpy.model.time import seconds
from millpy.process.assembly import deploy, run_worker
from millpy.sources.files.source import File
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.combiner import Combiner
from millpy.windowing.aggregates.distinct import ApproxDistinct
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, StandardDeviation, Sum, Variance
from millpy.windowing.aggregates.positional import Collect, First, Last, Top
from millpy.windowing.aggregates.quantile import Median, Quantile
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from tests.crash.test_versions import fed
from tests.feed import Feed

DEVICES = 150


class Reading(msgspec.Struct):
    device: str
    at_ms: int
    number: int | None
    text: str


class Words(Combiner[dict[str, int]]):
    accumulator = dict[str, int]
    result_type = dict[str, int]

    def create(self) -> dict[str, int]:
        return {}

    def add(self, accumulator: dict[str, int], record: Reading) -> dict[str, int]:
        return accumulator | {record.text: accumulator.get(record.text, 0) + 1}

    def merge(self, one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        return {word: one.get(word, 0) + other.get(word, 0) for word in one | other}

    def result(self, accumulator: dict[str, int]) -> dict[str, int]:
        return dict(sorted(accumulator.items()))


AGGREGATES: dict[str, Aggregate] = {
    "n": Count(),
    "total": Sum("number"),
    "mean": Mean("number"),
    "variance": Variance("number"),
    "deviation": StandardDeviation("number"),
    "earliest": First("text"),
    "latest": Last("number"),
    "best": Top("number", n=2),
    "texts": Collect("text", limit=3),
    "p90": Quantile("number", 0.9),
    "median": Median("number"),
    "words": Words(),
}


def readings() -> list[dict[str, Any]]:
    """Ten records a device within twenty seconds, out of order by up to four; some numbers are large, some None."""
    rng = random.Random(11)
    found = []
    for step in range(10):
        for device in range(DEVICES):
            number = rng.choice([None, rng.randrange(100), 2**62 + rng.randrange(100)])
            at_ms = max(step * 2_000 - rng.choice([0, 0, 0, 4_000]), 0)
            found.append({"device": f"d{device}", "at_ms": at_ms, "number": number, "text": rng.choice("abc")})
    return found


def graph_of(path: Path, name: str) -> Graph:
    graph = Graph(name)
    keyed = graph.inject(
        "readings", File(path), schema=Reading, event_time=EventTime("at_ms", unit="ms", max_disorder=seconds(1))
    ).key_by("device")
    for table, windows in (
        ("sliding", SlidingWindows(seconds(8), every=seconds(4))),
        ("sessions", SessionWindows(seconds(3))),
    ):
        keyed.window(windows, allowed_lateness=seconds(60), intervals=2).aggregate(**AGGREGATES).to_table(table)
    return graph


IN_DELTAS = "SELECT sum(pg_table_size(relid))::bigint FROM pg_partition_tree('mill.deltas') WHERE isleaf"
EMPTY = 16 * 8_192  # sixteen slots, each with a TOAST index of one page


async def test_no_table_depends_on_the_size_of_bundles(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "readings.ndjson"
    path.write_text("".join(json.dumps(reading) + "\n" for reading in readings()))

    sizes = []
    for name, size, finished_bytes in (("large", 65_536, 10**9), ("small", 100, 1)):
        monkeypatch.setattr("millpy.runtime.maintenance.FINISHED_BYTES", finished_bytes)
        limits = Limits(bundle_records_max=size, fold_every_s=600, epoch_s=86_400)  # only the end folds and empties
        await run_worker(graph_of(path, name), database_url, limits=limits)
        with psycopg.connect(database_url) as connection:
            sizes += connection.execute(IN_DELTAS).fetchone() or ()

    assert sizes[0] > EMPTY, "a little is left"
    assert sizes[1] <= EMPTY, "a finished graph empties its rings"

    columns = ", ".join(["device", "window_start", "window_end", *AGGREGATES, "pane_timing", "late_count"])
    columns = columns.replace("variance,", "round(variance::numeric, -30),").replace(
        "deviation,", "round(deviation::numeric, -12),"
    )
    with psycopg.connect(database_url) as connection:
        for table, rows in (("sliding", 5 * DEVICES), ("sessions", DEVICES)):
            query = f"SELECT {columns} FROM {{}}.{table} ORDER BY 1, 2, 3"
            large = connection.execute(query.format("large")).fetchall()  # type: ignore[call-overload]
            small = connection.execute(query.format("small")).fetchall()  # type: ignore[call-overload]
            assert large == small
            assert len(large) >= rows
            counted = sum(sum(row[3 + list(AGGREGATES).index("words")].values()) for row in large)
            assert counted == sum(row[3] for row in large)
            exact = [row[4] for row in large if row[4] is not None]
            assert max(exact) > 2**63, "a sum that 64 bits cannot hold"


class Amount(msgspec.Struct):
    device: str
    group: str
    at: int
    value: int


@pytest.mark.parametrize("devices", [3, 2 * SMALL_RECORDS_MAX], ids=["records", "columns"])
async def test_values_of_sums_may_have_more_than_64_bits(database_url: str, devices: int) -> None:
    limits = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)
    feed = Feed()
    graph = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(1))
    source = graph.inject("amounts", feed, schema=Amount, event_time=event_time)
    sums = source.key_by("group", "device").window(FixedWindows(seconds(10)), name="sums").aggregate(total=Sum("value"))
    sums.key_by("group").window(FixedWindows(seconds(60))).aggregate(
        least=Min("total"),
        most=Max("total"),
        first=First("total"),
        last=Last("total"),
        distinct=ApproxDistinct("total"),
    ).to_table("totals")
    totals = [3 * (2**62 + device) for device in range(devices)]

    for place, mine in enumerate((totals[:2], totals[2:])):  # the second part is merged into what was stored
        amounts = [(f"{total:030}", 20 * place, total // 3) for total in mine] * 3 + [("next", 20 * place + 12, 0)]
        feed.push(*(msgspec.json.encode(Amount(device, "a", at, value)) for device, at, value in amounts))
        await fed(database_url, graph, feed, limits)
    feed.push(msgspec.json.encode(Amount("end", "b", 100, 0)))
    await fed(database_url, graph, feed, limits)

    with psycopg.connect(database_url) as connection:
        (row,) = connection.execute('SELECT least, most, first, last, "distinct" FROM factory.totals')
    least, most, first, last, distinct = row
    assert (least, most, last) == (0, totals[-1], 0)
    assert first in totals[:2]
    assert abs(distinct - (devices + 1)) <= devices // 20


@pytest.mark.parametrize("name", ["ctid", "xmin", "tableoid"])
async def test_a_column_is_not_named_like_a_system_column(database_url: str, name: str) -> None:
    graph = Graph("named")
    stream = graph.inject("readings", Feed(), schema=Reading, event_time=EventTime("at_ms", unit="ms", sorted=True))
    stream.key_by("device").window(FixedWindows(seconds(1))).aggregate(**{name: Count()}).to_table("minutes")

    with pytest.raises(GraphError, match=f"column '{name}' of 'minutes' has the name of a system column"):
        await deploy(graph, database_url)
