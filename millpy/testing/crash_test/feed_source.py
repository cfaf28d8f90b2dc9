"""The source that replaces a graph's own: a set of growing files of whole lines.

The tool writes and workers read everything up to the last newline. Its order is the order of the input, whatever
happens to the workers, and an `end` file marks its end: then the source finishes and all windows close. Decoding is
the graph's own (schema, event time, dedupe); only the origin of the bytes differs.

    DIRECTORY/parts.json   [{"format": "csv", "header": [...]}, ...]
    DIRECTORY/0, 1, ...    the lines, a record each; part n is complete when part n + 1 or `end` is there
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.model.identity import Identity

PARTITION = "feed"
PARTS_FILE = "parts.json"
END_FILE = "end"
LOOK_EVERY_S = 0.01


class FeedFormat(msgspec.Struct, frozen=True):
    """How the lines of one file of the feed are written.

    Attributes:
        wrapped: whether each line is a payload in base64, because payloads hold newlines themselves.
        origin: where the lines came from, for dead letters.
    """

    format: Literal["json", "csv"] = "json"
    header: tuple[str, ...] = ()
    wrapped: bool = False
    origin: str = ""


class FeedPosition(msgspec.Struct, frozen=True):
    """The position at which reading continues."""

    part: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class FeedSource(Source):
    """Replaces a source of the graph. Its directory is not part of its identity."""

    directory: Path

    def identity(self) -> Identity:
        """Describe the source, without its directory."""
        return {"kind": "crash_test_feed"}

    def partitions(self) -> tuple[str, ...]:
        """Return one source partition, so that its records have one order."""
        return (PARTITION,)

    def connect(self, setup: SourceSetup) -> FeedInjector:
        """Return a reader, not yet open."""
        return FeedInjector(self.directory, setup)


class FeedInjector:
    """Reads a feed on the event loop, because the lines are in the page cache."""

    def __init__(self, directory: Path, setup: SourceSetup) -> None:
        self._directory = directory
        self._setup = setup
        self._parts: list[FeedFormat] = []
        self._at = FeedPosition()
        self._ended = False
        self._looking: asyncio.Task[None] | None = None

    async def open(self, position: bytes | None) -> None:
        """Continue at a stored position."""
        self._parts = msgspec.json.decode((self._directory / PARTS_FILE).read_bytes(), type=list[FeedFormat])
        if position is not None:
            self._at = msgspec.json.decode(position, type=FeedPosition)
        self._looking = asyncio.create_task(self._look(), name="millpy-feed")

    async def _look(self) -> None:
        while not self._ended:
            if self._size() > self._at.offset or self._is_complete():
                self._setup.ready.set()
            await self._setup.clock.sleep(LOOK_EVERY_S)

    def _file(self, part: int) -> Path:
        return self._directory / str(part)

    def _size(self) -> int:
        path = self._file(self._at.part)
        return path.stat().st_size if path.exists() else 0

    def _is_complete(self) -> bool:
        following = self._at.part + 1
        return self._file(following).exists() if following < len(self._parts) else (self._directory / END_FILE).exists()

    async def take(self) -> SourceBatch | None:
        """Return the whole lines that are there, at most a bundle."""
        if self._ended:
            return None
        while True:
            complete = self._is_complete()  # checked before reading, so that nothing can follow the lines that are read
            block = self._read()
            if block or not complete:
                break
            if self._at.part + 1 == len(self._parts):
                self._ended = True
                return self._taken(b"", finished=True)
            self._at = FeedPosition(self._at.part + 1)
        return self._taken(block, finished=False) if block else None

    def _read(self) -> bytes:
        limits = self._setup.limits
        if self._size() <= self._at.offset:
            return b""
        with self._file(self._at.part).open("rb") as file:
            file.seek(self._at.offset)
            block = file.read(limits.bundle_bytes_max)
            block = block[: block.rfind(b"\n") + 1] or _whole_line(block + file.readline())
        if block.count(b"\n") > limits.bundle_records_max:
            lines = block.split(b"\n", limits.bundle_records_max)
            block = block[: len(block) - len(lines[-1])]
        return block

    def _taken(self, block: bytes, *, finished: bool) -> SourceBatch:
        before, part = self._at, self._parts[self._at.part]
        self._at = FeedPosition(before.part, before.offset + len(block), before.line + block.count(b"\n"))
        return SourceBatch(
            format=part.format,
            arrived_at=self._setup.clock.now_us(),
            block=b"" if part.wrapped else block,
            payloads=[b64decode(line) for line in block.splitlines()] if part.wrapped else (),
            header=part.header,
            describe=_describer(part, before.line),
            position=msgspec.json.encode(self._at),
            finished=finished,
        )

    async def acknowledge(self, token: Any) -> None:
        """Do nothing: the position is in the commit."""

    def quiet(self) -> bool:
        """Tell whether the source is idle: never, because the clock must not move the watermark of a recording."""
        return False

    async def close(self) -> None:
        """Stop looking for lines."""
        task, self._looking = self._looking, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _whole_line(line: bytes) -> bytes:
    """Return a line that is longer than a bundle, or nothing while its end is not written yet."""
    return line if line.endswith(b"\n") else b""


def _describer(part: FeedFormat, line: int) -> Callable[[int], str]:
    return lambda row: f"{part.origin}, record {line + row + 1}"
