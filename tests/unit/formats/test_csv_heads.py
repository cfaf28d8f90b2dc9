"""Lines around the header of a CSV file or message: titles, units, comments."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy import Csv, Files
from millpy.errors import BrokenFileError, GraphError
from millpy.formats import BadPart, Message
from millpy.ingest.dead_letters import replay_rows_of
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.checkpoint import Request
from millpy.model.record import RecordType
from tests.unit.sources.test_files import accepted, read_all


class Row(msgspec.Struct):
    at: str
    battery: float | None = None


TYPE = RecordType(Row)
LOGGER = Csv(skip=1, skip_below=2, null=["", "NAN"], rename={"TIMESTAMP": "at", "BattV": "battery"})
TOA5 = (
    '"TOA5","CR1000","CR1000","4711","CR1000.Std.22","CPU:hall.CR1","63022","Minutes"\r\n'
    '"TIMESTAMP","RECORD","BattV"\r\n'
    '"TS","RN","Volts"\r\n'
    '"","","Avg"\r\n'
)
TURBINE = Csv(skip=4, null=["", "NaN"], rename={"# Date and time": "at", "Power (kW)": "battery"})
EXPORT = (
    "# This file was exported at 2026-02-02 11:58:25.\n"
    '# Turbine: "Hall, 1\n'
    "\n"
    "# Time zone: UTC\n"
    "# Date and time,Wind speed (m/s),Power (kW)\n"
)


def parts(format: Csv, text: str | bytes, header: bytes | None = None) -> list[Any]:
    payload = text if isinstance(text, bytes) else text.encode()
    return list(format.reader(TYPE)(Message(payload, header=header)))


def rows(found: list[Any]) -> list[Row]:
    return [msgspec.json.decode(part, type=Row) for part in found if not isinstance(part, BadPart)]


def bad(found: list[Any]) -> list[bytes]:
    return [part.payload for part in found if isinstance(part, BadPart)]


async def read(path: Path, format: Csv, position: bytes | None = None, **limits: Any) -> list[SourceBatch]:
    return await read_all(Files(path, format=format), position, record_type=TYPE, **limits)


LOGGED = TOA5 + '"2026-01-01 00:10:00",0,12.5\r\n"2026-01-01 00:20:00",1,"NAN"\r\n"2026-01-01 00:30:00",2\r\n'
EXPORTED = EXPORT + "2026-01-03 00:00:00,5.5,NaN\n\n2026-01-03 00:10:00,5.6,71.25\n2026-01-03 00:20:00,1\n"
EXAMPLES = {
    "logger": (LOGGER, LOGGED, [Row("2026-01-01 00:10:00", 12.5), Row("2026-01-01 00:20:00")]),
    "turbine": (TURBINE, EXPORTED, [Row("2026-01-03 00:00:00"), Row("2026-01-03 00:10:00", 71.25)]),
    "no header": (
        Csv(header=["at", "battery"], skip=2, comment="//"),
        'Title of "all\n\na,1\n// b,2\nc,3\nd\n',
        [Row("a", 1.0), Row("c", 3.0)],
    ),
    "comments before the header": (
        Csv(comment="#", skip_below=1),
        "# one\n# two\nat,battery\ntime,V\na,1\n#\nc\n",
        [Row("a", 1.0)],
    ),
    "a note for Excel": (
        Csv(delimiter=";", decimal=",", skip=1),
        "sep=;\nat;battery\na;1,5\nb\n",
        [Row("a", 1.5)],
    ),
}


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16"])
async def test_lines_around_the_header_are_no_rows(tmp_path: Path, example: str, encoding: str) -> None:
    plain, text, expected = EXAMPLES[example]
    format = Csv(**{name: getattr(plain, name) for name in Csv.__slots__} | {"encoding": encoding})
    content = text.encode(encoding)

    in_message = parts(format, content)
    for name in ("a.csv", "b.csv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        found = await read(tmp_path / name, format)
        assert accepted(Row, found) == expected
        [message] = [message for taken in found for message in taken.messages.values()]
        assert message.header is not None
        [again] = format.reader(TYPE)(message)  # a replay of the dead letter
        assert isinstance(again, BadPart)

    assert rows(in_message) == expected
    [letter] = bad(in_message)
    assert bad(parts(format, letter)) == [letter]
    corrected = letter.decode("utf-8" if encoding == "utf-16" else encoding) + ",7"
    if example in ("no header", "comments before the header"):
        [replayed] = rows(parts(format, corrected.encode("utf-8" if encoding == "utf-16" else encoding)))
        assert replayed.battery == 7.0


@pytest.mark.parametrize("example", EXAMPLES)
async def test_a_file_is_read_on_at_every_position_and_when_it_grows(tmp_path: Path, example: str) -> None:
    format, text, expected = EXAMPLES[example]
    path = tmp_path / "a.csv"
    sizes = {"bundle_records_max": 1}
    path.write_bytes(text.encode())
    whole = await read(path, format, **sizes)
    assert accepted(Row, whole) == expected
    for index in range(len(whole)):
        rest = await read(path, format, whole[index].position, **sizes)
        assert accepted(Row, rest) == accepted(Row, whole[index + 1 :])

    lines = text.encode().splitlines(keepends=True)
    head = format.head.skip + format.head.has_header + format.head.skip_below
    if format.comment == "#":
        head += 2
    for count in range(head, len(lines)):
        path.write_bytes(b"".join(lines[:count]))
        begun = await read(path, format)
        path.write_bytes(text.encode())
        assert accepted(Row, begun) + accepted(Row, await read(path, format, begun[-1].position)) == expected


async def test_a_dead_letter_names_the_line_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(LOGGED)
    [taken] = [taken for taken in await read(tmp_path / "a.csv", LOGGER) if taken.refused]

    assert taken.describe(taken.refused[0].row).startswith(f"{tmp_path / 'a.csv'}:7 (byte ")


@pytest.mark.parametrize(
    ("format", "text", "said"),
    [
        (LOGGER, TOA5[:20], "has no header: it has only blank lines and comments behind line 1"),
        (Csv(skip=3), "a\nb\n", "has no header: it ends before line 4"),
        (Csv(header=["at"], skip=3), "a\nb\n", "has no header: it ends before line 4"),
        (Csv(comment="#"), "# one\n# two", "has no header: it has only blank lines and comments"),
        (Csv(skip=1), "t" * 70_000 + "\nat\n1\n", "line 1 has more than 65536 bytes"),
        (Csv(skip=1), "t\n" + "t" * 70_000, "line 2 has more than 65536 bytes"),
        (Csv(skip_below=1), "at\n" + "t" * 70_000 + "\n1\n", "line 2 has more than 65536 bytes"),
        (Csv(), "title\nat\n1\n", "skip=1"),
        (Csv(comment="#"), "# at\n1\n", "a header that begins with '#' is a comment: use skip= instead"),
    ],
)
async def test_a_file_without_its_header_is_one_defect(tmp_path: Path, format: Csv, text: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(text)

    with pytest.raises(BrokenFileError) as error:
        await read(tmp_path / "a.csv", format)

    assert said in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("format", [LOGGER, TURBINE, Csv(header=["at"], skip=3)])
async def test_an_empty_file_needs_no_header(tmp_path: Path, content: bytes, format: Csv) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    found = await read(tmp_path / "a.csv", format)

    assert accepted(Row, found) == []
    assert found[-1].finished


async def test_a_cut_archive_in_the_head_is_that_defect(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"title\n" * 3)[:-6])

    with pytest.raises(BrokenFileError) as error:
        await read(tmp_path / "a.csv.gz", Csv(skip=3))

    assert "no header" not in str(error.value)


@pytest.mark.parametrize("quoted", ['# by,"Bob', '#"', '# "a","b', '#,""'])
def test_quotes_of_a_comment_count_in_its_line_only(quoted: str) -> None:
    text = f'{quoted}\nat,battery\n{quoted}\n1,2\n"3",4\n{quoted}\n"5\n6",7\n'

    assert rows(parts(Csv(comment="#"), text)) == [Row("1", 2.0), Row("3", 4.0), Row("5\n6", 7.0)]


async def test_blank_lines_before_the_header_are_passed_over(tmp_path: Path) -> None:
    text = "\n\r\n# one\n \nat,battery\na,1\n"
    (tmp_path / "a.csv").write_text(text)

    assert rows(parts(Csv(comment="#"), text)) == [Row("a", 1.0)]
    assert accepted(Row, await read(tmp_path / "a.csv", Csv(comment="#"))) == [Row("a", 1.0)]


async def test_wide_text_without_its_setting_is_one_defect_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("title\nat,battery\na,1\n".encode("utf-16"))

    with pytest.raises(BrokenFileError, match='encoding="utf-16"'):
        await read(tmp_path / "a.csv", Csv(skip=1))


def test_a_replay_that_gives_no_record_leaves_its_dead_letter_open() -> None:
    """A payload may be corrected without the lines under its header: its record would be gone."""
    corrected = b'"TIMESTAMP","BattV"\n"2026-01-01 00:30:00",12.5'
    format = Csv(skip_below=1, rename={"TIMESTAMP": "at", "BattV": "battery"})
    request = Request("dead_letters", 1, 1, "readings", "readings", corrected, wire='{"format":"message"}')

    replayed = replay_rows_of([request], 0, Expander(format, TYPE, Limits()))

    assert replayed.taken.payloads == [corrected]
    assert [refused.detail for refused in replayed.taken.refused] == ["the payload gives no record"]
    assert list(replayed.places) == [0]


@pytest.mark.parametrize(("text", "lines"), [("a", 1), ("a\nb\nc", 3)])
def test_a_message_that_is_shorter_than_its_head_is_bad_as_a_whole(text: str, lines: int) -> None:
    with pytest.raises(ValueError, match=f"it has {lines} lines, of which skip=3 passes over all"):
        parts(Csv(skip=3), text)
    assert parts(Csv(skip=3), "\n \n") == []


def test_a_head_is_repeated_in_dead_letters_without_its_bytes() -> None:
    text = "title " + "x" * 50_000 + "\nat,battery\n" + "a\n" * 100
    letters = bad(parts(Csv(skip=1), text))

    assert letters == [b"\nat,battery\na"] * 100


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"skip": -1}, "skip=-1 is not a number of lines"),
        ({"skip": True}, "skip=True is not a number of lines"),
        ({"skip": 1_001}, "skip=1001 is not a number of lines"),
        ({"skip_below": "1"}, "skip_below='1' is not a number of lines"),
        ({"skip_below": 1, "header": ["at"]}, "skip_below=1 without a header"),
        *(
            ({"comment": comment}, "cannot tell comments from rows")
            for comment in ("", " ", " #", ",", '"', "\n#", "№", 1, b"#")
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError) as error:
        Csv(**settings)

    assert said in str(error.value)


def test_the_head_is_a_part_of_the_identity() -> None:
    variants = [Csv(), Csv(skip=1), Csv(skip_below=1), Csv(comment="#"), Csv(comment="//")]

    assert len({repr(variant.identity()) for variant in variants}) == len(variants)
    assert len(set(variants)) == len(variants)
    assert "skip" not in repr(Csv().identity())
