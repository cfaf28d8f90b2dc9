from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.errors import BrokenFileError
from millpy.ingest.arrow_columns import TableColumns, plain
from millpy.ingest.decode import Decoder, DecodeResult
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.sources.files.source import File, Files
from tests.unit.sources.test_files import connect, read_all, take


class Reading(msgspec.Struct):
    s: str
    i: int
    f: float
    b: bool
    at: datetime
    u: UUID | None = None
    o: str | None = None


TYPE = RecordType(Reading)
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
ID = UUID("6f3c9a52-7d39-4b6c-8f53-2f0a9d3f6f11")
GOOD: dict[str, Any] = {"s": "a", "i": 1, "f": 0.5, "b": True, "at": MOMENT, "u": str(ID), "o": None}


def decoded(batch: pa.RecordBatch) -> DecodeResult:
    return Decoder(TYPE, record_bytes_max=100).decode(SourceBatch("columns", Instant(0), batch=plain(batch)))


def records(found: DecodeResult) -> list[Any]:
    return found.objects if found.objects is not None else TYPE.objects_of(found.batch)


def write(path: Path, rows: int, *, group: int = 10) -> None:
    table = pa.table({"i": list(range(rows)), "s": [f"row {i}" for i in range(rows)], "unknown": [None] * rows})
    pq.write_table(table, path, row_group_size=group)


def numbers(found: list[SourceBatch]) -> list[int]:
    return [i for taken in found if taken.batch is not None for i in taken.batch.column("i").to_pylist()]


async def test_rows_are_read_in_order_in_bundles_across_row_groups(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 95)
    write(tmp_path / "b.pq", 5)

    found = await read_all(Files(tmp_path / "a.parquet", tmp_path / "b.pq"), bundle_records_max=7)

    assert numbers(found) == [*range(95), *range(5)]
    assert all(taken.batch is None or len(taken.batch) <= 7 for taken in found)


async def test_reading_resumes_at_every_row(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 50, group=8)
    source = File(tmp_path / "a.parquet")
    whole = await read_all(source, bundle_records_max=3)

    for taken in whole:
        position = msgspec.json.decode(taken.position or b"")
        rest = await read_all(source, taken.position, bundle_records_max=3)

        assert numbers(rest) == list(range(position["offset"], 50))


async def test_bundle_of_wide_rows_is_cut_by_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"i": range(100), "s": ["x" * 1_000] * 100}), tmp_path / "a.parquet")

    found = await read_all(File(tmp_path / "a.parquet"), bundle_bytes_max=10_000, record_bytes_max=2_000)

    assert numbers(found) == list(range(100))
    assert all(taken.batch is None or taken.batch.nbytes <= 11_000 for taken in found)


async def test_row_is_described_by_its_number(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 20)

    _, second, *_ = await read_all(File(tmp_path / "a.parquet"), bundle_records_max=7)

    assert second.describe(1) == f"{tmp_path}/a.parquet: row 9"


async def test_file_without_its_end_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 100)
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(BrokenFileError):
        await read_all(File(path))
    (dead_letter,) = await read_all(Files(path, broken="dead_letter"))
    assert [r.reason for r in dead_letter.refused] == ["broken_file"]


async def test_rows_before_a_corrupt_page_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"i": range(100_000)})
    pq.write_table(table, path, row_group_size=10_000, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    at = len(content) // 2
    content[at : at + 2_000] = b"\xff" * 2_000
    path.write_bytes(bytes(content))

    *found, dead_letter = await read_all(Files(path, broken="dead_letter"), bundle_records_max=5_000)

    assert [r.reason for r in dead_letter.refused] == ["broken_file"]
    assert 0 < len(numbers(found)) < 100_000
    assert numbers(found) == list(range(len(numbers(found))))


async def test_replaced_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 50)
    injector = connect(File(path), bundle_records_max=7)
    await injector.open(None)
    taken = await take(injector)
    await injector.close()
    pq.write_table(pa.table({"i": [5]}), path)

    with pytest.raises(BrokenFileError):
        await connect(File(path)).open(taken.position)


def test_columns_of_many_types_are_records() -> None:
    batch = pa.record_batch(
        {
            "s": pa.array(["a", "b"]).dictionary_encode(),
            "i": pa.array([1, 2], pa.uint8()),
            "f": pa.array([Decimal("1.5"), Decimal("2.5")], pa.decimal128(5, 1)),
            "b": [True, False],
            "at": pa.array([MOMENT, MOMENT], pa.timestamp("ns", "Europe/Paris")),
            "u": [str(ID), None],
        }
    )

    found = decoded(batch)

    assert found.batch is not None
    assert records(found) == [Reading("a", 1, 1.5, True, MOMENT, ID), Reading("b", 2, 2.5, False, MOMENT)]


