"""An archive read as a source: its records in the order of arrival, from any position, in bundles of today's size."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from millpy.clock import SystemClock
from millpy.errors import SourceUnavailableError, UsageError
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import FixedBound, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.sources.files.source import Files
from millpy.spark.archive_input import ArchivedHistory
from millpy.spark.archive_source import ArchivedSource
from millpy.spark.backfill import _listed_anew
from millpy.spark.job import BatchJob
from millpy.store.archive.erasure import without_key
from millpy.store.archive.parquet import encode

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Place(msgspec.Struct, frozen=True):
    hall: int
    tags: list[str]


class Reading(msgspec.Struct, frozen=True):
    device: str
    at: datetime
    value: float | None
    n: int
    ok: bool
    id: UUID
    raw: bytes
    place: Place
    labels: dict[str, int]


class Later(Reading, frozen=True):
    unit: str = "C"


def reading(number: int) -> Reading:
    return Reading(
        f"d{number % 3}", EPOCH + timedelta(microseconds=1_000_001 * number), None if number % 4 == 0 else number / 3,
        -number, number % 2 == 0, UUID(int=number), bytes([number % 256]), Place(number, ["a", "b"][: number % 3]),
        {"x": number} if number % 5 else {},
    )  # fmt: skip


def written(directory: Path, bundles: dict[int, list[int]], files: int) -> tuple[str, ...]:
    """Write bundles of numbers; one file after the other gets the next bundle, as hours do."""
    of_file: list[list[Bundle]] = [[] for _ in range(files)]
    for place, (before, seq) in enumerate(pairwise([0, *bundles])):
        objects = [reading(number) for number in bundles[seq]]
        times = np.array([number * 1_000_001 for number in bundles[seq]], np.int64)
        records = Records(RecordType(Reading), times, watermarks=times - 1, objects=objects)
        keys = records.keys(["device"], KeyHasher())
        of_file[place % files].append(Bundle(0, 7, seq, Instant(seq), records, keys, before))
    names = [str(directory / f"{number}.parquet") for number in range(files)]
    for name, content in zip(names, of_file, strict=True):
        Path(name).write_bytes(encode(content, {7: "readings/files"}, 4))
    return tuple(names)


def taken(
    history: ArchivedHistory,
    record: type,
    records_max: int,
    position: bytes | None = None,
    *,
    bytes_max: int = 1 << 20,
) -> list[SourceBatch]:
    async def all_of() -> list[SourceBatch]:
        limits = Limits()
        setup = SourceSetup(
            graph="plant", stream="readings", partition="files", limits=limits, clock=SystemClock(),
            ready=asyncio.Event(), record_type=RecordType(record), bound=FixedBound(records_max, bytes_max),
        )  # fmt: skip
        injector = ArchivedSource("readings", Files("x"), history).connect(setup)
        await injector.open(position)
        found = []
        while (batch := await injector.take()) is not None:
            found.append(batch)
        assert injector.quiet()
        await injector.close()
        return found

    return asyncio.run(all_of())


def decoded(batches: list[SourceBatch], record: type) -> list[Any]:
    kind = RecordType(record)
    found = []
    for batch in batches:
        if batch.batch is not None:
            result = Decoder(kind, record_bytes_max=1 << 20).decode(batch)
            assert not result.refused
            found += kind.objects_of(result.batch) if result.batch is not None else result.objects or []
    return found


BUNDLES = {2: list(range(7)), 3: [20, 11, 12], 7: [8], 9: list(range(30, 41))}


def test_records_come_in_the_order_of_arrival_and_every_type_is_what_it_was(tmp_path: Path) -> None:
    history = ArchivedHistory(written(tmp_path, BUNDLES, files=3), INSTANT_MIN, INSTANT_MAX)
    batches = taken(history, Reading, 4)
    assert [batch.records for batch in batches] == [4, 3, 3, 1, 4, 4, 3]
    assert [batch.finished for batch in batches] == [False] * 6 + [True]
    assert decoded(batches, Reading) == [reading(number) for numbers in BUNDLES.values() for number in numbers]
    arrivals = [at for batch in batches if batch.arrivals is not None for at in batch.arrivals().tolist()]
    assert arrivals == [number * 1_000_001 for numbers in BUNDLES.values() for number in numbers]
    assert [one.unit for one in decoded(taken(history, Later, 100), Later)] == ["C"] * 22


def test_reading_continues_at_each_position(tmp_path: Path) -> None:
    history = ArchivedHistory(written(tmp_path, BUNDLES, files=2), INSTANT_MIN, INSTANT_MAX)
    batches = taken(history, Reading, 4)
    for place, batch in enumerate(batches[:-1]):
        rest = taken(history, Reading, 4, batch.position)
        assert decoded(rest, Reading) == decoded(batches[place + 1 :], Reading)


def test_a_later_list_has_the_same_bundles_in_other_files_and_a_lost_file_is_named(tmp_path: Path) -> None:
    first = ArchivedHistory(written(tmp_path, BUNDLES, files=4), INSTANT_MIN, INSTANT_MAX, {"readings/files": 9})
    batches = taken(first, Reading, 4)
    merged = tmp_path / "merged"
    merged.mkdir()
    later = replace(first, files=written(merged, {**BUNDLES, 10: [50]}, files=1))
    for place, batch in enumerate(batches[:-1]):
        assert decoded(taken(later, Reading, 4, batch.position), Reading) == decoded(batches[place + 1 :], Reading)
    Path(first.files[1]).unlink()
    with pytest.raises(SourceUnavailableError, match=r"gone, as it was merged .*1\.parquet"):
        taken(first, Reading, 4)


def test_reading_continues_in_a_bundle_of_which_records_were_erased_meanwhile(tmp_path: Path) -> None:
    history = ArchivedHistory(written(tmp_path, {1: list(range(9)), 2: [20]}, files=1), INSTANT_MIN, INSTANT_MAX)
    batches = taken(history, Reading, 4)
    erased = without_key(history.files[0], {"readings": ("device",)}, "d0")
    assert erased is not None
    Path(history.files[0]).write_bytes(erased[0])

    rests = [[-one.n for one in decoded(taken(history, Reading, 4, batch.position), Reading)] for batch in batches[:3]]

    assert rests == [[4, 5, 7, 8, 20], [8, 20], [20]]


def test_a_backfill_that_continues_reads_nothing_of_a_partition_that_was_quiet_when_it_began(tmp_path: Path) -> None:
    quiet = ArchivedHistory((), INSTANT_MIN, INSTANT_MAX)
    stored = BatchJob("plant.py", "", {}, Limits(), 0, False, archives={"readings": quiet})
    since = ArchivedHistory(written(tmp_path, BUNDLES, files=2), INSTANT_MIN, INSTANT_MAX, {"readings/files": 9})

    (end,) = taken(_listed_anew(stored, {"readings": since}).archives["readings"], Reading, 4)

    assert (end.finished, end.records) == (True, 0)
    with pytest.raises(UsageError, match="--from is not that with which the backfill began"):
        _listed_anew(stored, {"readings": replace(since, first=5)})


def test_a_range_leaves_records_out_and_an_archive_without_any_ends(tmp_path: Path) -> None:
    files = written(tmp_path, BUNDLES, files=2)
    history = ArchivedHistory(files, 11_000_000, 31_000_000)
    assert [one.n for one in decoded(taken(history, Reading, 4), Reading)] == [-20, -11, -12, -30]
    (end,) = taken(ArchivedHistory(files, 900_000_000, 901_000_000), Reading, 4)
    assert (end.finished, end.records, end.has_records) == (True, 0, False)


def test_a_bundle_that_is_too_large_in_bytes_is_cut(tmp_path: Path) -> None:
    history = ArchivedHistory(written(tmp_path, {1: list(range(1_000))}, files=1), INSTANT_MIN, INSTANT_MAX)
    pieces = taken(history, Reading, 5_000, bytes_max=20_000)
    assert len(pieces) > 4
    assert all(piece.batch is not None and piece.batch.nbytes < 25_000 for piece in pieces)
    assert sum(piece.records for piece in pieces) == 1_000


def test_a_partition_that_the_source_has_no_more_is_refused(tmp_path: Path) -> None:
    history = ArchivedHistory(written(tmp_path, BUNDLES, files=1), INSTANT_MIN, INSTANT_MAX)
    ArchivedSource("readings", Files("x"), history).check()
    with pytest.raises(UsageError, match="records of readings/files, which source 'readings' does not read"):
        ArchivedSource("readings", Files("x", partitions=2), history).check()
