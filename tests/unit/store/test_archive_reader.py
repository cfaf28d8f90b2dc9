"""Which files of an archive are read, and which missing bundle is seen, from the files alone and from the manifest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpy.errors import ArchiveUnavailableError, CorruptionError, UsageError
from millpy.model.bundle import Bundle
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.time import Instant
from millpy.store.archive.erasure import without_key
from millpy.store.archive.parquet import encode
from millpy.store.archive.reader import ArchiveReader, ListedFile, TimeRange, bundles_of
from millpy.store.archive.storage import parquet_file, parquet_metadata, storage_at

AHEAD_US = 5
HOUR = "plant/readings_archive/hour=1970-01-01T00"


class Nested(msgspec.Struct):
    a: int
    b: str


class Reading(msgspec.Struct):
    nested: Nested
    device: str


def bundle(seq: int, previous: int, *times: int) -> Bundle:
    """A bundle whose watermark is its number times 100 after it."""
    objects = [Reading(Nested(at, "x"), f"d{at}") for at in times]
    before = np.full(len(times), (seq - 1) * 100, np.int64)
    records = Records(RecordType(Reading), np.array(times, np.int64), watermarks=before, objects=objects)
    keys = records.keys(["device"], KeyHasher())
    return Bundle(0, 7, seq, Instant(seq * 100), records, keys, previous)


def written(root: Path, *files: list[Bundle]) -> ArchiveReader:
    directory = root / HOUR
    directory.mkdir(parents=True, exist_ok=True)
    for number, bundles in enumerate(files):
        (directory / f"{number}.parquet").write_bytes(encode(bundles, {7: "readings/0"}, 4))
    return ArchiveReader(root, "plant/readings_archive")


@pytest.fixture
def chain() -> list[Bundle]:
    """Bundles 2, 4, …, 12 of ten records each; odd ones had none."""
    return [bundle(seq, before, *range(seq * 100, seq * 100 + 10)) for before, seq in pairwise(range(0, 14, 2))]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: content[:-100], "magic bytes not found"),
        (lambda content: b"", "0 bytes"),
        (lambda content: strange_parquet(), "no metadata 'millpy'"),
    ],
)
def test_a_copy_with_a_file_that_is_not_whole_names_the_file(
    tmp_path: Path, chain: list[Bundle], damage: Callable[[bytes], bytes], why: str
) -> None:
    reader, name = written(tmp_path, chain[:2], chain[2:]), tmp_path / HOUR / "1.parquet"
    name.write_bytes(damage(name.read_bytes()))
    for read in (lambda: reader.files, lambda: parquet_file(name)):
        with pytest.raises(CorruptionError, match=rf"1\.parquet is not a whole file of an archive: .*{why}"):
            read()


def test_what_other_programs_have_left_in_a_copy_is_not_read(tmp_path: Path, chain: list[Bundle]) -> None:
    reader = written(tmp_path, chain)
    for name in (".0.parquet.Xy12", "_SUCCESS", ".0.parquet.crc"):
        (tmp_path / HOUR / name).write_bytes(b"half")
    assert [file.path for file in reader.files] == [f"{HOUR}/0.parquet"]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArchiveUnavailableError, match=f"{tmp_path} cannot be read"):
        parquet_metadata(tmp_path)
    with pytest.raises(ArchiveUnavailableError, match="File name too long"):
        storage_at(tmp_path).exists("x" * 300)


def strange_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": [1]}), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def test_files_are_listed_by_what_is_in_them(tmp_path: Path, chain: list[Bundle]) -> None:
    reader = written(tmp_path, chain[:2], [chain[3], chain[2]])

    assert reader.files == [
        ListedFile(f"{HOUR}/0.parquet", Instant(200), Instant(409), {"readings/0": (2, 4)}),
        ListedFile(f"{HOUR}/1.parquet", Instant(600), Instant(809), {"readings/0": (6, 8)}),
    ]  # fmt: skip
    assert reader.holding(TimeRange(Instant(409), Instant(600))) == reader.files[:1]
    assert reader.holding(TimeRange(Instant(410), Instant(601)), "readings") == reader.files[1:]
    with pytest.raises(UsageError, match="no files in this range"):
        reader.holding(TimeRange(Instant(410), Instant(600)))
    with pytest.raises(UsageError, match="no files in this range"):
        reader.holding(TimeRange(), "reading")


def test_bundles_come_in_their_order_and_a_doubled_one_is_refused(tmp_path: Path, chain: list[Bundle]) -> None:
    reader = written(tmp_path, [chain[3], chain[0]], [chain[1], chain[2]])
    files = [reader.find(file) for file in reader.files]

    assert [(place.seq, place.watermark) for place in bundles_of(files, "readings/0")] == [
        (2, 200), (4, 400), (6, 600), (8, 800),
    ]  # fmt: skip
    assert bundles_of(files, "readings/1") == []
    assert max(pq.ParquetFile(file).num_row_groups for file in files) <= 4, "small bundles share row groups"
    with pytest.raises(Exception, match="both have bundle 2"):
        bundles_of([files[0], files[0]], "readings/0")


@pytest.mark.parametrize(
    ("kept", "span", "message"),
    [
        ([[0, 1], [2, 3], [4, 5]], (0, 2000), None),
        ([[0, 3], [1, 2], [4, 5]], (600, 700), None),  # of one turn, cut by hour
        ([[0, 1], [3], [4, 5]], (0, 2000), "what came before bundle 8 of readings/0"),
        ([[0, 1], [3], [4, 5]], (400, 500), "what came before bundle 8 of readings/0"),  # it may lack late ones
        ([[0, 1], [3], [4, 5]], (1000, 1100), None),
        ([[0, 1], [3], [4, 5]], (700, 900), "what came before bundle 8"),
        ([[2], [3], [4, 5]], (0, 2000), "what came before bundle 6"),
        ([[2], [3], [4, 5]], (500 + AHEAD_US, 900), None),
        ([[2], [3], [4, 5]], (500 + AHEAD_US - 1, 900), "what came before bundle 6"),
    ],
)
def test_a_missing_bundle_is_seen_where_its_records_may_be_in_the_range(
    tmp_path: Path, chain: list[Bundle], kept: list[list[int]], span: tuple[int, int], message: str | None
) -> None:
    found = written(tmp_path, *([chain[place] for place in places] for places in kept))
    times = TimeRange(*map(Instant, span))

    for reader in (found, ArchiveReader(tmp_path, "", found.files)):
        chosen = reader.holding(times, "readings")
        if message is None:
            reader.check(chosen, "readings", times, AHEAD_US)
        else:
            with pytest.raises(UsageError, match=message):
                reader.check(chosen, "readings", times, AHEAD_US)


def test_a_bundle_that_an_erasure_has_emptied_is_not_missing(tmp_path: Path, chain: list[Bundle]) -> None:
    chain[2] = bundle(6, 4, 600)
    reader = written(tmp_path, chain[:2], [chain[2]], chain[3:])
    emptied = Path(reader.find(reader.files[1]))
    found = without_key(emptied, {"readings": ("nested.a", "device")}, (600, "d600"))
    assert without_key(emptied, {"readings": ("device",)}, "d601") is None
    assert found is None, "the bucket is that of the archive's key"

    found = without_key(emptied, {"readings": ("device",)}, "d600")
    assert found is not None
    emptied.write_bytes(found[0])

    reader = ArchiveReader(tmp_path, "plant/readings_archive")
    everything = TimeRange()
    assert [len(pq.ParquetFile(reader.find(file)).read()) for file in reader.files] == [20, 0, 30]
    assert len(reader.holding(everything, "readings")) == 2
    reader.check(reader.holding(everything), "readings", everything, AHEAD_US)
    assert [place.seq for place in bundles_of(reader.find_all(reader.files), "readings/0")] == [2, 4, 6, 8, 10, 12]
