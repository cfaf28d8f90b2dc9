"""Bounds on the decoded size of Parquet pages, checked by the page headers before a page is decoded.

Decoding takes a page in one piece, and allocates the size that its header claims: 65 kB of zstd can become 2 GB of
zeros. A delta-encoded text, which refers to the prefix of the text before it, can be as long as its page in every row.
And identical rows take no bytes at all. The headers use Thrift's compact protocol; pyarrow does not expose them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

PAGE_BYTES_MAX = 64_000_000
VALUES_MAX = 16_000_000
"""The most values in a page of texts, whose lengths are all decoded at once."""
VALUE_BYTES_MAX = 16_000_000
"""The longest value of a column of fixed length."""
ROWS_FREE, ROWS_PER_BYTE = 1_000_000, 100
LISTED_FREE_BYTES, LISTED_BYTES_PER_BYTE = 128_000_000, 100
"""The most decoded bytes of a column of lists: the first number, plus the second for each byte of its row group."""
NAMES_MAX = 1_000_000
"""The most texts in a dictionary that is scanned text by text; writers end a dictionary at a few MB."""
FOOTER_BYTES_MAX = 32_000_000
_LISTED_BYTES = 16
_HEADER_BYTES, _HEADER_BYTES_MAX = 4_096, 4_000_000
_DICTIONARY_PAGE = 2
_DELTA_BYTE_ARRAY = 7
_DICTIONARY_ENCODINGS = (2, 8)
_CODECS = {"LZ4": "lz4_raw"}
_DELTAS = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
_DEPTH_MAX = 8


@dataclass(frozen=True, slots=True)
class Page:
    """The header of a page.

    Attributes:
        kind: the page type as in the format: 0 and 3 data, 2 a dictionary.
        size: decompressed bytes.
        compressed: compressed bytes.
        values: number of values.
        encoding: encoding as in the format.
        place: offset of the page's bytes in the file.
    """

    kind: int
    size: int
    compressed: int
    values: int
    encoding: int
    place: int


def check_footer(opened: BinaryIO) -> None:
    """Check that the footer of a file is not too large.

    Raises:
        ValueError: it is; the message names its size.
    """
    size = opened.seek(0, 2)
    opened.seek(max(0, size - 8))
    length = int.from_bytes(opened.read(4), "little")
    opened.seek(0)
    if FOOTER_BYTES_MAX < length <= size:
        raise ValueError(f"the footer has {length} bytes, which is too many")


def check_file(opened: BinaryIO, file: pq.ParquetFile, names: Sequence[str]) -> None:
    """Check that a file does not have too many rows for its size, or values that are too large.

    Raises:
        ValueError: it has; the message names the count or the column.
    """
    size = opened.seek(0, 2)
    if file.metadata.num_rows > ROWS_FREE + ROWS_PER_BYTE * size:
        raise ValueError(f"{file.metadata.num_rows} rows are too many for {size} bytes")
    for index in _wanted(file, names):
        column = file.schema.column(index)
        if (column.length or 0) > VALUE_BYTES_MAX:
            raise ValueError(f"column {column.path} has values of {column.length} bytes, which is too many")


def bound_pages(
    opened: BinaryIO, file: pq.ParquetFile, group: int, names: Sequence[str], deltas: Container[int]
) -> int:
    """Check that the pages of a row group do not become too large.

    Args:
        opened: the file.
        file: the same file, opened by pyarrow.
        group: the row group to read.
        names: the columns to read.
        deltas: indexes of the columns that cannot be read as dictionaries.

    Returns:
        The number of rows that may be decoded at once.

    Raises:
        ValueError: a page would become too large; the message names it.
    """
    size, at_once = opened.seek(0, 2), VALUES_MAX
    columns = file.metadata.row_group(group)
    for index in _wanted(file, names):
        chunk = columns.column(index)
        texts = chunk.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
        plain = texts and index in deltas
        listed = file.schema.column(index).max_repetition_level > 0
        named = longest = 0
        for page in _pages(opened, size, chunk):
            _check(page, chunk.path_in_schema, texts)
            if listed and page.kind == _DICTIONARY_PAGE:
                longest = _longest(opened, page, chunk) if chunk.physical_type == "BYTE_ARRAY" else 8
            elif page.encoding in _DICTIONARY_ENCODINGS:
                named += page.values
            if plain or (texts and page.encoding == _DELTA_BYTE_ARRAY):
                at_once = min(at_once, max(1, PAGE_BYTES_MAX // max(1, page.size)))
        if listed:
            fixed = file.schema.column(index).length or 0
            at_once = min(at_once, _listed_at_once(chunk, columns.num_rows, named * longest + chunk.num_values * fixed))
    return at_once


def is_delta(file: pq.ParquetFile, index: int) -> bool:
    """Tell by the footer whether a column has texts that pyarrow cannot return as dictionaries."""
    groups = range(file.metadata.num_row_groups)
    return any(_DELTAS & set(file.metadata.row_group(group).column(index).encodings) for group in groups)


def _listed_at_once(chunk: pq.ColumnChunkMetaData, rows: int, texts_bytes: int) -> int:
    """Return how many rows of a column of lists to decode at once: on average, their values fit into a page.

    The file does not say how many values a row has, so one row may have all of them, and each may be the longest.

    Raises:
        ValueError: the lists may grow too large for the bytes of the row group, or their encoding hides their size.
    """
    name, size = chunk.path_in_schema, chunk.total_compressed_size
    if chunk.physical_type == "BYTE_ARRAY" and "DELTA_BYTE_ARRAY" in chunk.encodings:
        raise ValueError(f"column {name} has lists of texts in the encoding DELTA_BYTE_ARRAY, which is not supported")
    becomes: int = chunk.num_values * _LISTED_BYTES + texts_bytes
    if becomes > LISTED_FREE_BYTES + LISTED_BYTES_PER_BYTE * size:
        raise ValueError(f"lists of column {name} may grow to {becomes} bytes from {size} bytes of a row group")
    return max(1, rows * PAGE_BYTES_MAX // max(1, becomes))


def _longest(opened: BinaryIO, page: Page, chunk: pq.ColumnChunkMetaData) -> int:
    """Return the bytes of the longest text of a dictionary, or of all texts if finding it is impossible or slow."""
    if page.values > NAMES_MAX:
        return page.size
    opened.seek(page.place)
    data, codec = opened.read(page.compressed), chunk.compression
    if codec != "UNCOMPRESSED":
        try:
            data = pa.Codec(_CODECS.get(codec, codec.lower())).decompress(data, page.size, asbytes=True)
        except (pa.ArrowException, OSError, ValueError):
            return page.size
    longest = place = 0
    for _ in range(page.values):
        length = int.from_bytes(data[place : place + 4], "little")
        longest, place = max(longest, length), place + 4 + length
    return min(longest, page.size)


def _wanted(file: pq.ParquetFile, names: Sequence[str]) -> list[int]:
    schema = file.schema
    return [index for index in range(len(schema)) if schema.column(index).path.partition(".")[0] in names]


def _check(page: Page, name: str, texts: bool) -> None:
    if page.size > PAGE_BYTES_MAX:
        raise ValueError(f"a page of column {name} grows from {page.compressed} to {page.size} bytes")
    if page.values > (page.size * 8 if page.kind == _DICTIONARY_PAGE else VALUES_MAX if texts else 2**31):
        raise ValueError(f"a page of column {name} with {page.size} bytes has {page.values} values")


def _pages(opened: BinaryIO, size: int, chunk: Any) -> Iterator[Page]:
    """Yield the pages of a column in a row group."""
    offsets = [chunk.data_page_offset]
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        offsets.append(chunk.dictionary_page_offset)
    place = min(offset for offset in offsets if offset > 0)
    end = place + chunk.total_compressed_size
    if not place <= end <= size:
        raise ValueError(f"column {chunk.path_in_schema} ends at byte {end}, and the file at byte {size}")
    while place < end:
        page, length = _page(opened, place, end)
        place += length + page.compressed
        if page.compressed < 0 or page.size < 0 or page.values < 0:
            raise ValueError(f"a page of column {chunk.path_in_schema} has a negative size")
        yield page


def _page(opened: BinaryIO, place: int, end: int) -> tuple[Page, int]:
    """Return the page at an offset, and the length of its header."""
    wanted = _HEADER_BYTES
    while True:
        opened.seek(place)
        data = opened.read(min(wanted, end - place))
        try:
            fields, length = _struct(data, 0)
            break
        except IndexError:
            if len(data) < wanted or wanted >= _HEADER_BYTES_MAX:
                raise ValueError("a page header has no end") from None
            wanted *= 16
    inner: dict[int, Any] = next((fields[i] for i in (5, 7, 8) if isinstance(fields.get(i), dict)), {})
    values, encoding = inner.get(1, 0), inner.get(4 if isinstance(fields.get(8), dict) else 2, 0)
    found = [fields.get(1, -1), fields.get(2, -1), fields.get(3, -1), values, encoding, place + length]
    if not all(isinstance(value, int) for value in found):
        raise ValueError("a page header is malformed")
    return Page(*found), length


# Thrift's compact protocol: only integers, booleans and structs are read; other values are skipped.


def _struct(data: bytes, place: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    if depth > _DEPTH_MAX:
        raise ValueError("a page header is nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while (head := data[place]) != 0:
        place += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, place = _zigzag(data, place)
        fields[number], place = _value(data, place, kind, depth)
    return fields, place + 1


def _value(data: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, place
    if kind == 3:
        return None, place + 1
    if kind in (4, 5, 6):
        return _zigzag(data, place)
    if kind == 7:
        return None, place + 8
    if kind == 8:
        length, place = _varint(data, place)
        if place + length > len(data):
            raise IndexError
        return None, place + length
    if kind == 12:
        return _struct(data, place, depth + 1)
    raise ValueError(f"a page header has a field of kind {kind}")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a page header has a number that is too long")


def _zigzag(data: bytes, place: int) -> tuple[int, int]:
    value, place = _varint(data, place)
    return (value >> 1) ^ -(value & 1), place
