"""Workers that archive what they make: no kill loses or doubles a record, and an absent place stops no window."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millpy.admin.queries import Admin
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.archive.reader import ArchiveReader, TimeRange
from millpy.store.postgres.archiving import ArchiveInto
from tests.crash.archive_graph import RECORDS, archived_graph, write_input
from tests.crash.test_archive import archived, listed, rows, run_archiver, stored

WAIT_S_MAX = 60.0
DOUBLED = "SELECT pending::int FROM millpy.archive WHERE archive = 'doubles_archive'"
KILLS = ("run.writing:1", "run.written:2", "run.fenced:3", "run.committed:1", "run.published:2")
OF_READINGS = """
SELECT g.payload <> '' FROM mill.segments AS g JOIN mill.subscriptions AS u USING (subscription_id)
  JOIN mill.computations AS c ON c.computation_id = u.consumer_id WHERE c.name = 'readings_archive'
"""
WAITS = "archives wait, and their records stay in the database"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in.ndjson")


def has_every_record_once(url: str, place: Path) -> None:
    readings = archived(url, place, "readings_archive")
    assert sorted(readings["n"].to_pylist()) == list(range(RECORDS))
    doubles = archived(url, place, "doubles_archive")
    assert sorted(doubles["twice"].to_pylist()) == [2 * n for n in range(RECORDS)]
    assert stored(place) == listed(url), "orphans are swept, and every listed file is there"
    assert rows(url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    files = Admin(url).archive_files("plant", "readings_archive")
    reader = ArchiveReader(place, "plant/readings_archive", files)
    reader.check(files, "readings", TimeRange(), 0)  # the chain of bundles has no gap


def test_no_kill_of_an_archiving_worker_loses_or_doubles_a_record(
    source: Path, database_url: str, tmp_path: Path
) -> None:
    place = tmp_path / "archive"

    run_archiver(source, database_url, place, *KILLS)

    has_every_record_once(database_url, place)
    stored_in_segments = rows(database_url, OF_READINGS)
    assert set(stored_in_segments) == {(True,), (False,)}, "small bundles are, and large ones are not"


def test_archiver_and_archiving_worker_share_the_archives(source: Path, database_url: str, tmp_path: Path) -> None:
    place, graph = tmp_path / "archive", "tests/crash/archive_graph.py"
    environment = os.environ | {"ARCHIVE_INPUT": str(source), "MILLPY_ARCHIVE_EVERY_S": "0"}
    millpy = [sys.executable, "-m", "millpy"]
    commands = [["archive", graph, "--to", str(place)], ["run", graph, "--archive", str(place)]]

    together = [
        subprocess.Popen([*millpy, *command, "--database", database_url], env=environment) for command in commands
    ]

    assert [process.wait(WAIT_S_MAX) for process in together] == [0, 0]
    has_every_record_once(database_url, place)


def test_absent_place_stops_no_computation_and_gets_everything_later(
    source: Path, database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph, place = archived_graph(source), tmp_path / "archive"
    caplog.set_level("INFO", "millpy")
    place.mkdir()
    (place / "plant").touch()  # a file where the archives' directory has to be
    into = ArchiveInto(place, every_s=0.0, in_worker=True)
    limits = Limits(lease_ttl_s=1, bundle_records_max=50, archive_bytes_min=1)

    async def run() -> None:
        running = asyncio.create_task(run_worker(graph, database_url, limits=limits, archive=into))
        async with asyncio.timeout(WAIT_S_MAX):
            while rows(database_url, DOUBLED) != [(RECORDS,)] or WAITS not in caplog.text:
                await asyncio.sleep(0.05)
                assert not running.done()
            pending = rows(database_url, "SELECT pending FROM millpy.archive WHERE archive = 'readings_archive'")
            assert pending == [(RECORDS,)]
            (place / "plant").unlink()
            await running

    asyncio.run(run())

    has_every_record_once(database_url, place)
    failures = [record for record in caplog.records if "ArchiveUnavailableError" in record.getMessage()]
    assert len(failures) == 1, "a place that is away voids one turn, not one after the other"
    assert "the place of the archives can be written again" in caplog.text
    told = rows(database_url, "SELECT kind FROM millpy.events WHERE kind LIKE 'archives_%' ORDER BY at")
    assert told == [("archives_held",), ("archives_resumed",)]


def test_worker_starts_where_its_archives_cannot_be_written_and_an_archiver_does_not(
    source: Path, database_url: str, tmp_path: Path
) -> None:
    place = tmp_path / "file"
    place.touch()
    graph = archived_graph(source, when_behind="skip")
    limits = Limits(lease_ttl_s=1, backlog_bytes_high=1_000)

    async def run() -> None:
        into = ArchiveInto(place, every_s=0.0, in_worker=True)
        running = asyncio.create_task(run_worker(graph, database_url, limits=limits, archive=into))
        async with asyncio.timeout(WAIT_S_MAX):
            await running  # it skips the records of the archives that it owns itself, and ends

    asyncio.run(run())

    counted = "SELECT consumer, dead_lettered, balanced FROM millpy.accounting WHERE consumer LIKE '%archive'"
    assert sorted(rows(database_url, counted)) == [
        ("doubles_archive", RECORDS, True),
        ("readings_archive", RECORDS, True),
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_run_archives_into_a_directory(source: Path, database_url: str, tmp_path: Path, workers: int) -> None:
    place = tmp_path / "archive"
    command = [sys.executable, "-m", "millpy", "run", "tests/crash/archive_graph.py", "--archive", str(place)]
    command += ["--workers", str(workers), "--database", database_url, "--json"]
    environment = os.environ | {"ARCHIVE_INPUT": str(source), "MILLPY_ARCHIVE_EVERY_S": "0"}

    ended = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True, env=environment)

    assert json.loads(ended.stdout)["graph"] == "plant"
    has_every_record_once(database_url, place)


def test_run_refuses_to_archive_into_an_object_store_or_without_an_archive(
    source: Path, database_url: str, tmp_path: Path
) -> None:
    graph = tmp_path / "graph.py"
    graph.write_text(Path("tests/crash/archive_graph.py").read_text().replace("keyed.archive(", "(lambda **_: 0)("))
    text = graph.read_text().replace('doubles.key_by("device").archive(', "(lambda **_: 0)(")
    graph.write_text(text)

    def run(location: str, place: str) -> Any:
        command = [sys.executable, "-m", "millpy", "run", location, "--archive", place, "--database", database_url]
        environment = os.environ | {"ARCHIVE_INPUT": str(source)}
        return subprocess.run(command, timeout=60, check=False, capture_output=True, text=True, env=environment)

    stores, none = run("tests/crash/archive_graph.py", "s3://bucket/plant"), run(str(graph), str(tmp_path / "to"))

    assert stores.returncode == none.returncode != 0
    assert "workers cannot archive into s3://bucket/plant" in stores.stderr
    assert "has no archive" in none.stderr
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM mill.graphs").fetchone() == (0,)
