"""Files that have grown since they were read to their end, and files that are not what they were."""

from __future__ import annotations

import asyncio
import gzip
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from millpy.errors import BrokenFileError, SourceUnavailableError
from millpy.formats import Csv
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import RecordType
from millpy.sources.files import file_queue
from millpy.sources.files.byte_reader import FilePosition, check_grown
from millpy.sources.files.file_names import open_regular
from millpy.sources.files.source import Directory, Files
from tests.unit.sources.test_files import connect, lines_of, read_all, take
from tests.unit.sources.test_files_watched import OFTEN, Watch


async def read_on(
    path: Path, more: bytes, record_type: RecordType | None = None, **settings: Any
) -> tuple[list[SourceBatch], list[SourceBatch]]:
    """Read a file to its end, append to it, and read on from what the first reading has noted."""
    found = []
    notes: dict[str, bytes] = {}
    for _ in range(2):
        injector = connect(Files(path, **settings), notes=notes, record_type=record_type)
        try:
            await injector.open(found[-1][-1].position if found else None)
            batches = [await take(injector)]
            while not batches[-1].finished:
                batches.append(await take(injector))
        finally:
            await injector.close()
        found.append(batches)
        for batch in batches:
            notes.update({name: note for name, note in batch.notes.items() if note is not None})
        with path.open("ab") as file:
            file.write(more)
    return found[0], found[1]


def records_and_letters(batches: list[SourceBatch]) -> tuple[list[bytes], list[tuple[bytes, str, str]]]:
    """The lines of batches, and their dead letters with reason and place."""
    letters = [(b.payloads[r.row], r.reason, b.describe(r.row).rpartition("/")[2]) for b in batches for r in b.refused]
    refused = {id(batch) for batch in batches if batch.refused}
    payloads = [p for batch in batches if id(batch) not in refused for p in batch.payloads]
    return [line for line in lines_of(batches) if line] + payloads, letters


class Pair(msgspec.Struct):
    x: int
    y: int


GROWN = [
    ("a.csv", b"x,y\n1,2\n", b"3,4\n", [b"3,4"], []),
    ("a.csv", b"x,y\n1,2", b"\n3,4\n", [b"3,4"], []),
    ("a.csv", b"x,y\r\n1,2", b"\r\n3,4\r\n", [b"3,4"], []),
    ("a.csv", b"x,y\n1,2", b"3\n4,5", [b"4,5"], [(b"1,23", "continued_line", "a.csv:2 (byte 4)")]),
    ("a.csv", b"x,y\n1,2", b"3", [], [(b"1,23", "continued_line", "a.csv:2 (byte 4)")]),
    ("a.csv", b'x,y\n5,6\n1,"a\nb"', b"\n3,4\n", [b"3,4"], []),
    ("a.csv", b"x,y\n", b"3,4\n", [b"3,4"], []),
    ("a.csv", b"", b"x,y\n3,4\n", [b"3,4"], []),
    ("a.csv", b"x,", b"y\n3,4\n", [b"3,4"], []),
    ("a.ndjson", b"\xef\xbb\xbf{1}\n{2}", b"\n{3}", [b"{3}"], []),
    ("a.ndjson", b"{1}\n{2", b"2}\n{3}\n", [b"{3}"], [(b"{22}", "continued_line", "a.ndjson:2 (byte 4)")]),
    ("a.ndjson", b"{1}\n", b"\n", [], []),
]


@pytest.mark.parametrize(("name", "first", "more", "lines", "letters"), GROWN)
@pytest.mark.parametrize("suffix", ["", ".gz"])
async def test_a_grown_file_is_read_on_from_its_former_end(
    tmp_path: Path, name: str, first: bytes, more: bytes, lines: list[bytes], letters: list[Any], suffix: str
) -> None:
    path = tmp_path / (name + suffix)
    pack = gzip.compress if suffix else bytes
    path.write_bytes(pack(first))

    _, later = await read_on(path, pack(more))

    found, refused = records_and_letters(later)
    assert found == lines
    assert refused == [(payload, reason, place.replace(name, path.name)) for payload, reason, place in letters]
    assert sum(batch.records for batch in later) == len(lines) + len(letters)


