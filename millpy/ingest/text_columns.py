r"""The fast path of decoding: a block of lines to Arrow columns, or None.

None means that msgspec decides record by record; it does not mean that a record is invalid. The result is exactly what
msgspec would make of every line (tests/property/test_decode.py): where the two readers differ, the guards below decline
the block. The differences, found by experiment (pyarrow 26, msgspec 0.22), and their guards:

    NaN, Infinity            pyarrow accepts them                  search for the text
    \u0000                   both accept it, PostgreSQL does not   search for the text
    raw control characters   pyarrow ends at NUL                   count of control characters
    invalid UTF-8            pyarrow does not check                decode the block
    deep nesting             msgspec raises RecursionError         count of brackets
    missing or null field    pyarrow makes both null               decline unless the default is None
    -0 in a float field      -0.0 or 0.0                           sign bit of zeros
    1.0 in an int field, duplicate fields, lone surrogates         pyarrow raises
    a block that begins with null                                  pyarrow crashes the process: covered by the next
    two values in a line     rows would shift                      every newline must stand between } and {
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from millpy.ingest.local_times import TimeReader
from millpy.ingest.timestamps import instants_of_text
from millpy.model.field_types import is_json, is_literal
from millpy.model.record import ARROW_TYPES, RecordType, without_none

_JSON_TYPES = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    datetime: pa.string(),
    UUID: pa.string(),
}
_FLOAT_TEXT = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$"
UUID_TEXT = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_BRACKETS_MAX = 100
_BLOCK_BYTES = 1 << 20


def fields_of(record_type: RecordType) -> dict[str, Any]:
    """Return the msgspec fields of a record class by name."""
    return {field.name: field for field in msgspec.structs.fields(record_type.struct)}


def takes(record_type: RecordType) -> bool:
    """Tell whether the fast path supports a record class: flat, without constraints, renamed fields and hooks."""
    struct = record_type.struct
    config = struct.__struct_config__
    if config.array_like or config.tag is not None or hasattr(struct, "__post_init__"):
        return False
    if struct.__struct_encode_fields__ != struct.__struct_fields__ or not record_type.fields:
        return False
    for name, annotation in record_type.annotations.items():
        plain, _ = without_none(annotation)
        if plain not in _JSON_TYPES or plain not in ARROW_TYPES or "Annotated" in repr(annotation):
            return False
        if is_literal(annotation) or is_json(annotation):
            return False
        if re.search(r'[\x00-\x1f\\"]', name):
            return False
    return True


Readers = Mapping[str, TimeReader]
"""The fields whose text is read by a format or a zone of the graph."""
NO_READERS: Readers = {}


class JsonColumns:
    """Converts blocks of JSON lines to the columns of one record type.

    Args:
        record_type: the type.
        readers: the fields whose text is read by a format or a zone.
        as_text: numbers and booleans that all lines write as text.
    """

    def __init__(
        self, record_type: RecordType, readers: Readers = NO_READERS, as_text: frozenset[str] = frozenset()
    ) -> None:
        self._type = record_type
        self._columns = _ColumnConverter(record_type, readers, as_text)
        kinds = {n: pa.string() if n in as_text else _JSON_TYPES[record_type.field_type(n)] for n in record_type.fields}
        schema = pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
        unknown = "error" if record_type.struct.__struct_config__.forbid_unknown_fields else "ignore"
        self._parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unknown)
        self._read = pa.json.ReadOptions(block_size=_BLOCK_BYTES)

    def columns(self, block: bytes, count: int) -> pa.RecordBatch | None:
        """Return `count` lines, joined by newlines, as columns, or None if msgspec has to decide."""
        if not (_lines_are_objects(block, count) and _is_plain(block, count) and _is_shallow(block, count)):
            return None
        try:
            table = pa.json.read_json(pa.BufferReader(block), read_options=self._read, parse_options=self._parse)
        except pa.ArrowException:
            return None
        if table.num_rows != count:
            return None
        return self._columns.typed({name: table.column(name) for name in self._type.fields})


def _lines_are_objects(block: bytes, count: int) -> bool:
    # A newline between } and { can only separate two values, so `count` values in `count` lines are one per line.
    if block[:1] != b"{" or block[-1:] != b"}":
        return False
    data = np.frombuffer(block, np.uint8)
    newlines = np.flatnonzero(data == ord("\n"))
    between = (data[newlines - 1] == ord("}")) & (data[newlines + 1] == ord("{"))
    return int(np.count_nonzero(between)) == count - 1


def _is_plain(block: bytes, count: int) -> bool:
    # A search for one byte is ten times as fast as one for a word, and usually finds nothing.
    if any(word[:1] in block and word in block for word in (b"NaN", b"Inf", b"\\u0000")):
        return False
    if int(np.count_nonzero(np.frombuffer(block, np.uint8) < 0x20)) != count - 1:
        return False
    return is_utf8(block)


def is_utf8(block: bytes) -> bool:
    """Tell whether the bytes are strict UTF-8."""
    if block.isascii():
        return True
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_shallow(block: bytes, count: int) -> bool:
    data = np.frombuffer(block, np.uint8)
    # Faster than bytes.count, which stops at every match, and there are many of the first.
    lists = int(np.count_nonzero(data == ord("["))) if b"[" in block else 0
    if int(np.count_nonzero(data == ord("{"))) + lists <= count + _BRACKETS_MAX:
        return True
    brackets = np.flatnonzero((data == ord("{")) | (data == ord("[")))
    ends = np.append(np.flatnonzero(data == ord("\n")), len(block))
    return int(np.diff(np.searchsorted(brackets, ends), prepend=0).max()) <= _BRACKETS_MAX


class CsvColumns:
    """Converts blocks of CSV lines, one record per line, to the columns of one record type under one header."""

    def __init__(self, record_type: RecordType, header: Sequence[str], readers: Readers = NO_READERS) -> None:
        self._type = record_type
        self._columns = _ColumnConverter(record_type, readers)
        self._header = list(header)
        self._missing = [name for name in record_type.fields if name not in header]
        self._present = [name for name in record_type.fields if name in header]
        forbidden = record_type.struct.__struct_config__.forbid_unknown_fields
        self._fits = (
            len(set(header)) == len(header)
            and not (forbidden and set(header) - set(record_type.fields))
            and bool(self._present)
            and all(record_type.is_nullable(n) and fields_of(record_type)[n].default is None for n in self._missing)
        )

    def columns(self, block: bytes, count: int) -> pa.RecordBatch | None:
        """Return `count` lines as columns, or None if msgspec has to decide."""
        quoted = b'"' in block
        if (
            not self._fits
            or (quoted and not _quotes_lines(block))
            or b"\n\n" in block
            or block[:1] == b"\n"
            or block[-1:] == b"\n"
        ):
            return None
        if int(np.count_nonzero(np.frombuffer(block, np.uint8) < 0x20)) != count - 1 or not is_utf8(block):
            return None
        try:
            table = pa.csv.read_csv(
                pa.BufferReader(block),
                pa.csv.ReadOptions(column_names=self._header, block_size=_BLOCK_BYTES),
                pa.csv.ParseOptions(quote_char='"' if quoted else False, ignore_empty_lines=False),
                pa.csv.ConvertOptions(
                    include_columns=self._present,
                    column_types={name: pa.string() for name in self._present},
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowException:
            return None
        if table.num_rows != count:
            return None
        texts = {name: self._empty_as_null(name, table.column(name)) for name in self._present}
        texts |= {name: pa.chunked_array([pa.nulls(count, pa.string())]) for name in self._missing}
        return self._columns.from_text(texts)

    def _empty_as_null(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        if not self._type.is_nullable(name):
            return column
        return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)


def quotes_are_regular(codes: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64]) -> bool:
    """Tell whether every opening quote begins a CSV field and every closing quote ends one.

    Args:
        codes: bytes that begin with a record.
        quotes: the positions of the quotes.
    """
    opening, closing = quotes[0::2], quotes[1::2]
    before = codes[opening[opening > 0] - 1]
    after = codes[closing[closing + 1 < len(codes)] + 1]
    begins = (before == ord(",")) | (before == ord("\n")) | (before == ord('"'))
    ends = (after == ord(",")) | (after == ord("\n")) | (after == ord("\r")) | (after == ord('"'))
    return bool(begins.all() and ends.all())


def _quotes_lines(block: bytes) -> bool:
    """Tell whether quotes delimit fields as every reader understands them, and no quoted field spans two lines."""
    codes = np.frombuffer(block, np.uint8)
    quotes = np.flatnonzero(codes == ord('"'))
    newlines = np.flatnonzero(codes == ord("\n"))
    inside = np.searchsorted(quotes, newlines) % 2
    return len(quotes) % 2 == 0 and not inside.any() and quotes_are_regular(codes, quotes)


class _ColumnConverter:
    """Checks and converts raw columns to the schema of a record type."""

    def __init__(self, record_type: RecordType, readers: Readers, as_text: frozenset[str] = frozenset()) -> None:
        self._type = record_type
        self._parsers = {name: _PARSERS[record_type.field_type(name)] for name in as_text}
        checks = {name: _CHECKS[record_type.field_type(name)] for name in record_type.fields}
        self._checks = {**checks, **{name: reader.column for name, reader in readers.items()}}
        defaults = fields_of(record_type)
        self._none_by_default = {
            n for n in record_type.fields if record_type.is_nullable(n) and defaults[n].default is None
        }

    def typed(self, columns: dict[str, pa.ChunkedArray]) -> pa.RecordBatch | None:
        """Check and convert columns as typed by the JSON reader."""
        arrays = []
        for field in self._type.schema:
            column = _one_array(columns[field.name])
            if column.null_count and field.name not in self._none_by_default:
                return None
            parsed = self._parsers[field.name](column) if field.name in self._parsers else column
            checked = None if parsed is None else self._checks[field.name](parsed)
            if checked is None:
                return None
            arrays.append(checked)
        return pa.RecordBatch.from_arrays(arrays, schema=self._type.schema)

    def from_text(self, columns: dict[str, pa.ChunkedArray]) -> pa.RecordBatch | None:
        """Parse the string columns of CSV, which are null where an optional field was empty."""
        arrays = []
        for field in self._type.schema:
            column = _one_array(columns[field.name])
            kind = self._type.field_type(field.name)
            parsed = _PARSERS[kind](column) if kind in _PARSERS else column
            checked = None if parsed is None else self._checks[field.name](parsed)
            if checked is None:
                return None
            arrays.append(checked)
        return pa.RecordBatch.from_arrays(arrays, schema=self._type.schema)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks() if column.num_chunks else pa.array([], column.type)


def _unchecked(column: pa.Array) -> pa.Array:
    return column


def _finite(column: pa.Array) -> pa.Array | None:
    values = column.to_numpy(zero_copy_only=False)
    if int(np.count_nonzero(np.isfinite(values))) != len(column) - column.null_count:
        return None
    return None if np.signbit(values[values == 0]).any() else column


def _moments(column: pa.Array) -> pa.Array | None:
    times = instants_of_text(column)
    if times is None:
        return None
    mask = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return pa.array(times, pa.int64(), mask=mask).cast(ARROW_TYPES[datetime])


def _all_match(column: pa.Array, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(column, pattern), skip_nulls=True, min_count=0).as_py() is True


def _uuids(column: pa.Array) -> pa.Array | None:
    return column if _all_match(column, UUID_TEXT) else None


def _int_texts(column: pa.Array) -> pa.Array | None:
    try:
        numbers = pc.cast(column, pa.int64())
    except pa.ArrowException:
        return None
    same = pc.all(pc.equal(pc.cast(numbers, pa.string()), column), skip_nulls=True, min_count=0).as_py()
    return numbers if same else None


def _float_texts(column: pa.Array) -> pa.Array | None:
    if not _all_match(column, _FLOAT_TEXT):
        return None
    try:
        return pc.cast(column, pa.float64())
    except pa.ArrowException:
        return None


def _bool_texts(column: pa.Array) -> pa.Array | None:
    return pc.equal(column, "true") if _all_match(column, "^(true|false)$") else None


_CHECKS: dict[type, Callable[[pa.Array], pa.Array | None]] = {
    str: _unchecked,
    int: _unchecked,
    bool: _unchecked,
    float: _finite,
    datetime: _moments,
    UUID: _uuids,
}
_PARSERS: dict[type, Callable[[pa.Array], pa.Array | None]] = {int: _int_texts, float: _float_texts, bool: _bool_texts}
PARSED = tuple(_PARSERS)
"""The types that columns read from text."""
