"""An audit hides no difference of any type that a result table has, and reports no equal pair."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import random
from base64 import b64encode
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from millpy.embedded import EmbeddedPostgres
from millpy.model.delta import encode_value
from millpy.model.deployment import ColumnSpec, TableSpec
from millpy.model.time import INSTANT_MAX
from millpy.spark import audit as audits
from millpy.spark.audit import AuditDifference, AuditScope, TableAudit, audit
from millpy.spark.hosted_rows import TYPES
from tests.databases import fresh_database

UTC = dt.UTC
NOON = dt.datetime(2026, 11, 22, 12, tzinfo=UTC)
TINY = dt.timedelta(microseconds=1)
A_UUID = "00000000-0000-4000-8000-00000000abcd"
DOUBLES = [None, math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1.0 + 1e-10, 1.0 + 1e-8, 5e300, 5e300 * (1 + 1e-10)]
DOUBLES += [-5e300, 5e-324, 1.7976931348623157e308, -1.7976931348623157e308]
TEXTS = ["", "a", "A", "a ", "ü", "u\u0308", "\x01", "\x7f\u2028", "\\0", "\\u0000", "NULL", "\ufffd", "😀", "1e5", '"']
DOCUMENTS = [
    *[1, 1.0, 1.0 + 1e-10, 1.5, True, False, 0, -0.0, "1", "true", "", [], {}, [None], [[]], {"a": None}, {"a": 1}],
    *[{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"aa": 1, "b": 2}, {"b": [1.5e-7, 1e16], "a": "1e5"}, 1.5e-7, 1e16, 10**16],
    *[
        10**16 + 1,
        1e22,
        1e300,
        1e300 * (1 + 1e-10),
        5e-324,
        1.7976931348623157e308,
        2**63 - 1,
        2**63 - 2,
        0.1 + 0.2,
        0.3,
    ],
    *[[0.1], [0.1, 0.1], [0.1 + 1e-12], [0.2], "1e5", "100000", 1e5, 'a"1e5', "a\\", ["a", 1e-9], *TEXTS],
]
WHOLE = [None, 0, -1, 1, 2**63 - 1, -(2**63)]
BYTES = [None, b"", b"\0", b"\xff", b"a\0", b"a"]
PAIRS: dict[str, list[tuple[Any, Any, bool]]] = {
    "text": [(one, other, one == other) for one, other in itertools.product([None, *TEXTS], repeat=2)],
    "bigint": [(one, other, one == other) for one, other in itertools.product(WHOLE, repeat=2)],
    "boolean": [(one, other, one is other) for one, other in itertools.product([None, True, False], repeat=2)],
    "bytea": [(one, other, one == other) for one, other in itertools.product(BYTES, repeat=2)],
    "uuid": [(A_UUID, A_UUID.upper(), True), (A_UUID, str(UUID(int=1)), False), (None, None, True)],
}  # fmt: skip
"""SQL type -> (expected, stored, whether they are equal)."""


def is_close(one: Any, other: Any) -> bool:
    """Tell whether numbers are equal: whole ones exactly, if jsonb keeps them."""
    whole = all(float(value).is_integer() and abs(value) < 1e38 for value in (one, other))
    return int(one) == int(other) if whole else math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def are_equal(one: Any, other: Any) -> bool:
    """Compare documents as a reader would."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return is_close(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    return bool(one == other)


