"""Archives of streams whose records may be retracted say of every record what it is; others have no column for it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from millpy.operators.archive import ADDED_COLUMNS, ArchiveLogic
from millpy.store.archive.compaction import merge
from millpy.store.archive.erasure import without_key
from millpy.store.archive.parquet import ADDED, RETRACTS, encode
from tests.stage_driver import SOURCE, StageDriver


class Pane(msgspec.Struct):
    key: str
    n: int


def encoded(logic: ArchiveLogic, path: Path, rows: list[Pane], retracts: list[bool] | None) -> Path:
    subject = StageDriver(logic, Pane)
    result = subject.feed([(pane, 0) for pane in rows], retracts=retracts)
    path.write_bytes(encode(result.archived, {SOURCE: "panes/0"}, logic.buckets))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    logic = ArchiveLogic(1, takes_retractions=True)
    first = encoded(logic, tmp_path / "1", [Pane("a", 1), Pane("b", 2)], None)
    return [first, encoded(logic, tmp_path / "2", [Pane("a", 1), Pane("a", 3)], [True, False])]


def marks(file: object) -> list[tuple[str, int, bool]]:
    table = pq.ParquetFile(file).read()
    return list(zip(*(table[name].to_pylist() for name in ("key", "n", RETRACTS)), strict=True))


def test_files_of_a_stream_that_may_retract_have_marks(files: list[Path]) -> None:
    assert [marks(file) for file in files] == [
        [("a", 1, False), ("b", 2, False)],
        [("a", 1, True), ("a", 3, False)],
    ]
    assert set(ADDED_COLUMNS) == {field.name for field in ADDED} | {RETRACTS}


def test_other_files_have_none(tmp_path: Path) -> None:
    path = encoded(ArchiveLogic(1), tmp_path / "1", [Pane("a", 1)], None)

    assert RETRACTS not in pq.ParquetFile(path).schema_arrow.names


def test_merged_and_erased_files_keep_the_marks(files: list[Path]) -> None:
    merged = merge([str(file) for file in files])
    assert merged is not None
    assert marks(merged[0]) == [("a", 1, False), ("b", 2, False), ("a", 1, True), ("a", 3, False)]

    erased = without_key(str(files[0]), {"panes": ("key",)}, "b")
    assert erased is not None
    assert marks(erased[0]) == [("a", 1, False)]