def test_rows_that_are_no_records_are_refused_one_by_one_with_their_values() -> None:
    rows = [
        GOOD,
        {**GOOD, "s": None},
        {**GOOD, "f": float("nan")},
        {**GOOD, "s": "nul\0"},
        {**GOOD, "s": "x" * 101},
        {**GOOD, "u": "no id"},
    ]

    found = decoded(pa.RecordBatch.from_pylist(rows))

    assert records(found) == [Reading("a", 1, 0.5, True, MOMENT, ID)]
    assert [(r.row, r.reason) for r in found.refused] == [
        (1, "undecodable"), (2, "refused"), (3, "refused"), (4, "oversize"), (5, "undecodable"),
    ]  # fmt: skip
    assert msgspec.json.decode(found.payload(1))["i"] == 1


def test_timestamps_without_a_zone_name_no_instant() -> None:
    found = decoded(pa.RecordBatch.from_pylist([{**GOOD, "at": MOMENT.replace(tzinfo=None)}]))

    assert [r.reason for r in found.refused] == ["refused"]


VALUES = {
    "s": st.one_of(st.none(), st.text(max_size=3)),
    "i": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "f": st.one_of(st.none(), st.floats()),
    "b": st.one_of(st.none(), st.booleans()),
    "at": st.one_of(st.none(), st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=2))]))),
    "u": st.one_of(st.none(), st.just(str(ID)), st.just("x")),
    "o": st.one_of(st.none(), st.text(max_size=3)),
}
SCHEMA = pa.schema(
    [("s", pa.string()), ("i", pa.int64()), ("f", pa.float64()), ("b", pa.bool_()), ("at", pa.timestamp("us", "UTC")),
     ("u", pa.string()), ("o", pa.string())]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional=VALUES).map(lambda some: GOOD | some), min_size=1, max_size=3))
def test_columns_equal_what_msgspec_decodes_row_by_row(rows: list[dict[str, Any]]) -> None:
    try:
        batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return
    whole = TableColumns(TYPE).columns(plain(batch))

    one_by_one = [decoded(batch.slice(i, 1)) for i in range(len(rows))]
    slow = [found for found in one_by_one if not found.refused]
    if whole is not None:
        assert len(slow) == len(rows)
        assert TYPE.objects_of(whole) == [record for found in slow for record in records(found)]
    assert len(records(decoded(batch))) == len(slow)


@pytest.mark.parametrize("beside", ["2.0", "-2.5", "99999999999999999999.0"])
async def test_whole_decimals_keep_their_digits_in_an_int_field(tmp_path: Path, beside: str) -> None:
    class Numbered(msgspec.Struct):
        i: int

    type_, long = RecordType(Numbered), 2**53 + 1  # no double
    column = pa.array([Decimal(long), Decimal(beside)], pa.decimal128(38, 1))
    pq.write_table(pa.table({"i": column}), tmp_path / "a.parquet")
    injector = connect(File(tmp_path / "a.parquet"), record_type=type_)
    await injector.open(None)

    taken = await take(injector)

    await injector.close()
    found = Decoder(type_).decode(taken)
    read = found.objects if found.objects is not None else type_.objects_of(found.batch)
    assert read == [Numbered(long), Numbered(2)][: 2 if beside == "2.0" else 1]
    assert [rejected.row for rejected in found.refused] == ([] if beside == "2.0" else [1])
    assert found.payload(1) == b'{"i":%s}' % beside.encode()


async def test_dictionary_of_long_texts_is_expanded_in_pieces(tmp_path: Path) -> None:
    # A file of 671 bytes became 1.9 GB.
    table = pa.table({"s": pa.DictionaryArray.from_arrays(pa.array(np.zeros(65_536, np.int32)), ["x" * 30_000])})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 2_000
    before = pa.total_allocated_bytes()
    largest = rows = 0

    injector = connect(File(tmp_path / "a.parquet"))
    await injector.open(None)
    while rows < 65_536:
        taken = await take(injector)
        assert taken.batch is not None
        rows += len(taken.batch)
        largest = max(largest, pa.total_allocated_bytes() - before)
    await injector.close()

    assert rows == 65_536
    assert largest < 100_000_000


