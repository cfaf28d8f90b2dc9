"""Files of UTF-16 and UTF-32: read by pieces, at every position, plain and compressed."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy import Csv, Files
from millpy.errors import BrokenFileError
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import RecordType
from tests.unit.sources.test_files import connect, read_all, take


class Row(msgspec.Struct):
    x: int
    name: str = ""


TYPE = RecordType(Row)
NAMES = ("a", "Füllstand", "水", "𐅑", "\u0a0d\u0d0a", "")  # the bytes of a newline are in other characters, too
MARKS = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff", "utf-32-le": b"\xff\xfe\0\0", "utf-32-be": b"\0\0\xfe\xff"}


def records(found: list[SourceBatch]) -> list[Row]:
    return [msgspec.json.decode(row, type=Row) for taken in found for row in taken.payloads]


async def read(path: Path, format: Csv, position: bytes | None = None, **limits: Any) -> list[SourceBatch]:
    return await read_all(Files(path, format=format), position, record_type=TYPE, **limits)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("codec", MARKS)
async def test_a_wide_file_is_read_by_pieces_and_resumes_at_every_position(
    tmp_path: Path, codec: str, name: str
) -> None:
    expected = [Row(n, NAMES[n % len(NAMES)]) for n in range(200)]
    text = "x;name\r\n" + "".join(f"{row.x};{row.name}\r\n" for row in expected)
    content = MARKS[codec] + text.encode(codec)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    format = Csv(delimiter=";", encoding=codec[:6])
    sizes = {"bundle_records_max": 7, "bundle_bytes_max": 120, "record_bytes_max": 50}

    whole = await read(tmp_path / name, format, **sizes)

    assert records(whole) == expected
    for index in range(0, len(whole), 5):
        rest = await read(tmp_path / name, format, whole[index].position, **sizes)
        assert records(rest) == records(whole[index + 1 :])


@pytest.mark.parametrize("header", [True, ["x", "name"]])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "cp1252"])
async def test_a_file_may_have_the_mark_of_utf_8_or_none(
    tmp_path: Path, encoding: str, header: bool | list[str]
) -> None:
    text = ("x,name\n" if header is True else "") + "1,ü\n2\n"
    marked, plain = tmp_path / "marked.csv", tmp_path / "plain.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + text.encode())
    plain.write_bytes(text.encode("utf-16-le" if encoding == "utf-16" else encoding))

    for path in (marked, plain):
        found = await read(path, Csv(encoding=encoding, header=header))
        good, bad = [row for taken in found for row in taken.payloads]
        assert msgspec.json.decode(good, type=Row) == Row(1, "ü")
        assert bad.removeprefix(b"\xef\xbb\xbf") == b"2"
        [message] = [message for taken in found for message in taken.messages.values()]
        corrected = "3,ü".encode("cp1252" if path is plain and encoding == "cp1252" else "utf-8")
        [again] = Csv(encoding=encoding, header=header).reader(TYPE)(
            msgspec.structs.replace(message, payload=corrected)
        )
        assert again == '{"x":3,"name":"ü"}'.encode()


async def test_a_wide_file_that_grows_is_read_on(tmp_path: Path) -> None:
    path, format = tmp_path / "a.csv", Csv(encoding="utf-16")
    path.write_bytes("x,name\n1,a\n2,水".encode("utf-16"))
    first = await read(path, format)
    with path.open("ab") as file:
        file.write("\n3,ü\n".encode("utf-16-le"))

    assert records(first) == [Row(1, "a"), Row(2, "水")]
    assert records(await read(path, format, first[-1].position)) == [Row(3, "ü")]


@pytest.mark.parametrize("mark", ["utf-16", "utf-8-sig"])
@pytest.mark.parametrize("name", ["a", "水" * 50])
async def test_a_wide_file_that_was_read_is_unchanged(tmp_path: Path, name: str, mark: str) -> None:
    path, source = tmp_path / "a.csv", Files(tmp_path / "a.csv", format=Csv(encoding="utf-16"))
    path.write_bytes(f"x,name\n1,{name}\n".encode(mark))
    read_before = await read(path, Csv(encoding="utf-16"))
    notes = {key: note for taken in read_before for key, note in taken.notes.items() if note is not None}
    setup = connect(source, notes=notes, record_type=TYPE)._setup

    assert source.unread(setup) == []  # its UTF-8 is shorter or longer than the file
    with path.open("ab") as file:
        file.write("2,b\n".encode("utf-16-le" if mark == "utf-16" else "utf-8"))
    [grown] = source.unread(setup)
    assert grown.startswith(f"{path} had ")
    injector = connect(source, notes=notes, record_type=TYPE)
    await injector.open(read_before[-1].position)
    assert records([await take(injector)]) == [Row(2, "b")]
    await injector.close()


@pytest.mark.parametrize("damage", [b"\x0a", b"\x00\xd8a\x00", b"\x00\xdc"])
async def test_records_before_a_defect_are_read(tmp_path: Path, damage: bytes) -> None:
    path, format = tmp_path / "a.csv", Csv(encoding="utf-16")
    path.write_bytes("x,name\n1,a\n2,b\n".encode("utf-16") + damage)

    found = await read_all(Files(path, format=format, broken="dead_letter"), record_type=TYPE)

    assert [msgspec.json.decode(row, type=Row) for row in found[0].payloads if row] == [Row(1, "a"), Row(2, "b")]
    [refused] = [refused for taken in found for refused in taken.refused]
    assert refused.reason == "broken_file"
    assert "is not utf-16-le: " in refused.detail
    with pytest.raises(BrokenFileError, match="is not utf-16-le"):
        await read(path, format)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\xef\xbb\xbf"])
async def test_an_empty_file_has_no_records(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    found = await read(tmp_path / "a.csv", Csv(encoding="utf-16", header=["x"]))

    assert records(found) == []
    assert found[-1].finished


@pytest.mark.parametrize(
    ("name", "format", "hint"),
    [
        ("a.csv", None, 'read it by format=Csv(encoding="utf-16"), or convert it to UTF-8'),
        ("a.ndjson", None, "convert it to UTF-8"),
        ("a.txt", Csv(), 'set encoding="utf-16", or convert it to UTF-8'),
        ("a.txt", Csv(header=["x"]), 'read it by format=Csv(encoding="utf-16")'),
        ("a.txt", Csv(encoding="utf-32"), 'set encoding="utf-16" in its format'),
    ],
)
async def test_a_wide_file_that_no_setting_names_is_one_defect(
    tmp_path: Path, name: str, format: Csv | None, hint: str
) -> None:
    path = tmp_path / name
    path.write_bytes("x,name\n1,a\n2,b\n".encode("utf-16"))

    with pytest.raises(BrokenFileError, match="UTF-16, by its byte order mark") as broken:
        await read_all(Files(path, format=format), record_type=TYPE)
    assert hint in f"{broken.value} {broken.value.hint}"
    found = await read_all(Files(path, format=format, broken="dead_letter"), record_type=TYPE)
    assert [refused.reason for taken in found for refused in taken.refused] == ["broken_file"]


async def test_pieces_of_any_size_are_the_same_text(tmp_path: Path) -> None:
    chance = random.Random(3)
    text = "x,name\n" + "".join(f"{n},{chance.choice(NAMES) * chance.randint(0, 3)}\n" for n in range(2_000))
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("utf-16"))

    for size in (100, 101, 128, 1_000):
        found = await read(path, Csv(encoding="utf-16"), bundle_bytes_max=size, record_bytes_max=size)
        assert [row.name for row in records(found)] == [line.partition(",")[2] for line in text.split("\n")[1:-1]]
