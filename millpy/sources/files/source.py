"""Files as a source: NDJSON, CSV and Parquet, plain or gzipped; a set that ends, or a watched directory.

The position is (file, byte offset in the decompressed stream, line), so there is nothing to acknowledge: after a crash
the next owner resumes at the committed position. A thread reads one bundle ahead. A bundle never spans two files and
never exceeds the bundle's bound on records.

    file_queue.py    the order of files             line_reader.py      NDJSON and CSV, cut into bundles
    file_names.py    patterns, opening a file       parquet_reader.py   rows of Parquet files
    reader.py        one file after the other       parquet_pages.py    bounds on Parquet pages
    byte_reader.py   plain and gzip, recognizing a file
    named_paths.py   fields from names of files
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.formats import Format as PayloadFormat
from millpy.formats import Message
from millpy.formats.message import checked_format
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.model.arguments import check_instance, is_whole
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.sources.files.byte_reader import StoppedError
from millpy.sources.files.file_names import NamePattern, check_name
from millpy.sources.files.file_queue import (
    FileQueue,
    FixedFileQueue,
    Notes,
    SkipReporter,
    WatchedFileQueue,
    check_directory,
    is_ours,
)
from millpy.sources.files.line_reader import ExpandedLines, FilePiece
from millpy.sources.files.line_reader import Format as FileFormat
from millpy.sources.files.named_paths import NamedPath, PathFields, check_paths
from millpy.sources.files.reader import Broken, FileReader

log = logging.getLogger(__name__)

PARTITION = "files"


def _described(format: FileFormat | PayloadFormat | None) -> Any:
    return format.identity() if isinstance(format, PayloadFormat) else format


def _payload_format(format: FileFormat | PayloadFormat | None) -> PayloadFormat | None:
    return format if isinstance(format, PayloadFormat) else None


PARTITIONS_MAX = 1_000
"""The most source partitions of files."""


def _partition_names(count: int) -> tuple[str, ...]:
    return (PARTITION,) if count == 1 else tuple(f"{PARTITION}-{place}" for place in range(count))


def _check(
    format: FileFormat | PayloadFormat | None, broken: Broken, partitions: int, paths: Iterable[NamedPath]
) -> None:
    named = next((name for path in paths for name in path.names), None)
    if named is not None and not isinstance(format, PayloadFormat):
        raise ConfigError(
            f"the part {{{named}}} of a path needs a payload format to put it into records",
            hint="give format=Csv(), format=Json(), or decode=; or write * for it ([{] for a brace in a name)",
        )
    if isinstance(format, PayloadFormat):
        if not format.reads_lines:
            raise ConfigError(
                f"files cannot have the format {format!r}, in which a record is not a line",
                hint="text formats can: Json, Csv, LineProtocol, Scalar or decode=; files that end in .gz are unpacked",
            )
    elif format not in (None, "json", "csv", "parquet"):
        raise ConfigError(f"unknown file format {format!r}", hint='choose "json" (NDJSON), "csv" or "parquet"')
    if broken not in ("stop", "dead_letter"):
        raise ConfigError(f"unknown value broken={broken!r}", hint='choose "stop" or "dead_letter"')
    if not is_whole(partitions, 1, PARTITIONS_MAX):
        raise ConfigError(
            f"partitions={partitions!r} must be a number from 1 to {PARTITIONS_MAX:,}", hint="for example partitions=4"
        )


def _text_of(path: object) -> str:
    """Return a path as text. Raises ConfigError."""
    if not isinstance(path, str | Path):
        raise ConfigError(f"{path!r} is not the path of files", hint='an example: Files("monday.ndjson")')
    return str(path)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Files(Source):
    """Files read one after the other; the source ends with the last file.

    Args:
        paths: names and patterns (`data/*.csv`, `**` for any depth), relative to the working directory. They are read
            in this order, the files that match a pattern sorted by name. `.gz` is decompressed. A part written `{name}`
            is a wildcard and fills the record's field of that name: `data/{site}/{device}_*.csv`. It stands for as few
            characters as fit, and needs a payload format.
        format: "json" (NDJSON), "csv" or "parquet"; by default each file's suffix decides (.csv, .parquet, .pq, else
            NDJSON). Or a payload format for each line, such as `Csv(delimiter=";", decimal=",")`.
        broken: the reaction to a truncated or corrupt file: "stop" stops the worker with an error; "dead_letter" makes
            the rest of the file one dead letter and continues with the next file.
        partitions: the number of source partitions, which are read concurrently. A file's name decides its partition.
            Each partition has its own order and watermark.
        decode: instead of a format, a function from a `Message`, which is a line, to its records.
    """

    paths: tuple[str, ...]
    format: FileFormat | PayloadFormat | None
    broken: Broken
    count: int

    def __init__(
        self,
        *paths: str | Path,
        format: FileFormat | PayloadFormat | None = None,
        broken: Broken = "stop",
        partitions: int = 1,
        decode: Callable[[Message], Iterable[Any]] | None = None,
    ) -> None:
        format = checked_format(format, decode, named=True)
        names = tuple(map(_text_of, paths))
        if not names or len(set(names)) != len(names):
            raise ConfigError(
                "Files needs one or more different files", hint='an example: Files("monday.ndjson", "tuesday.ndjson")'
            )
        for name in names:
            check_name(name)
        _check(format, broken, partitions, map(NamedPath.parse, names))
        for name, value in {"paths": names, "format": format, "broken": broken, "count": partitions}.items():
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the files and their form. How many partitions there are decides the partition of each file."""
        return {"kind": "files", "paths": list(self.paths), "format": _described(self.format), "partitions": self.count}

    def payload_format(self) -> PayloadFormat | None:
        """Return the payload format of lines."""
        return _payload_format(self.format)

    def validate(self, record_type: RecordType) -> None:
        """Check that the format fits the record class, and has a field for each named part. Raises GraphError."""
        check_paths(self._named(), record_type, self.payload_format())
        if isinstance(self.format, PayloadFormat):
            self.format.validate(record_type)

    def _named(self) -> list[NamedPath]:
        return list(map(NamedPath.parse, self.paths))

    def _patterns(self) -> tuple[str, ...]:
        return tuple(path.pattern for path in self._named())

    def partitions(self) -> tuple[str, ...]:
        """Return the names of the source partitions, by default one."""
        return _partition_names(self.count)

    def check(self) -> None:
        """Check that each name or pattern has a file. Raises ConfigError."""
        FixedFileQueue(self._patterns(), Notes.recovered({}), lambda path: True, lambda path, why: None).check()

    def ends(self) -> bool:
        """Return True: it ends with the last file."""
        return True

    def connect(self, setup: SourceSetup) -> FileInjector:
        """Return the injector of one source partition, not yet open."""
        notes = Notes.recovered(setup.notes)
        queue, paths = self._queue(setup, notes), self._named()
        return FileInjector(setup, queue, notes, paths, format=self.format, broken=self.broken)

    def unread(self, setup: SourceSetup) -> list[str]:
        """Say which files are new, or have another size, since the partition ended.

        Raises:
            BrokenFileError: a file was replaced or has shrunk, and `broken="stop"`.
        """
        return self._queue(setup, Notes.recovered(setup.notes)).unread(stops=self.broken == "stop")

    def _queue(self, setup: SourceSetup, notes: Notes) -> FixedFileQueue:
        place = self.partitions().index(setup.partition)
        return FixedFileQueue(
            self._patterns(), notes, lambda path: is_ours(path, place, self.count), SkipReporter(setup)
        )


