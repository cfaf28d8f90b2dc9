"""`millpy backfill` on a real Spark: the history of an MQTT feed under a new window, then what the broker has kept."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import aiomqtt
import psycopg
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.embedded import EmbeddedBroker
from millpy.graph.loader import load_graph
from millpy.process.assembly import run_worker
from millpy.spark.backfill import Backfill

pytestmark = pytest.mark.timeout(400)  # a JVM starts first
GRAPH = """
import msgspec
from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, Mqtt, Sum, minutes, seconds

class Note(msgspec.Struct):
    id: int
    device: str
    at: int
    value: float

graph = Graph("plant", generation=2)
notes = graph.inject("notes", Mqtt("plant/+", port=PORT), schema=Note,
                     event_time=EventTime("at", unit="s", max_disorder=seconds(30)), DEDUPE)
windows = notes.key_by("device").window(FixedWindows(seconds(40)), intervals=2, name="sums")
windows.aggregate(n=Count(), total=Sum("value")).to_table("sums")
"""
DEDUPE = 'dedupe=Dedupe("id", within=minutes(60), time="at", unit="s")'


def note(number: int) -> str:
    return json.dumps({"id": number, "device": "abc"[number % 3], "at": number, "value": float(number)})


async def publish(port: int, numbers: Iterable[int]) -> None:
    async with aiomqtt.Client("127.0.0.1", port) as client:
        for number in numbers:
            await client.publish("plant/1", note(number), qos=1)


async def work(path: Path, url: str, accepted: int) -> None:
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(load_graph(str(path)), url, stop=stop))
    while await asyncio.to_thread(_accepted, url) < accepted:
        assert not worker.done()
        await asyncio.sleep(0.05)
    stop.set()
    await worker


def _accepted(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT sum(accepted), bool_and(balanced), sum(pending) FROM millpy.accounting WHERE graph = 'plant_2'"
        ).fetchone()
    assert row is not None
    assert row[1]
    return 0 if row[2] else int(row[0])


def test_nothing_is_lost_or_doubled_between_a_history_and_what_its_broker_has_kept(
    spark: SparkSession, database_url: str, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, history, work_dir = tmp_path / "plant.py", tmp_path / "history.ndjson", tmp_path / "work"
    text = GRAPH.replace("PORT", str(broker.port))
    command = ["backfill", str(graph), "--input", str(history), "--work", str(work_dir), "--database", database_url]
    (tmp_path / "first.py").write_text(text.replace("DEDUPE", DEDUPE).replace("generation=2", "generation=1"))
    assert CliRunner().invoke(app, ["deploy", str(tmp_path / "first.py"), "--database", database_url]).exit_code == 0

    history.write_text("".join(note(number) + "\n" for number in range(500)))
    graph.write_text(text.replace("DEDUPE", ""))
    refused = CliRunner().invoke(app, command)
    assert "source 'notes' does not deduplicate" in refused.output

    graph.write_text(text.replace("DEDUPE", DEDUPE))
    find = Backfill._fix_inputs

    def while_the_broker_keeps(self: Backfill) -> None:
        asyncio.run(publish(broker.port, range(450, 600)))
        find(self)

    monkeypatch.setattr(Backfill, "_fix_inputs", while_the_broker_keeps)
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert "millpy switch plant 2" in found.output

    asyncio.run(publish(broker.port, range(600, 700)))
    asyncio.run(work(graph, database_url, 700))
    counts = Counter((number // 40 * 40, "abc"[number % 3]) for number in range(640))  # those of 640 to 680 are open
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT extract(epoch FROM window_start)::int, device, n FROM plant_2.sums"
        ).fetchall()
    assert {(start, device): n for start, device, n in rows} == counts
    assert CliRunner().invoke(app, ["switch", "plant", "2", "--database", database_url, "--anyway"]).exit_code == 0
    again = CliRunner().invoke(app, [*command, "--json"])
    assert again.exit_code == 0, again.output
    document = json.loads(again.stdout)
    assert document["finished"]
    assert sum(source["injected"] for source in document["accounting"]["sources"]) == 500