def a_document(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth < 3 and kind < 0.25:
        return [a_document(chance, depth + 1) for _ in range(chance.randrange(4))]
    if depth < 3 and kind < 0.5:
        return {chance.choice(TEXTS): a_document(chance, depth + 1) for _ in range(chance.randrange(4))}
    number = chance.choice([chance.random(), chance.uniform(-1, 1) * 10.0 ** chance.randrange(-300, 300)])
    return chance.choice([None, True, chance.choice(TEXTS), chance.randrange(-(2**63), 2**63), number, float(2**60)])


def changed(document: Any, chance: random.Random) -> Any:
    """Change one leaf of a document, or its end."""
    if isinstance(document, list) and document:
        at = chance.randrange(len(document))
        return [*document[:at], changed(document[at], chance), *document[at + 1 :]]
    if isinstance(document, dict) and document:
        name = chance.choice(sorted(document))
        return {**document, name: changed(document[name], chance)}
    if isinstance(document, int | float) and not isinstance(document, bool):
        return (
            document + max(1, abs(document)) * chance.choice([1e-12, 1e-6])
            if isinstance(document, float)
            else -document
        )
    return [document] if chance.random() < 0.5 else "another"


def pairs_of_documents(chance: random.Random) -> Iterator[tuple[Any, Any, bool]]:
    documents = [a_document(chance) for _ in range(150)]
    every = [*itertools.product(DOCUMENTS, repeat=2)]
    pairs = [*chance.sample(every, 600), *((one, one) for one in [*DOCUMENTS, *documents])]
    pairs += [(one, changed(one, chance)) for one in documents]
    for one, other in pairs:
        yield encode_value(one).decode(), json.dumps(other, ensure_ascii=chance.random() < 0.5), are_equal(one, other)
    for document in ("null", "1"):
        yield None, document, False
        yield "1", None, False


@cache
def all_pairs() -> dict[str, list[tuple[Any, Any, bool]]]:
    close = [{0.0}, {1.0, 1.0 + 1e-10}, {5e300, 5e300 * (1 + 1e-10)}, {0.0, 5e-324}]
    times = [
        None,
        NOON,
        NOON + TINY,
        NOON - TINY,
        dt.datetime(1, 1, 3, tzinfo=UTC),
        dt.datetime.max.replace(tzinfo=UTC),
    ]
    numbers = [None, 0, 5, -5, 10**37, 10**37 + 1]
    decimals = [("0", "-0.00"), ("10", "10.0"), ("0.0000001", "0.00000010"), ("-1.5", "-1.50"), ("100.05", "100.050")]
    odd = [
        "5.4",
        "4.6",
        "NaN",
        "Infinity",
        "-Infinity",
        str(10**37) + "00",
        "9" * 50,
        "5.00000000000000000000000000001",
    ]
    return PAIRS | {
        "double precision": [
            (one, other, repr(one) == repr(other) or any({one, other} <= both for both in close))
            for one, other in itertools.product(DOUBLES, repeat=2)
        ],
        "timestamptz": [
            *((one, other, one == other) for one, other in itertools.product(times, repeat=2)),
            *((NOON, other, False) for other in ("infinity", "-infinity", "20000-01-01", "4000-01-01 BC")),
        ],
        "numeric": [
            *((one, other, one == other) for one, other in itertools.product(numbers, repeat=2)),
            *((one, other, False) for one, other in itertools.product(numbers, odd)),
            *((one, f"{one}.000", True) for one in numbers if one is not None),
        ],
        "decimal": [
            (text, other, one == another)
            for (one, two), (another, four) in itertools.product(decimals, repeat=2)
            for text, other in itertools.product([one, two], [another, four])
        ],
        "jsonb": list(pairs_of_documents(random.Random(1))),
    }  # fmt: skip


KEYS = tuple(ColumnSpec(f"of {kind}", kind, False) for kind in ("bigint", "text", "boolean", "bytea", "uuid"))
VALUES = tuple(ColumnSpec(kind, kind, True) for kind in all_pairs())
"""A column of each type, and names that mean something in a comparison."""
ODD_NAMES = (
    ColumnSpec("expected", "bigint", True),
    ColumnSpec("stored", "text", True),
    ColumnSpec("_rows", "bigint", True),
)


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres, "template1") as name:
        yield postgres.url(name)


def compared(
    spark: SparkSession,
    url: str,
    spec: TableSpec,
    expected: list[list[Any]],
    stored: list[list[Any]],
    **scope_of: Any,
) -> TableAudit:
    """Audit rows as a batch gives them against rows of a table."""
    windows = ("window_start", "window_end") if spec.kind == "windowed" else ("event_time",)
    columns = [*spec.keys, *(ColumnSpec(name, "timestamptz", False) for name in windows), *spec.values]
    arrays = [
        pa.array([Decimal(v) if c.sql_type == "numeric" and v is not None else v for v in values], TYPES[c.sql_type][0])
        for c, values in zip(columns, zip(*expected, strict=True), strict=True)
    ]
    frame = spark.createDataFrame(pa.Table.from_arrays(arrays, names=[column.name for column in columns]))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS pairs")
        listed = ", ".join(f'"{column.name}" {column.sql_type}' for column in columns)
        connection.execute(f"CREATE TABLE pairs.{spec.name} (id bigint PRIMARY KEY, {listed})")  # type: ignore[arg-type]
        casts = ", ".join(f"%s::{column.sql_type}" for column in columns)
        connection.cursor().executemany(
            f"INSERT INTO pairs.{spec.name} VALUES (%s, {casts})",  # type: ignore[arg-type]
            [(number, *row) for number, row in enumerate(stored)],
        )
    scope = AuditScope("pairs", {"computed": INSTANT_MAX}, database_url=url, **scope_of)
    (found,) = audit(spark, {spec.name: frame}, [spec], scope)
    return found


def in_rows() -> tuple[list[list[Any]], list[list[Any]], list[set[str]]]:
    """Deal the pairs of all types out to rows: (expected, stored, the columns that differ)."""
    pairs = all_pairs()
    count = max(map(len, pairs.values()))
    chance = random.Random(2)
    dealt = {kind: chance.sample(own, len(own)) for kind, own in pairs.items()}
    rows = [
        {kind: own[number] if number < len(own) else (None, None, True) for kind, own in dealt.items()}
        for number in range(count)
    ]
    differ = [{kind for kind, (_, _, equal) in row.items() if not equal} for row in rows]
    return [[p[0] for p in row.values()] for row in rows], [[p[1] for p in row.values()] for row in rows], differ


