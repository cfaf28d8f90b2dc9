from __future__ import annotations

import asyncio
import csv
import gzip
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpy.clock import Clock, SystemClock
from millpy.errors import BrokenFileError, ConfigError
from millpy.formats import Csv, Message
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.files.csv_records import record_ends
from millpy.sources.files.source import Directory, File, FileInjector, Files


def connect(
    source: Files | Directory,
    *,
    partition: str = "files",
    notes: Mapping[str, bytes] | None = None,
    clock: Clock | None = None,
    tell: Callable[[str, dict[str, object]], None] = lambda kind, detail: None,
    record_type: RecordType | None = None,
    **limits: Any,
) -> FileInjector:
    setup = SourceSetup(
        graph="g", stream="s", partition=partition, limits=Limits(**limits), clock=clock or SystemClock(),
        ready=asyncio.Event(), notes=notes or {}, tell=tell, record_type=record_type,
    )  # fmt: skip
    return source.connect(setup)


async def take(injector: FileInjector) -> SourceBatch:
    while (taken := await injector.take()) is None:
        injector._setup.ready.clear()
        await injector._setup.ready.wait()
    return taken


async def read_all(source: Files, position: bytes | None = None, **limits: Any) -> list[SourceBatch]:
    injector = connect(source, **limits)
    try:
        await injector.open(position)
        found = [await take(injector)]
        while not found[-1].finished:
            found.append(await take(injector))
        assert injector.quiet()
    finally:
        await injector.close()
    return found


def accepted(kind: type[Any], found: Sequence[SourceBatch]) -> list[Any]:
    """The records of the rows that are not refused."""
    records = []
    for taken in found:
        refused = {bad.row for bad in taken.refused}
        records += [
            msgspec.json.decode(payload, type=kind) for row, payload in enumerate(taken.payloads) if row not in refused
        ]
    return records


def lines_of(found: list[SourceBatch]) -> list[bytes]:
    return [line for taken in found for line in taken.block.splitlines()]


async def test_last_line_without_newline_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_bytes(b'{"a":1}\n{"a":2}')

    found = await read_all(File(tmp_path / "a.ndjson"))

    assert lines_of(found) == [b'{"a":1}', b'{"a":2}']
    assert found[-1].finished


