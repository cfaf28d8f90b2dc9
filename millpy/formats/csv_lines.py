"""Separated values in the dialects of SCADA exports."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from millpy.errors import GraphError
from millpy.formats.byte_order_marks import decoded, is_wide
from millpy.formats.csv_rows import COLUMNS_MAX, CsvReader
from millpy.formats.message import FileHead, Format, Reader, check_objects, encoded_names
from millpy.model.arguments import are_texts
from millpy.model.identity import Identity
from millpy.model.record import RecordType

SKIP_MAX = 1_000
_FOR_EXCEL = re.compile(r"sep=.")
_LONE_RETURN = re.compile(r"\r(?!\n)")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Csv(Format):
    """Separated values; each row is a record, and the header names its fields.

    In a file, each line is a row. In a message, the rows are lines, and the header is the first of them unless
    `header=` names the columns. A row that does not fit is a dead letter with its header, so that it can be replayed.
    Cells of columns that are no field are ignored, and a field without a column gets its default.

    Exports and data loggers put other lines around the header: `Csv(skip=1, skip_below=2)` reads Campbell's TOA5. Where
    each column is a device or a tag, `unpivot=("tag", "value")` makes a record of each cell.

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
        unpivot: two fields, the first of them text. Each cell of a column that is no field is then a record, with the
            name of its column in the first field, the cell in the second, and the row's other fields. A cell that means
            no value gives none, nor does a column without a name.
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
    unpivot: tuple[str, str] | None

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
        unpivot: tuple[str, str] | None = None,
    ) -> None:
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n\0"':
            raise GraphError(f"delimiter={delimiter!r} must be one character", hint='for example ";" or "\\t"')
        if decimal not in (".", ",") or decimal == delimiter:
            raise GraphError(
                f"decimal={decimal!r} does not go with delimiter={delimiter!r}",
                hint='for example decimal=",", delimiter=";"',
            )
        quote = None if quote == "" else quote
        if quote is not None and (
            not isinstance(quote, str) or len(quote) != 1 or quote in (delimiter, decimal, "\n", "\r")
        ):
            raise GraphError(f"quote={quote!r} must be one character, and not the delimiter", hint="None for no quotes")
        if not are_texts(null):
            raise GraphError(f"null={null!r} is not a list of texts", hint='null=["", "---"]')
        if rename is not None and not isinstance(rename, dict):
            raise GraphError(f"rename={rename!r} is not a dict", hint='rename={"Temperature [C]": "temperature"}')
        if header is False:
            raise GraphError("header=False does not say what the columns are", hint='header=("device", "at", "value")')
        names: bool | tuple[str, ...] = True if header is True else tuple(header) if are_texts(header) else ()
        if isinstance(names, tuple) and (not any(names) or len(names) > COLUMNS_MAX):
            raise GraphError(
                f"{f'header={header!r}':.100} names no columns, or more than {COLUMNS_MAX:,}",
                hint='header=("device", "at", "value")',
            )
        _check_other_lines(skip, skip_below, has_header=header is True)
        if comment is not None and not _is_comment(comment, delimiter, quote):
            raise GraphError(
                f"comment={comment!r} cannot tell comments from rows",
                hint='for example "#": visible ASCII characters that do not begin with the delimiter or the quote',
            )
        fields = _fields_of(unpivot)
        values = {
            "delimiter": delimiter, "decimal": decimal, "encoding": _codec_of(encoding), "null": tuple(null),
            "quote": quote, "header": names, "rename": dict(rename or {}), "skip": skip, "skip_below": skip_below,
            "comment": comment, "unpivot": fields,
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
    def filled_names(self) -> Sequence[str]:
        """The fields of `unpivot`."""
        return self.unpivot or ()

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
        unpivot = None if self.unpivot is None else list(self.unpivot)
        others = {"skip": self.skip, "skip_below": self.skip_below, "comment": self.comment, "unpivot": unpivot}
        given = {name: value for name, value in others.items() if value}
        return {"kind": "separated_values", **plain, "null": list(self.null), **header, **rename, **given}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class and the names. Raises GraphError."""
        check_objects(record_type, self)
        known = set(encoded_names(record_type).values())
        for column, name in self.rename.items():
            if name not in known:
                raise GraphError(
                    f"rename={{{column!r}: {name!r}}}: {record_type.struct.__name__} has no such field",
                    hint=f"its fields are {', '.join(record_type.fields)}",
                )
        fields = {name: own for own, name in encoded_names(record_type).items()}
        for name in self.unpivot or ():
            if name in self.rename.values():
                raise GraphError(f"unpivot={self.unpivot!r}: rename= gives a column the name {name!r}, too")
            if name not in fields:
                raise GraphError(f"unpivot={self.unpivot!r}: {record_type.struct.__name__} has no field {name!r}")
        if self.unpivot is not None and record_type.field_type(fields[self.unpivot[0]]) is not str:
            raise GraphError(f"unpivot={self.unpivot!r}: {self.unpivot[0]!r} is not a str, which names of columns need")
        if self.unpivot is not None and isinstance(self.header, tuple):
            try:
                self.check_unpivoted([name for name, _ in self.places(self.header)], fields.keys())
            except ValueError as error:
                raise GraphError(f"header={self.header!r}: {error}", hint="name each column once") from error

    def cells(self, line: str, *, skips_space: bool = False) -> list[str]:
        """Split a line, in which space may come before a quote if `skips_space`. Raises csv.Error."""
        if self.quote is None or self.quote not in line:
            return line.split(self.delimiter)
        skips = skips_space and self.delimiter != " "
        lines = csv.reader([line], delimiter=self.delimiter, quotechar=self.quote, strict=True, skipinitialspace=skips)
        return next(lines)

    def header_names(self, line: bytes, record_type: RecordType) -> Sequence[str]:
        """Return the names of the columns of a file, renamed. Raises ValueError."""
        text, _ = decoded(line, self.encoding)
        names = [name for name, _ in self.places(self.header_cells(text))]
        if self.unpivot is None:
            return names
        self.check_unpivoted(names, set(encoded_names(record_type).values()))
        return [*names, *self.unpivot]

    def check_unpivoted(self, names: Sequence[str], fields: Set[str]) -> None:
        """Check the names of columns, of which those that are no fields are values. Raises ValueError."""
        counts = Counter((*filter(None, names), *(self.unpivot or ())))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two columns are {min(twice)!r}")
        if not set(names) - fields - {""}:
            raise ValueError("each of its columns is a field, so none is left to unpivot")

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
            cells = self.cells(plain, skips_space=True)
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if len(cells) > COLUMNS_MAX:
            raise ValueError(f"the header has more than {COLUMNS_MAX} columns")
        return cells

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that reads the rows of a message."""
        return CsvReader(self, record_type).read


def _codec_of(encoding: str) -> str:
    """Return the name of the codec of an encoding in which lines can be found. Raises GraphError."""
    try:
        name = codecs.lookup(encoding).name
        plain = is_wide(name) or "\n;A".encode(name) == b"\n;A"
    except (LookupError, TypeError, ValueError, AttributeError):
        plain = False
    if not plain:
        raise GraphError(
            f"encoding={encoding!r} is unknown, or its newline is not one byte", hint='for example "utf-8", "cp1252"'
        )
    return name


def _check_other_lines(skip: object, skip_below: object, *, has_header: bool) -> None:
    """Check numbers of lines around the header. Raises GraphError."""
    for setting, count in (("skip", skip), ("skip_below", skip_below)):
        if type(count) is not int or not 0 <= count <= SKIP_MAX:
            raise GraphError(f"{setting}={count!r} is not a number of lines", hint=f"from 0 to {SKIP_MAX:,}")
    if skip_below and not has_header:
        raise GraphError(f"skip_below={skip_below!r} without a header", hint="give the number of all lines as skip=")


def _fields_of(unpivot: object) -> tuple[str, str] | None:
    """Return the two fields of `unpivot=`, if it is given. Raises GraphError."""
    if unpivot is None:
        return None
    names = tuple(unpivot) if isinstance(unpivot, list | tuple) else ()
    if len(names) != 2 or names[0] == names[1] or not all(isinstance(name, str) for name in names):
        raise GraphError(f"unpivot={unpivot!r} is not two fields", hint='unpivot=("tag", "value")')
    return names


def _is_comment(comment: object, delimiter: str, quote: str | None) -> bool:
    """Tell whether no row has to begin like this."""
    if not isinstance(comment, str) or not comment.isascii() or not comment.isprintable() or not comment.strip():
        return False
    return comment[0] not in (delimiter, quote, " ")
