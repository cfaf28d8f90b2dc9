"""Small files are merged as far as they fit, in their order, and only with files of the same fields."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from millpy.store.archive.compaction import (
    MERGED_BYTES_MAX,
    MERGED_FILES_MAX,
    DamagedFiles,
    SmallFile,
    first_run,
    merge,
)
from millpy.store.archive.parquet import METADATA, FileDescription
from millpy.store.archive.reader import described


def test_adjacent_files_are_merged_until_the_next_does_not_fit() -> None:
    half = MERGED_BYTES_MAX // 2
    sizes = {"a": half + 1, "b": half, "c": half, "d": 1, "e": half, "f": 1}
    files = [SmallFile(path, 1, size) for path, size in sizes.items()]

    assert [file.path for file in first_run(files)] == ["b", "c"]
    assert [file.path for file in first_run(files, unlike={"c"})] == ["c", "d"]
    assert first_run(files[:2]) == []
    assert len(first_run([SmallFile(str(n), 0, 0) for n in range(1_000)])) == MERGED_FILES_MAX


def a_file(path: Path, seq: int, groups: dict[int, list[int]], more: tuple[str, ...] = ()) -> Path:
    schema = pa.schema([(name, pa.int64()) for name in ("n", *more)])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups.values():
            writer.write_table(pa.table({name: rows for name in schema.names}, schema=schema), row_group_size=len(rows))
        counts = [(bucket, len(rows)) for bucket, rows in groups.items()]
        description = FileDescription(4, [("p", seq, seq - 1, seq)], counts)
        writer.add_key_value_metadata({METADATA: msgspec.json.encode(description).decode()})
    return path


def test_merged_file_has_the_bundles_and_the_records_of_a_bucket_in_order(tmp_path: Path) -> None:
    one, two = a_file(tmp_path / "1", 1, {0: [9, 1], 3: [4]}), a_file(tmp_path / "2", 2, {})
    three, four = a_file(tmp_path / "3", 3, {0: [2], 1: [7]}), a_file(tmp_path / "4", 4, {0: [5]}, more=("later",))

    merged = merge([one, two, three, four])

    assert merged is not None
    content, count = merged
    assert count == 3, "the last one has another field"
    file = pq.ParquetFile(content)
    description = described(file.metadata)
    assert description.bundles == [("p", 1, 0, 1), ("p", 2, 1, 2), ("p", 3, 2, 3)]
    assert description.row_groups == [(0, 3), (1, 1), (3, 1)]
    assert [file.read_row_group(at)["n"].to_pylist() for at in range(3)] == [[9, 1, 2], [7], [4]]
    assert merge([three, four]) is None


def test_a_damaged_file_is_left_alone_for_a_time_that_doubles_up_to_a_day() -> None:
    damaged, files, hour = DamagedFiles(), [SmallFile(path, 1, 1) for path in "abcde"], 3_600.0

    assert damaged.add("c", now=0.0) == hour
    alone = damaged.waiting(hour - 1)
    assert [file.path for file in first_run(files, alone=alone)] == ["a", "b"]
    assert [file.path for file in first_run(files[1:], alone=alone)] == ["d", "e"]
    assert damaged.waiting(hour) == set()
    assert [damaged.add("c", now=hour) / hour for _ in range(6)] == [2, 4, 8, 16, 24, 24]
    assert damaged.waiting(24 * hour) == {"c"}
