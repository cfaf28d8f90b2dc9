"""Archives: their rows are the stream's rows, wherever the archiver is killed; workers do not wait for them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpy.clock import SystemClock
from millpy.errors import StaleSequencerError, UsageError
from millpy.graph import Graph, StageNode
from millpy.hosting.failpoints import NoFailpoints
from millpy.hosting.plan import plan
from millpy.limits import Limits
from millpy.model.checkpoint import Grant
from millpy.model.keys import KEY_SPACE, key_hash
from millpy.model.time import INSTANT_MIN
from millpy.process.archive_erasure import Erasure, erase_key
from millpy.process.assembly import archives_of, run_worker
from millpy.process.service import as_given
from millpy.runtime.archive_skipper import ArchiveSkipper
from millpy.runtime.context import WorkerContext
from millpy.runtime.lease import Lease
from millpy.runtime.worker import Worker
from millpy.store.archive import object_storage
from millpy.store.archive.directory import ArchiveDirectory
from millpy.store.archive.object_storage import ObjectStorage
from millpy.store.archive.storage import OWNER, claim_place, parquet_file, storage_at
from millpy.store.postgres.archiving import ArchiveInto, ArchivingStore
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import WorkerInfo
from tests.crash.archive_graph import DISORDER_S, RECORDS, archived_graph, event_times, write_input
from tests.crash.archiver import ARCHIVED, ERASED, FORGOTTEN, REWRITTEN, compact, erase, forget
from tests.s3_server import KEY, SECRET, S3Server


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


def rows_affected(url: str, query: str, *given: object) -> int:
    with psycopg.connect(url) as connection:
        return connection.execute(query, given).rowcount  # type: ignore[call-overload, no-any-return]


def run_archiver(source: Path, url: str, place: str | Path, *kills: str) -> None:
    command = [sys.executable, "-m", "tests.crash.archiver", str(source), url, str(place), *kills]
    more = {"timeout": 120, "capture_output": True, "text": True}
    ended = subprocess.run(command, check=False, **more)
    assert ended.returncode == 0, ended.stderr


def archived(url: str, place: str | Path, archive: str) -> pa.Table:
    listed = rows(url, f"SELECT path FROM millpy.archive_files WHERE archive = '{archive}'")
    files = ArchiveDirectory(place, listed[0][0].rsplit("/", 2)[0])
    return pa.concat_tables([parquet_file(files.find(path)).read() for (path,) in listed])


def stored(place: str | Path) -> set[str]:
    """The paths of all archived files that are there, pending or not."""
    return set(storage_at(place).list_files("")) - {OWNER}


def listed(url: str) -> set[str]:
    return {path for (path,) in rows(url, "SELECT path FROM millpy.archive_files")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_input(tmp_path / "in.ndjson")


@pytest.fixture
def streamed(source: Path, database_url: str) -> str:
    """A database in which workers have run the whole graph, and ended without its archives."""
    asyncio.run(run_worker(archived_graph(source), database_url, limits=Limits(lease_ttl_s=1, bundle_records_max=50)))
    return database_url


def test_no_kill_loses_or_doubles_a_record(source: Path, streamed: str, tmp_path: Path) -> None:
    directory = tmp_path / "archive"

    kills = [f"archive.{point}:{1 + place % 2}" for place, point in enumerate(ARCHIVED)]
    run_archiver(source, streamed, directory, *kills, *(f"compact.{point}:1" for point in REWRITTEN))

    has_every_record_once(streamed, directory)

    before = listed(streamed)
    kills = [*(f"forget.{point}:1" for point in FORGOTTEN), *(f"erase.{point}:1" for point in REWRITTEN)]
    run_archiver(source, streamed, directory, *kills)

    lacks_the_first_hour_and_the_erased_key(streamed, directory, before)
    assert rows(streamed, "SELECT * FROM mill.archive_garbage") == []


def test_no_kill_loses_or_doubles_a_record_in_an_object_store_and_what_is_deleted_stays_deleted(
    source: Path, streamed: str, bucket: str
) -> None:
    place = f"{bucket}/plant"
    kills = ("archive.written:2", "archive.committed:1", "archive.published:1", "compact.published:1")

    run_archiver(source, streamed, place, *kills)

    has_every_record_once(streamed, place)

    before = listed(streamed)
    forget(source, streamed, place)
    erase(source, streamed, place)

    lacks_the_first_hour_and_the_erased_key(streamed, place, before)
    garbage = {path for (path,) in rows(streamed, "SELECT path FROM mill.archive_garbage WHERE deleted_at IS NOT NULL")}
    assert garbage >= before - listed(streamed), "they are deleted once more"
    storage = storage_at(place)
    storage.create(min(garbage), pa.py_buffer(b"a copy that was under way"))
    rows_affected(streamed, "UPDATE mill.archive_garbage SET deleted_at = '-infinity'")
    forget(source, streamed, place)
    assert stored(place) == listed(streamed)
    assert rows(streamed, "SELECT * FROM mill.archive_garbage") == []
    with psycopg.connect(streamed) as connection:
        texts = connection.execute("SELECT path FROM mill.archive_files UNION SELECT detail::text FROM millpy.events")
        assert not [text for (text,) in texts if SECRET in text or KEY in text]


def test_archiver_warns_and_tries_again_while_its_object_store_is_away(
    source: Path, streamed: str, bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    graph, create, thaw = archived_graph(source), ObjectStorage.create, Timer(1.5, s3.thaw)

    def freeze_first(self: ObjectStorage, *given: Any) -> None:
        if thaw.ident is None:
            monkeypatch.setattr(object_storage, "REQUEST_S_MAX", 0.5)  # not before: a busy machine is no outage
            s3.freeze()
            thaw.start()
        create(self, *given)

    monkeypatch.setattr(ObjectStorage, "create", freeze_first)
    into, limits = ArchiveInto(bucket, every_s=0.0), Limits(lease_ttl_s=1, bundle_records_max=150)
    try:
        asyncio.run(run_worker(graph, streamed, limits=limits, only=archives_of(graph), archive=into))
    finally:
        s3.thaw()

    assert "the archive cannot use s3://" in caplog.text
    numbers = archived(streamed, bucket, "readings_archive")["n"].to_pylist()
    assert sorted(numbers) == list(range(RECORDS))
    assert stored(bucket) == listed(streamed)


def has_every_record_once(streamed: str, directory: str | Path) -> None:
    readings = archived(streamed, directory, "readings_archive").to_pylist()
    times = event_times()
    assert sorted(row["n"] for row in readings) == list(range(RECORDS))
    assert [row["_event_time_us"] for row in sorted(readings, key=lambda row: row["n"])] == times
    doubles = archived(streamed, directory, "doubles_archive").to_pylist()
    assert sorted(row["twice"] for row in doubles) == [2 * n for n in range(RECORDS)]
    assert {row["_watermark_us"] for row in doubles} == {None}
    on_disk = stored(directory)
    assert on_disk == listed(streamed), "orphans are swept"
    assert len(on_disk) == len({path.rpartition("/")[0] for path in on_disk}), "small files are merged"
    assert rows(streamed, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    assert sorted(rows(streamed, "SELECT archive, records, pending FROM millpy.archive")) == [
        ("doubles_archive", RECORDS, 0),
        ("readings_archive", RECORDS, 0),
    ]


def lacks_the_first_hour_and_the_erased_key(url: str, place: str | Path, before: set[str]) -> None:
    first = min(path.rpartition("/hour=")[2] for path in before)[: len("2026-11-22T08")]
    left = listed(url)
    assert stored(place) == left
    assert {path.rpartition("/")[0] for path in left} == {
        path.rpartition("/")[0] for path in before if f"/hour={first}" not in path
    }
    devices = archived(url, place, "readings_archive")["device"].to_pylist()
    assert set(devices) == {f"d{n}" for n in range(40)} - {ERASED}
    assert {event for (event,) in rows(url, "SELECT kind FROM millpy.events WHERE kind LIKE 'archive_e%'")} == {
        "archive_erased"
    }


def test_row_has_its_place_and_the_watermark_before_it_and_lies_in_its_bucket(
    source: Path, streamed: str, tmp_path: Path
) -> None:
    directory = tmp_path / "archive"

    run_archiver(source, streamed, directory)
    compact(source, streamed, str(directory))

    found: dict[int, int] = {}
    places: dict[tuple[str, int, int], int] = {}
    followed: dict[tuple[str, int], tuple[str, int]] = {}
    listed = "SELECT path, partitions FROM millpy.archive_files WHERE archive = 'readings_archive'"
    for path, partitions in rows(streamed, listed):
        file = pq.ParquetFile(directory / path)
        described = json.loads(file.metadata.metadata[b"millpy"])
        followed |= {(partition, seq): (partition, before) for partition, seq, before, _ in described["bundles"]}
        seqs = [seq for _, seq, _, _ in described["bundles"]]
        assert partitions == {"readings/files": [min(seqs), max(seqs)]}
        assert len(described["row_groups"]) == file.num_row_groups
        for place, (bucket, count) in enumerate(described["row_groups"]):
            group = file.read_row_group(place).to_pylist()
            assert len(group) == count
            assert {row["_partition"] for row in group} == {"readings/files"}
            assert {row["_seq"] for row in group} <= set(seqs)
            assert {key_hash(row["device"]) * described["buckets"] // KEY_SPACE for row in group} == {bucket}
            found |= {row["n"]: row["_watermark_us"] for row in group}
            places |= {(row["_partition"], row["_seq"], row["_ordinal"]): row["n"] for row in group}
            assert [row["n"] for row in group] == sorted(row["n"] for row in group)
    times = event_times()
    before = [max(times[:n], default=None) for n in range(RECORDS)]
    assert [found[n] for n in range(RECORDS)] == [
        INSTANT_MIN if at is None else at - DISORDER_S * 1_000_000 for at in before
    ]
    assert [n for _, n in sorted(places.items())] == list(range(RECORDS)), "the order across buckets is kept"
    assert set(followed.values()) == {("readings/files", 0), *followed} - {max(followed)}, "every bundle is there"


def test_a_damaged_small_file_is_told_once_and_the_others_are_merged(
    source: Path, streamed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "archive"
    run_archiver(source, streamed, directory)
    ours = sorted(path for path in listed(streamed) if "/readings_archive/" in path)
    hour = max((list(of) for _, of in groupby(ours, lambda path: path.rsplit("/", 1)[0])), key=len)
    assert len(hour) > 4
    ordered = "SELECT path FROM mill.archive_files WHERE path = ANY (%s) ORDER BY bundle, path"
    with psycopg.connect(streamed) as connection:
        in_order = [path for (path,) in connection.execute(ordered, [hour]).fetchall()]
    file = directory / (damaged := in_order[len(in_order) // 2])
    content = bytearray(file.read_bytes())
    content[4:200] = b"\xff" * 196
    file.write_bytes(content)

    compact(source, streamed, str(directory), rounds=5)

    told = [record.getMessage() for record in caplog.records if "cannot be read: restore it" in record.getMessage()]
    assert len(told) == 1
    assert damaged in told[0]
    assert damaged in listed(streamed)
    assert len([path for path in listed(streamed) if path.startswith(damaged.rsplit("/", 1)[0])]) == 3


def test_archive_needs_a_directory_of_its_own(source: Path, database_url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory is set for the archive"):
        asyncio.run(run_worker(archived_graph(source), database_url, only=["readings_archive"]))
    claim_place(tmp_path, "another/1")
    into = ArchiveInto(tmp_path, every_s=0.0)
    with pytest.raises(UsageError, match="has the archives of another database"):
        asyncio.run(run_worker(archived_graph(source), database_url, only=["readings_archive"], archive=into))


def test_service_without_injectors_leaves_archives_alone(source: Path) -> None:
    assert as_given(archived_graph(source), ["--no-injectors"]) == ["doubles"]


def test_command_archives_and_prints_what_it_has(source: Path, streamed: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millpy", "archive", "tests/crash/archive_graph.py", "--to", str(tmp_path / "to")]
    environment = os.environ | {"ARCHIVE_INPUT": str(source)}
    command += ["--every", "0", "--database", streamed, "--json"]

    ended = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True, env=environment)

    found = {each["archive"]: (each["records"], each["pending"]) for each in json.loads(ended.stdout)["archives"]}
    assert found == {"readings_archive": (RECORDS, 0), "doubles_archive": (RECORDS, 0)}


def test_archive_joins_a_deployed_graph_and_can_be_taken_back(source: Path, database_url: str) -> None:
    with_archives, without = archived_graph(source), archived_graph(source)
    without.nodes[:] = [node for node in without.nodes if not (isinstance(node, StageNode) and node.archives)]

    async def deploy_in_turn() -> list[tuple[str, ...]]:
        async with PostgresStore(database_url) as store:
            graphs = ((without, False), (with_archives, False), (without, True))
            return [(await store.deploy(graph.spec(), on_purpose=True, back=back)).changes for graph, back in graphs]

    assert asyncio.run(deploy_in_turn())[1:] == [
        (
            "readings_archive: the archive is new; it starts with new data",
            "doubles_archive: the archive is new; it starts with new data",
        ),
        ("doubles_archive: the archive was removed", "readings_archive: the archive was removed"),
    ]
    assert rows(database_url, "SELECT * FROM millpy.archive") == []


async def skip(graph: Graph, url: str) -> None:
    """Let a worker with a small bound skip what the archives of a graph lack, while an archiver owns them."""
    limits = Limits(lease_ttl_s=5, backlog_bytes_high=1_000)
    async with PostgresStore(url) as store, PostgresStore(url) as others:
        deployed = await store.deploy(graph.spec())
        archiver = WorkerInfo(uuid4(), deployed.graph_id, deployed.version, archives_of(graph))
        await others.register(archiver, 5)
        ids = [i.interval_id for name in archives_of(graph) for i in deployed.intervals_of(name)]
        grants = await others.claim(archiver.worker_id, ids)
        clock, rng, planned = SystemClock(), Random(1), plan(graph, deployed, limits)
        context = WorkerContext(
            store=store, plan=planned, worker_id=uuid4(), limits=limits, host_clock=clock, failpoints=NoFailpoints(),
            lease=Lease(limits, clock), rng=rng,
        )  # fmt: skip
        await Worker(context).start()
        skipper = ArchiveSkipper(context)

        assert await skipper.skip(await store.backlog(deployed.graph_id))

        assert not await skipper.skip(await store.backlog(deployed.graph_id))
        for grant in grants:
            with pytest.raises(StaleSequencerError):
                await others.read([grant], state_rows_max=1)


def test_archive_that_skips_is_taken_from_its_archiver_and_counts_what_it_lacks(
    source: Path, database_url: str, tmp_path: Path
) -> None:
    graph = archived_graph(source, when_behind="skip")
    asyncio.run(run_worker(graph, database_url, limits=Limits(lease_ttl_s=1)))

    asyncio.run(skip(graph, database_url))
    run_archiver(source, database_url, tmp_path / "archive")

    assert sorted(rows(database_url, "SELECT archive, records, pending FROM millpy.archive")) == [
        ("doubles_archive", 0, 0),
        ("readings_archive", 0, 0),
    ]
    counted = "SELECT consumer, dead_lettered, balanced FROM millpy.accounting WHERE consumer LIKE '%archive'"
    assert sorted(rows(database_url, counted)) == [
        ("doubles_archive", RECORDS, True),
        ("readings_archive", RECORDS, True),
    ]
    noted = "SELECT detail ->> 'archive', detail ->> 'records' FROM millpy.events WHERE kind = 'archive_skipped'"
    assert sorted(rows(database_url, noted)) == [
        ("doubles_archive", str(RECORDS)),
        ("readings_archive", str(RECORDS)),
    ]


def test_erasure_passes_over_files_that_retention_deletes_meanwhile(
    source: Path, streamed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, calls = tmp_path / "archive", []
    run_archiver(source, streamed, directory)
    before, rewrite = listed(streamed), ArchiveDirectory.rewrite

    def rewrite_late(self: ArchiveDirectory, grant: Grant, *given: Any) -> str:
        if not calls:
            forget(source, streamed, str(directory), owns=False)
        calls.append(given)
        return rewrite(self, grant, *given)

    monkeypatch.setattr(ArchiveDirectory, "rewrite", rewrite_late)
    erase(source, streamed, str(directory))

    lacks_the_first_hour_and_the_erased_key(streamed, directory, before)


def test_erasure_ends_when_it_loses_the_archive_and_continues_when_it_is_run_again(
    source: Path, streamed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, graph = tmp_path / "archive", archived_graph(source)
    run_archiver(source, streamed, directory)
    rewrite, read = ArchiveDirectory.rewrite, ArchivingStore.read

    async def erase(key: str, archive: str = "readings_archive") -> Erasure:
        return await erase_key(
            graph, archive, key, streamed, ArchiveInto(directory, every_s=0.0), Limits(lease_ttl_s=5)
        )

    def take_over(grant: Grant) -> None:
        taken = "UPDATE mill.intervals SET sequencer = sequencer + 1 WHERE interval_id = %s"
        rows_affected(streamed, taken, grant.interval_id)

    def lose_the_fence(self: ArchiveDirectory, grant: Grant, *given: Any) -> str:
        take_over(grant)
        return rewrite(self, grant, *given)

    async def read_too_late(self: ArchivingStore, grants: Sequence[Grant], **given: Any) -> object:
        take_over(grants[0])
        return await read(self, grants, **given)

    with monkeypatch.context() as patch, pytest.raises(StaleSequencerError, match="taken over readings_archive"):
        patch.setattr(ArchivingStore, "read", read_too_late)
        asyncio.run(erase("d20"))
    with monkeypatch.context() as patch, pytest.raises(StaleSequencerError, match="taken over readings_archive"):
        patch.setattr(ArchiveDirectory, "rewrite", lose_the_fence)
        asyncio.run(erase("d20"))
    assert len(archived(streamed, directory, "readings_archive")) == RECORDS
    assert asyncio.run(erase('"d20"')).records == RECORDS // 40
    assert asyncio.run(erase("nobody")) == Erasure("readings_archive", 0, 0)
    assert stored(directory) == listed(streamed)
    for archive, reason in {"": "has several archives", "other": "has no archive other"}.items():
        with pytest.raises(UsageError, match=reason):
            asyncio.run(erase("d1", archive))
