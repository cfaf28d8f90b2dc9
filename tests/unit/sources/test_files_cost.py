"""What reading a file costs depends on how many bytes it has, not on which; and it can be stopped at any moment."""

from __future__ import annotations

import asyncio
import gzip
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.sources.files.csv_records import record_ends
from millpy.sources.files.source import File, Files
from tests.unit.sources.test_files import connect, end_by_state, read_all, take

CPU_S_PER_MB = 1.0
SHAPES = {
    "one quote too many in each line": b'"a","b\n',
    "a quote in each line": b'"\n',
    "text behind a quoted field": b'"a"b,"c"\n',
    "quotes in the middle of fields": b'a"b,c"d\n',
    "escaped quotes": b'""' * 200 + b'x,"\n',
    "many fields": b'"",' * 5_000 + b'"\n',
    "a long field that is closed a line later": b'"' + b"," * 300_000 + b'\n"\n',
    "blank lines": b"\n",
    "lines that end in CR": b'a,"\r\n',
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_time_to_read_lines_is_linear_in_their_bytes(tmp_path: Path, shape: str) -> None:
    line = SHAPES[shape]
    data = b"x,y\n" + line * (2_000_000 // len(line))
    (tmp_path / "a.csv").write_bytes(data)

    begun = time.process_time()
    found = await read_all(File(tmp_path / "a.csv"))

    assert time.process_time() - begun < CPU_S_PER_MB * len(data) / 1e6
    assert found[-1].finished


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from([b'"', b'"', b'""', b",", b"\n", b"\n", b"a", b"\r\n", b'"a"', b'"b,\n"'])).map(b"".join),
    st.integers(1, 12),
    st.booleans(),
)
def test_quote_not_closed_within_reach_rejects_only_its_own_line(
    text: bytes, record_bytes_max: int, at_end: bool
) -> None:
    whole = text + b"\n" if at_end else text  # the end of the data ends a line
    expected, start = [], 0
    while start < len(whole):
        end = end_by_state(whole, start)
        end = None if end == len(whole) else end
        if end is None and not at_end and len(whole) - start <= record_bytes_max:
            break
        if end is None or end - start > record_bytes_max:
            end = whole.find(b"\n", start)
            if end < 0:
                break
        expected.append(end)
        start = end + 1

    found = record_ends(text, record_bytes_max, at_end=at_end).tolist()
    assert found == [end for end in expected if end < len(text)]


@pytest.mark.parametrize("what", ["an endless line", "the way to a position"])
async def test_reading_of_an_archive_bomb_stops_soon(tmp_path: Path, what: str) -> None:
    # A worker that was to leave waited until 6 GB had been decompressed.
    member = gzip.compress(b"a" * 64_000_000, compresslevel=1)
    path = tmp_path / "a.ndjson.gz"
    path.write_bytes(gzip.compress(b"{}\n") + member * 100)
    injector = connect(Files(path, broken="dead_letter"))
    await injector.open(None)
    position = (await take(injector)).position
    if what == "the way to a position":
        await injector.close()
        injector = connect(Files(path, broken="dead_letter"))
        assert position is not None
        await injector.open(position.replace(b'"offset":3', b'"offset":6000000000'))
    while injector._reading._opened is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    begun = time.monotonic(), time.process_time()
    await injector.close()

    assert time.process_time() - begun[1] < 2  # of more than a minute that the file would take
    assert time.monotonic() - begun[0] < 30