def test_integers_stored_as_doubles_are_decoded_with_and_without_columns() -> None:
    class Numbered(msgspec.Struct):
        i: int

    kind = RecordType(Numbered)
    values = [1.0, -3.0, 2.0**53, 1.5, float("nan"), 1e300]

    for count, accepted in ((3, 3), (6, 3)):
        batch = pa.record_batch({"i": pa.array(values[:count] * 50, pa.float64())})
        found = Decoder(kind).decode(SourceBatch("columns", Instant(0), batch=batch))
        numbers = [r.i for r in (found.objects if found.objects is not None else kind.objects_of(found.batch))]
        assert numbers == [1, -3, 2**53] * 50
        assert len(found.refused) == (count - accepted) * 50


@pytest.mark.parametrize(
    ("keys", "twice"),
    [
        (pa.string(), [("k", 1), ("k", 2)]),
        (pa.struct({"x": pa.int64()}), [({"x": 1}, 1)]),
        (pa.list_(pa.int64()), [([1], 1)]),
    ],
)
def test_map_with_duplicate_keys_is_one_dead_letter(keys: pa.DataType, twice: list[Any]) -> None:
    class Mapped(msgspec.Struct):
        i: int
        m: dict[str, int] | None = None

    maps = pa.array([[], twice, None], pa.map_(keys, pa.int64()))
    for name in ("m", "passed_over"):
        batch = pa.record_batch({"i": pa.array([1, 2, 3]), name: maps})
        found = Decoder(RecordType(Mapped)).decode(SourceBatch("columns", Instant(0), batch=batch))
        assert [record.i for record in found.objects or ()] == [1, 3]
        assert [(refused.row, refused.reason) for refused in found.refused] == [(1, "undecodable")]
        assert msgspec.json.decode(found.payload(1))["i"] == 2


