"""A backfill waits for what an earlier generation has taken, of each stream that an archive has."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path

import msgspec
import psycopg
import pytest

from millpy import EventTime, Files, Graph, seconds
from millpy.clock import SystemClock
from millpy.errors import UsageError
from millpy.process.assembly import archives_of, run_worker
from millpy.spark import earlier_archive
from millpy.spark.earlier_archive import EarlierArchive
from millpy.store.postgres.archiving import ArchiveInto

SIZES = {"many": 7, "few": 2}
A_FILE = """
INSERT INTO mill.archive_files (interval_id, bundle, path, records, bytes, event_time_lo, event_time_hi, partitions)
SELECT interval_id, 0, 'a', 0, 0, 0, 0, '{}' FROM mill.places WHERE computation = 'all'
"""


class Reading(msgspec.Struct):
    device: str
    at: datetime


def a_graph(directory: Path, generation: int = 1) -> Graph:
    graph, at = Graph("plant", generation=generation), EventTime("at", max_disorder=seconds(1))
    many, few = (
        graph.inject(name, Files(str(directory / f"{name}.ndjson")), schema=Reading, event_time=at) for name in SIZES
    )
    many.key_by("device").archive()
    many.union(few).key_by("device").archive("all")
    return graph


def test_records_of_each_source_of_a_union_are_waited_for(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in SIZES.items():
        line = json.dumps({"device": name, "at": "2026-11-22T08:00:00Z"}) + "\n"
        (tmp_path / f"{name}.ndjson").write_text(line * size)
    graph, place = a_graph(tmp_path), tmp_path / "archive"
    into, earlier = ArchiveInto(place, every_s=0.0), EarlierArchive(database_url, place)
    asyncio.run(run_worker(graph, database_url))
    monkeypatch.setattr(earlier_archive, "CAUGHT_UP_S_MAX", 0.0)

    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(A_FILE)  # something was archived before
        with pytest.raises(UsageError, match="16 records of plant are not archived"):
            earlier.wait(a_graph(tmp_path, 2).spec(), SystemClock())
        connection.execute("DELETE FROM mill.archive_files")

    asyncio.run(run_worker(graph, database_url, only=archives_of(graph), archive=into))
    earlier.wait(a_graph(tmp_path, 2).spec(), SystemClock())
    found = earlier.listed(a_graph(tmp_path, 2).spec(), list(SIZES)).listed
    assert found is not None
    assert {archive: len(files) for archive, files in found.items()} == {"many_archive": 1, "all": 1}
