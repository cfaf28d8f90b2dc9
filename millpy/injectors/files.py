"""Files as a source: NDJSON, CSV and Parquet, plain or gzipped; a set that ends, or a directory that is watched.

The position is (file, byte offset in the decompressed stream, line), so nothing has to be acknowledged: after a crash
the next owner goes on at the committed position. Reading happens in a thread, one bundle ahead. A bundle never spans
two files and never holds more records than a bundle may.

    files_agenda    which file is next            files_lines     NDJSON and CSV, cut into bundles
    files_reading   one after the other           files_parquet   rows of Parquet files
    files_bytes     plain and gzip, recognizing a file
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.injectors.files_agenda import (
    Agenda,
    FixedAgenda,
    Notes,
    PassedOver,
    WatchedAgenda,
    check_directory,
    is_ours,
)
from millpy.injectors.files_bytes import StoppedError
from millpy.injectors.files_lines import Format, Piece
from millpy.injectors.files_names import Pattern, check_name
from millpy.injectors.files_reading import Broken, Reading
from millpy.injectors.protocol import SourceSetup, Taken

log = logging.getLogger(__name__)

PARTITION = "files"


def _partition_names(count: int) -> tuple[str, ...]:
    return (PARTITION,) if count == 1 else tuple(f"{PARTITION}-{place}" for place in range(count))


def _check(format: Format | None, broken: Broken, partitions: int) -> None:
    if format not in (None, "json", "csv", "parquet"):
        raise ConfigError(f"unknown format {format!r} of files", hint='"json" (NDJSON), "csv" or "parquet"')
    if broken not in ("stop", "set_aside"):
        raise ConfigError(f"broken={broken!r} says nothing", hint='"stop" or "set_aside"')
    if partitions < 1:
        raise ConfigError(f"files cannot be in {partitions} partitions")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Files:
    """Files read one after the other; the source ends with the last one.

    Args:
        paths: names and patterns (`data/*.csv`, `**` for any depth), at least one; read in this order, those that match
            a pattern by name. `.gz` is decompressed. Relative to the working directory.
        format: "json" (NDJSON), "csv" or "parquet"; by default what each name says (.csv, .parquet, .pq, else NDJSON).
        broken: a file that is cut or corrupt: "stop" (the worker, with an error) or "set_aside" (its rest is one dead
            letter, and reading goes on with the next).
        partitions: how many can be read at a time; a file belongs to one by its name. Order and watermark are a
            partition's own.
    """

    paths: tuple[str, ...]
    format: Format | None
    broken: Broken
    count: int

    def __init__(
        self, *paths: str | Path, format: Format | None = None, broken: Broken = "stop", partitions: int = 1
    ) -> None:
        names = tuple(str(path) for path in paths)
        if not names or len(set(names)) != len(names):
            raise ConfigError("name one or more different files", hint='Files("monday.ndjson", "tuesday.ndjson")')
        for name in names:
            check_name(name)
        _check(format, broken, partitions)
        for name, value in {"paths": names, "format": format, "broken": broken, "count": partitions}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        format = f", format={self.format!r}" if self.format else ""
        partitions = f", partitions={self.count}" if self.count > 1 else ""
        return f"Files({', '.join(map(repr, self.paths))}{format}{partitions})"

    def partitions(self) -> tuple[str, ...]:
        """One by default."""
        return _partition_names(self.count)

    def check(self) -> None:
        """Refuse a name without a file. Raises ConfigError."""
        FixedAgenda(self.paths, Notes.recovered({}), lambda path: True, lambda path, why: None).check()

    def connect(self, setup: SourceSetup) -> FileInjector:
        """A reader, not yet open."""
        place = self.partitions().index(setup.partition)
        notes = Notes.recovered(setup.notes)
        agenda = FixedAgenda(self.paths, notes, lambda path: is_ours(path, place, self.count), PassedOver(setup))
        return FileInjector(setup, agenda, notes, format=self.format, broken=self.broken)


def File(path: str | Path, *, format: Format | None = None) -> Files:  # noqa: N802
    """One file: `File("readings.ndjson.gz")`."""
    return Files(path, format=format)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Directory:
    """New files of a directory, each once, as they come; never ends.

    A file is read when it is whole: when its size and time of change have stood for `settle`. Write elsewhere (or under
    a name that begins with `.` or `_`, or ends in `.tmp`, `.part` and the like) and rename it into place, and `settle`
    may be zero. What is there is read by name; a file that comes later is read later, whatever its name. A text file
    that grows after it was read is read on from there; any other change is a defect of the file.

    Args:
        path: the directory, there already.
        pattern: which files (`*.csv`; `**/*.csv` for any depth). Symbolic links are passed over, and whatever is no
            regular file.
        settle: see above.
        every: how often to look.
        format: as for `Files`.
        broken: as for `Files`, but by default a broken file is set aside, so that it does not stop the others. Put a
            whole one in its place and it is read on from where it broke.
        partitions: as for `Files`.
    """

    path: str
    pattern: str
    settle: timedelta
    every: timedelta
    format: Format | None
    broken: Broken
    count: int

    def __init__(
        self,
        path: str | Path,
        *,
        pattern: str = "*",
        settle: timedelta = timedelta(seconds=2),
        every: timedelta = timedelta(seconds=1),
        format: Format | None = None,
        broken: Broken = "set_aside",
        partitions: int = 1,
    ) -> None:
        check_name(str(path))
        Pattern(pattern)
        _check(format, broken, partitions)
        if settle < timedelta(0) or every <= timedelta(0):
            raise ConfigError("settle= must not be negative, and every= must be positive")
        values = {
            "path": str(path), "pattern": pattern, "settle": settle, "every": every, "format": format,
            "broken": broken, "count": partitions,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        format = f", format={self.format!r}" if self.format else ""
        partitions = f", partitions={self.count}" if self.count > 1 else ""
        return f"Directory({self.path!r}, pattern={self.pattern!r}{format}{partitions})"

    def partitions(self) -> tuple[str, ...]:
        """One by default."""
        return _partition_names(self.count)

    def check(self) -> None:
        """Refuse a directory that is not there. Raises ConfigError."""
        check_directory(Path(self.path))

    def connect(self, setup: SourceSetup) -> FileInjector:
        """A reader, not yet open."""
        place = self.partitions().index(setup.partition)
        notes = Notes.recovered(setup.notes)
        agenda = WatchedAgenda(
            self.path,
            self.pattern,
            notes,
            lambda path: is_ours(path, place, self.count),
            settle_s=self.settle.total_seconds(),
            setup=setup,
        )
        every_s = self.every.total_seconds()
        return FileInjector(setup, agenda, notes, format=self.format, broken=self.broken, every_s=every_s)


class FileInjector:
    """Reads the files of one source partition, one bundle ahead.

    Args:
        every_s: how often to look again when there is nothing; None for a set that ends.
    """

    def __init__(
        self,
        setup: SourceSetup,
        agenda: Agenda,
        notes: Notes,
        *,
        format: Format | None,
        broken: Broken,
        every_s: float | None = None,
    ) -> None:
        record_type = setup.record_type
        fields = tuple(record_type.struct.__struct_encode_fields__) if record_type is not None else ()
        self._setup = setup
        self._every_s = every_s
        self._reading = Reading(
            agenda, notes, format=format, broken=broken, fields=fields, limits=setup.limits, bound=setup.take_bound
        )
        self._ahead: asyncio.Task[Piece | None] | None = None
        self._closing = asyncio.Event()
        self._idle = False
        self._ended = False
        self._total = 0

    async def open(self, position: bytes | None) -> None:
        """Go to a stored position and start reading.

        Raises:
            ConfigError: a file is missing, or the position belongs to files that are not in the set.
            BrokenFileError: the file at the position is not the one that was being read.
            SourceUnavailableError: a file cannot be read.
        """
        await asyncio.to_thread(self._reading.open, position)
        self._read_ahead()

    def _read_ahead(self) -> None:
        self._ahead = asyncio.create_task(self._next(), name="millpy-read-ahead")
        self._ahead.add_done_callback(lambda _: self._setup.ready.set())

    async def _next(self) -> Piece | None:
        """The next piece, waiting for one when more files may come; None when closing."""
        complained = False
        while not self._closing.is_set():
            piece = None
            try:
                piece = await asyncio.to_thread(self._reading.read)
                idle = not self._reading.is_waiting()
            except SourceUnavailableError as error:
                if self._every_s is None:
                    raise
                if not complained:
                    log.warning("%s; looking again every %s s", error.message, self._every_s)
                complained, idle = True, False
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

    async def take(self) -> Taken | None:
        """What was read ahead; None while the thread still reads or when all has been handed over.

        Raises:
            BrokenFileError: a file is cut, corrupt or not the one it was, and that stops the source.
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
        return Taken(
            format=piece.format,
            arrived_at=self._setup.clock.now_us(),
            payloads=piece.payloads,
            block=piece.block,
            batch=piece.batch,
            header=piece.header,
            refused=piece.refused,
            describe=piece.describe,
            position=msgspec.json.encode(piece.after),
            notes=piece.notes,
            finished=piece.finished,
            records=piece.records,
            total=self._total,
        )

    async def acknowledge(self, token: Any) -> None:
        """Nothing to do: the position is ours."""

    def quiet(self) -> bool:
        """Whether everything that is there has been read, and no file waits to settle."""
        return self._ended or self._idle

    async def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        self._reading.stop()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # A thread cannot be cancelled; it ends with what it reads at this moment.
            await asyncio.wait([ahead])
            if not ahead.cancelled():
                ahead.exception()
        await asyncio.to_thread(self._reading.close)
