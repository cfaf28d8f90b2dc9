"""The recorded feeds end in the tables that were computed without us: from files, and through a broker with kills."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from millpy.embedded import EmbeddedBroker
from millpy.graph.loader import load_graph
from millpy.process.assembly import run_worker
from millpy.windowing.accumulation import Accumulation
from tests.feeds.feed import DATA, FEEDS
from tests.feeds.through_mqtt import run_through_mqtt

pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the recorded feeds are not here")


CASES = [
    *((feed, Accumulation.ACCUMULATING) for feed in FEEDS),
    ("ooo_umts", Accumulation.RETRACTING),
]
if os.environ.get("FEED_MODES") == "all":
    CASES = [(feed, mode) for feed in FEEDS for mode in Accumulation]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "mode"), CASES, ids=lambda value: getattr(value, "value", value))
def test_files_end_in_the_expected_tables_in_every_mode(
    name: str, mode: Accumulation, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = FEEDS[name]
    monkeypatch.setenv("FEED_FILES", str(tmp_path))
    monkeypatch.setenv("FEED_MODE", mode.value)
    monkeypatch.delenv("FEED_BROKER", raising=False)
    feed.write_files(tmp_path)

    asyncio.run(run_worker(load_graph(str(feed.graph)), database_url))

    assert {table: wrong for table, (_, wrong) in feed.check(database_url).items() if wrong} == {}


def test_messages_end_in_the_expected_tables_though_workers_are_killed(
    tmp_path: Path, database_url: str, quick_broker: EmbeddedBroker
) -> None:
    feed = FEEDS["ooo_umts"]

    faults = run_through_mqtt(feed, tmp_path, database_url, quick_broker, kills=2)

    assert faults == []
    assert {table: wrong for table, (_, wrong) in feed.check(database_url).items() if wrong} == {}