async def test_a_line_of_a_payload_format_that_has_continued_is_one_dead_letter_with_its_message(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x;y\n1;2")

    _, later = await read_on(path, b"3\n4;5\n", RecordType(Pair), format=Csv(delimiter=";"))

    (letter,) = [b for b in later if b.refused]
    assert (list(letter.payloads), letter.messages[0].payload, letter.messages[0].header) == (
        [b"1;23"],
        b"1;23",
        b"x;y",
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{9}\n" + b"{1}\n" * 3_000, "first bytes differ"),
        (b"{1}\n" * 1_900 + b"{2}\n" + b"{1}\n" * 100, "the bytes before byte 8000 differ"),
        (b"{1}\n" * 1_999, "has changed since it was read: from 8000 to 7996 bytes"),
    ],
    ids=["replaced", "changed inside", "shrunk"],
)
async def test_a_file_that_is_not_the_one_that_was_read_is_a_defect(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n" * 2_000)
    (whole,) = await read_all(Files(path))
    notes = {name: note for name, note in whole.notes.items() if note is not None}
    path.write_bytes(content)

    injector = connect(Files(path), notes=notes)
    with pytest.raises(BrokenFileError, match=problem) as raised:
        Files(path).unread(injector._setup)
    assert "--reset" in (raised.value.hint or "")
    await injector.open(whole.position)
    with pytest.raises(BrokenFileError, match=problem):
        await take(injector)
    await injector.close()

    lenient = Files(path, broken="dead_letter")
    injector = connect(lenient, notes=notes)
    assert lenient.unread(injector._setup)
    await injector.open(whole.position)
    letter = await take(injector)
    await injector.close()
    assert [r.reason for r in letter.refused] == ["broken_file"]
    assert letter.finished
    notes.update({name: note for name, note in letter.notes.items() if note is not None})
    assert lenient.unread(replace(injector._setup, notes=notes)) == []


async def test_a_file_that_grows_while_it_is_read_does_not_keep_the_source_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n")
    injector = connect(Files(path))
    queue = injector._reading._queue
    over = queue.is_over

    def grow() -> bool:
        with path.open("ab") as file:
            file.write(b"{2}\n")
        return over()

    queue.is_over = grow  # type: ignore[method-assign]
    await injector.open(None)
    assert (await take(injector)).finished
    await injector.close()


async def test_another_file_of_the_same_size_is_a_defect_and_a_touched_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n{2}\n")
    (whole,) = await read_all(Files(path))
    notes = {name: note for name, note in whole.notes.items() if note is not None}
    setup = connect(Files(path), notes=notes)._setup

    os.utime(path, ns=(1, 1))
    assert Files(path).unread(setup) == []
    path.write_bytes(b"{1}\n{3}\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(BrokenFileError, match="bytes differ"):
        Files(path).unread(setup)
    lenient = Files(path, broken="dead_letter")
    assert lenient.unread(setup)
    injector = connect(lenient, notes=notes)
    await injector.open(whole.position)
    letter = await take(injector)
    await injector.close()
    assert [r.reason for r in letter.refused] == ["broken_file"]
    notes.update({name: note for name, note in letter.notes.items() if note is not None})
    assert lenient.unread(replace(setup, notes=notes)) == []


@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "between two workers"])
async def test_a_watched_file_replaced_by_one_of_the_same_size_is_a_dead_letter(tmp_path: Path, restarts: bool) -> None:
    path = tmp_path / "now.ndjson"
    path.write_bytes(b"{1}\n")
    watch = Watch(Directory(tmp_path, settle=timedelta(0), every=OFTEN))

    def replace_file() -> None:
        (tmp_path / "next.tmp").write_bytes(b"{2}\n")
        os.utime(tmp_path / "next.tmp", ns=(2, 2))
        (tmp_path / "next.tmp").rename(path)

    async with watch.open():
        await watch.until_quiet()
        if not restarts:
            replace_file()
            async with asyncio.timeout(60):
                while (taken := await watch.injector.take()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            found = [watch.commit(taken)]
    if restarts:
        replace_file()
        found = await watch.read()

    assert [r.detail for batch in found for r in batch.refused] == [
        f"{path} is not the file that was read to its end: its first bytes differ"
    ]
    assert await watch.read() == []


async def test_a_watched_file_that_is_touched_again_and_again_delays_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    watch = Watch(Directory(tmp_path, settle=timedelta(seconds=5), every=OFTEN))
    async with watch.open():
        await watch.until_quiet()
        path.write_bytes(b"{1}\n")
        await watch.settled()
        for moment in range(1, 100):
            os.utime(path, ns=(moment, moment))
            watch.clock.now += 1
            assert await watch.injector.take() is None
            assert watch.injector.quiet()

    assert watch.reported == []


async def test_a_touched_file_that_has_gone_meanwhile_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n")
    watch = Watch(Directory(tmp_path, settle=timedelta(0), every=OFTEN))
    async with watch.open():
        await watch.until_quiet()
        opened: list[str] = []

        def open_gone(name: str) -> BinaryIO:
            opened.append(name)
            path.unlink()
            return open_regular(name, str(tmp_path))

        monkeypatch.setattr(watch.queue(), "open", open_gone)
        os.utime(path, ns=(1, 1))
        await watch.until(lambda: bool(opened))
        assert await watch.injector.take() is None


async def test_a_watched_file_that_was_only_touched_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b"{1}\n")
    watch = Watch(Directory(tmp_path, settle=timedelta(0), every=OFTEN))
    checked: list[str] = []

    def check(done: FilePosition, opened: BinaryIO) -> None:
        checked.append(done.path)
        check_grown(done, opened)

    monkeypatch.setattr(file_queue, "check_grown", check)
    async with watch.open():
        await watch.until_quiet()
        os.utime(path, ns=(1, 1))
        await watch.until(lambda: bool(checked))
        await watch.appear()
    async with watch.open():
        assert await watch.until_quiet() == []

    assert checked == [str(path)]


