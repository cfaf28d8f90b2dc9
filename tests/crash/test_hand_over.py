"""A generation that Spark computes: no worker begins before it is handed over, and then real workers go on.

The tasks are called here as Spark calls them; tests/spark/test_backfill.py runs them on Spark.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.errors import OtherEngineError, StaleSequencerError, UsageError
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint
from millpy.model.time import INSTANT_MIN, Instant
from millpy.process.assembly import run_worker
from millpy.spark import hand_over
from millpy.spark.hand_over import HandOver
from millpy.spark.job import make_job
from millpy.spark.stream_store import StreamStore
from millpy.spark.stream_tables import StreamTables
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import WorkerInfo
from tests.crash.histories import add_witness, history_faults
from tests.property.test_spark_stream_tasks import Query, forget

GRAPH = """
from datetime import timedelta
import msgspec
from millpy import *

class Note(msgspec.Struct):
    id: int
    device: str
    at: int
    value: float

class Total(msgspec.Struct):
    device: str
    number: int
    total: float

class Sums(msgspec.Struct):
    number: int = 0
    total: float = 0.0

class Running(Computation):
    sums = Value(Sums)

    def process_record(self, context, record):
        if record.value == 13:
            raise ValueError(f"note {record.id}")
        context[Running.sums].number += 1
        context[Running.sums].total += record.value
        context.set_timer("silent", at=context.event_time_us + 40_000_000)

    def process_timer(self, context, timer):
        context.produce(Total("", context[Running.sums].number, context[Running.sums].total))

graph = Graph("plant", generation=GENERATION)
files = Directory("IN", settle=timedelta(seconds=0.1), every=timedelta(seconds=0.05))
notes = graph.inject("notes", files, schema=Note, event_time=EventTime("at", unit="s", max_disorder=seconds(5)),
                     dedupe=Dedupe("id", within=seconds(600), time="at", unit="s"))
keyed = notes.key_by("device")
keyed.archive()
windows = keyed.window(FixedWindows(seconds(20)), allowed_lateness=seconds(10), intervals=3, name="windows")
windows.aggregate(n=Count(), total=Sum("value")).to_table("sums", history=True)
visits = keyed.window(SessionWindows(seconds(25), max_records=9), allowed_lateness=seconds(10), intervals=2,
                      name="visits")
visits.aggregate(n=Count(), total=Sum("value")).to_table("visits", history=True)
keyed.process(Running(), name="running", output=Total, intervals=2).to_table("silences")
"""
LIMITS = Limits(bundle_records_max=20, lease_ttl_s=2.0)


def written(directory: Path, generation: int) -> Path:
    (directory / "in").mkdir(exist_ok=True)
    path = directory / f"plant_{generation}.py"
    path.write_text(GRAPH.replace("IN", str(directory / "in")).replace("GENERATION", str(generation)))
    return path


def bring(directory: Path, numbers: Sequence[int]) -> None:
    """Write a file with notes; some are late, some come twice, some fail, some do not decode."""
    lines = []
    for i in numbers:
        note = {"id": i - i % 9 // 8, "device": "abcde"[i % 5], "at": 2 * i - 30 * (i % 7 == 0) + 60, "value": i % 14}
        lines.append("{" if i % 50 == 49 else json.dumps(note))
    ready = directory / f".{numbers[0]:04}"
    ready.write_text("\n".join(lines) + "\n")
    ready.rename(directory / "in" / f"{numbers[0]:04}.ndjson")


def contents(url: str, schema: str) -> Any:
    """The rows of the generation, and what is counted."""
    name = schema if schema == "plant_2" else "plant"
    with psycopg.connect(url, row_factory=dict_row) as connection:
        found = {
            table: connection.execute(f"SELECT * FROM {schema}.{table}").fetchall() for table in ("sums", "silences")
        }
        # Later ones close at the watermark behind the last note, which nobody waits for.
        found["visits"] = connection.execute(
            f"SELECT * FROM {schema}.visits WHERE window_end < to_timestamp(1200)"
        ).fetchall()
        found["late"] = connection.execute(
            "SELECT computation, key, payload, window_start FROM millpy.late_records WHERE graph = %s", [name]
        ).fetchall()
        found["letters"] = connection.execute(
            "SELECT computation, reason, payload, key FROM millpy.dead_letters WHERE graph = %s", [name]
        ).fetchall()
        found["state"] = connection.execute(
            "SELECT e.kind, e.namespace, e.key, e.subkey, e.value, e.fire_at FROM mill.entries AS e"
            " JOIN mill.places AS p USING (interval_id) WHERE p.graph = %s AND e.kind IN ('state', 'timer')",
            [name],
        ).fetchall()
        found["accounting"] = connection.execute(
            "SELECT stream, consumer, key_fields, injected, accepted, duplicate, dead_lettered, filtered, consumed,"
            " late, parked, balanced FROM millpy.accounting WHERE graph = %s AND result_table IS NULL"
            " AND consumer IS DISTINCT FROM 'notes_archive'",
            [name],
        ).fetchall()
    # Whether late records make one pane or two depends on how they are bundled.
    apart = {"emitted_at", "interval_id", "bundle", "ordinal", "pane_index", "pane_timing", "late_count"}
    return {
        table: sorted(repr({n: v for n, v in row.items() if n not in apart}) for row in rows)
        for table, rows in found.items()
    }


async def work_until(path: Path, url: str, accepted: int) -> None:
    """Run a worker until its source has taken this many records; kill it once on the way."""
    generation = load_graph(str(path)).spec().generation
    for share in (0.7, 1.0):
        stop = asyncio.Event()
        worker = asyncio.create_task(run_worker(load_graph(str(path)), url, limits=LIMITS, stop=stop))
        while await asyncio.to_thread(_taken, url, generation) < share * accepted:
            assert not worker.done(), await worker
            await asyncio.sleep(0.05)
        if share < 1:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
    await asyncio.sleep(0.3)
    stop.set()
    await worker


def _taken(url: str, generation: int) -> int:
    """Return how many records the source has taken, if all of them are accounted for and processed."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT sum(injected), bool_and(balanced), sum(pending) FILTER (WHERE consumer NOT LIKE '%%archive%%')"
            " FROM millpy.accounting WHERE graph = %s",
            ["plant_2" if generation == 2 else "plant"],
        ).fetchone()
    assert row is not None
    injected, balanced, pending = row
    assert balanced
    return 0 if pending else int(injected)


