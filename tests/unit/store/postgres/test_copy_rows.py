"""COPY data is in PostgreSQL's binary format, and its rows equal the columns."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.adapt import Transformer
from psycopg.pq import Format

from millpy.store.postgres.copy_rows import (
    HEAD,
    ROWS_AT_ONCE,
    TAIL,
    bytes_field,
    copy_rows,
    moment_field,
    numeric_field,
    packed_field,
)


def fields_of(data: bytes) -> list[list[bytes | None]]:
    """The rows of a file, each field as its bytes."""
    assert data.startswith(HEAD)
    place, rows = len(HEAD), []
    while data[place : place + 2] != TAIL:
        (count,) = struct.unpack_from("!h", data, place)
        place += 2
        row: list[bytes | None] = []
        for _ in range(count):
            (length,) = struct.unpack_from("!i", data, place)
            place += 4
            row.append(None if length < 0 else data[place : place + length])
            place += max(length, 0)
        rows.append(row)
    assert place + 2 == len(data), (place, len(data))
    return rows


def loaded(value: bytes | None, type_name: str) -> Any:
    if value is None:
        return None
    oid = psycopg.adapters.types[type_name].oid
    loader = psycopg.adapters.get_loader(oid, Format.BINARY)
    assert loader is not None
    return loader(oid, Transformer()).load(value)


def test_rows_equal_the_columns() -> None:
    count = 2 * ROWS_AT_ONCE + 1
    words = [None if row % 5 == 0 else "ä" * (row % 4) for row in range(count)]
    whole = [None if row % 3 == 0 else row - 10 for row in range(count)]
    real = [row / 3 for row in range(count)]

    (data,) = copy_rows(
        [
            packed_field(pa.array(whole, pa.int64()), ">i8"),
            bytes_field(pa.array(words)),
            packed_field(pa.array(real), ">f8"),
            packed_field(pa.array([row % 2 == 0 for row in range(count)]), "?"),
        ]
    )

    rows = fields_of(data)
    assert [loaded(row[0], "int8") for row in rows] == whole
    assert [loaded(row[1], "text") for row in rows] == words
    assert [loaded(row[2], "float8") for row in rows] == real
    assert [loaded(row[3], "bool") for row in rows] == [row % 2 == 0 for row in range(count)]


def test_rows_are_in_the_requested_order() -> None:
    fields = [packed_field(pa.array([1, 2, 3]), ">i8"), bytes_field(pa.array(["a", None, "c"]))]

    rows = fields_of(copy_rows(fields, np.array([2, 0, 1]))[0])

    assert [(loaded(a, "int8"), loaded(b, "text")) for a, b in rows] == [(3, "c"), (1, "a"), (2, None)]


def test_whole_numbers_of_any_width_are_numeric() -> None:
    numbers = [0, 1, -1, 9_999, 10_000, 2**63 - 1, -(2**63), None, 10**37, -(10**36) - 7]
    narrow = [number for number in numbers if number is None or abs(number) <= 2**63]

    for values in (numbers, narrow):
        rows = fields_of(copy_rows([numeric_field(pa.array(values, pa.decimal128(38, 0)))])[0])
        assert [loaded(row[0], "numeric") for row in rows] == values


def test_moments_count_from_the_year_2000() -> None:
    rows = fields_of(copy_rows([moment_field(pa.array([946_684_800_000_001, None], pa.int64()))])[0])

    assert rows == [[struct.pack("!q", 1)], [None]]


def test_many_rows_are_several_files() -> None:
    numbers = np.arange(2 * ROWS_AT_ONCE + 1)

    files = copy_rows([packed_field(pa.array(numbers), ">i8")], numbers[::-1], bytes_max=1)

    rows = [int.from_bytes(row[0] or b"", "big") for data in files for row in fields_of(data)]
    assert len(files) == 3
    assert rows == numbers[::-1].tolist()
