"""Separated values in the dialects of SCADA exports."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from uuid import UUID

import msgspec

from millpy.errors import GraphError
from millpy.formats.byte_order_marks import UTF_8, decoded, is_wide
from millpy.formats.message import BadPart, FileHead, Format, Message, Part, Reader, check_objects, encoded_names
from millpy.formats.values import cell_writer
from millpy.model.identity import Identity
from millpy.model.record import RecordType

_FOR_EXCEL = re.compile(r"sep=.")
_COLUMNS_MAX = 10_000
_HEADERS_MAX = 100
SKIP_MAX = 1_000
HEADER_CHARACTERS_MAX = 65_536
UNCLOSED_MAX = 100
"""Quotes of a message that are not closed before its other quotes only count inside their lines."""
_TRIMMED = (int, float, bool, Decimal, datetime, date, UUID)
_LONE_RETURN = re.compile(r"\r(?!\n)")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Csv(Format):
    """Separated values; each row is a record, and the header names its fields.

    In a file, each line is a row. In a message, the rows are lines, and the header is the first of them unless
    `header=` names the columns. A row that does not fit is a dead letter with its header, so that it can be replayed.
    Cells of columns that are no field are ignored, and a field without a column gets its default.

    Exports and data loggers put other lines around the header: `Csv(skip=1, skip_below=2)` reads Campbell's TOA5.

    Args:
        delimiter: one character between cells.
        decimal: the decimal mark. With a comma, a number that has a point is rejected.
        encoding: the encoding of the text, such as "cp1252" or "utf-16"; UTF-16, UTF-32, or one in which a newline is
            one byte. What begins with the byte order mark of UTF-8 is UTF-8.
        null: cells that mean no value; such a cell is None, or the default of its field. In a str that may not be None,
            and has no default, an empty cell is empty text. Space around a cell counts only in a field of text.
        quote: the character around cells that have delimiters in them, doubled inside; None or "" for none.
        header: True if the first line names the columns; or the names of the columns, if no line does. "" skips one.
        rename: name in the header -> field, for names that are no identifiers. Columns that get the same field are
            joined by a space, in the order of the header: a date and a time of day.
        skip: the number of lines before the header, such as a title, or before the first row if `header=` names the
            columns; at most 1,000. Blank lines count.
        skip_below: the number of lines under the header, such as one of units; at most 1,000.
        comment: ASCII text with which lines begin that are no rows, such as "#"; None for none. Behind `skip` lines,
            the header is the first line that does not begin with it.
    """

    delimiter: str
    decimal: str
    encoding: str
    null: tuple[str, ...]
    quote: str | None
    header: bool | tuple[str, ...]
    rename: dict[str, str]
    skip: int
    skip_below: int
    comment: str | None

    def __init__(  # noqa: PLR0913 - what makes dialects differ
        self,
        *,
        delimiter: str = ",",
        decimal: str = ".",
        encoding: str = "utf-8",
        null: Sequence[str] = ("",),
        quote: str | None = '"',
        header: bool | Sequence[str] = True,
        rename: dict[str, str] | None = None,
        skip: int = 0,
        skip_below: int = 0,
        comment: str | None = None,
    ) -> None:
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n\0"':
            raise GraphError(f"delimiter={delimiter!r} must be one character", hint='for example ";" or "\\t"')
        if decimal not in (".", ",") or decimal == delimiter:
            raise GraphError(
                f"decimal={decimal!r} does not go with delimiter={delimiter!r}",
                hint='for example decimal=",", delimiter=";"',
            )
        quote = quote or None
        if quote is not None and (len(quote) != 1 or quote in (delimiter, decimal, "\n", "\r")):
            raise GraphError(f"quote={quote!r} must be one character, and not the delimiter", hint="None for no quotes")
        if isinstance(null, str) or not all(isinstance(cell, str) for cell in null):
            raise GraphError(f"null={null!r} is not a list of texts", hint='null=["", "---"]')
        if rename is not None and not isinstance(rename, dict):
            raise GraphError(f"rename={rename!r} is not a dict", hint='rename={"Temperature [C]": "temperature"}')
        if header is False:
            raise GraphError("header=False does not say what the columns are", hint='header=("device", "at", "value")')
        names: bool | tuple[str, ...] = True if header is True else tuple(header)
        if isinstance(names, tuple) and (not any(names) or isinstance(header, str)):
            raise GraphError(f"header={header!r} names no columns", hint='header=("device", "at", "value")')
        _check_other_lines(skip, skip_below, has_header=header is True)
        if comment is not None and not _is_comment(comment, delimiter, quote):
            raise GraphError(
                f"comment={comment!r} cannot tell comments from rows",
                hint='for example "#": visible ASCII characters that do not begin with the delimiter or the quote',
            )
        try:
            name = codecs.lookup(encoding).name
            plain = is_wide(name) or "\n;A".encode(name) == b"\n;A"
        except (LookupError, TypeError, UnicodeError, AttributeError):
            plain = False
        if not plain:
            raise GraphError(
                f"encoding={encoding!r} is unknown, or its newline is not one byte",
                hint='for example "utf-8", "cp1252"',
            )
        values = {
            "delimiter": delimiter, "decimal": decimal, "encoding": name, "null": tuple(null), "quote": quote,
            "header": names, "rename": dict(rename or {}), "skip": skip, "skip_below": skip_below, "comment": comment,
        }  # fmt: skip
        for own, value in values.items():
            object.__setattr__(self, own, value)

    def __hash__(self) -> int:
        return hash((self.delimiter, self.decimal, self.encoding, self.null, self.quote, self.header, self.skip))

    @property
    def head(self) -> FileHead:
        """The lines of a file that are no rows."""
        return FileHead(self.header is True, self.skip, self.skip_below, (self.comment or "").encode())

    @property
    def text_encoding(self) -> str:
        """The encoding of a file without a mark."""
        return self.encoding

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
        others = {"skip": self.skip, "skip_below": self.skip_below, "comment": self.comment}
        given = {name: value for name, value in others.items() if value}
        return {"kind": "separated_values", **plain, "null": list(self.null), **header, **rename, **given}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class and the names. Raises GraphError."""
        check_objects(record_type, self)
        known = set(encoded_names(record_type).values())
        for column, name in self.rename.items():
            if name not in known:
                raise GraphError(f"rename={{{column!r}: {name!r}}}: {record_type.struct.__name__} has no such field")

    def cells(self, line: str, *, skips_space: bool = False) -> list[str]:
        """Split a line, in which space may come before a quote if `skips_space`. Raises csv.Error."""
        if self.quote is None or self.quote not in line:
            return line.split(self.delimiter)
        skips = skips_space and self.delimiter != " "
        lines = csv.reader([line], delimiter=self.delimiter, quotechar=self.quote, strict=True, skipinitialspace=skips)
        return next(lines)

    def header_names(self, line: bytes) -> Sequence[str]:
        """Return the names of the columns of a file, renamed. Raises ValueError."""
        text, _ = decoded(line, self.encoding)
        return [name for name, _ in self.places(self.header_cells(text))]

    def places(self, cells: Sequence[str]) -> list[tuple[str, list[int]]]:
        """Return the names of columns, renamed, and the places of each; different columns of one name are joined."""
        found: list[tuple[str, list[int]]] = []
        joined: dict[str, list[int]] = {}
        columns = [cell.strip() for cell in cells]
        for place, column in enumerate(columns):
            name = self.rename.get(column, column)
            if column in self.rename and name in joined and column not in columns[:place]:
                joined[name].append(place)
                continue
            found.append((name, [place]))
            if column in self.rename:
                joined.setdefault(name, found[-1][1])
        return found

    def header_cells(self, text: str) -> Sequence[str]:
        """Split a header. Raises ValueError."""
        plain = text.rstrip("\r\n")
        if _LONE_RETURN.search(plain):
            raise ValueError("its lines end in a carriage return alone: convert them to newlines")
        if _FOR_EXCEL.fullmatch(plain):
            raise ValueError("it is a note for Excel: pass over it by skip=1, or remove that line")
        try:
            return self.cells(plain, skips_space=True)
        except csv.Error as error:
            raise ValueError(str(error)) from error

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that reads the rows of a message."""
        return _CsvReader(self, record_type).read


def _check_other_lines(skip: object, skip_below: object, *, has_header: bool) -> None:
    """Check numbers of lines around the header. Raises GraphError."""
    for setting, count in (("skip", skip), ("skip_below", skip_below)):
        if type(count) is not int or not 0 <= count <= SKIP_MAX:
            raise GraphError(f"{setting}={count!r} is not a number of lines", hint=f"from 0 to {SKIP_MAX:,}")
    if skip_below and not has_header:
        raise GraphError(f"skip_below={skip_below!r} without a header", hint="give the number of all lines as skip=")


def _is_comment(comment: object, delimiter: str, quote: str | None) -> bool:
    """Tell whether no row has to begin like this."""
    if not isinstance(comment, str) or not comment.isascii() or not comment.isprintable() or not comment.strip():
        return False
    return comment[0] not in (delimiter, quote, " ")


class _CsvReader:
    """Reads the messages of one dialect into one record type."""

    def __init__(self, dialect: Csv, record_type: RecordType) -> None:
        self._dialect = dialect
        self._type = record_type
        self._fields = {name: own for own, name in encoded_names(record_type).items()}
        self._defaults = {f.encode_name for f in msgspec.structs.fields(record_type.struct) if not f.required}
        self._null = frozenset(dialect.null)
        self._record = None if dialect.quote is None else _record_pattern(dialect.delimiter, dialect.quote)
        self._known: dict[str, _HeaderColumns] = {}
        self._fixed = None if isinstance(dialect.header, bool) else self._columns_of(dialect.header)

    def read(self, message: Message) -> Iterable[Part]:
        """Yield the rows of a message."""
        dialect = self._dialect
        columns, head, encoding = self._fixed, b"", dialect.encoding
        if message.header is not None:
            names, encoding = decoded(message.header, encoding)
            columns = self._columns_under(names) if columns is None else columns
        text, encoding = decoded(message.payload, encoding)
        if message.header is None and dialect.skip and text.strip():
            text, head = _rest_of(text, dialect.skip), b"\n" * dialect.skip
        is_quoted = self._record is not None and (dialect.quote or "") in text
        lines = _records(text, self._record) if self._record is not None and is_quoted else text.split("\n")
        mark = UTF_8 if encoding != dialect.encoding else b""
        if columns is None:
            first = next((i for i, line in enumerate(lines) if self._counts(line)), None)
            if first is None:
                return
            columns = self._columns_under(lines[first])
            head += lines[first].encode(encoding) + b"\n" * (1 + dialect.skip_below)
            lines = lines[first + 1 + dialect.skip_below :]
        for line in lines:
            if not self._counts(line):
                continue
            try:
                yield self._row(line.removesuffix("\r"), columns)
            except (ValueError, csv.Error) as error:
                part = head + line.encode(encoding)
                unmarked = b"\n" if part.startswith(UTF_8) else b""  # no mark when it is read again
                yield BadPart((mark or unmarked) + part, _reason(error, message))

    def _counts(self, line: str) -> bool:
        """Tell whether a line is neither blank nor a comment."""
        comment = self._dialect.comment
        return bool(line.strip()) and not (comment is not None and line.startswith(comment))

    def _row(self, line: str, columns: _HeaderColumns) -> bytes:
        cells = self._dialect.cells(line)
        if len(cells) != columns.count:
            raise ValueError(f"{len(cells)} cells instead of {columns.count}")
        parts = []
        for index, others, name, write, empty, nulls, is_text in columns.fields:
            cell = cells[index] if is_text else cells[index].strip()
            is_null = cell in nulls
            if others:
                more = [cells[place].strip() for place in others]
                is_null = is_null or not nulls.isdisjoint(more)
                cell = " ".join((cell.strip(), *more))
            if not is_null:
                parts.append(name + write(cell))
            elif empty is not None:
                parts.append(name + empty)
        return b"{" + b",".join(parts) + b"}"

    def _columns_under(self, header: str) -> _HeaderColumns:
        found = self._known.get(header)
        if found is None:
            if len(header) > HEADER_CHARACTERS_MAX:
                raise ValueError(f"its header has more than {HEADER_CHARACTERS_MAX:,} characters")
            if len(self._known) >= _HEADERS_MAX:
                self._known.clear()
            found = self._known[header] = self._columns_of(self._dialect.header_cells(header))
        return found

    def _columns_of(self, names: Sequence[str]) -> _HeaderColumns:
        if len(names) > _COLUMNS_MAX:
            raise ValueError(f"the header has more than {_COLUMNS_MAX} columns")
        found = _HeaderColumns(len(names), [])
        seen = set()
        for name, (index, *others) in self._dialect.places(names):
            own = self._fields.get(name)
            if own is None:
                continue
            if name in seen:
                raise ValueError(f"two columns are {name!r}")
            seen.add(name)
            # What an empty cell becomes: None, or nothing so that the default holds, or else an error.
            empty = None if name in self._defaults and not self._type.is_nullable(own) else b"null"
            kind = self._type.field_type(own)
            write = cell_writer(kind, self._dialect.decimal)
            # A text that must be there may be empty.
            is_needed = kind is str and name not in self._defaults and not self._type.is_nullable(own)
            key, is_text = msgspec.json.encode(name) + b":", kind not in _TRIMMED
            nulls = self._null if is_text and not others else frozenset(text.strip() for text in self._null)
            nulls = nulls - {""} if is_needed and not others else nulls
            found.fields.append((index, others, key, write, empty, nulls, is_text))
        if not found.fields:
            raise ValueError(f"no column is a field of {self._type.struct.__name__}: {', '.join(names)[:200]}")
        return found


def _rest_of(text: str, count: int) -> str:
    """Return what is behind some lines of a text. Raises ValueError."""
    *skipped, rest = text.split("\n", count)
    if len(skipped) < count:
        raise ValueError(f"it has {len(skipped) + 1} lines, of which skip={count} passes over all")
    return rest


def _reason(error: Exception, message: Message) -> str:
    if isinstance(error, csv.Error) and "unexpected end of data" in str(error):
        more = "" if message.header is None else "; in a file, each line is a row, and a cell cannot have newlines"
        return f"a quoted cell does not end{more}"
    return str(error)


@dataclass(frozen=True, slots=True)
class _HeaderColumns:
    """The columns under a header.

    Attributes:
        count: how many there are.
        fields: for each field, its column, the columns that are joined to it, its name as JSON, how its cells are
            written, what one without a value becomes, which cells those are, and whether space around a cell counts.
    """

    count: int
    fields: list[tuple[int, list[int], bytes, Callable[[str], bytes], bytes | None, frozenset[str], bool]]


def _record_pattern(delimiter: str, quote: str) -> re.Pattern[str]:
    """Return a pattern of one record, up to its newline. A quote counts only at the beginning of a cell.

    Each character can match in one way only, so matching is linear, and remembers no place to go back to.
    """
    d, q = re.escape(delimiter), re.escape(quote)
    cell = f"(?:{q}[^{q}]*+(?:{q}{q}[^{q}]*+)*+{q}(?!{q})[^{d}\\n]*+|(?!{q})[^{d}\\n]*+)"
    return re.compile(f"{cell}(?:{d}{cell})*+(?=\\n|\\Z)")


def _records(text: str, record: re.Pattern[str]) -> list[str]:
    """Split text at newlines outside of quotes; a quote that is not closed spoils its own line.

    The search for each quote that is not closed reads the rest of the text: `UNCLOSED_MAX` bounds their number.
    """
    found, start, unclosed = [], 0, 0
    while start < len(text):
        whole = record.match(text, start) if unclosed < UNCLOSED_MAX else None
        unclosed += whole is None
        end = text.find("\n", start) if whole is None else whole.end()
        end = len(text) if end < 0 else end
        found.append(text[start:end])
        start = end + 1
    return found