def File(  # noqa: N802
    path: str | Path,
    *,
    format: FileFormat | PayloadFormat | None = None,
    decode: Callable[[Message], Iterable[Any]] | None = None,
) -> Files:
    """Return a source of one file: `File("readings.ndjson.gz")`."""
    return Files(path, format=format, decode=decode)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Directory(Source):
    """New files of a directory, each read once; the source never ends.

    A file is read when it is complete: when its size and time of change have not changed for `settle`. A writer that
    writes elsewhere (or under a name that begins with `.` or `_`, or ends in `.tmp`, `.part` and the like) and renames
    the file into place allows a `settle` of zero. Existing files are read in order of their names; a file that appears
    later is read later, whatever its name. When a text file grows after it was read, reading resumes at its old end;
    any other change is a defect of the file.

    Args:
        path: the directory, which must exist.
        pattern: the files to read (`*.csv`; `**/*.csv` for any depth). Symbolic links and files that are not regular
            are skipped. A part written `{name}` fills a field, as for `Files`: `{device}/*.csv`.
        settle: how long a file must stay unchanged before it is read.
        every: how often to list the directory.
        format: as for `Files`.
        broken: as for `Files`, but "dead_letter" by default, so that a broken file does not stop the others. After the
            file is replaced by a complete one, reading resumes at the defect.
        partitions: as for `Files`.
        decode: as for `Files`.
    """

    path: str
    pattern: str
    settle: timedelta
    every: timedelta
    format: FileFormat | PayloadFormat | None
    broken: Broken
    count: int

    def __init__(  # noqa: PLR0913 - what a user may say of a feed
        self,
        path: str | Path,
        *,
        pattern: str = "*",
        settle: timedelta = timedelta(seconds=2),
        every: timedelta = timedelta(seconds=1),
        format: FileFormat | PayloadFormat | None = None,
        broken: Broken = "dead_letter",
        partitions: int = 1,
        decode: Callable[[Message], Iterable[Any]] | None = None,
    ) -> None:
        format = checked_format(format, decode, named=True)
        check_name(path := _text_of(path))
        check_instance("pattern", pattern, str, 'for example pattern="*.csv"')
        named = NamedPath.parse(pattern, path)
        NamePattern(named.pattern)
        _check(format, broken, partitions, [named])
        durations = all(isinstance(time, timedelta) for time in (settle, every))
        if not durations or settle < timedelta(0) or every <= timedelta(0):
            raise ConfigError(
                f"settle= and every= must be durations, settle not negative, every positive: {settle=}, {every=}",
                hint="for example settle=seconds(2), every=seconds(1)",
            )
        values = {
            "path": path, "pattern": pattern, "settle": settle, "every": every, "format": format,
            "broken": broken, "count": partitions,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the directory, the pattern, the format and the number of partitions."""
        described = {
            "path": self.path,
            "pattern": self.pattern,
            "format": _described(self.format),
            "partitions": self.count,
        }
        return {"kind": "directory", **described}

    def payload_format(self) -> PayloadFormat | None:
        """Return the payload format of lines."""
        return _payload_format(self.format)

    def validate(self, record_type: RecordType) -> None:
        """Check that the format fits the record class, and has a field for each named part. Raises GraphError."""
        check_paths([self._named()], record_type, self.payload_format())
        if isinstance(self.format, PayloadFormat):
            self.format.validate(record_type)

    def _named(self) -> NamedPath:
        return NamedPath.parse(self.pattern, self.path)

    def partitions(self) -> tuple[str, ...]:
        """Return the names of the source partitions, by default one."""
        return _partition_names(self.count)

    def check(self) -> None:
        """Check that the directory exists. Raises ConfigError."""
        check_directory(Path(self.path))

    def connect(self, setup: SourceSetup) -> FileInjector:
        """Return the injector of one source partition, not yet open."""
        place = self.partitions().index(setup.partition)
        notes, named = Notes.recovered(setup.notes), self._named()
        queue = WatchedFileQueue(
            self.path,
            named.pattern,
            notes,
            lambda path: is_ours(path, place, self.count),
            settle_s=self.settle.total_seconds(),
            setup=setup,
        )
        every_s = self.every.total_seconds()
        return FileInjector(setup, queue, notes, [named], format=self.format, broken=self.broken, every_s=every_s)


class FileInjector:
    """The injector of one source partition of files, which reads one bundle ahead.

    Args:
        setup: the partition's setup.
        queue: the order of the files.
        notes: the files that have been read to their end.
        paths: the paths and patterns, whose named parts fill fields.
        format: the source's format.
        broken: the reaction to a defect.
        every_s: how many seconds to wait before looking for files again; None for a set that ends.
    """

    def __init__(
        self,
        setup: SourceSetup,
        queue: FileQueue,
        notes: Notes,
        paths: Sequence[NamedPath],
        *,
        format: FileFormat | PayloadFormat | None,
        broken: Broken,
        every_s: float | None = None,
    ) -> None:
        self._setup = setup
        self._every_s = every_s
        record_type, lines = setup.record_type, None
        if isinstance(format, PayloadFormat) and record_type is not None:
            expander = Expander(format, record_type, setup.limits)
            fields = PathFields(paths, record_type)
            lines = ExpandedLines(expander, setup.clock.now_us, format, record_type, fields)
        self._reading = FileReader(
            queue,
            notes,
            format="json" if isinstance(format, PayloadFormat) else format,
            broken=broken,
            record_type=record_type,
            limits=setup.limits,
            bound=setup.take_bound,
            lines=lines,
        )
        self._ahead: asyncio.Task[FilePiece | None] | None = None
        self._closing = asyncio.Event()
        self._idle = False
        self._complained = ""
        self._ended = False
        self._total = 0

    async def open(self, position: bytes | None) -> None:
        """Go to a stored position and start reading.

        Raises:
            ConfigError: a file or the directory is missing.
            BrokenFileError: the file at the position is not in the set, or is not the file that was being read.
            SourceUnavailableError: a file cannot be read.
        """
        await asyncio.to_thread(self._reading.open, position)
        self._read_ahead()

    def _read_ahead(self) -> None:
        self._ahead = asyncio.create_task(self._next(), name="millpy-read-ahead")
        self._ahead.add_done_callback(lambda _: self._setup.ready.set())

    async def _next(self) -> FilePiece | None:
        """Return the next piece, waiting for it while more files may appear; None when closing."""
        while not self._closing.is_set():
            piece = None
            try:
                piece = await asyncio.to_thread(self._reading.read)
                idle = not self._reading.is_waiting()
                # Between two attempts to read a file, others are read, or nothing.
                if not self._reading.is_unreadable():
                    self._setup.connection.connected()
                    self._complained = ""
            except SourceUnavailableError as error:
                if self._every_s is None:
                    raise
                if self._complained != error.message:
                    log.warning("%s; trying again every %s s", error.message, self._every_s)
                self._complained, idle = error.message, False
                self._setup.connection.disconnected(error.message, attempted=True)
            except StoppedError:
                return None
            if piece is not None:
                self._idle = False
                return piece
            self._idle = idle
            await self._pause()
        return None

    async def _pause(self) -> None:
        assert self._every_s is not None, "a set of files ends"
        try:
            async with asyncio.timeout(self._every_s):
                await self._closing.wait()
        except TimeoutError:
            return

    async def take(self) -> SourceBatch | None:
        """Return the piece that was read ahead; None while the thread reads, or after the last piece.

        Raises:
            BrokenFileError: a file is truncated, corrupt or replaced, and `broken="stop"`.
            SourceUnavailableError: a file cannot be read.
        """
        if self._ahead is None or not self._ahead.done():
            return None
        piece = self._ahead.result()
        self._ahead = None
        if piece is None:
            return None
        self._total += piece.records
        if piece.finished:
            self._ended = True
        else:
            self._read_ahead()
        return SourceBatch(
            format=piece.format,
            arrived_at=self._setup.clock.now_us(),
            payloads=piece.payloads,
            block=piece.block,
            batch=piece.batch,
            header=piece.header,
            refused=piece.refused,
            describe=piece.describe,
            messages=piece.messages,
            position=msgspec.json.encode(piece.after),
            notes=piece.notes,
            finished=piece.finished,
            records=piece.records,
            total=self._total,
            origin=Path(piece.after.path).name,
        )

    async def acknowledge(self, token: Any) -> None:
        """Do nothing: we keep the position."""

    def quiet(self) -> bool:
        """Tell whether all existing files have been read, and none is waiting to settle."""
        return self._ended or self._idle

    async def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        self._reading.stop()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # A thread cannot be cancelled; it ends after its current read.
            await asyncio.wait([ahead])
            if not ahead.cancelled():
                ahead.exception()
        await asyncio.to_thread(self._reading.close)