class Driver:
    """A driver of the backfill, whose tasks run here."""

    def __init__(self, path: Path, url: str, directory: Path) -> None:
        now_us = Instant(1_700_000_000_000_000)
        job = make_job(str(path), (), limits=LIMITS, now_us=now_us, streams=True, hands_over=True)
        self.query = Query(job, directory)
        self.store = StreamStore(url, self.query.commits.worker_id, self.query.hosted)
        self.tables = StreamTables(self.store, self.query.hosted, directory / "out")
        try:
            self.store.open()
            self.store.own()
        except BaseException:
            self.store.close()
            raise

    def compute(self) -> None:
        query = self.query
        self.tables.open(query.commits.newest)
        while not query.commits.newest.finished:
            commit = query.attempt()
            query.commits.commit(commit)
            query.output.publish(commit.outputs)
            self.tables.publish(commit)
        forget()

    def hand_over(self) -> None:
        newest = self.query.commits.newest
        self.tables.open(newest, hands_over=True)
        HandOver(self.store, self.query.hosted, newest, self.query.commits.state).run()


def test_workers_go_on_behind_a_history_that_spark_has_computed(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "DOCUMENT_BYTES_MAX", 2_000)
    second, work = written(tmp_path, 2), tmp_path / "work"
    asyncio.run(_deploy(written(tmp_path, 1), database_url))
    for at in range(0, 300, 100):
        bring(tmp_path, range(at, at + 100))
    first = Driver(second, database_url, work)
    add_witness(database_url, "plant_2", ["sums", "visits"])
    first.compute()
    zombie = first.store

    with pytest.raises(OtherEngineError, match="Spark computes this generation"):
        asyncio.run(_register(second, database_url))

    class DeadError(Exception):
        pass

    commits = 0

    def dies(checkpoints: Any, commit: Any = zombie.commit) -> None:
        nonlocal commits
        commits += 1
        if commits == 4:
            raise DeadError
        commit(checkpoints)

    monkeypatch.setattr(zombie, "commit", dies)
    with pytest.raises(DeadError):
        first.hand_over()
    with closing(zombie):
        again = Driver(second, database_url, work)
        with pytest.raises(StaleSequencerError):
            zombie.give_to_workers()
        again.hand_over()
        again.store.close()
    for at in range(300, 600, 100):
        bring(tmp_path, range(at, at + 100))

    asyncio.run(work_until(second, database_url, 600))
    asyncio.run(work_until(tmp_path / "plant_1.py", database_url, 600))
    assert contents(database_url, "plant_2") == contents(database_url, "plant")
    with psycopg.connect(database_url) as connection:
        for table in ("sums", "visits"):
            assert history_faults(connection, "plant_2", table, retracts=False) == []
    with pytest.raises(UsageError, match="workers have begun this generation"):
        Driver(second, database_url, tmp_path / "other")


def test_a_worker_from_before_claims_nothing_of_what_is_sparks(database_url: str, tmp_path: Path) -> None:
    path = written(tmp_path, 1)

    async def run() -> None:
        async with PostgresStore(database_url) as store:
            deployed = await store.deploy(load_graph(str(path)).spec())
            ids = [interval.interval_id for interval in deployed.intervals]
            worker = WorkerInfo(uuid4(), deployed.graph_id, deployed.version)
            await store.register(worker, 60.0)
            early = await store.claim(worker.worker_id, ids[:2])
            assert len(early) == 2
            driver = await asyncio.to_thread(Driver, path, database_url, tmp_path / "work")
            await asyncio.to_thread(driver.store.close)  # it dies
            assert not await store.claim(worker.worker_id, ids)
            with psycopg.connect(database_url) as connection:
                connection.execute("UPDATE mill.workers SET lease_deadline = clock_timestamp() WHERE engine = 'spark'")
            assert not await store.claim(worker.worker_id, ids)
            assert not await store.seize(worker.worker_id, ids)
            with pytest.raises(StaleSequencerError):
                await store.commit([Checkpoint(early[0], 1, INSTANT_MIN, INSTANT_MIN)], graph_version=deployed.version)

    asyncio.run(run())
    found = CliRunner().invoke(app, ["doctor", "--database", database_url])
    assert "plant is computed by Spark, and no driver is alive" in found.output


async def _deploy(path: Path, url: str) -> None:
    async with PostgresStore(url) as store:
        await store.deploy(load_graph(str(path)).spec())


async def _register(path: Path, url: str) -> None:
    async with PostgresStore(url) as store:
        deployed = await store.deploy(load_graph(str(path)).spec())
        await store.register(WorkerInfo(uuid4(), deployed.graph_id, deployed.version), 2.0)