BROKEN = [("a.log", b"{1}\n" * 100, b""), ("a.log", b"{1}\n" * 100, b"{2}\n"), ("a.csv", b"", b"z\n1\n")]


@pytest.mark.parametrize(("name", "first", "other"), BROKEN, ids=["cut in place", "replaced", "another header"])
async def test_a_broken_file_that_grows_is_one_dead_letter(
    tmp_path: Path, name: str, first: bytes, other: bytes
) -> None:
    # Each look at a log that was cut in place, and is written to all the time, was another dead letter.
    path = tmp_path / name
    watch = Watch(Directory(tmp_path, settle=timedelta(0), every=OFTEN), record_type=RecordType(Pair))
    path.write_bytes(first)
    await watch.read()
    path.write_bytes(other)
    found = await watch.read()
    for _ in range(3):
        with path.open("ab") as file:
            file.write(b"{3}\n")
        found += await watch.read()
    async with watch.open():
        await watch.until_quiet()
        with path.open("ab") as file:
            file.write(b"{3}\n" * 200)
        await watch.until(lambda: not watch.injector.quiet())
        found += await watch.until_quiet()
    assert [r.reason for taken in found for r in taken.refused] == ["broken_file"]

    path.write_bytes(b"{4}\n" * 99)
    (again,) = await watch.read()
    assert len(again.refused) == 1


@pytest.mark.parametrize("settle_s", [0, 1])
async def test_a_source_is_unavailable_while_one_file_is_unreadable_and_reads_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settle_s: int
) -> None:
    # It was connected between the attempts: two events for each of them, for as long as the file stayed unreadable.
    def open_unless_secret(path: str, root: str | None) -> BinaryIO:
        if path == secret:
            raise SourceUnavailableError(f"{path}: Permission denied")
        return open_regular(path, root)

    for name in ("a", "b"):
        (tmp_path / f"{name}.ndjson").write_bytes(b"{%s}\n" % name.encode())
    secret = str(tmp_path / "a.ndjson")
    monkeypatch.setattr(file_queue, "open_regular", open_unless_secret)
    watch = Watch(Directory(tmp_path, settle=timedelta(seconds=settle_s), every=OFTEN))
    states = []

    async def look(times: int) -> list[SourceBatch]:
        found = []
        for _ in range(times):
            watch.clock.now += 0.6
            assert watch.injector._ahead is not None
            await asyncio.wait([watch.injector._ahead], timeout=0.005)
            if (taken := await watch.injector.take()) is not None:
                found.append(watch.commit(taken))
            states.append(watch.injector._setup.connection.is_connected)
        return found

    async with watch.open():
        while not states or states[-1] is not False:
            found = await look(1)
        states.clear()
        found += await look(30)
        assert lines_of(found) == [b"{b}"]
        assert states == [False] * 30
        assert not watch.injector.quiet()
        secret = ""
        assert lines_of(await look(10)) == [b"{a}"]
        assert states[-1]
