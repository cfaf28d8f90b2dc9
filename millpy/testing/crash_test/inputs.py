"""Inputs: what each injector of the graph is fed, as plain lines on disk, whatever it came from.

--input FILE, --input STREAM=FILE   replaces the source of the only, or of the named injector
--generate N                        makes records up for injectors without one
neither                             the files that the graph itself reads
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from millpy.errors import ConfigError, SourceUnavailableError, UsageError
from millpy.graph import Graph, InjectorNode
from millpy.injectors.files import Files
from millpy.injectors.files_agenda import FixedAgenda, Notes
from millpy.injectors.files_lines import Format, Piece
from millpy.injectors.files_reading import Reading
from millpy.limits import Limits
from millpy.testing.crash_test.generate import key_fields, payloads
from millpy.testing.crash_test.options import Options
from millpy.testing.crash_test.tape import PARTS_FILE, Part


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of one injector: `directory` is a whole tape, but for its end.

    Attributes:
        records: lines of each part.
        origin: where it came from, for people.
    """

    stream: str
    directory: Path
    records: tuple[int, ...]
    origin: str

    @property
    def total(self) -> int:
        """Lines of all parts."""
        return sum(self.records)


def injectors(graph: Graph) -> list[InjectorNode]:
    """The injectors of a graph, in order."""
    return [node for node in graph.nodes if isinstance(node, InjectorNode)]


def prepare(graph: Graph, options: Options, place: Path) -> list[Prepared]:
    """Bring the input of every injector to disk.

    Raises:
        UsageError: an injector has no input, an input no injector, or a file cannot be read.
    """
    given = _given(options.inputs, [node.name for node in injectors(graph)])
    found = []
    for node in injectors(graph):
        directory = place / node.name
        directory.mkdir(parents=True)
        if node.name in given:
            found.append(_from_files(node.name, directory, [given[node.name]], None))
        elif options.generate is not None:
            tape = _TapeWriter(directory)
            tape.write(
                Part(origin="generated"), payloads(node, key_fields(graph, node), options.generate, options.seed)
            )
            tape.close()
            found.append(Prepared(node.name, directory, tuple(tape.counts), f"generated with seed {options.seed}"))
        elif isinstance(node.source, Files):
            found.append(_from_files(node.name, directory, node.source.paths, node.source.format))
        else:
            raise UsageError(
                f"{node.name!r} reads from {node.source!r}, which a crash test does not touch",
                hint=f"give its records with --input {node.name}=FILE, or --generate 100000",
            )
    for prepared in found:
        if not prepared.total:
            raise UsageError(f"there are no records in {prepared.origin}", hint="a crash test needs some thousands")
    return found


def _given(inputs: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for text in inputs:
        name, equals, path = text.partition("=")
        if not equals or name not in names:
            if equals and not Path(text).exists():
                raise UsageError(f"the graph has no injector {name!r}", hint=f"it has: {', '.join(names)}")
            if len(names) > 1:
                raise UsageError(
                    f"the graph has several injectors: {', '.join(names)}", hint=f"say which: --input {names[0]}={text}"
                )
            name, path = names[0], text
        if name in given:
            raise UsageError(f"{name!r} has two inputs", hint="give one file for each injector")
        given[name] = path
    return given


def _from_files(stream: str, directory: Path, paths: Sequence[str], format: Format | None) -> Prepared:
    """Read files as the graph's own source would, down to its idea of a record."""
    notes = Notes.recovered({})
    agenda = FixedAgenda(tuple(paths), notes, lambda _: True, lambda path, why: None)
    reading = Reading(agenda, notes, format=format, broken="stop", fields=(), limits=Limits())
    tape = _TapeWriter(directory)
    try:
        reading.open(None)
        finished = False
        while not finished and (piece := reading.read()) is not None:
            tape.add(piece)
            finished = piece.finished
    except (ConfigError, SourceUnavailableError) as error:
        raise UsageError(error.message, hint=error.hint) from error
    finally:
        reading.close()
        tape.close()
    return Prepared(stream, directory, tuple(tape.counts), ", ".join(Path(path).name for path in paths))


class _TapeWriter:
    """Writes records to a tape that is not fed yet, a part for each way of writing them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: list[Part] = []
        self._out: IO[bytes] | None = None
        self.counts: list[int] = []

    def add(self, piece: Piece) -> None:
        """What was read of a file. Rows of Parquet become JSON, which holds the same values."""
        origin = Path(piece.after.path).name
        if piece.batch is not None:
            rows = piece.batch.to_pylist(maps_as_pydicts="strict")
            self.write(Part(origin=origin), (msgspec.json.encode(row) for row in rows))
        elif piece.payloads:
            part = Part("csv" if piece.format == "csv" else "json", piece.header, wrapped=True, origin=origin)
            self.write(part, map(b64encode, piece.payloads))
        elif piece.block:
            part = Part("csv" if piece.format == "csv" else "json", piece.header, origin=origin)
            self.write(part, piece.block.split(b"\n"))

    def write(self, part: Part, lines: Iterable[bytes]) -> None:
        """Lines that are not blank, which are no records."""
        if not self._parts or self._parts[-1] != part:
            self._shut()
            self._out = (self._directory / str(len(self._parts))).open("wb")
            self._parts.append(part)
            self.counts.append(0)
        assert self._out is not None
        kept = [line for line in lines if line.strip()]
        self._out.write(b"".join(line + b"\n" for line in kept))
        self.counts[-1] += len(kept)

    def _shut(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None

    def close(self) -> None:
        """Say what the parts are."""
        self._shut()
        (self._directory / PARTS_FILE).write_bytes(msgspec.json.encode(self._parts))
