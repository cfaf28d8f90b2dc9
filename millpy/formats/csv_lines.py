"""Separated values in the dialects of SCADA exports."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO

import msgspec

from millpy.errors import GraphError
from millpy.formats.message import BadPart, Format, Message, Part, Reader, check_objects, encoded_names
from millpy.formats.values import cell_writer
from millpy.model.identity import Identity
from millpy.model.record import RecordType

_BOM = b"\xef\xbb\xbf"
_COLUMNS_MAX = 10_000


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Csv(Format):
    """Separated values; each row is a record, and the header names its fields.

    In a file, each line is a row. In a message, the rows are lines, and the header is the first of them unless
    `header=` names the columns. A row that does not fit is a dead letter with its header, so that it can be replayed.
    Cells of columns that are no field are ignored, and a field without a column gets its default.

    Args:
        delimiter: one character between cells.
        decimal: the decimal mark. With a comma, a number that has a point is rejected.
        encoding: the encoding of the text, such as "cp1252"; one in which a newline is one byte.
        null: cells that mean no value; such a cell is None, or the default of its field.
        quote: the character around cells that have delimiters in them, doubled inside; None for none.
        header: True if the first line names the columns; or the names of the columns, if no line does. "" skips one.
        rename: name in the header -> field, for names that are no identifiers.
    """

    delimiter: str
    decimal: str
    encoding: str
    null: tuple[str, ...]
    quote: str | None
    header: bool | tuple[str, ...]
    rename: dict[str, str]

    def __init__(
        self,
        *,
        delimiter: str = ",",
        decimal: str = ".",
        encoding: str = "utf-8",
        null: Sequence[str] = ("",),
        quote: str | None = '"',
        header: bool | Sequence[str] = True,
        rename: dict[str, str] | None = None,
    ) -> None:
        if len(delimiter) != 1 or delimiter in "\r\n\0\"":
            raise GraphError(f"delimiter={delimiter!r} must be one character", hint='for example ";" or "\\t"')
        if decimal not in (".", ",") or decimal == delimiter:
            raise GraphError(
                f"decimal={decimal!r} does not go with delimiter={delimiter!r}", hint='for example decimal=",", delimiter=";"'
            )
        if quote is not None and (len(quote) != 1 or quote in (delimiter, decimal, "\n", "\r")):
            raise GraphError(f"quote={quote!r} must be one character, and not the delimiter", hint="None for no quotes")
        if header is False:
            raise GraphError("header=False does not say what the columns are", hint='header=("device", "at", "value")')
        names: bool | tuple[str, ...] = True if header is True else tuple(header)  # type: ignore[arg-type]
        if isinstance(names, tuple) and (not any(names) or isinstance(header, str)):
            raise GraphError(f"header={header!r} names no columns", hint='header=("device", "at", "value")')
        try:
            name = codecs.lookup(encoding).name
            plain = "\n;A".encode(name) == b"\n;A"
        except (LookupError, TypeError, UnicodeError, AttributeError):
            plain = False
        if not plain:
            raise GraphError(f"encoding={encoding!r} is unknown, or its newline is not one byte", hint='"utf-8", "cp1252"')
        values = {
            "delimiter": delimiter, "decimal": decimal, "encoding": name, "null": tuple(null), "quote": quote,
            "header": names, "rename": dict(rename or {}),
        }  # fmt: skip
        for own, value in values.items():
            object.__setattr__(self, own, value)

    def __hash__(self) -> int:
        return hash((self.delimiter, self.decimal, self.encoding, self.null, self.quote, self.header))

    @property
    def has_header(self) -> bool:
        """Whether the first line of a file names the columns."""
        return self.header is True

    def identity(self) -> Identity:
        """Describe the dialect."""
        header = {} if self.header is True else {"header": list(self.header)}  # type: ignore[arg-type]
        rename = {"rename": {"dict": sorted(map(list, self.rename.items()))}} if self.rename else {}
        plain = {"delimiter": self.delimiter, "decimal": self.decimal, "encoding": self.encoding, "quote": self.quote}
        return {"kind": "separated_values", **plain, "null": list(self.null), **header, **rename}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class and the names. Raises GraphError."""
        check_objects(record_type, self)
        known = set(encoded_names(record_type).values())
        for column, name in self.rename.items():
            if name not in known:
                raise GraphError(f"rename={{{column!r}: {name!r}}}: {record_type.struct.__name__} has no such field")

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that reads the rows of a message."""
        fields = {name: own for own, name in encoded_names(record_type).items()}
        defaults = {f.encode_name for f in msgspec.structs.fields(record_type.struct) if not f.required}
        null, rename = frozenset(self.null), self.rename

        Column = tuple[int, bytes, Callable[[str], bytes], bytes | None]

        def columns_of(names: Sequence[str]) -> tuple[int, list[Column]]:
            """Return the number of columns; and for each field, its column, its name, and how a cell is written."""
            if len(names) > _COLUMNS_MAX:
                raise ValueError(f"the header has more than {_COLUMNS_MAX} columns")
            named = [rename.get(name.strip(), name.strip()) for name in names]
            wanted = [name for name in named if name in fields]
            if len(set(wanted)) < len(wanted):
                raise ValueError("two columns have the same name")
            found: list[Column] = []
            for index, name in enumerate(named):
                own = fields.get(name)
                if own is None:
                    continue
                # What an empty cell becomes: None, or nothing so that the default holds, or else an error.
                empty = b"null" if record_type.is_nullable(own) else None if name in defaults else b"null"
                write = cell_writer(record_type.field_type(own), self.decimal)
                found.append((index, msgspec.json.encode(name) + b":", write, empty))
            if not found:
                raise ValueError(f"no column is a field of {record_type.struct.__name__}: {', '.join(names)[:200]}")
            return len(named), found

        def cells_of(line: str) -> list[str]:
            if self.quote is None:
                return line.split(self.delimiter)
            if self.quote not in line:
                return line.split(self.delimiter)
            return next(csv.reader([line], delimiter=self.delimiter, quotechar=self.quote, strict=True))

        known: dict[str, tuple[int, list[Column]]] = {}

        def columns_for(header: str) -> tuple[int, list[Column]]:
            if header not in known:
                if len(known) > 100:
                    known.clear()
                known[header] = columns_of(cells_of(header))
            return known[header]

        fixed = None if self.header is True else columns_of(self.header)  # type: ignore[arg-type]

        def row_of(line: str, count: int, columns: list[Column]) -> bytes:
            cells = cells_of(line)
            if len(cells) != count:
                raise ValueError(f"{len(cells)} cells instead of {count}")
            parts = []
            for index, name, write, empty in columns:
                cell = cells[index]
                if cell in null:
                    if empty is not None:
                        parts.append(name + empty)
                else:
                    parts.append(name + write(cell))
            return b"{" + b",".join(parts) + b"}"

        def read(message: Message) -> Iterable[Part]:
            text = message.payload.removeprefix(_BOM).decode(self.encoding)
            lines = text.split("\n") if self.quote is None or self.quote not in text else _records(text, self.quote)
            start, header = 0, b""
            if fixed is not None:
                count, columns = fixed
            elif message.header is not None:
                count, columns = columns_for(message.header.removeprefix(_BOM).decode(self.encoding).rstrip("\r\n"))
            else:
                first = next((i for i, line in enumerate(lines) if line.strip()), len(lines))
                if first == len(lines):
                    return
                count, columns = columns_for(lines[first].removesuffix("\r"))
                start, header = first + 1, lines[first].encode(self.encoding) + b"\n"
            for line in lines[start:]:
                if not line.strip():
                    continue
                try:
                    yield row_of(line.removesuffix("\r"), count, columns)
                except (ValueError, csv.Error) as error:
                    yield BadPart(header + line.encode(self.encoding), str(error))

        return read


def _records(text: str, quote: str) -> list[str]:
    """Split text at newlines outside of quotes; if quotes do not match, at every newline."""
    if text.count(quote) % 2:
        return text.split("\n")
    found: list[str] = []
    waiting: list[str] = []
    odd = False
    for line in StringIO(text, newline="\n"):
        waiting.append(line)
        odd ^= line.count(quote) % 2 == 1
        if not odd:
            found.append("".join(waiting).removesuffix("\n"))
            waiting.clear()
    if waiting:
        found.append("".join(waiting))
    return found
