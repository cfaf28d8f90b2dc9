"""Which files of which source an `--input` names, and which an archive has for it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.spark.archive_input import Archive
from millpy.spark.job import make_job
from millpy.store.archive.parquet import encode
from millpy.store.archive.reader import ArchiveReader
from tests.unit.store.test_archive_reader import bundle

GRAPH = """
from datetime import datetime

import msgspec

from millpy import EventTime, Graph, Mqtt, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime


graph = Graph("plant")
readings = graph.inject("readings", Mqtt("a/#"), schema=Reading, event_time=EventTime("at", max_disorder=seconds(1)))
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "plant.py"
    path.write_text(GRAPH)
    for hour in ("06", "07"):
        (tmp_path / f"hour={hour}").mkdir()
        (tmp_path / f"hour={hour}" / "a.ndjson").touch()
    return path


@pytest.mark.parametrize("source", ["", "readings="])
@pytest.mark.parametrize("pattern", ["hour=*/*.ndjson", "hour=06/a.ndjson"])
def test_a_path_with_an_equals_sign_is_a_path(
    graph: Path, monkeypatch: pytest.MonkeyPatch, source: str, pattern: str
) -> None:
    monkeypatch.chdir(graph.parent)
    job = make_job(str(graph), [source + pattern], limits=Limits(), now_us=Instant(0))
    expected = sorted(str(path) for path in graph.parent.glob(pattern))
    assert {name: list(history.files) for name, history in job.histories.items()} == {"readings": expected}


def test_a_name_that_is_no_source_is_refused(graph: Path) -> None:
    with pytest.raises(UsageError, match="the graph has no source 'reading'"):
        make_job(str(graph), [f"reading={graph.parent}/*/a.ndjson"], limits=Limits(), now_us=Instant(0)).load_graph()


AT_400_US, AT_500_US = (datetime(1970, 1, 1, microsecond=at, tzinfo=UTC) for at in (400, 500))


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """The archives of two sources, a file for each bundle: 1 to 9 of readings, 2 and 8 of alarms."""
    path = tmp_path / "plant.py"
    alarms = GRAPH.replace("readings = ", "alarms = ").replace('"readings", Mqtt("a/#")', '"alarms", Mqtt("b/#")')
    source = alarms.partition("alarms = ")
    archived = 'readings.key_by("device").archive()\nalarms.key_by("device").archive()\n'
    path.write_text(f"{GRAPH}{source[1]}{source[2]}{archived}")
    for name, seqs in (("readings", range(1, 10)), ("alarms", (2, 8))):
        folder = tmp_path / f"archive/plant/{name}_archive/hour=1970-01-01T00"
        folder.mkdir(parents=True)
        for before, seq in pairwise([0, *seqs]):
            (folder / f"{seq}.parquet").write_bytes(encode([bundle(seq, before, seq * 100)], {7: f"{name}/0"}, 4))
    return tmp_path / "archive"


def read(archives: Path, *, end: datetime | None = AT_500_US, listed: bool = False) -> dict[str, int]:
    """Return how many files are read of each source."""
    graph = load_graph(str(archives.parent / "plant.py"))
    names = [f"{source.name}_archive" for source in graph.injectors()]
    manifest = {name: ArchiveReader(archives, f"plant/{name}").files for name in names} if listed else None
    found = Archive(archives, AT_400_US, end, manifest).histories(graph)
    return {source: len(history.files) for source, history in found.items()}


def test_a_source_that_was_quiet_in_a_range_has_no_files(archives: Path) -> None:
    assert read(archives) == read(archives, listed=True) == {"readings": 1, "alarms": 0}
    (newest,) = archives.glob("plant/alarms_archive/*/8.parquet")
    newest.unlink()
    assert read(archives, end=None) == {"readings": 6, "alarms": 0}


def test_a_quiet_time_of_which_a_bundle_is_missing_is_refused(archives: Path) -> None:
    (oldest,) = archives.glob("plant/alarms_archive/*/2.parquet")
    oldest.unlink()
    with pytest.raises(UsageError, match="alarms_archive lacks records: what came before bundle 8"):
        read(archives)


def test_an_archive_without_a_file_is_taken_from_a_manifest_only(archives: Path) -> None:
    for path in archives.glob("plant/alarms_archive/*/*"):
        path.unlink()
    with pytest.raises(UsageError, match="plant/alarms_archive has no files"):
        read(archives)
    assert read(archives, listed=True) == {"readings": 1, "alarms": 0}
    for path in archives.glob("plant/readings_archive/*/*"):
        path.unlink()
    with pytest.raises(UsageError, match="the archives of plant have no files in this range"):
        read(archives, listed=True)


def test_an_archive_of_a_union_says_of_each_source_how_far_it_reaches(archives: Path) -> None:
    path, folder = archives.parent / "plant.py", archives / "plant/all/hour=1970-01-01T00"
    text, own, _ = path.read_text().partition("readings.")
    path.write_text(f'{text}{own}union(alarms).key_by("device").archive("all")')
    folder.mkdir(parents=True)
    both = [bundle(1, 0, 100), replace(bundle(2, 0, 200), producer=8)]
    for number, bundles in enumerate((both, [bundle(2, 1, 200)])):
        (folder / f"{number}.parquet").write_bytes(encode(bundles, {7: "readings/0", 8: "alarms/0"}, 4))

    found = Archive(archives).histories(load_graph(str(path)))

    assert {source: history.through for source, history in found.items()} == {
        "readings": {"readings/0": 2},
        "alarms": {"alarms/0": 2},
    }
