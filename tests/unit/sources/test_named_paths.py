"""Fields from the names of files: which part of a path a name stands for, and what records get."""

from __future__ import annotations

import gzip
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy import Csv, Decode, Directory, File, Files, Json, Mqtt
from millpy.errors import BrokenFileError, ConfigError, GraphError
from millpy.model.record import RecordType
from millpy.sources.files.file_names import NamePattern
from millpy.sources.files.named_paths import NamedPath
from tests.unit.sources.test_files import accepted, connect, read_all, take


class Row(msgspec.Struct):
    device: str
    value: float
    site: str = ""


class Numbered(msgspec.Struct, rename={"line": "Line"}):
    line: int
    value: float


def parts(pattern: str, path: str, directory: str | None = None) -> dict[str, str] | None:
    return NamedPath.parse(pattern, directory).find(path)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("{device}.csv", "pump 1.csv", {"device": "pump 1"}),
        ("{device}.csv", ".csv", {"device": ""}),
        ("{device}.csv", "a/b.csv", None),
        ("{device}.csv*", "a.csv.csv.gz", {"device": "a"}),
        ("{site}_{device}.csv", "north_hall_7.csv", {"site": "north", "device": "hall_7"}),
        ("*_{device}_20*.csv", "Data_Hill_1_2016_2017.csv", {"device": "Hill_1"}),
        ("data/{site}/{device}_*.csv", "data/n/a_1_2.csv", {"site": "n", "device": "a"}),
        ("data/**/{device}.csv", "data/a.csv", {"device": "a"}),
        ("data/**/{device}.csv", "data/x/y/a.csv", {"device": "a"}),
        ("{site}/**", "n/x/a.csv", {"site": "n"}),
        ("./{device}.csv", "a.csv", {"device": "a"}),
        ("/data/{device}.csv", "/data/a.csv", {"device": "a"}),
        ("[a-c]{device}?[!0-9].csv", "bTank1x.csv", {"device": "Tank"}),
        ("[{]{device}}.csv", "{a}.csv", {"device": "a"}),
        ("[]{device}.csv", "[]a.csv", {"device": "a"}),
        ("{device}.csv", "line\nbreak.csv", {"device": "line\nbreak"}),
        ("{a-b}.csv", "{a-b}.csv", {}),
        ("{_0}_{_1}_*.csv", "a_b_c.csv", {"_0": "a", "_1": "b"}),
        ("**/{x}[!a]{y}.csv", "q/ab.csv", {"x": "a", "y": ""}),
        ("**/{x}/**/*.csv", "a/b/c.csv", {"x": "a"}),
        ("a/**/{x}/b/*.csv", "a/c/d/b/e.csv", {"x": "d"}),
        ("a/**/{x}/b/*.csv", "a/b/e.csv", None),
        ("**.csv", "a.csv", {}),
        ("data/a**", "data/ab", {}),
        ("data/a**", "data/b", None),
        ("//data/{x}.csv", "//data/a.csv", {"x": "a"}),
    ],
)
def test_a_name_stands_for_as_few_characters_as_fit(pattern: str, path: str, expected: dict[str, str] | None) -> None:
    assert parts(pattern, path) == expected


def test_the_directory_of_a_pattern_has_no_wildcards() -> None:
    assert parts("{device}.csv", "in*[x]/a.csv", "in*[x]") == {"device": "a"}
    assert parts("{device}.csv", "inx/a.csv", "in*[x]") is None
    assert parts("{device}.csv", "a.csv", ".") == {"device": "a"}
    assert parts("{device}.csv", "/a.csv", "/") == {"device": "a"}


signs = st.sampled_from(["a", "b", "_", ".", "*", "?", "[ab]", "[!a]", "[", "{x}", "{y}", "{z}"])
components = st.one_of(st.lists(signs, min_size=1, max_size=5).map("".join), st.just("**"))
names = st.lists(st.text("ab_.[", min_size=1, max_size=8), min_size=1, max_size=4)


