"""A stream over an archive that grows commits what a batch over the whole archive gives, whatever happens meanwhile.

The tasks are called as Spark calls them; tests/spark/test_archive_input.py runs them on Spark, over a real archiver's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from millpy.errors import UsageError
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.spark import Archive
from millpy.spark.job import BatchJob, make_job
from millpy.spark.stream_commits import StreamCommit
from millpy.store.archive.compaction import merge
from millpy.store.archive.parquet import encode
from tests.property.test_spark_stream_tasks import Query, forget
from tests.property.test_spark_tasks import NOW_US, by_tasks

TEXT = """
import msgspec
from millpy import Count, EventTime, FixedWindows, Graph, Kafka, Sum, seconds

class Reading(msgspec.Struct):
    device: str
    at: int
    value: float

graph = Graph("plant")
at = EventTime("at", unit="s", max_disorder=seconds(5))
readings = graph.inject("readings", Kafka("topic", partitions={partitions}), schema=Reading, event_time=at)
readings.key_by("device").archive()
windows = readings.key_by("device").window(FixedWindows(seconds(20)), intervals=2, name="sums")
windows.aggregate(n=Count(), total=Sum("value")).to_table("sums")
"""
PARTITIONS = {7: "readings/topic/0", 8: "readings/topic/1"}
LIMITS = Limits(bundle_records_max=20)
BUNDLES = 30


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


def bundles_of(producer: int, seed: int, *, late: bool = False) -> list[Bundle]:
    """Bundles whose numbers have gaps; the last one closes all windows. The sums do not depend on the order if `late`
    is not set: then neither these nor lateness tell how the bundles of two partitions were interleaved.
    """
    chance, found, previous, newest = random.Random(seed), list[Bundle](), 0, INSTANT_MIN
    for place in range(BUNDLES):
        seq = previous + chance.choice([1, 1, 2])
        seconds = [
            place * 12 + n - chance.choice([0, 0, 3, 40 if late else 2]) + 100 for n in range(chance.randint(1, 12))
        ]
        before = []
        for second in seconds:
            before.append(newest)
            newest = max(newest, (second - 5) * 1_000_000)
        objects = [
            Reading(f"d{n % 3}", second, chance.uniform(-9, 9) if late else chance.randint(-9, 9))
            for n, second in enumerate(seconds)
        ]
        times = np.array(seconds, np.int64) * 1_000_000
        records = Records(RecordType(Reading), times, watermarks=np.array(before, np.int64), objects=objects)
        watermark = Instant(INSTANT_MAX if place == BUNDLES - 1 else newest)
        found.append(Bundle(0, producer, seq, watermark, records, records.keys(["device"], KeyHasher()), previous))
        previous = seq
    return found


class GrowingArchive:
    """An archive to which an archiver adds files, and which it compacts."""

    def __init__(self, directory: Path) -> None:
        self.root, self.files, self._number = directory / "archive", list[Path](), 0
        self.hour = self.root / "plant/readings_archive/hour=1970-01-01T00"
        self.pending = self.hour.parent / ".pending"
        for folder in (self.hour, self.pending):
            folder.mkdir(parents=True)

    def _name(self) -> str:
        self._number += 1
        return f"5-{self._number}-9-{self._number:012x}.parquet"

    def add(self, bundles: Sequence[Bundle], *, pending: bool = False) -> Path:
        name = self._name()
        path = self.pending / f"{self.hour.name},{name}" if pending else self.hour / name
        path.write_bytes(encode(bundles, PARTITIONS, 4))
        self.files.append(path)
        return path

    def compact(self, count: int, *, keeps_old: bool = False) -> None:
        """Merge the first files into one."""
        merged = merge([str(path) for path in self.files[:count]])
        assert merged is not None
        path = self.hour / self._name()
        path.write_bytes(merged[0])
        for old in self.files[: merged[1]]:
            if not keeps_old:
                old.unlink()
        self.files[: merged[1]] = [path]

    def job(self, graph: Path, *, streams: bool) -> BatchJob:
        return make_job(str(graph), Archive(self.root), limits=LIMITS, now_us=NOW_US, streams=streams)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[GrowingArchive]:
    (tmp_path / "plant.py").write_text(TEXT.format(partitions=2))
    yield GrowingArchive(tmp_path)
    forget()


def rows_of(found: Any) -> list[str]:
    rows = [{name: value for name, value in row.items() if name != "bundle"} for row in found["rows"]["sums"]]
    return sorted(map(repr, rows))


def ended(query: Query, commit: StreamCommit) -> None:
    query.commits.commit(commit)
    query.output.publish(commit.outputs)


@pytest.mark.parametrize(("partitions", "seed"), [(1, 1), (1, 2), (2, 3), (2, 4)])
def test_an_archive_that_grows_and_is_compacted_gives_the_rows_of_a_batch_through_restarts(
    archive: GrowingArchive, tmp_path: Path, partitions: int, seed: int
) -> None:
    chance, late = random.Random(seed), partitions == 1
    (tmp_path / "plant.py").write_text(TEXT.format(partitions=partitions))
    left, right = bundles_of(7, seed, late=late), bundles_of(8, seed + 1) if partitions == 2 else []
    query = Query(archive.job(tmp_path / "plant.py", streams=True), tmp_path, bundles_max=2)
    query.ends = {}
    while left or right or any(end.news.until and not end.news.drained for end in query.ends.values()):
        parts = [of[:count] for of, count in ((left, chance.randint(0, 4)), (right, chance.randint(0, 4)))]
        left, right = left[len(parts[0]) :], right[len(parts[1]) :]
        if any(parts):
            archive.add([bundle for part in parts for bundle in part])
        commit = query.attempt()
        if chance.random() < 0.4:  # Python workers and files change between two attempts
            forget()
            if len(archive.files) > 3:
                archive.compact(chance.randint(2, len(archive.files)), keeps_old=chance.random() < 0.5)
            commit = query.attempt()
        ended(query, commit)
        if chance.random() < 0.3:
            query.restart()
            forget()

    for path in archive.hour.iterdir():
        if path not in archive.files:
            path.unlink()
    expected = by_tasks(archive.job(tmp_path / "plant.py", streams=False), chance)
    found = query.contents()
    assert rows_of(found) == rows_of(expected)
    assert len(rows_of(found)) > 20
    assert found["late"] == expected["late"]
    assert bool(found["late"]) == late


def test_a_stream_waits_for_a_bundle_that_is_not_published_and_stops_where_one_is_lost(
    archive: GrowingArchive, tmp_path: Path
) -> None:
    chain, other = bundles_of(7, 1), bundles_of(8, 1)
    archive.add([*chain[:3], *other])
    late = archive.add(chain[3:5], pending=True)
    archive.add(chain[5:7])
    query = Query(archive.job(tmp_path / "plant.py", streams=True), tmp_path, bundles_max=100)

    commit = query.attempt()
    ends = [end.news for end in query.ends.values() if end.news.until]
    assert {news.until for news in ends} == {chain[2].seq, other[-1].seq}
    assert [text for news in ends for text in news.told if "waits for an archiver" in text]
    ended(query, commit)
    late.rename(archive.hour / late.name.partition(",")[2])
    ended(query, query.attempt())
    assert {end.news.until for end in query.ends.values()} >= {chain[6].seq}

    archive.add(chain[8:])  # without one
    for _ in range(2):
        with pytest.raises(UsageError, match="lacks records: the bundles of readings/topic/0 before") as error:
            query.attempt()
        assert f"has read up to bundle {chain[6].seq}" in str(error.value)
        assert "MILLPY_ARCHIVE_KEPT_S" in (error.value.hint or "")
        query.restart()
    archive.add(chain[7:8])  # restored
    ended(query, query.attempt())
    assert rows_of(by_tasks(archive.job(tmp_path / "plant.py", streams=False), random.Random(1))) == rows_of(
        query.contents()
    )


def test_a_partition_that_the_source_no_longer_has_is_not_left_out(archive: GrowingArchive, tmp_path: Path) -> None:
    archive.add([*bundles_of(7, 1), *bundles_of(8, 1)])
    (tmp_path / "plant.py").write_text(TEXT.format(partitions=1))

    with pytest.raises(UsageError, match="has records of readings/topic/1, which source 'readings' does not read"):
        Query(archive.job(tmp_path / "plant.py", streams=True), tmp_path).attempt()


def test_a_checkpoint_of_an_archive_is_not_one_of_its_source(archive: GrowingArchive, tmp_path: Path) -> None:
    query = Query(archive.job(tmp_path / "plant.py", streams=True), tmp_path)
    query.commits.commit(query.attempt())  # an archive of nothing

    with pytest.raises(UsageError, match="is one of another graph"):
        Query(make_job(str(tmp_path / "plant.py"), [], limits=LIMITS, now_us=NOW_US, streams=True), tmp_path)