async def test_bundles_never_exceed_their_limit_of_records(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_bytes(b"".join(b"{%d}\n" % i for i in range(1000)))

    found = await read_all(File(tmp_path / "a.ndjson"), bundle_records_max=64)

    assert [t.block.count(b"\n") for t in found] == [64] * 15 + [40]
    assert lines_of(found) == [b"{%d}" % i for i in range(1000)]


@pytest.mark.parametrize("name", ["a.ndjson", "a.ndjson.gz", "a.csv", "a.csv.gz"])
async def test_reading_resumes_at_every_position(tmp_path: Path, name: str) -> None:
    header = b"x,y\n" if ".csv" in name else b""
    text = header + b"".join(b"{%d},1\n" % i for i in range(50)) + b"{last},1"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    source = File(tmp_path / name)
    whole = await read_all(source, bundle_records_max=7)

    for index, taken in enumerate(whole):
        rest = await read_all(source, taken.position, bundle_records_max=7)

        assert lines_of(rest) == lines_of(whole[index + 1 :])
    assert len(lines_of(whole)) == 51


async def test_files_are_read_in_order_each_with_its_own_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfx,y\r\n1,2\r\n")
    (tmp_path / "b.csv").write_bytes(b"y,x\n3,4")
    (tmp_path / "c.csv").write_bytes(b"x\n")

    found = await read_all(Files(tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"))

    assert [(tuple(t.header), t.block) for t in found if t.block] == [(("x", "y"), b"1,2\r\n"), (("y", "x"), b"3,4")]


@pytest.mark.parametrize("header", [b"x, y", b" x\t,\ty ", b'x, "y"', b'\xef\xbb\xbf x, "y"\r'])
async def test_space_around_a_name_in_a_header_does_not_count(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(header + b"\n1,2\n")

    [taken] = [t for t in await read_all(File(tmp_path / "a.csv"), record_type=RecordType(Row)) if t.block]

    assert tuple(taken.header) == ("x", "y")
    [record] = Decoder(RecordType(Row)).decode(taken).objects or []
    assert record == Row(1, 2)
    [read] = Csv().reader(RecordType(Row))(Message(header + b"\n1,2"))
    assert read == b'{"x":1,"y":2}'


async def test_empty_csv_file_needs_no_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"")
    (tmp_path / "b.csv").write_bytes(b"x\n1\n")
    (tmp_path / "c.csv").write_bytes(b"")

    found = await read_all(Files(tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"))

    assert [(tuple(t.header), t.block) for t in found if t.block] == [(("x",), b"1\n")]
    assert found[-1].finished


async def test_csv_file_whose_lines_end_in_a_lone_cr_is_broken_and_does_not_end_the_worker(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x,y\r1,2\r3,4\r")
    (tmp_path / "b.csv").write_bytes(b"x,y\n5,6\n")

    found = await read_all(Files(tmp_path / "*.csv", broken="dead_letter"))

    assert [[refused.reason for refused in taken.refused] for taken in found if taken.refused] == [["broken_file"]]
    assert lines_of(found) == [b"5,6"]
    with pytest.raises(BrokenFileError, match="not a header"):
        await read_all(Files(tmp_path / "a.csv"))


class Row(msgspec.Struct):
    x: int
    y: int | None
    note: str = ""


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    x: int = 0


@pytest.mark.parametrize(
    ("text", "struct", "says"),
    [
        (b"\xef\xbb\xbfx;y\r\n", Row, "no column 'x', 'y'; the columns seem to be separated by semicolons"),
        (b"x\ty\n", Row, "separated by tabs"),
        (b"X,y\n", Row, "no column 'x'; give the columns of Row their names: note, x, y"),
        (b"1,2\n", Closed, "no column of a field"),
        (b"x,z\n", Closed, "column 'z', which the class forbids"),
    ],
)
async def test_header_that_cannot_give_a_record_is_one_defect_of_its_file(
    tmp_path: Path, text: bytes, struct: type[msgspec.Struct], says: str
) -> None:
    (tmp_path / "a.csv").write_bytes(text + b"3,4\n" * 1000)
    (tmp_path / "b.csv").write_bytes(b"x,y\n5,6\n" if struct is Row else b"x\n5\n")

    found = await read_all(Files(tmp_path / "*.csv", broken="dead_letter"), record_type=RecordType(struct))

    [broken] = [taken for taken in found if taken.refused]
    assert (broken.payloads, broken.records) == ([text.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")], 1)
    assert [refused.reason for refused in broken.refused] == ["broken_file"]
    assert says in broken.refused[0].detail
    assert broken.describe(0) == f"{tmp_path}/a.csv:1 (byte 0)"
    assert [taken.block for taken in found if taken.block] == [b"5,6\n" if struct is Row else b"5\n"]
    assert found[-1].total == 2
    with pytest.raises(BrokenFileError, match=re.escape(says)):
        await read_all(Files(tmp_path / "a.csv"), record_type=RecordType(struct))


async def test_header_may_lack_fields_with_defaults_and_have_other_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"y,z,x\n1,2,3\n")

    found = await read_all(Files(tmp_path / "a.csv"), record_type=RecordType(Row))

    assert lines_of(found) == [b"1,2,3"]


async def test_file_name_endings_match_in_either_case(tmp_path: Path) -> None:
    (tmp_path / "A.CSV").write_bytes(b"x\n1\n")
    (tmp_path / "B.Csv.GZ").write_bytes(gzip.compress(b"x\n2\n"))

    found = await read_all(Files(tmp_path / "*"))

    assert [(tuple(t.header), t.block) for t in found if t.block] == [(("x",), b"1\n"), (("x",), b"2\n")]


async def test_record_is_described_by_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,y\n1,2\n3,4\n5,6\n")

    first, second = await read_all(File(path), bundle_records_max=2)

    assert first.describe(1) == f"{path}:3 (byte 8)"
    assert second.describe(0) == f"{path}:4 (byte 12)"


async def test_line_too_long_for_any_bundle_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n" + b"x" * 9_000_000 + b"\n{2}\n{3}")

    found = await read_all(File(path), bundle_bytes_max=100_000, record_bytes_max=1_000)

    assert [len(line) for line in lines_of(found)] == [3, 1001, 3, 3]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line)),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 60),
)
async def test_every_byte_is_delivered_once(
    tmp_path: Path, lines: list[bytes], ended: bool, records_max: int, bytes_max: int
) -> None:
    text = b"\n".join(lines) + (b"\n" if ended else b"")
    path = tmp_path / "any.ndjson"
    path.write_bytes(text)

    found = await read_all(
        File(path), bundle_records_max=records_max, bundle_bytes_max=bytes_max + 30, record_bytes_max=30
    )

    assert b"".join(t.block for t in found) == text.removeprefix(b"\xef\xbb\xbf")
    assert all(t.block.removesuffix(b"\n").count(b"\n") < records_max for t in found)


async def test_missing_file_is_named_before_the_graph_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await connect(File(tmp_path / "none.ndjson")).open(None)

    assert "none.ndjson" in caught.value.message
    assert caught.value.hint


async def test_records_before_a_defect_are_read_and_then_the_source_stops(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson.gz"
    whole = b"".join(b'{"a":%d}\n' % i for i in range(200_000))
    path.write_bytes(gzip.compress(whole)[:-100_000])
    found: list[SourceBatch] = []
    injector = connect(File(path), bundle_records_max=1_000)

    await injector.open(None)
    with pytest.raises(BrokenFileError, match="in the middle"):
        while True:
            found.append(await take(injector))
    await injector.close()

    lines = lines_of(found)
    assert len(lines) > 50_000
    assert lines == whole.splitlines()[: len(lines)]


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
async def test_corrupt_archive_yields_all_records_before_the_defect(tmp_path: Path, place: float) -> None:
    path = tmp_path / "a.ndjson.gz"
    whole = b"".join(b'{"a":%d}\n' % (i * 7919 % 100_003) for i in range(100_000))
    packed = bytearray(gzip.compress(whole))
    at = int(len(packed) * place)
    packed[at : at + 40] = b"\xff" * 40
    path.write_bytes(bytes(packed))

    found = await read_all(Files(path, broken="dead_letter"))

    lines = lines_of(found[:-1])
    assert [r.reason for r in found[-1].refused] == ["broken_file"]
    assert len(lines) > 80_000 * place
    # A checksum is at the end of a member: a byte may be wrong that still decompresses.
    right = sum(a == b for a, b in zip(lines, whole.splitlines(), strict=False))
    assert right > 0.9 * 90_000 * place


async def test_members_of_an_archive_are_read_in_order_without_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson.gz"
    path.write_bytes(gzip.compress(b"{1}\n{2") + gzip.compress(b"}\n") + b"\0" * 100_000 + gzip.compress(b"{3}\n"))

    assert lines_of(await read_all(File(path))) == [b"{1}", b"{2}", b"{3}"]


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{1}\n"])
async def test_gz_file_that_is_not_an_archive_is_broken(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.ndjson.gz"
    path.write_bytes(content)

    with pytest.raises(BrokenFileError):
        await read_all(File(path))


async def test_rest_of_a_broken_file_is_dead_lettered_and_the_next_is_read(tmp_path: Path) -> None:
    broken, good = tmp_path / "a.ndjson.gz", tmp_path / "b.ndjson"
    packed = gzip.compress(b"{1}\n{2}\n{3", 0)
    broken.write_bytes(packed[:-8])
    good.write_bytes(b"{4}\n")

    found = await read_all(Files(broken, good, broken="dead_letter"))

    assert lines_of(found) == [b"{1}", b"{2}", b"{4}"]
    dead_letter = found[1]
    assert (dead_letter.payloads, dead_letter.describe(0)) == ([b"{3"], f"{broken}:3 (byte 8)")
    assert [(r.row, r.reason) for r in dead_letter.refused] == [(0, "broken_file")]


async def test_file_cut_shorter_than_its_position_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n{2}\n")
    found = await read_all(File(path))
    path.write_bytes(b"{1}\n")

    with pytest.raises(BrokenFileError, match="has shrunk"):
        await connect(File(path)).open(found[-1].position)


@pytest.mark.parametrize("name", ["a.ndjson", "a.ndjson.gz"])
async def test_replaced_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pack = gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(pack(b"{1}\n{2}\n{3}\n"))
    first, *_ = await read_all(File(path), bundle_records_max=1)
    path.write_bytes(pack(b"{7}\n{8}\n{9}\n{10}\n"))

    with pytest.raises(BrokenFileError, match="its first bytes differ"):
        await connect(File(path)).open(first.position)


async def test_file_that_shrinks_while_it_is_read_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n" * 1_000)
    injector = connect(File(path), bundle_bytes_max=1_000, record_bytes_max=100)
    await injector.open(None)
    await take(injector)

    path.write_bytes(b"{1}\n")

    with pytest.raises(BrokenFileError, match="has shrunk"):
        while True:
            await take(injector)
    await injector.close()


def test_repr_evaluates_to_an_equal_value() -> None:
    for source in (
        Files("a.csv", "b.csv.gz"),
        Files("a", format="csv", partitions=3),
        Directory("in", pattern="*.csv", format="json", partitions=2),
    ):
        assert eval(repr(source)) == source


# -- CSV ----------------------------------------------------------------------------------------------------------


def records_of(found: list[SourceBatch]) -> list[bytes]:
    return [record for t in found for record in (t.payloads or [line for line in t.block.split(b"\n") if line.strip()])]


def end_by_state(text: bytes, start: int) -> int | None:
    """One record of CSV, a byte at a time."""
    state = "start"
    for place in range(start, len(text)):
        byte = text[place : place + 1]
        if state == "quoted":
            state = "closed" if byte == b'"' else "quoted"
        elif state == "closed" and byte == b'"':
            state = "quoted"
        elif byte == b"\n":
            return place
        elif byte == b",":
            state = "start"
        elif state == "start" and byte == b'"':
            state = "quoted"
        else:
            state = "plain"
    return None if state in ("quoted", "closed") or text[start:] else len(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([b'"', b'"', b'""', b",", b"\n", b"a", b"\r\n", b'"a"', b'"b,\n"'])).map(b"".join))
def test_records_end_where_a_byte_by_byte_parser_ends_them(text: bytes) -> None:
    found = record_ends(text, 1_000_000, at_end=False).tolist()

    expected, start = [], 0
    while (end := end_by_state(text, start)) is not None and end < len(text):
        expected.append(end)
        start = end + 1
    assert found == expected


FIELDS = st.text(alphabet='ab",\n\r é', max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(FIELDS, FIELDS, FIELDS), max_size=30), st.integers(1, 7), st.integers(40, 200), st.booleans())
async def test_output_of_a_csv_writer_is_read_record_by_record(
    tmp_path: Path, rows: list[tuple[str, str, str]], records_max: int, bytes_max: int, everything: bool
) -> None:
    path = tmp_path / "any.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL if everything else csv.QUOTE_MINIMAL)
        writer.writerows([("x", "y", "z"), *rows])

    found = await read_all(
        File(path), bundle_records_max=records_max, bundle_bytes_max=bytes_max, record_bytes_max=bytes_max
    )

    read = [tuple(next(csv.reader(io.StringIO(r.decode(), newline="")))) for r in records_of(found)]
    assert read == rows
    assert all(len(t.payloads) <= records_max for t in found)


async def test_unclosed_quote_rejects_only_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'x,y\n1,"two\n3,4\n5,6\n7,8\n')

    assert records_of(await read_all(File(path))) == [b'1,"two', b"3,4", b"5,6", b"7,8"]
    assert records_of(await read_all(File(path), bundle_bytes_max=12, record_bytes_max=12)) == [
        b'1,"two', b"3,4", b"5,6", b"7,8",
    ]  # fmt: skip


async def test_reading_resumes_at_every_position_between_records_of_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,y\n" + b"".join(b'%d,"a\nb ""%d"""\n%d,plain\n' % (i, i, i) for i in range(20)))
    whole = await read_all(File(path), bundle_records_max=3)

    assert len(records_of(whole)) == 40
    for index, taken in enumerate(whole):
        rest = await read_all(File(path), taken.position, bundle_records_max=3)

        assert records_of(rest) == records_of(whole[index + 1 :])


async def test_record_of_several_lines_is_described_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'x,y\n1,"a\nb"\n\n2,c\n3,"\n\n"\n4,d')

    (found,) = await read_all(File(path))

    places = [f"{path}:{line} (byte {byte})" for line, byte in ((2, 4), (5, 13), (6, 17), (9, 24))]
    assert [found.describe(row) for row in range(4)] == places
