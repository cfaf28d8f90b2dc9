"""CSV in which each column is a tag: a record of each cell."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy import Csv, FieldMapping, Files, Format, Gzip, Kafka, Mqtt
from millpy.errors import BrokenFileError, GraphError
from millpy.formats import BadPart, Message
from millpy.ingest.expansion import Expander
from millpy.limits import Limits
from millpy.model.record import RecordType
from tests.unit.sources.test_files import accepted, read_all


class Row(msgspec.Struct, rename={"tag": "Tag"}):
    at: str
    tag: str
    value: float
    site: str = "none"


TYPE = RecordType(Row)
WIDE = Csv(delimiter=";", decimal=",", null=["", "---"], rename={"Zeit": "at"}, unpivot=("Tag", "value"))
HEAD = 'Zeit;TI 101;"FI; ""2""";;Druck\n'


def parts(format: Csv, text: str) -> list[Any]:
    return list(format.reader(TYPE)(Message(text.encode())))


def rows(found: list[Any]) -> list[Row]:
    return [msgspec.json.decode(part, type=Row) for part in found if not isinstance(part, BadPart)]


def test_each_cell_that_has_a_value_is_a_record() -> None:
    WIDE.validate(TYPE)
    found = parts(WIDE, HEAD + "08:00;1,5; --- ;x;-7\n08:01;;;;\n08:02;;+2;;\n")

    assert rows(found) == [
        Row("08:00", "TI 101", 1.5),
        Row("08:00", "Druck", -7.0),
        Row("08:02", 'FI; "2"', 2.0),
    ]
    assert len(found) == 3


def test_a_cell_that_is_no_value_spoils_its_own_record_and_a_doubtful_row_itself() -> None:
    found = parts(WIDE, HEAD + "08:00;x;2;;3\n08:01;1.5;2;;3\n08:02;1\n08:03;4;;;\n")

    bad = [part for part in found if isinstance(part, BadPart)]
    assert [part.payload.decode() for part in bad] == [HEAD + "08:01;1.5;2;;3", HEAD + "08:02;1"]
    assert found[0] == b'{"at":"08:00","Tag":"TI 101","value":"x"}'  # which decoding rejects
    assert rows(found[1:]) == [
        Row("08:00", 'FI; "2"', 2.0),
        Row("08:00", "Druck", 3.0),
        Row("08:03", "TI 101", 4.0),
    ]
    corrected = bad[0].payload.decode().replace("1.5", "1,5")
    assert [row.value for row in rows(parts(WIDE, corrected))] == [1.5, 2.0, 3.0]


async def test_a_file_gives_a_record_of_each_cell_and_resumes_between_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "hall_1.csv"
    path.write_text("title\nZeit;A;B\nunit;C;%\n" + "".join(f"{n};{n},5;{n}\n" for n in range(20)))
    format = Csv(delimiter=";", decimal=",", skip=1, skip_below=1, rename={"Zeit": "at"}, unpivot=("Tag", "value"))
    source = Files(f"{tmp_path}/{{site}}_1.csv", format=format)
    whole = await read_all(source, record_type=TYPE, bundle_records_max=5)

    assert accepted(Row, whole) == [
        Row(str(n), tag, n + more, "hall") for n in range(20) for tag, more in (("A", 0.5), ("B", 0.0))
    ]
    for index in range(len(whole)):
        rest = await read_all(source, whole[index].position, record_type=TYPE, bundle_records_max=5)
        assert accepted(Row, rest) == accepted(Row, whole[index + 1 :])


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("at,a,a", "two columns are 'a'"),
        ("at,Tag,a", "two columns are 'Tag'"),
        ("at,value", "two columns are 'value'"),
        ("at,site", "none is left to unpivot"),
        ("a,b", "no column 'at'"),
    ],
)
async def test_a_header_that_gives_no_record_is_refused(tmp_path: Path, header: str, said: str) -> None:
    format = Csv(unpivot=("Tag", "value"))
    (tmp_path / "a.csv").write_text(f"{header}\n1,2,3\n")
    if said.startswith("no column"):
        assert rows_or_none(format, header) == []
    else:
        with pytest.raises(ValueError, match=said):
            parts(format, f"{header}\n1,2,3\n")
    with pytest.raises(BrokenFileError, match=said):
        await read_all(Files(tmp_path / "a.csv", format=format), record_type=TYPE)