def test_exactly_the_windows_and_columns_that_differ_are_named(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "SHOWN_MAX", 100_000)
    expected, stored, differ = in_rows()
    spec = TableSpec("windows", "windowed", "computed", "s", KEYS, (*VALUES, *ODD_NAMES))
    span = [NOON, NOON + TINY]
    keys = [
        [number, f"k{number % 3}", number % 2 == 0, bytes([number % 256]), str(UUID(int=number))]
        for number in range(len(differ))
    ]
    sides = [
        [[*key, *span, *row, 1, "", 2] for key, row in zip(keys, rows, strict=True)] for rows in (expected, stored)
    ]
    lone = [[-1, one, True, b"", A_UUID, *span, *[None] * len(spec.values)] for one in TEXTS]

    found = compared(spark, url, spec, [*sides[0], *lone[::2]], [*sides[1], *lone[1::2]])

    of = {one.row["of bigint"]: one for one in found.examples if one.row["of bigint"] >= 0}
    assert {number: set(one.expected) for number, one in of.items()} == {n: c for n, c in enumerate(differ) if c}
    assert all(one.kind == "changed" and one.expected.keys() == one.stored.keys() for one in of.values())
    assert sorted((one.row["of text"], one.kind) for one in found.examples if one.row["of bigint"] < 0) == sorted(
        (text, "added" if at % 2 else "missing") for at, text in enumerate(TEXTS)
    )
    assert found.rows == len(differ) + len(lone)
    assert found.differences == len(found.examples)
    assert any(one.stored.get("numeric") == "5.4" for one in of.values())


def test_corrected_rows_are_counted_apart_and_dropped_ones_are_not_compared(spark: SparkSession, url: str) -> None:
    spec = TableSpec("corrected", "windowed", "computed", "s", KEYS, (ColumnSpec("n", "bigint", True),))
    hour = dt.timedelta(hours=1)
    keys = [[number, "é", False, b"\xff\0" * 40, A_UUID] for number in range(4)]
    span = [NOON, NOON + hour]
    expected = [[*key, *span, 1] for key in keys] + [[*keys[0], NOON - hour, NOON - TINY, 7]]
    stored = [[*key, *span, n] for key, n in zip(keys[:3], (1, 2, 3), strict=True)]
    bounds = [str(int(at.timestamp() * 1_000_000)) for at in span]
    texts = [(str(number), "é", "false", b64encode(b"\xff\0" * 40).decode(), A_UUID, *bounds) for number in (0, 1, 3)]

    found = compared(
        spark,
        url,
        spec,
        expected,
        stored,
        corrected={"corrected": {*texts, ("of another table", *bounds)}},
        dropped_us={"corrected": int(NOON.timestamp() * 1_000_000)},
    )

    assert (found.rows, found.differences, found.corrected) == (4, 1, 2)
    assert [(one.row["of bigint"], one.kind) for one in found.examples] == [(2, "changed")]
    assert [(one.rows, one.differences, one.corrected) for one in found.hours] == [(4, 1, 2)]


def test_exactly_the_records_that_differ_are_named(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "SHOWN_MAX", 100_000)
    expected, stored, _ = in_rows()
    spec = TableSpec("records", "records", "computed", "s", (), (*VALUES, *ODD_NAMES))
    unlike = {number for number, rows in enumerate(zip(expected, stored, strict=True)) if differ_at_all(*rows)}
    sides = [[[NOON, *row, number, "", 2] for number, row in enumerate(rows)] for rows in (expected, stored)]

    found = compared(spark, url, spec, [*sides[0], sides[0][0]], sides[1])

    assert kinds_of(found.examples, "missing") == unlike | {0}
    assert kinds_of(found.examples, "added") == unlike
    assert found.differences == 2 * len(unlike) + 1


def kinds_of(examples: list[AuditDifference], kind: str) -> set[int]:
    return {one.row["expected"] for one in examples if one.kind == kind}


def differ_at_all(expected: list[Any], stored: list[Any]) -> bool:
    """Compare rows of records: floats have no tolerance there."""
    return not all(exactly(spec.sql_type, *pair) for spec, *pair in zip(VALUES, expected, stored, strict=True))


def exactly(sql_type: str, one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if sql_type == "jsonb":
        return exact_form(json.loads(one)) == exact_form(json.loads(other))
    if sql_type == "double precision":
        return bool(one == other or (math.isnan(one) and math.isnan(other)))
    return next(equal for first, second, equal in all_pairs()[sql_type] if first == one and second == other)


def exact_form(document: Any) -> str:
    if isinstance(document, list):
        return f"[{','.join(map(exact_form, document))}]"
    if isinstance(document, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{exact_form(document[name])}' for name in sorted(document))}}}"
    if isinstance(document, int | float) and not isinstance(document, bool):
        return format(Decimal(repr(document)).normalize() + 0, "f")
    return json.dumps(document)