@given(st.lists(components, min_size=1, max_size=3).map("/".join), names)
def test_a_named_pattern_matches_what_it_does_with_wildcards(pattern: str, path: list[str]) -> None:
    try:
        named = NamedPath.parse(pattern)
    except ConfigError:
        return
    if {".", ".."} & {*path, *pattern.split("/")} or named.pattern == "/".join(path):
        return
    texts = named.find("/".join(path))

    assert (texts is not None) == NamePattern(named.pattern).matches(path)
    lone = "[" in pattern.replace("[ab]", "").replace("[!a]", "")  # one before a text with [ would begin a set
    if texts is not None and "**" not in pattern and not (lone and "[" in "".join(texts.values())):
        for name, text in texts.items():
            pattern = pattern.replace(f"{{{name}}}", "".join(f"[{sign}]" if sign == "[" else sign for sign in text))
        assert NamePattern(pattern).matches(path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("{a}_{b}_{c}_{d}_{e}_{f}x*y.csv", "_" * 240 + "xy.csv"),
        ("in/{site}_{line}_{device}_{kind}_*.csv.gz", "in/" + "_" * 240 + ".csv"),
        ("**/{site}_{line}_{device}_{kind}/*.csv", "_" * 240 + "/a.csv"),
        ("**/{site}_{line}_{device}_{kind}/*.csv", "/".join(["_" * 200] * 15) + "/a.csv"),
        ("**/{site}/**/{line}/**/{device}/**/{kind}.csv", "/".join(["a"] * 2_000) + "/a.gz"),
    ],
)
def test_matching_costs_little_whatever_the_name_is(pattern: str, path: str) -> None:
    """The other files of a directory get their names from somebody else."""
    begun = time.process_time()
    NamedPath.parse(pattern).find(path)

    assert time.process_time() - begun < 1


def test_a_path_that_is_the_name_of_a_file_has_no_names(tmp_path: Path) -> None:
    path = tmp_path / "{site}.csv"
    path.write_text("device,value\na,1\n")

    assert Files(path).identity() == {"kind": "files", "paths": [str(path)], "format": None, "partitions": 1}
    assert NamedPath.parse(str(path)).find(str(path)) == {}
    assert NamedPath.parse("{site}.csv", str(tmp_path)).find(str(path)) == {"site": "{site}"}


def test_many_plain_names_cost_little() -> None:
    begun = time.process_time()
    source = Files(*(f"data/{number}.csv" for number in range(5_000)))
    source.validate(RecordType(Row))

    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Files("{a}/{a}.csv", format=Csv()), "two parts of '{a}/{a}.csv' have the same name"),
        (lambda: Files("{a}{b}.csv", format=Csv()), "nothing separates {b} from the wildcard beside it"),
        (lambda: Files("*{b}.csv", format=Csv()), "nothing separates {b} from the wildcard beside it"),
        (lambda: Directory(".", pattern="{a}*.csv", format=Csv()), "nothing separates {a} from the wildcard beside it"),
        (lambda: File("{a}.csv"), "the part {a} of a path needs a payload format"),
        (lambda: Files("{a}.parquet", format="parquet"), "the part {a} of a path needs a payload format"),
        (lambda: Directory(".", pattern="{a}.csv"), "the part {a} of a path needs a payload format"),
    ],
)
def test_names_that_cannot_be_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()

    assert said in error.value.message


@pytest.mark.parametrize("source", [File("{x}.csv", format=Csv()), Directory(".", pattern="{x}.csv", format=Csv())])
def test_a_name_without_its_field_is_refused(source: Files | Directory) -> None:
    with pytest.raises(GraphError, match=r"part of a path \{x\}: Row has no field 'x'"):
        source.validate(RecordType(Row))


FORMATS = {
    "csv": (Csv(skip=1), "title\nvalue,other\n1.5,a\nx\n2.5,b\n"),
    "json": (Json(), '{"value":1.5}\nnonsense\n{"value":2.5,"device":"own"}\n'),
    "function": (Decode(lambda message: [{"value": float(message.payload)}]), "1.5\nx\n2.5\n"),
}


@pytest.mark.parametrize("name", FORMATS)
async def test_records_get_the_parts_of_their_files_name(tmp_path: Path, name: str) -> None:
    format, text = FORMATS[name]
    for site in ("north", "south"):
        (tmp_path / site).mkdir()
        for device in ('pump "1"', "tank"):
            (tmp_path / site / f"{device}_2026.csv.gz").write_bytes(gzip.compress(text.encode()))
    source = Files(f"{tmp_path}/{{site}}/{{device}}_*", format=format)

    batches = await read_all(source, record_type=RecordType(Row), bundle_records_max=1)

    expected = [
        Row(device, value, site)
        for site in ("north", "south")
        for device in ('pump "1"', "tank")
        for value in (1.5, 2.5)
    ]
    assert accepted(Row, batches) == expected
    messages = [message for taken in batches for message in taken.messages.values()]
    assert len(messages) == 4
    reader = format.reader(RecordType(Row))
    corrected = {"csv": b"3.5,c", "json": b'{"value":3.5}', "function": b"3.5"}[name]
    for message, place in zip(messages, expected[::2], strict=True):
        [again] = reader(msgspec.structs.replace(message, payload=corrected))
        assert isinstance(again, bytes)
        whole = again.removesuffix(b"}") + message.ending
        assert msgspec.json.decode(whole, type=Row) == Row(place.device, 3.5, place.site)


