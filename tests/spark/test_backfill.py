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
from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.process.assembly import archives_of, run_worker
from millpy.spark import earlier_archive
from millpy.spark.backfill import Backfill
from millpy.store.postgres.archiving import ArchiveInto

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


async def work(path: Path, url: str, accepted: int, name: str = "plant_2") -> None:
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(load_graph(str(path)), url, stop=stop))
    while await asyncio.to_thread(_accepted, url, name) < accepted:
        assert not worker.done()
        await asyncio.sleep(0.05)
    stop.set()
    await worker


def _accepted(url: str, name: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT sum(accepted), bool_and(balanced), sum(pending) FILTER (WHERE consumer <> 'notes_archive')"
            " FROM millpy.accounting WHERE graph = %s",
            [name],
        ).fetchone()
    assert row is not None
    assert row[1] is not False
    return 0 if row[2] else int(row[0] or 0)


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
    for until, reason in (("1h", "no source of the graph is one"), ("2226-11-24T00:00:00Z", "is in the future")):
        assert reason in CliRunner().invoke(app, [*command, "--until", until]).output
    assert "'noon' is not a time" in CliRunner().invoke(app, [*command, "--until", "noon"]).output
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


def test_an_archive_is_the_history_of_a_changed_graph(
    spark: SparkSession, database_url: str, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GRAPH.replace("PORT", str(broker.port)).replace("DEDUPE", DEDUPE) + 'notes.key_by("device").archive()\n'
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(text.replace("generation=2", "generation=1"))
    second.write_text(
        text.replace("seconds(40)", "seconds(60)").replace("value: float", "value: float; unit: str = 'C'")
    )
    place = tmp_path / "archive"
    command = ["backfill", str(second), "--archive", str(place), "--work", str(tmp_path / "work")]
    command += ["--database", database_url]

    def archive() -> None:
        graph, into = load_graph(str(first)), ArchiveInto(place, every_s=0.0)
        stop = asyncio.Event()

        async def archived() -> None:
            archiver = asyncio.create_task(
                run_worker(graph, database_url, only=archives_of(graph), archive=into, stop=stop)
            )
            while await asyncio.to_thread(_pending, database_url):
                assert not archiver.done()
                await asyncio.sleep(0.05)
            stop.set()
            await archiver

        asyncio.run(archived())

    asyncio.run(_published(broker.port, first, database_url, 0, 300))
    refused = CliRunner().invoke(app, command)
    assert "no generation of plant before 2 has archived anything" in refused.output
    archive()

    find = Backfill._fix_inputs

    def while_the_first_generation_works(self: Backfill) -> None:
        asyncio.run(_published(broker.port, first, database_url, 300, 450))
        monkeypatch.setattr(earlier_archive, "CAUGHT_UP_S_MAX", 0.1)
        with pytest.raises(UsageError, match="150 records of plant are not archived, and no archiver makes progress"):
            find(self)
        archive()
        find(self)

    monkeypatch.setattr(Backfill, "_fix_inputs", while_the_first_generation_works)
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output

    asyncio.run(publish(broker.port, range(450, 700)))
    asyncio.run(work(second, database_url, 700))
    counts = Counter((number // 60 * 60, "abc"[number % 3]) for number in range(660))
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT extract(epoch FROM window_start)::int, device, n FROM plant_2.sums"
        ).fetchall()
    assert {(start, device): n for start, device, n in rows} == counts


async def _published(port: int, graph: Path, url: str, first: int, end: int) -> None:
    """Publish numbers while the first generation works, the first until its session has begun; the others are later."""
    worker = asyncio.create_task(work(graph, url, end, "plant"))
    while await asyncio.to_thread(_taken, url) <= first:
        assert not worker.done()
        await publish(port, [first])
        await asyncio.wait([worker], timeout=0.2)
    await publish(port, range(first + 1, end))
    await worker


def _taken(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT sum(accepted) FROM millpy.accounting WHERE graph = 'plant'").fetchone()
    return int(row[0] or 0) if row else 0


def _pending(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT sum(pending) FROM millpy.archive WHERE graph = 'plant'").fetchone()
    assert row is not None
    return int(row[0])