def rows_or_none(format: Csv, header: str) -> list[Row]:
    found = []
    for part in parts(format, f"{header}\n1,2\n"):
        try:
            found.append(msgspec.json.decode(part, type=Row))
        except msgspec.ValidationError:
            continue
    return found


@pytest.mark.parametrize(
    ("unpivot", "said"),
    [
        ("ab", "is not two fields"),
        (("a",), "is not two fields"),
        (("a", "a"), "is not two fields"),
        (("a", 1), "is not two fields"),
        (("tag", "value"), "Row has no field 'tag'"),
        (("value", "at"), "'value' is not a str"),
    ],
)
def test_fields_that_cannot_be_are_refused(unpivot: Any, said: str) -> None:
    with pytest.raises(GraphError) as error:
        Csv(unpivot=unpivot).validate(TYPE)

    assert said in error.value.message


@pytest.mark.parametrize("format", [Csv(unpivot=("Tag", "value")), Gzip(Csv(unpivot=("Tag", "value")))])
def test_a_field_that_a_source_fills_too_is_refused(format: Format) -> None:
    feeds = [
        Kafka("tags", partitions=1, fields=FieldMapping(key="tag"), format=format),
        Mqtt("plant/{tag}", format=format),
    ]
    for feed in feeds:
        with pytest.raises(GraphError, match=r"fills (.tag.|it), too"):
            feed.validate(TYPE)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"header": ["at", "a", "a"]}, "two columns are 'a'"),
        ({"header": ["at", "Tag", "a"]}, "two columns are 'Tag'"),
        ({"header": ["at", "site"]}, "none is left to unpivot"),
        ({"rename": {"x": "Tag"}}, "rename= gives a column the name 'Tag', too"),
        ({"header": ["at"] * 10_001}, "names no columns"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(GraphError) as error:
        Csv(unpivot=("Tag", "value"), **settings).validate(TYPE)

    assert said in error.value.message


async def test_a_header_of_too_many_columns_is_one_defect(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("at" + ",a" * 10_000 + "\n1,2\n2,3\n")

    for format in (Csv(), Csv(unpivot=("Tag", "value"))):
        with pytest.raises(BrokenFileError, match="more than 10000 columns"):
            await read_all(Files(tmp_path / "a.csv", format=format), record_type=TYPE)


def test_headers_that_change_with_each_message_are_not_all_remembered() -> None:
    read = Csv(unpivot=("Tag", "value")).reader(TYPE)
    tracemalloc.start()
    for number in range(30):
        header = ",".join(f"c{number}_{column}" for column in range(6_000))
        list(read(Message(f"{header}\n{'1' + ',1' * 5_999}".encode())))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 35_000_000  # without a bound 42,000,000


def test_one_row_of_many_columns_is_bounded() -> None:
    """The fields that its records have in common are written for each: ten thousand times a megabyte."""
    columns = ",".join(map(str, range(9_998)))
    text = f"at,site,{columns}\n1,{'x' * 1_000_000},{','.join(['1'] * 9_998)}\n"
    expander = Expander(Csv(unpivot=("Tag", "value")), TYPE, Limits())
    begun = time.process_time()

    found = expander.expand([Message(text.encode())], records_max=10**6, bytes_max=10**9)

    assert time.process_time() - begun < 5
    [refused] = found.refused
    assert (refused.reason, refused.detail) == ("oversize", "the records of the message have more than 4000000 bytes")


def test_a_text_cell_may_be_what_is_null_elsewhere() -> None:
    class Said(msgspec.Struct):
        tag: str
        said: str | None = None

    found = Csv(null=["-"], unpivot=("tag", "said")).reader(RecordType(Said))(Message(b"a,b,c\n x ,-,\n"))

    assert [msgspec.json.decode(part, type=Said) for part in found if isinstance(part, bytes)] == [
        Said("a", " x "),
        Said("c", ""),
    ]
