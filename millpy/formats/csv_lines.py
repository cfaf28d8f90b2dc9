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
_HEADERS_MAX = 100


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
        quote: the character around cells that have delimiters in them, doubled inside; None or "" for none.
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
        if len(delimiter) != 1 or delimiter in '\r\n\0"':
            raise GraphError(f"delimiter={delimiter!r} must be one character", hint='for example ";" or "\\t"')
        if decimal not in (".", ",") or decimal == delimiter:
            raise GraphError(
                f"decimal={decimal!r} does not go with delimiter={delimiter!r}",
                hint='for example decimal=",", delimiter=";"',
            )
        quote = quote or None
        if quote is not None and (len(quote) != 1 or quote in (delimiter, decimal, "\n", "\r")):
            raise GraphError(f"quote={quote!r} must be one character, and not the delimiter", hint="None for no quotes")
        if header is False:
            raise GraphError("header=False does not say what the columns are", hint='header=("device", "at", "value")')
        names: bool | tuple[str, ...] = True if header is True else tuple(header)
        if isinstance(names, tuple) and (not any(names) or isinstance(header, str)):
            raise GraphError(f"header={header!r} names no columns", hint='header=("device", "at", "value")')
        try:
            name = codecs.lookup(encoding).name
            plain = "\n;A".encode(name) == b"\n;A"
        except (LookupError, TypeError, UnicodeError, AttributeError):
            plain = False
        if not plain:
            raise GraphError(
                f"encoding={encoding!r} is unknown, or its newline is not one byte",
                hint='for example "utf-8", "cp1252"',
            )
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
        plain = {
            "delimiter": self.delimiter,
            "decimal": self.decimal,
            "encoding": self.encoding,
            "quote": self.quote or "",
        }
        return {"kind": "separated_values", **plain, "null": list(self.null), **header, **rename}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class and the names. Raises GraphError."""
        check_objects(record_type, self)
        known = set(encoded_names(record_type).values())
        for column, name in self.rename.items():
            if name not in known:
                raise GraphError(f"rename={{{column!r}: {name!r}}}: {record_type.struct.__name__} has no such field")

    def cells(self, line: str) -> list[str]:
        """Split a line. Raises csv.Error."""
        if self.quote is None or self.quote not in line:
            return line.split(self.delimiter)
        return next(csv.reader([line], delimiter=self.delimiter, quotechar=self.quote, strict=True))

    def header_names(self, line: bytes) -> Sequence[str]:
        """Return the names of the columns of a file, renamed. Raises ValueError."""
        try:
            cells = self.cells(line.removeprefix(_BOM).decode(self.encoding).rstrip("\r\n"))
        except csv.Error as error:
            raise ValueError(str(error)) from error
        return [self.rename.get(cell.strip(), cell.strip()) for cell in cells]

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that reads the rows of a message."""
        return _CsvReader(self, record_type).read


class _CsvReader:
    """Reads the messages of one dialect into one record type."""

    def __init__(self, dialect: Csv, record_type: RecordType) -> None:
        self._dialect = dialect
        self._type = record_type
        self._fields = {name: own for own, name in encoded_names(record_type).items()}
        self._defaults = {f.encode_name for f in msgspec.structs.fields(record_type.struct) if not f.required}
        self._null = frozenset(dialect.null)
        self._known: dict[str, _HeaderColumns] = {}
        self._fixed = None if isinstance(dialect.header, bool) else self._columns_of(dialect.header)

    def read(self, message: Message) -> Iterable[Part]:
        """Yield the rows of a message."""
        dialect = self._dialect
        text = message.payload.removeprefix(_BOM).decode(dialect.encoding)
        quoted = dialect.quote is not None and dialect.quote in text
        lines = _records(text, dialect.quote or "") if quoted else text.split("\n")
        columns, header = self._fixed, b""
        if columns is None and message.header is not None:
            columns = self._columns_under(message.header.removeprefix(_BOM).decode(dialect.encoding))
        if columns is None:
            first = next((i for i, line in enumerate(lines) if line.strip()), None)
            if first is None:
                return
            columns, header = self._columns_under(lines[first]), lines[first].encode(dialect.encoding) + b"\n"
            lines = lines[first + 1 :]
        for line in lines:
            if not line.strip():
                continue
            try:
                yield self._row(line.removesuffix("\r"), columns)
            except (ValueError, csv.Error) as error:
                yield BadPart(header + line.encode(dialect.encoding), str(error))

    def _row(self, line: str, columns: _HeaderColumns) -> bytes:
        cells = self._dialect.cells(line)
        if len(cells) != columns.count:
            raise ValueError(f"{len(cells)} cells instead of {columns.count}")
        parts = []
        for index, name, write, empty in columns.fields:
            cell = cells[index]
            if cell not in self._null:
                parts.append(name + write(cell))
            elif empty is not None:
                parts.append(name + empty)
        return b"{" + b",".join(parts) + b"}"

    def _columns_under(self, header: str) -> _HeaderColumns:
        found = self._known.get(header)
        if found is None:
            if len(self._known) >= _HEADERS_MAX:
                self._known.clear()
            found = self._known[header] = self._columns_of(self._dialect.cells(header.rstrip("\r\n")))
        return found

    def _columns_of(self, names: Sequence[str]) -> _HeaderColumns:
        if len(names) > _COLUMNS_MAX:
            raise ValueError(f"the header has more than {_COLUMNS_MAX} columns")
        rename = self._dialect.rename
        found = _HeaderColumns(len(names), [])
        seen = set()
        for index, column in enumerate(names):
            name = rename.get(column.strip(), column.strip())
            own = self._fields.get(name)
            if own is None:
                continue
            if name in seen:
                raise ValueError(f"two columns are {name!r}")
            seen.add(name)
            # What an empty cell becomes: None, or nothing so that the default holds, or else an error.
            empty = None if name in self._defaults and not self._type.is_nullable(own) else b"null"
            write = cell_writer(self._type.field_type(own), self._dialect.decimal)
            found.fields.append((index, msgspec.json.encode(name) + b":", write, empty))
        if not found.fields:
            raise ValueError(f"no column is a field of {self._type.struct.__name__}: {', '.join(names)[:200]}")
        return found


@dataclass(frozen=True, slots=True)
class _HeaderColumns:
    """The columns under a header.

    Attributes:
        count: how many there are.
        fields: for each field, its column, its name as JSON, how its cells are written, and what an empty one becomes.
    """

    count: int
    fields: list[tuple[int, bytes, Callable[[str], bytes], bytes | None]]


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
