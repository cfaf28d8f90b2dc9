"""The input of each injector of the graph, as plain lines on disk, whatever its origin.

--input FILE, --input STREAM=FILE   replaces the source of the only injector, or of the named one
--generate N                        generates records for injectors without an input
neither                             the files that the graph itself reads
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from millpy.clock import SystemClock
from millpy.errors import ConfigError, SourceUnavailableError, UsageError
from millpy.graph import Graph
from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.sources.files.source import Files
from millpy.testing.crash_test.feed_source import PARTS_FILE, FeedFormat
from millpy.testing.crash_test.generate import key_fields, payloads
from millpy.testing.crash_test.options import Options


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """The input of one injector; `directory` is a complete feed, without its end.

    Attributes:
        records: the lines of each part.
        origin: where the lines come from, for the report.
    """

    stream: str
    directory: Path
    records: tuple[int, ...]
    origin: str

    @property
    def total(self) -> int:
        """The number of lines of all parts."""
        return sum(self.records)


def prepare(graph: Graph, options: Options, place: Path) -> list[PreparedInput]:
    """Write the input of every injector to disk.

    Raises:
        UsageError: an injector has no input, an input no injector, or a file cannot be read.
    """
    given = _given(options.inputs, [node.name for node in graph.injectors()])
    found = []
    for node in graph.injectors():
        directory = place / node.name
        directory.mkdir(parents=True)
        if node.name in given:
            found.append(_from_source(node.name, Files(given[node.name]), directory))
        elif options.generate is not None:
            writer = _FeedWriter(directory)
            writer.write(
                FeedFormat(origin="generated"), payloads(node, key_fields(graph, node), options.generate, options.seed)
            )
            writer.close()
            found.append(
                PreparedInput(node.name, directory, tuple(writer.counts), f"generated with seed {options.seed}")
            )
        elif node.source.ends():
            found.append(_from_source(node.name, node.source, directory))
        else:
            raise UsageError(
                f"{node.name!r} reads from {node.source!r}, which a crash test does not read",
                hint=f"give its records with --input {node.name}=FILE, or --generate 100000",
            )
    for prepared in found:
        if not prepared.total:
            raise UsageError(
                f"no records in {prepared.origin}", hint="give a file with some thousand records, or --generate 100000"
            )
    return found


def _given(inputs: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for text in inputs:
        name, equals, path = text.partition("=")
        if not equals or name not in names:
            if equals and not Path(text).exists():
                raise UsageError(f"the graph has no injector named {name!r}", hint=f"it has: {', '.join(names)}")
            if len(names) > 1:
                raise UsageError(
                    f"the graph has several injectors: {', '.join(names)}", hint=f"name one: --input {names[0]}={text}"
                )
            name, path = names[0], text
        if name in given:
            raise UsageError(f"{name!r} has two inputs", hint="give one file for each injector")
        given[name] = path
    return given


def _from_source(stream: str, source: Source, directory: Path) -> PreparedInput:
    """Read a source to its end."""
    writer = _FeedWriter(directory)
    try:
        asyncio.run(_read_to_the_end(stream, source, writer))
    except (ConfigError, SourceUnavailableError) as error:
        raise UsageError(error.message, hint=error.hint) from error
    finally:
        writer.close()
    return PreparedInput(stream, directory, tuple(writer.counts), ", ".join(writer.origins()) or repr(source))


async def _read_to_the_end(stream: str, source: Source, writer: _FeedWriter) -> None:
    for partition in source.partitions():
        ready = asyncio.Event()
        setup = SourceSetup(
            graph="crash_test", stream=stream, partition=partition, limits=Limits(), clock=SystemClock(), ready=ready
        )
        injector = source.connect(setup)
        try:
            await injector.open(None)
            finished = False
            while not finished:
                ready.clear()
                batch = await injector.take()
                if batch is None:
                    await ready.wait()
                    continue
                writer.add(batch)
                await injector.acknowledge(batch.token)
                finished = batch.finished
        finally:
            await injector.close()


class _FeedWriter:
    """Writes prepared input to disk, with a part for each format."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: list[FeedFormat] = []
        self._out: IO[bytes] | None = None
        self.counts: list[int] = []

    def add(self, piece: SourceBatch) -> None:
        """Write a batch of a source. Rows of Parquet become JSON, which holds the same values."""
        origin = piece.origin
        if piece.batch is not None:
            rows = piece.batch.to_pylist(maps_as_pydicts="strict")
            self.write(FeedFormat(origin=origin), (msgspec.json.encode(row) for row in rows))
        elif piece.payloads:
            part = FeedFormat(
                "csv" if piece.format == "csv" else "json", tuple(piece.header), wrapped=True, origin=origin
            )
            self.write(part, map(b64encode, piece.payloads))
        elif piece.block:
            part = FeedFormat("csv" if piece.format == "csv" else "json", tuple(piece.header), origin=origin)
            self.write(part, piece.block.split(b"\n"))

    def write(self, part: FeedFormat, lines: Iterable[bytes]) -> None:
        """Write lines; skip blank lines, which are no records."""
        if not self._parts or self._parts[-1] != part:
            self._shut()
            self._out = (self._directory / str(len(self._parts))).open("wb")
            self._parts.append(part)
            self.counts.append(0)
        assert self._out is not None
        kept = [line for line in lines if line.strip()]
        self._out.write(b"".join(line + b"\n" for line in kept))
        self.counts[-1] += len(kept)

    def origins(self) -> list[str]:
        """Return where the lines came from, each origin once."""
        return [origin for origin in dict.fromkeys(part.origin for part in self._parts) if origin]

    def _shut(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None

    def close(self) -> None:
        """Write the description of the parts."""
        self._shut()
        (self._directory / PARTS_FILE).write_bytes(msgspec.json.encode(self._parts))