async def test_a_watched_directory_gives_fields_of_its_files(tmp_path: Path) -> None:
    directory = tmp_path / "in{x}[1]"
    (directory / "north").mkdir(parents=True)
    (directory / "north" / "a.csv").write_text("value\n1\n")
    source = Directory(directory, pattern="{site}/{device}.csv", settle=timedelta(0), format=Csv())
    injector = connect(source, record_type=RecordType(Row))
    await injector.open(None)
    try:
        first = await take(injector)
        (directory / "north" / "b.csv").write_text("value,device\n2,own\n")
        second = await take(injector)
    finally:
        await injector.close()

    assert accepted(Row, [first, second]) == [Row("a", 1.0, "north"), Row("b", 2.0, "north")]


async def test_a_part_may_be_a_number_or_an_id(tmp_path: Path) -> None:
    class Identified(msgspec.Struct):
        id: UUID

    (tmp_path / "12.csv").write_text("value\n1\n")
    (tmp_path / "x.csv").write_text("value\n2\n")
    batches = await read_all(Files(f"{tmp_path}/{{line}}.csv", format=Csv()), record_type=RecordType(Numbered))
    good, bad = [payload for taken in batches for payload in taken.payloads]
    assert msgspec.json.decode(good, type=Numbered) == Numbered(12, 1.0)
    assert bad == b'{"value":2,"Line":"x"}'  # a dead letter, once it is decoded

    name = "0b7e9f3a-6f0c-4f7e-8a8b-0f0e6d1c2b3a"
    (tmp_path / f"id-{name}.ndjson").write_text("{}\n")
    source = Files(f"{tmp_path}/id-{{id}}.ndjson", format=Json())
    assert accepted(Identified, await read_all(source, record_type=RecordType(Identified))) == [Identified(UUID(name))]


async def test_the_first_path_that_matches_a_file_names_its_parts(tmp_path: Path) -> None:
    (tmp_path / "north_a.csv").write_text("value\n1\n")
    (tmp_path / "b.csv").write_text("value\n2\n")
    (tmp_path / "plain.csv").write_text("device,value\nc,3\n")
    paths = ("{site}_{device}.csv", "pl*.csv", "{device}.csv")
    source = Files(*(f"{tmp_path}/{path}" for path in paths), format=Csv())

    batches = await read_all(source, record_type=RecordType(Row))

    assert accepted(Row, batches) == [Row("a", 1.0, "north"), Row("c", 3.0), Row("b", 2.0)]


async def test_a_file_whose_name_is_the_pattern_gives_its_parts(tmp_path: Path) -> None:
    (tmp_path / "*_a.csv").write_text("value\n1\n")
    source = Files(f"{tmp_path}/{{device}}_a.csv", format=Csv())

    assert accepted(Row, await read_all(source, record_type=RecordType(Row))) == [Row("*", 1.0)]


def test_a_field_that_the_format_fills_cannot_have_a_part_of_the_name() -> None:
    format = Csv(unpivot=("device", "value"))
    with pytest.raises(GraphError, match=r"part of a path \{device\}: .* fills 'device', too"):
        Files("{device}.csv", format=format).validate(RecordType(Row))
    with pytest.raises(GraphError, match=r"topic level \{device\}: .* fills 'device', too"):
        Mqtt("plant/{device}", format=format).validate(RecordType(Row))
    Files("{site}.csv", format=format).validate(RecordType(Row))


async def test_a_column_that_the_name_does_not_give_is_required(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("site\nx\n")

    with pytest.raises(BrokenFileError, match="no column 'value'"):
        await read_all(Files(f"{tmp_path}/{{device}}.csv", format=Csv()), record_type=RecordType(Row))


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file matches"):
        Files(f"{tmp_path}/{{device}}.csv", format=Csv()).check()


def test_the_names_are_a_part_of_the_identity() -> None:
    one, other = (Files(path, format=Csv()).identity() for path in ("{a}.csv", "{b}.csv"))

    assert one != other
