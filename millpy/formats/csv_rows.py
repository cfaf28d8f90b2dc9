"""The rows of separated values as JSON objects, in the dialect that a `Csv` describes."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from millpy.formats.byte_order_marks import UTF_8, decoded
from millpy.formats.message import BadPart, Message, Part, encoded_names
from millpy.formats.values import cell_writer
from millpy.model.record import RecordType

if TYPE_CHECKING:
    from millpy.formats.csv_lines import Csv

COLUMNS_MAX = 10_000
_HEADERS_MAX, _HEADERS_CHARACTERS_MAX = 100, 1_000_000
"""Headers of messages that are remembered; the columns of one take up to 25 times its characters."""
HEADER_CHARACTERS_MAX = 65_536
UNCLOSED_MAX = 100
"""Quotes of a message that are not closed before its other quotes only count inside their lines."""
_TRIMMED = (int, float, bool, Decimal, datetime, date, UUID)


class CsvReader:
    """Reads the messages of one dialect into one record type."""

    def __init__(self, dialect: Csv, record_type: RecordType) -> None:
        self._dialect = dialect
        self._type = record_type
        self._fields = {name: own for own, name in encoded_names(record_type).items()}
        self._defaults = {f.encode_name for f in msgspec.structs.fields(record_type.struct) if not f.required}
        self._null = frozenset(dialect.null)
        self._record = None if dialect.quote is None else _record_pattern(dialect.delimiter, dialect.quote)
        self._known: dict[str, _HeaderColumns] = {}
        self._known_characters = 0
        kind = str if dialect.unpivot is None else record_type.field_type(self._fields[dialect.unpivot[1]])
        self._write_value, self._value_is_text = cell_writer(kind, dialect.decimal), kind not in _TRIMMED
        self._value_nulls = self._null if self._value_is_text else frozenset(text.strip() for text in self._null)
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
        lines = self._lines(text)
        mark = UTF_8 if encoding != dialect.encoding else b""
        if columns is None:
            header = next(self._counting(lines), None)
            if header is None:
                return
            columns = self._columns_under(header)
            head += header.encode(encoding) + b"\n" * (1 + dialect.skip_below)
            lines = lines[lines.index(header) + 1 :]
            if dialect.skip_below:  # whatever quotes they have
                lines = self._lines("\n".join("\n".join(lines).split("\n")[dialect.skip_below :]))
        for line in self._counting(lines):
            try:
                common, cells = self._row(line.removesuffix("\r"), columns)
            except (ValueError, csv.Error) as error:
                part = head + line.encode(encoding)
                unmarked = b"\n" if part.startswith(UTF_8) else b""  # no mark when it is read again
                yield BadPart((mark or unmarked) + part, _reason(error, message))
            else:
                # One after the other: together, they may have many times the bytes of the line.
                if cells is None:
                    yield b"{" + common + b"}"
                    continue
                for cell in cells:
                    yield b"{" + common + cell + b"}"

    def _lines(self, text: str) -> list[str]:
        """Split text at newlines, of which those in quoted cells do not count."""
        if self._record is None or self._dialect.quote is None or self._dialect.quote not in text:
            return text.split("\n")
        return _records(text, self._record, self._dialect.comment)

    def _counting(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines that are neither blank nor comments."""
        comment = self._dialect.comment
        if comment is None:
            return (line for line in lines if line.strip())
        return (line for line in lines if line.strip() and not line.startswith(comment))

    def _row(self, line: str, columns: _HeaderColumns) -> tuple[bytes, list[bytes] | None]:
        """Return the fields of a row as JSON; and those of each of its cells, if they are records, else None."""
        cells = self._dialect.cells(line)
        if len(cells) != columns.count:
            raise ValueError(f"{len(cells)} cells instead of {columns.count}")
        place = 0
        try:
            parts = []
            for place, others, name, write, empty, nulls, is_text in columns.fields:
                cell = cells[place] if is_text else cells[place].strip()
                is_null = cell in nulls
                if others:
                    more = [cells[other].strip() for other in others]
                    is_null = is_null or not nulls.isdisjoint(more)
                    cell = " ".join((cell.strip(), *more))
                if not is_null:
                    parts.append(name + write(cell))
                elif empty is not None:
                    parts.append(name + empty)
            common = b",".join(parts)
            if self._dialect.unpivot is None:
                return common, None
            begin, found = b"," if common else b"", []
            for place, name in columns.unpivoted:
                cell = cells[place] if self._value_is_text else cells[place].strip()
                if cell not in self._value_nulls:
                    found.append(begin + name + self._write_value(cell))
        except ValueError as error:
            raise ValueError(f"column {columns.names[place][:50]!r}: {error}") from error
        return common, found

    def _columns_under(self, header: str) -> _HeaderColumns:
        found = self._known.get(header)
        if found is None:
            if len(header) > HEADER_CHARACTERS_MAX:
                raise ValueError(f"its header has more than {HEADER_CHARACTERS_MAX:,} characters")
            self._known_characters += len(header)
            if len(self._known) >= _HEADERS_MAX or self._known_characters > _HEADERS_CHARACTERS_MAX:
                self._known.clear()
                self._known_characters = len(header)
            found = self._known[header] = self._columns_of(self._dialect.header_cells(header))
        return found

    def _columns_of(self, names: Sequence[str]) -> _HeaderColumns:
        found = _HeaderColumns(len(names), [], [], [name.strip() for name in names])
        unpivot, places = self._dialect.unpivot, self._dialect.places(names)
        if unpivot is not None:
            self._dialect.check_unpivoted([name for name, _ in places], self._fields.keys())
        seen = set()
        for name, (index, *others) in places:
            own = self._fields.get(name)
            if own is None and (unpivot is None or not name):
                continue
            if name in seen:
                raise ValueError(f"two columns are {name!r}")
            seen.add(name)
            if own is None:
                assert unpivot is not None
                tag, value = map(msgspec.json.encode, unpivot)
                found.unpivoted.append((index, tag + b":" + msgspec.json.encode(name) + b"," + value + b":"))
                continue
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
        if not found.fields and not found.unpivoted:
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
        unpivoted: the columns whose cells are records, each with the JSON of both fields up to the cell.
        names: the names in the header.
    """

    count: int
    fields: list[tuple[int, list[int], bytes, Callable[[str], bytes], bytes | None, frozenset[str], bool]]
    unpivoted: list[tuple[int, bytes]]
    names: list[str]


def _record_pattern(delimiter: str, quote: str) -> re.Pattern[str]:
    """Return a pattern of one record, up to its newline. A quote counts only at the beginning of a cell.

    Each character can match in one way only, so matching is linear, and remembers no place to go back to. What is
    repeated is atomic: before Python 3.11.5 a possessive group that has alternatives matches wrongly.
    """
    d, q = re.escape(delimiter), re.escape(quote)
    cell = f"(?>{q}[^{q}]*+(?:(?>{q}{q}[^{q}]*))*+{q}(?!{q})[^{d}\\n]*+|(?!{q})[^{d}\\n]*+)"
    return re.compile(f"{cell}(?:(?>{d}{cell}))*+(?=\\n|\\Z)")


def _records(text: str, record: re.Pattern[str], comment: str | None) -> list[str]:
    """Split text at newlines outside of quotes; one that is not closed, or is in a comment, counts in its line only.

    The search for each quote that is not closed reads the rest of the text: `UNCLOSED_MAX` bounds their number.
    """
    found, start, unclosed = [], 0, 0
    while start < len(text):
        is_comment = comment is not None and text.startswith(comment, start)
        whole = record.match(text, start) if unclosed < UNCLOSED_MAX and not is_comment else None
        unclosed += whole is None and not is_comment
        end = text.find("\n", start) if whole is None else whole.end()
        end = len(text) if end < 0 else end
        found.append(text[start:end])
        start = end + 1
    return found
