"""Watermarks by site on PostgreSQL: workers are killed and taken over, and the source and the windows are apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from millpy.limits import Limits
from millpy.process.assembly import deploy, run_worker
from millpy.testing import GraphDriver, ManualSource
from tests.crash.graph_files import one, rows
from tests.crash.harness import Worker
from tests.crash.sites_graph import Reading, graph_of
from tests.feed import Feed

GRAPH = Path(__file__).with_name("sites_graph.py")
BEHIND_S = {"oslo": 0, "rome": 90_000, "ulm": -200, "pisa": 1_000}
"""How far the clock of each site is behind."""
TABLE = """
SELECT site, device, extract(epoch FROM window_start)::bigint, n, total::bigint, pane_index
  FROM sites.panes ORDER BY 1, 2, 3
"""
LATE = "SELECT coalesce(sum(late), 0)::bigint FROM millpy.accounting"
HELD = "SELECT detail FROM millpy.explain_watermark('readings')"
SITES = "SELECT site, watermark = 'infinity', records_beyond FROM millpy.site_watermarks ORDER BY site NULLS LAST"


def readings(count: int, sites: Sequence[str] = (*BEHIND_S,)) -> list[Reading]:
    """Return readings of sites that send in bursts, each with disorder; some are late."""
    rng, found, now = random.Random(3), [], 1_000_000
    while len(found) < count:
        site, now = rng.choice(sites), now + rng.randrange(4)
        for _ in range(rng.randrange(1, 9)):
            at = now - BEHIND_S[site] - rng.choice([0, 3, 19, 19, 45])
            found.append(Reading(site, f"d{rng.randrange(3)}", at, len(found)))
    return found[:count]


def by_site(records: Sequence[Reading]) -> tuple[list[tuple[Any, ...]], int]:
    """Return the table and the number of late records of a graph of its own for each site."""
    found, late = [], 0
    for site in BEHIND_S:
        driver = GraphDriver(graph_of(ManualSource(), None))
        driver.feed("readings", [record for record in records if record.site == site])
        driver.end()
        late += len(driver.late_records())
        for row in driver.rows("panes"):
            start = int(row["window_start"].timestamp())
            found.append((row["site"], row["device"], start, row["n"], int(row["total"]), row["pane_index"]))
    return sorted(found), late


def test_windows_of_killed_workers_are_those_of_each_site_alone(tmp_path: Path, database_url: str) -> None:
    records = readings(9_000)
    source = tmp_path / "in.ndjson"
    source.write_bytes(b"\n".join(map(msgspec.json.encode, records)))

    def worker(only: str, failpoint: str = "") -> Worker:
        options: dict[str, Any] = {"graph": GRAPH, "failpoint": failpoint and f"{failpoint}:kill"}
        return Worker(tmp_path, database_url, source, only=only, **options)

    with worker("readings", "before_commit:6") as one_worker, worker("panes", "after_commit:1") as other:
        one_worker.await_killed()
        other.await_killed()
    with worker("readings") as one_worker, worker("panes") as other:
        one_worker.await_finished()
        other.await_finished()

    expected, late = by_site(records)
    assert rows(database_url, TABLE) == expected
    assert one(database_url, LATE) == late
    assert late > 100
    assert rows(database_url, SITES) == [(site, True, 0) for site in sorted(BEHIND_S)]


async def test_operators_see_which_site_holds_back_and_how_many_are_beyond_the_bound(database_url: str) -> None:
    feed = Feed()
    graph = graph_of(feed)
    feed.push(*map(msgspec.json.encode, readings(500, ["oslo", "rome"])))
    feed.push(msgspec.json.encode(Reading("invented", "d0", 1_000_000, 1)))
    limits = Limits(progress_every_s=0.02, fold_every_s=0.2, sites_max=2)
    await deploy(graph, database_url)
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(graph, database_url, limits=limits, stop=stop))
    async with asyncio.timeout(60):
        while feed.unacknowledged and not worker.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    held = await asyncio.to_thread(rows, database_url, HELD)
    stop.set()
    await worker

    assert rows(database_url, SITES) == [("oslo", False, 0), ("rome", False, 0), (None, False, 1)]
    assert 'site "rome" holds it back, with no record since' in held[0][0]
