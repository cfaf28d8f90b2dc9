"""Inputs: what each injector of the graph is fed, as plain lines on disk, whatever it came from.

--input FILE, --input STREAM=FILE   replaces the source of the only, or of the named injector
--generate N                        makes records up for injectors without one
neither                             the files that the graph itself reads
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from millpy.errors import UsageError
from millpy.graph import Graph, InjectorNode
from millpy.injectors.files import Files
from millpy.testing.crash_test.generate import key_fields, payloads
from millpy.testing.crash_test.options import Options
from millpy.testing.crash_test.tape import PARTS_FILE, Part

BOM = b"\xef\xbb\xbf"


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
            path = given[node.name]
            found.append(_from_files(node.name, directory, [path], "csv" if ".csv" in Path(path).suffixes else "json"))
        elif options.generate is not None:
            lines = payloads(node, key_fields(graph, node), options.generate, options.seed)
            count = _write(directory, [Part(origin="generated")], [lines])
            found.append(
                Prepared(node.name, directory, count, f"{sum(count):,} generated records, seed {options.seed}")
            )
        elif isinstance(node.source, Files) and node.source.format in ("json", "csv"):
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


def _from_files(stream: str, directory: Path, paths: Sequence[str], format: str) -> Prepared:
    parts, contents = [], []
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(f"there is no file {path}", hint=f"looked in {Path.cwd()}")
        lines = _lines(Path(path))
        header: tuple[str, ...] = ()
        if format == "csv":
            first = next(lines, b"").decode(errors="replace").rstrip("\r\n")
            header = tuple(next(csv.reader([first]), []))
        parts.append(Part("csv" if format == "csv" else "json", header, origin=Path(path).name))
        contents.append(lines)
    records = _write(directory, parts, contents)
    return Prepared(stream, directory, records, ", ".join(Path(path).name for path in paths))


def _lines(path: Path) -> Any:
    try:
        with cast(
            "AbstractContextManager[IO[bytes]]", gzip.open(path) if path.suffix == ".gz" else path.open("rb")
        ) as file:
            for number, line in enumerate(file):
                yield line.removeprefix(BOM) if number == 0 else line
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="is the file whole?") from error


def _write(directory: Path, parts: Sequence[Part], contents: Sequence[Iterable[bytes]]) -> tuple[int, ...]:
    """Lines that are not blank, each with its newline; a blank line is no record."""
    counts = []
    for number, lines in enumerate(contents):
        count = 0
        with (directory / str(number)).open("wb") as out:
            for line in lines:
                if line.strip():
                    out.write(line.rstrip(b"\n") + b"\n")
                    count += 1
        counts.append(count)
    (directory / PARTS_FILE).write_bytes(msgspec.json.encode(parts))
    return tuple(counts)