async def test_dictionaries_of_any_type_are_read(tmp_path: Path) -> None:
    columns = {
        "i": pa.array([1, 2, None, 1], pa.int64()).dictionary_encode(),
        "s": pa.array(["a", None, "b", "a"]).dictionary_encode(),
        "b": pa.array([b"a", None, b"", b"a"], pa.large_binary()).dictionary_encode(),
        "f": pa.array([0.5, None, 1.5, 0.5]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    found = await read_all(File(tmp_path / "a.parquet"), bundle_bytes_max=1_000_000)

    (batch,) = [taken.batch for taken in found if taken.batch is not None]
    assert batch.to_pydict() == {name: column.to_pylist() for name, column in columns.items()}


@pytest.mark.parametrize("what", ["a page", "a text", "rows"])
async def test_small_file_that_would_expand_too_far_is_dead_lettered_and_the_next_one_is_read(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "a.parquet"
    if what == "a page":  # 70 MB of zeros, which is more than a page may be, in some kB
        zeros = pa.array(memoryview(bytes(72_000_000)).cast("q"))
        options: dict[str, Any] = {"data_page_size": 10**9, "write_batch_size": len(zeros), "use_dictionary": False}
        options |= {"max_rows_per_page": len(zeros), "row_group_size": len(zeros)}
        pq.write_table(pa.table({"i": zeros}), path, compression="zstd", **options)
    elif what == "a text":
        text = pa.array(["x" * 70_000_000])
        pq.write_table(pa.table({"i": [1], "s": text}), path, compression="zstd", use_dictionary=False)
    else:
        pq.write_table(pa.table({"i": pa.array([7] * 3_000_000, pa.int64())}), path, row_group_size=3_000_000)
    assert path.stat().st_size < 20_000

    await expect_dead_letter(path)


async def expect_dead_letter(path: Path) -> None:
    """The file is a dead letter without having become anything, and the next one is read."""
    write(path.with_name("b.parquet"), 5)
    begun = pa.total_allocated_bytes()

    dead_letter, *found = await read_all(Files(path, path.with_name("b.parquet"), broken="dead_letter"))

    assert [refused.reason for refused in dead_letter.refused] == ["broken_file"]
    assert numbers(found) == list(range(5))
    assert pa.total_allocated_bytes() - begun < 1_000_000


async def test_delta_encoded_texts_are_read_in_pieces(tmp_path: Path) -> None:
    # Each is as long as the one before it, and takes two bytes.
    rows, size = 3_000, 200_000
    texts = pa.array(["x" * size] * rows)
    pq.write_table(
        pa.table({"i": range(rows), "s": texts}), tmp_path / "a.parquet", use_dictionary=False, compression="zstd",
        column_encoding={"s": "DELTA_BYTE_ARRAY"},
    )  # fmt: skip
    del texts
    pool = pa.default_memory_pool()

    before = pool.bytes_allocated()
    found = 0
    injector = connect(File(tmp_path / "a.parquet"))
    await injector.open(None)
    while not (taken := await take(injector)).finished:
        found += 0 if taken.batch is None else len(taken.batch)
        assert pool.bytes_allocated() - before < 300_000_000
    await injector.close()

    assert found + (0 if taken.batch is None else len(taken.batch)) == rows


NO_PAIR = None if int(pa.__version__.partition(".")[0]) >= 26 else [0.0, 0.0]  # older versions cannot write none
LISTS: dict[str, pa.Array] = {
    "texts": pa.array([["a", "b"], [], None, ["a", None], ["c" * 50]] * 40),
    "large": pa.array([["a", "b"], [], None, ["a", None], ["c" * 50]] * 40, pa.large_list(pa.large_string())),
    "lists": pa.array([[["a"], ["b", "b"]], [[]], None, [None, ["c"]], []] * 40),
    "numbers": pa.array([[1, 2], [], None, [3], [4, None]] * 40, pa.list_(pa.int64())),
    "pairs": pa.array([[1.5, 2.5], NO_PAIR, [0.0, 1.0], [3.0, 4.0], [1.0, 1.0]] * 40, pa.list_(pa.float32(), 2)),
    "fixed": pa.array([[b"abcd", b"\xff" * 4], [], None, [b"abcd", None], [b"efgh"]] * 40, pa.list_(pa.binary(4))),
    "map": pa.array([[("a", "x" * 30)], [], None, [("b", None)], [("a", "y"), ("c", "z")]] * 40,
                    pa.map_(pa.string(), pa.string())),
    "struct": pa.array([{"t": "a", "n": [1]}, None, {"t": None, "n": None}, {"t": "b", "n": []}, {"t": "a"}] * 40),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LISTS))
async def test_nested_columns_are_read_in_bundles_of_their_bytes(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"i": range(200), name: LISTS[name]}), tmp_path / "a.parquet", row_group_size=70)

    found = await read_all(File(tmp_path / "a.parquet"), record_bytes_max=300, bundle_bytes_max=300)

    batches = [taken.batch for taken in found if taken.batch is not None]
    assert len(batches) > 5
    assert [row for batch in batches for row in batch.column(name).to_pylist()] == LISTS[name].to_pylist()


@pytest.mark.parametrize(
    "what",
    ["long texts", "long values of one length", "many names", "many numbers", "texts by what they share", "a footer"],
)
async def test_small_file_of_lists_that_would_expand_too_far_is_dead_lettered(tmp_path: Path, what: str) -> None:
    path, options = tmp_path / "a.parquet", {"compression": "zstd"}
    if what == "long texts":  # 10 rows of 1 GB
        names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int32)), ["x" * 10_000])
        lists = pa.ListArray.from_arrays(pa.array(range(0, 1_000_001, 100_000), pa.int32()), names)
    elif what == "long values of one length":  # 10 rows of 20 MB: pyarrow writes them out in full
        names = pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(20_000, np.int32)), pa.array([bytes(10_000)], pa.binary(10_000))
        )
        lists = pa.ListArray.from_arrays(pa.array(range(0, 20_001, 2_000), pa.int32()), names)
    elif what == "many names":  # which would be looked at one by one
        names = pa.array([b"%07d" % number for number in range(1_100_000)])
        lists = pa.ListArray.from_arrays([0, len(names)], names)
        options |= {"dictionary_pagesize_limit": 10**9}
    elif what == "many numbers":
        lists = pa.ListArray.from_arrays([0, 10_000_000, 20_000_000], pa.array(np.full(20_000_000, 7)))
    else:
        lists = pa.array([["x" * 1_000] * 1_000] * 3)
    if what.startswith("texts"):
        options |= {"use_dictionary": False, "column_encoding": {"l.list.element": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"i": range(len(lists)), "l": lists}), path, **options)
    if what == "a footer":
        data = path.read_bytes()
        with path.open("wb") as file:
            file.write(data[:-8] + bytes(40_000_000) + (40_000_000).to_bytes(4, "little") + data[-4:])

    await expect_dead_letter(path)
