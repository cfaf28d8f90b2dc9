from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpy.clock import SystemClock
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.injectors.files import File, FileInjector, Files
from millpy.injectors.protocol import SourceSetup, Taken
from millpy.limits import Limits


def connect(source: Files, **limits: int) -> FileInjector:
    setup = SourceSetup(
        graph="g", stream="s", partition="files", limits=Limits(**limits), clock=SystemClock(), ready=asyncio.Event()
    )
    return source.connect(setup)


async def take(injector: FileInjector) -> Taken:
    while (taken := await injector.take()) is None:
        injector._setup.ready.clear()
        await injector._setup.ready.wait()
    return taken


async def read_all(source: Files, position: bytes | None = None, **limits: int) -> list[Taken]:
    injector = connect(source, **limits)
    await injector.open(position)
    found = [await take(injector)]
    while not found[-1].finished:
        found.append(await take(injector))
    assert injector.quiet()
    await injector.close()
    return found


def lines_of(found: list[Taken]) -> list[bytes]:
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


async def test_csv_file_of_no_bytes_has_no_records_and_needs_no_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"")
    (tmp_path / "b.csv").write_bytes(b"x\n1\n")
    (tmp_path / "c.csv").write_bytes(b"")

    found = await read_all(Files(tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"))

    assert [(tuple(t.header), t.block) for t in found if t.block] == [(("x",), b"1\n")]
    assert found[-1].finished


async def test_record_is_described_by_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,y\n1,2\n3,4\n5,6\n")

    first, second = await read_all(File(path), bundle_records_max=2)

    assert first.describe(1) == f"{path}:3 (byte 8)"
    assert second.describe(0) == f"{path}:4 (byte 12)"


async def test_line_too_long_for_any_bundle_is_passed_over(tmp_path: Path) -> None:
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
async def test_every_byte_is_handed_over_once(
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


async def test_missing_file_is_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await connect(File(tmp_path / "none.ndjson")).open(None)

    assert "none.ndjson" in caught.value.message
    assert caught.value.hint


async def test_truncated_archive_is_a_source_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson.gz"
    path.write_bytes(gzip.compress(b'{"a":1}\n' * 100_000)[:200])

    with pytest.raises(SourceUnavailableError):
        await read_all(File(path))


async def test_file_cut_shorter_than_its_position_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n{2}\n")
    found = await read_all(File(path))
    path.write_bytes(b"{1}\n")

    with pytest.raises(ConfigError, match="shorter"):
        await connect(File(path)).open(found[-1].position)


def test_repr_reads_like_the_constructor() -> None:
    assert eval(repr(Files("a.csv", "b.csv.gz"))) == Files("a.csv", "b.csv.gz", format="csv")
