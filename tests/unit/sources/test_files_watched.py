from __future__ import annotations

import asyncio
import errno
import gzip
import io
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.ingest.protocol import SourceBatch
from millpy.model.time import Instant
from millpy.sources.files import file_names, file_queue
from millpy.sources.files.source import Directory, FileInjector, Files
from tests.unit.sources.test_files import connect, lines_of, read_all, take

OFTEN = timedelta(milliseconds=1)


class SteppedClock(SystemClock):
    """Its monotonic time stands until the test moves it."""

    now = 100.0
    wall_us = 1_750_000_000_000_000

    def monotonic(self) -> float:
        return self.now

    def now_us(self) -> Instant:
        return Instant(self.wall_us)


class Watch:
    """A watched directory, with the position and notes that a worker would have committed."""

    def __init__(self, source: Directory, partition: str = "files", **limits: Any) -> None:
        self.source = source
        self.partition = partition
        self.limits = limits
        self.reported: list[tuple[str, dict[str, object]]] = []
        self.made = 0
        self.clock = SteppedClock()
        self.position: bytes | None = None
        self.notes: dict[str, bytes] = {}
        self.injector: FileInjector

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Watch]:
        self.injector = connect(
            self.source, partition=self.partition, notes=self.notes, clock=self.clock, tell=self.tell, **self.limits
        )
        await self.injector.open(self.position)
        try:
            yield self
        finally:
            await self.injector.close()

    def queue(self) -> file_queue.WatchedFileQueue:
        queue = self.injector._reading._queue
        assert isinstance(queue, file_queue.WatchedFileQueue)
        return queue

    def tell(self, kind: str, detail: dict[str, object]) -> None:
        self.reported.append((kind, detail))

    async def read(self) -> list[SourceBatch]:
        """All that is there."""
        async with self.open():
            return await self.until_quiet()

    async def appear(self) -> None:
        """Another file comes, and is read."""
        self.made += 1
        await self.until_quiet()
        (Path(self.source.path) / f"new-{self.made:03}.ndjson").write_bytes(b"{}\n")
        await self.until(lambda: not self.injector.quiet())
        await self.until_quiet()

    async def until_quiet(self) -> list[SourceBatch]:
        """Read until no file is left or awaited; keep what a worker would commit."""
        found = []
        async with asyncio.timeout(60):
            while not self.injector.quiet():
                await asyncio.sleep(0)
                taken = await self.injector.take()
                if taken is None:
                    continue
                found.append(self.commit(taken))
        return found

    def commit(self, taken: SourceBatch) -> SourceBatch:
        """Keep the position and notes for the next owner."""
        self.position = taken.position
        self.notes.update({name: note for name, note in taken.notes.items() if note is not None})
        for name in [name for name, note in taken.notes.items() if note is None]:
            self.notes.pop(name, None)
        return taken

    async def settled(self) -> list[SourceBatch]:
        """Read everything written so far, after it has settled."""
        async with asyncio.timeout(60):
            await self.until(lambda: not self.injector.quiet())
            self.clock.now += 10
        return await self.until_quiet()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert await self.injector.take() is None
            await asyncio.sleep(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


async def test_each_new_file_is_read_exactly_once_by_name(folder: Path) -> None:
    (folder / "b.ndjson").write_bytes(b"{2}\n")
    (folder / "a.ndjson").write_bytes(b"{1}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    async with watch.open():
        assert lines_of(await watch.until_quiet()) == [b"{1}", b"{2}"]
        (folder / "0.ndjson").write_bytes(b"{0}\n")  # sorts before the files that were read
        await watch.until(lambda: not watch.injector.quiet())
        assert lines_of(await watch.until_quiet()) == [b"{0}"]
    async with watch.open():
        assert await watch.until_quiet() == []


async def test_file_that_is_still_written_is_not_read_until_it_has_settled(folder: Path) -> None:
    watch = Watch(Directory(folder, settle=timedelta(seconds=2), every=OFTEN))

    async with watch.open():
        assert await watch.until_quiet() == []
        (folder / "a.ndjson").write_bytes(b'{"half":')
        await watch.until(lambda: not watch.injector.quiet())
        watch.clock.now += 1.9
        (folder / "a.ndjson").write_bytes(b'{"half":1}\n')
        queue = watch.queue()
        await watch.until(lambda: any(seen.since == watch.clock.now for seen in queue._seen.values()))
        watch.clock.now += 1.9  # long enough for the first state of the file, not for this one
        await watch.until(lambda: not watch.injector.quiet())
        watch.clock.now += 0.2

        assert lines_of(await watch.until_quiet()) == [b'{"half":1}']


async def test_hidden_and_temporary_files_are_skipped(folder: Path) -> None:
    for name in (".a.ndjson", "_b.ndjson", "c.ndjson.tmp", "d.part", "e~"):
        (folder / name).write_bytes(b"{1}\n")
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "f.ndjson").write_bytes(b"{1}\n")
    watch = Watch(Directory(folder, pattern="**/*", settle=timedelta(0), every=OFTEN))

    async with watch.open():
        assert await watch.until_quiet() == []
        os.rename(folder / "c.ndjson.tmp", folder / "c.ndjson")
        await watch.until(lambda: not watch.injector.quiet())
        assert lines_of(await watch.until_quiet()) == [b"{1}"]


async def test_growing_text_file_is_read_from_its_former_end(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"x\n1\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    async with watch.open():
        await watch.until_quiet()
    with (folder / "a.csv").open("ab") as file:
        file.write(b"2\n")
    async with watch.open():
        (found,) = await watch.until_quiet()

    assert (found.header, found.block, found.describe(0)) == (("x",), b"2\n", f"{folder}/a.csv:3 (byte 4)")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.ndjson", b"{1}\n"), ("a.ndjson.gz", gzip.compress(b"{1}\n{2}\n{3}\n", mtime=0))],
    ids=["shorter", "packed anew"],
)
async def test_other_change_of_a_file_that_was_read_is_one_dead_letter(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.write_bytes(gzip.compress(b"{1}\n{2}\n") if name.endswith(".gz") else b"{1}\n{2}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    async with watch.open():
        await watch.until_quiet()
        path.write_bytes(content)
        await watch.until(lambda: not watch.injector.quiet())
        (dead_letter,) = await watch.until_quiet()
    async with watch.open():
        assert await watch.until_quiet() == []

    assert [r.reason for r in dead_letter.refused] == ["broken_file"]
    problem = "its first bytes differ" if name.endswith(".gz") else "has changed since it was read"
    assert problem in dead_letter.refused[0].detail


async def test_broken_file_is_dead_lettered_and_its_replacement_is_read_on(folder: Path) -> None:
    whole = gzip.compress(b"".join(b"{%d}\n" % (i * 7919 % 100_003) for i in range(50_000)))
    (folder / "a.ndjson.gz").write_bytes(whole[: len(whole) // 2])
    (folder / "b.ndjson").write_bytes(b"{b}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    async with watch.open():
        found = await watch.until_quiet()
    assert lines_of(found)[-1] == b"{b}"
    assert [r.reason for t in found for r in t.refused] == ["broken_file"]
    (folder / "a.ndjson.gz").write_bytes(whole)
    async with watch.open():
        rest = await watch.until_quiet()

    assert lines_of(found)[:-1] + lines_of(rest) == gzip.decompress(whole).splitlines()


async def test_replacement_of_a_broken_file_with_the_same_size_is_read(folder: Path) -> None:
    path, whole = folder / "a.parquet", io.BytesIO()
    pq.write_table(pa.table({"i": list(range(30))}), whole)
    path.write_bytes(whole.getvalue()[:-4] + b"RAP?")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    async with watch.open():
        found = await watch.until_quiet()
        os.utime(path, ns=(0, 0))  # it was touched, no more
        await watch.until(lambda: not watch.injector.quiet())
        found += await watch.until_quiet()
        path.write_bytes(whole.getvalue())
        await watch.until(lambda: not watch.injector.quiet())
        found += await watch.until_quiet()

    assert [len(taken.refused) for taken in found] == [1, 0, 0]
    assert found[-1].batch is not None
    assert found[-1].batch.column("i").to_pylist() == [*range(30)]
    assert await watch.read() == []


async def test_file_replaced_while_it_is_read_as_broken_is_read_on(folder: Path) -> None:
    # The note of the broken file had the size of the whole one, so that nothing seemed to have changed.
    whole = gzip.compress(b"".join(b"{%d}\n" % (i * 7919 % 100_003) for i in range(50_000)))
    (folder / "a.ndjson.gz").write_bytes(whole[: len(whole) // 2])
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    watch.injector = connect(watch.source, clock=watch.clock, bundle_records_max=1000)
    await watch.injector.open(None)
    found = [watch.commit(await take(watch.injector))]
    (folder / "b").write_bytes(whole)
    (folder / "b").rename(folder / "a.ndjson.gz")
    found += await watch.until_quiet()
    await watch.injector.close()

    assert [r.reason for t in found for r in t.refused] == ["broken_file"]
    assert lines_of(found) == gzip.decompress(whole).splitlines()


async def test_note_of_a_missing_file_is_kept_for_a_while(folder: Path) -> None:
    (folder / "a.ndjson").write_bytes(b"{1}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN), absent_files_kept_s=86_400.0)
    (folder / "a.ndjson").rename(folder.parent / "elsewhere") if await watch.read() else None

    async def noted_after(days: float, hours_watched: float) -> bool:
        watch.clock.wall_us += int(days * 86_400_000_000)
        async with watch.open():
            await watch.appear()  # missed from now on
            watch.clock.now += hours_watched * 3_600
            await watch.appear()
        return str(folder / "a.ndjson") in watch.notes

    assert await noted_after(0, 0)
    assert await noted_after(0.9, 2)
    assert await noted_after(365, 0)  # a step of the wall clock alone
    assert not await noted_after(0, 2)


async def test_notes_of_the_last_missing_files_are_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(6):
        (folder / f"{number}.ndjson").write_bytes(b"{%d}\n" % number)
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN), absent_files_max=3)
    await watch.read()
    async with watch.open():
        for number in range(6):
            (folder / f"{number}.ndjson").rename(folder.parent / f"{number}")
            watch.clock.wall_us += 1_000_000
            await watch.appear()

    assert sorted(Path(note).name for note in watch.notes if not Path(note).exists()) == [
        "3.ndjson", "4.ndjson", "5.ndjson"
    ]  # fmt: skip
    assert [kind for kind, _ in watch.reported] == ["files_forgotten"]


async def test_different_file_under_a_former_name_is_new(folder: Path) -> None:
    (folder / "a.ndjson").write_bytes(b"{1}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))
    await watch.read()
    async with watch.open():
        (folder / "a.ndjson").unlink()
        await watch.appear()
        (folder / "a.ndjson").write_bytes(b"{2}\n")  # of the same size
        await watch.until(lambda: not watch.injector.quiet())
        assert lines_of(await watch.until_quiet()) == [b"{2}"]
    assert await watch.read() == []


@pytest.mark.parametrize("content", [b"{3}\n", b"{2}\n{3}\n{4}\n", b""])
async def test_rotated_file_is_new_though_no_other_file_comes_meanwhile(folder: Path, content: bytes) -> None:
    # A missing file was noticed only when reading of another one began.
    (folder / "a.log").write_bytes(b"{1}\n{2}\n")
    watch = Watch(Directory(folder, pattern="*.log", settle=timedelta(0), every=OFTEN))
    async with watch.open():
        await watch.until_quiet()
        (folder / "a.log").rename(folder / "a.log.1")
        await watch.until(lambda: watch.queue()._listed == frozenset())
        (folder / "a.log").write_bytes(content)
        await watch.until(lambda: not watch.injector.quiet())
        found = await watch.until_quiet()

    assert [taken.refused for taken in found] == [()] * len(found)
    assert lines_of(found) == content.splitlines()
    assert await watch.read() == []


async def test_file_that_never_settles_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Directory(folder, settle=timedelta(seconds=2), every=OFTEN))

    async def written_for(seconds: int) -> None:
        for _ in range(seconds):
            with (folder / "a.log").open("ab") as file:
                file.write(b"{}\n")
            size = (folder / "a.log").stat().st_size
            await watch.until(lambda size=size: any(seen.size == size for seen in watch.queue()._seen.values()))
            watch.clock.now += 1

    async with watch.open():
        await written_for(60)
        assert watch.reported == []
        await written_for(30)
        assert [kind for kind, _ in watch.reported] == ["file_unsettled"]
        assert "a.log" in str(watch.reported[0][1]["what"])
        assert "settle=seconds(0)" in caplog.records[-1].hint  # type: ignore[attr-defined]
        assert len(lines_of(await watch.settled())) == 90
        await written_for(70)
        assert len(watch.reported) == 2  # another time


async def test_file_that_grew_while_missing_is_read_on(folder: Path) -> None:
    (folder / "a.ndjson").write_bytes(b"{1}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))
    await watch.read()
    async with watch.open():
        away = (folder / "a.ndjson").rename(folder.parent / "a")
        await watch.appear()
        with away.open("ab") as file:
            file.write(b"{2}\n")
        away.rename(folder / "a.ndjson")
        await watch.until(lambda: not watch.injector.quiet())
        assert lines_of(await watch.until_quiet()) == [b"{2}"]


@pytest.mark.parametrize("what", ["file", "directory", "pipe", "name"])
async def test_forbidden_files_of_a_watched_directory_are_skipped_and_reported_once(folder: Path, what: str) -> None:
    secret = folder.parent / "secret"
    secret.mkdir()
    (secret / "s.ndjson").write_bytes(b"{secret}\n")
    for number in range(3):
        if what == "file":
            (folder / f"{number}.ndjson").symlink_to("/proc/self/environ" if number else secret / "s.ndjson")
        elif what == "directory":
            (folder / f"{number}").symlink_to(secret)
        elif what == "pipe":
            os.mkfifo(folder / f"{number}.ndjson")
        else:
            (Path(os.fsdecode(os.fsencode(folder) + b"/\xff%d.ndjson" % number))).write_bytes(b"{1}\n")
    (folder / "z.ndjson").write_bytes(b"{z}\n")
    watch = Watch(Directory(folder, pattern="**/*", settle=timedelta(0), every=OFTEN))

    assert lines_of(await watch.read()) == [b"{z}"]
    assert [kind for kind, _ in watch.reported] == ["file_skipped"]
    json.dumps(watch.reported[0][1]).encode()

    watch.reported.clear()
    found = await read_all(Files(folder / "**/*.ndjson"), tell=watch.tell)
    assert lines_of(found) == [b"{z}"]
    assert [kind for kind, _ in watch.reported] == ["file_skipped"]


async def test_link_that_replaces_a_file_after_the_listing_is_not_followed(
    folder: Path,
) -> None:
    (folder.parent / "secret").write_bytes(b"{secret}\n")
    (folder / "a.ndjson").write_bytes(b"{1}\n")
    (folder / "in").mkdir()
    (folder / "in" / "b.ndjson").write_bytes(b"{1}\n")
    watch = Watch(Directory(folder, pattern="**/*.ndjson", settle=timedelta(seconds=1), every=OFTEN))
    async with watch.open():
        queue = watch.queue()
        await watch.until(lambda: len(queue._seen) == 2)
        listed, queue._list = queue._list, lambda: None  # this test decides when the next listing happens
        watch.clock.now += 2
        (folder / "a.ndjson").unlink()
        (folder / "a.ndjson").symlink_to(folder.parent / "secret")
        (folder / "in").rename(folder.parent / "elsewhere")
        (folder / "in").symlink_to(folder.parent / "elsewhere")
        found = [watch.commit(await take(watch.injector)) for _ in range(2)]
        queue._list = listed

    assert [(r.reason, "symbolic link" in r.detail) for taken in found for r in taken.refused] == [
        ("broken_file", True), ("broken_file", True)
    ]  # fmt: skip
    assert not any(b"secret" in payload for taken in found for payload in taken.payloads)


def test_named_file_may_be_a_link_and_its_name_must_be_storable(tmp_path: Path) -> None:
    (tmp_path / "a.ndjson").write_bytes(b"{1}\n")
    (tmp_path / "link.ndjson").symlink_to(tmp_path / "a.ndjson")

    assert lines_of(asyncio.run(read_all(Files(tmp_path / "link.ndjson")))) == [b"{1}"]
    for source in (Files, Directory):
        with pytest.raises(ConfigError, match="not UTF-8"):
            source(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))


@pytest.mark.parametrize("pattern", ["", "/etc/*", "../*.csv", "a/../b"])
def test_pattern_that_leaves_its_directory_is_refused(folder: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="invalid pattern"):
        Directory(folder, pattern=pattern)


@pytest.mark.parametrize("restarts", [False, True])
async def test_returned_files_are_not_read_again(folder: Path, restarts: bool) -> None:
    # A sub-directory that was unmounted for a moment was read a second time.
    (folder / "disk").mkdir()
    for name in "abc":
        (folder / "disk" / f"{name}.ndjson").write_bytes(b"{%s}\n" % name.encode())
    watch = Watch(Directory(folder, pattern="**/*.ndjson", settle=timedelta(0), every=OFTEN))
    found = []

    async with watch.open():
        found += lines_of(await watch.until_quiet())
        for number in range(3):
            (folder / "disk").rename(folder.parent / "away")
            (folder / f"{number}.ndjson").write_bytes(b"{%d}\n" % number)
            await watch.until(lambda: not watch.injector.quiet())
            found += lines_of(await watch.until_quiet())
            if restarts:
                await watch.injector.close()
                watch.injector = connect(watch.source, notes=watch.notes, clock=watch.clock)
                await watch.injector.open(watch.position)
            (folder.parent / "away").rename(folder / "disk")
            (folder / "disk" / f"{number}.ndjson").write_bytes(b"{d%d}\n" % number)
            await watch.until(lambda: not watch.injector.quiet())
            found += lines_of(await watch.until_quiet())

    assert sorted(found) == sorted(
        [b"{a}", b"{b}", b"{c}"] + [b"{%s%d}" % (d, n) for n in range(3) for d in (b"", b"d")]
    )


async def bundles(watch: Watch, count: int) -> list[bytes]:
    """Return the commits of a worker that is killed after each bundle of four records."""
    found: list[bytes] = []
    for _ in range(count):
        watch.injector = connect(watch.source, notes=watch.notes, clock=watch.clock, bundle_records_max=4)
        await watch.injector.open(watch.position)
        found += lines_of([watch.commit(await take(watch.injector))])
        await watch.injector.close()
    return found


async def test_restart_in_the_middle_of_a_file_forgets_no_file_that_was_read(folder: Path) -> None:
    # The directory had not been listed yet, so all files seemed missing, and were read again.
    for name in "abc":
        (folder / f"{name}.ndjson").write_bytes(b"".join(b"{%s%d}\n" % (name.encode(), i) for i in range(10)))
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    found = await bundles(watch, 9)
    async with watch.open():
        assert await watch.until_quiet() == []

    assert found == [b"{%s%d}" % (name, i) for name in (b"a", b"b", b"c") for i in range(10)]
    assert sorted(watch.notes) == [str(folder / f"{name}.ndjson") for name in "abc"]


async def test_restart_in_the_middle_of_a_files_growth_reads_nothing_twice(folder: Path) -> None:
    (folder / "a.ndjson").write_bytes(b"{0}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))
    async with watch.open():
        await watch.until_quiet()
    with (folder / "a.ndjson").open("ab") as file:
        file.write(b"".join(b"{%d}\n" % i for i in range(1, 11)))

    found = await bundles(watch, 3)
    async with watch.open():
        assert await watch.until_quiet() == []

    assert found == [b"{%d}" % i for i in range(1, 11)]


async def test_missing_directory_is_waited_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a.ndjson").write_bytes(b"{1}\n")
    watch = Watch(Directory(folder, settle=timedelta(0), every=OFTEN))

    async with watch.open():
        await watch.until_quiet()
        folder.rename(folder.with_name("away"))
        (folder.with_name("away") / "b.ndjson").write_bytes(b"{2}\n")
        folder.with_name("away").rename(folder)
        await watch.until(lambda: not watch.injector.quiet())

        assert lines_of(await watch.until_quiet()) == [b"{2}"]


async def test_file_that_cannot_be_read_for_a_moment_is_read_on_without_a_gap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a reader had in its hands was lost with the error; a Parquet file was taken for one that had ended.
    lines = [f"{number} {os.urandom(40_000).hex()}".encode() for number in range(64)]
    (folder / "a.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    pq.write_table(pa.table({"i": list(range(30))}), folder / "b.parquet", row_group_size=10)
    failures = {"gzip": 38, "parquet": 2}

    def fail(what: str) -> None:
        failures[what] -= 1
        if not failures[what]:
            raise OSError(errno.EIO, "the disk is away")

    class Flaky(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
            fail("gzip")
            return super().read(-1 if size is None else size)

    def batches(self: pq.ParquetFile, **options: Any) -> Iterator[pa.RecordBatch]:
        for batch in original(self, **options | {"batch_size": 10}):
            fail("parquet")
            yield batch

    original = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", batches)
    opened = file_names.open_regular
    monkeypatch.setattr(
        file_queue, "open_regular", lambda path, root: Flaky(path) if path.endswith(".gz") else opened(path, root)
    )
    source = Directory(folder, settle=timedelta(0), every=OFTEN)
    async with Watch(source).open() as watch:
        found = await watch.settled()

    assert max(failures.values()) <= 0
    assert lines_of(found) == lines
    assert [i for taken in found if taken.batch is not None for i in taken.batch.column("i").to_pylist()] == [
        *range(30)
    ]


async def test_missing_directory_is_named_before_the_graph_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        await connect(Directory(tmp_path / "none")).open(None)


async def test_every_file_belongs_to_one_of_several_partitions(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i:02}.ndjson").write_bytes(b"{%02d}\n" % i)
    source = Files(tmp_path / "*.ndjson", partitions=3)

    parts = []
    for partition in source.partitions():
        injector = connect(source, partition=partition)
        await injector.open(None)
        found = [await take(injector)]
        while not found[-1].finished:
            found.append(await take(injector))
        await injector.close()
        parts.append(lines_of(found))

    assert all(part == sorted(part) and part for part in parts)
    assert sorted(line for part in parts for line in part) == [b"{%02d}" % i for i in range(30)]


async def test_pattern_is_read_by_name_and_named_files_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.ndjson", "a.ndjson", "z.ndjson"):
        (tmp_path / name).write_bytes(b"{%s}\n" % name[:1].encode())

    found = await read_all(Files(tmp_path / "z.ndjson", tmp_path / "*.ndjson"))

    assert lines_of(found) == [b"{z}", b"{a}", b"{b}"]


async def test_pattern_that_nothing_matches_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matches"):
        await connect(Files(tmp_path / "*.ndjson")).open(None)
