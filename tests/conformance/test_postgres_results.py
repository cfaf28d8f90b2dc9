"""Result tables on PostgreSQL: every type by INSERT and by COPY, and the blame for refused rows."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest

from millpy.errors import GraphError, PaneOrderError, PoisonError
from millpy.model.checkpoint import ResultRows
from millpy.model.deployment import ColumnSpec, ComputationSpec, GraphSpec, StreamSpec, TableSpec
from millpy.model.time import INSTANT_MIN, Instant
from millpy.store.postgres.results import COPY_ROWS_MIN
from tests.conformance.store_builders import MINUTE, Owner

VALUES = (
    ColumnSpec("words", "text", True),
    ColumnSpec("whole", "bigint", True),
    ColumnSpec("real", "double precision", True),
    ColumnSpec("flag", "boolean", True),
    ColumnSpec("raw", "bytea", True),
    ColumnSpec("seen", "timestamptz", True),
    ColumnSpec("mark", "uuid", True),
    ColumnSpec("parts", "jsonb", True),
    ColumnSpec("wide", "numeric", True),
    ColumnSpec("price", "decimal", True),
    ColumnSpec("day", "date", True),
)
UUID_TEXT = "12345678-1234-5678-1234-567812345678"
SEEN = datetime(2024, 2, 29, 12, 0, 0, 123456, UTC)
ROW: tuple[Any, ...] = (
    'a "quoted", line\nä',
    -(2**62),
    0.1 + 0.2,
    True,
    b"\x00\xff\\",
    SEEN,
    UUID_TEXT,
    {"a": [1, None]},
    -(10**37) - 70_000,
    Decimal("-12345.06700"),
    date(1, 1, 1),
)
EMPTY: tuple[Any, ...] = ("", 0, -0.0, False, b"", SEEN, UUID_TEXT, [], 0, Decimal("0.00"), date(9999, 12, 31))
NULLS: tuple[Any, ...] = (None,) * len(VALUES)
ARROW = [
    pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.binary(), pa.timestamp("us", tz="UTC"), pa.string(), None,
    pa.decimal128(38, 0), pa.string(), pa.date32(),
]  # fmt: skip


def a_graph(name: str = "typed") -> GraphSpec:
    return GraphSpec(
        name=name,
        computations=(ComputationSpec("sums", "stage", intervals=1),),
        streams=(StreamSpec("sums", "sums", pa.schema([("device", pa.string())])),),
        subscriptions=(),
        tables=(
            TableSpec("panes", "windowed", "sums", "sums", (ColumnSpec("device", "text", False),), VALUES, MINUTE),
        ),
    )


@pytest.fixture
def spec() -> GraphSpec:
    return a_graph()


def panes(owner: Owner, values: list[tuple[Any, ...]], *, arrow: bool, count: int, index: int = 0) -> ResultRows:
    """`count` rows of different devices, with these values in turn."""
    columns: list[Any] = [[f"device {row}" for row in range(count)], [0] * count, [MINUTE] * count]
    for place in range(len(VALUES)):
        column = [values[row % len(values)][place] for row in range(count)]
        if arrow and ARROW[place] == pa.string():
            column = [None if value is None else str(value) for value in column]
        columns.append(pa.array(column, ARROW[place]) if arrow and ARROW[place] is not None else column)
    columns += [[index] * count, ["on_time"] * count, [0] * count]
    if arrow:
        columns[1:3] = [pa.array(column, pa.int64()) for column in columns[1:3]]
    return ResultRows(owner.deployment.table_ids["panes"], columns, count, first=index == 0)


async def commit(owner: Owner, rows: ResultRows, **watermarks: Any) -> None:
    (interval,) = owner.deployment.intervals
    await owner.commit(owner.checkpoint(interval, results=[rows], **watermarks))


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("arrow", [False, True], ids=["lists", "arrow"])
@pytest.mark.parametrize("count", [3, COPY_ROWS_MIN], ids=["insert", "copy"])
async def test_values_of_every_type_are_stored_exactly(
    owner: Owner, database_url: str, count: int, arrow: bool
) -> None:
    values = [ROW, EMPTY, NULLS]

    await commit(owner, panes(owner, values, arrow=arrow, count=count))

    names = ", ".join(column.name for column in VALUES)
    query = f"SELECT {names} FROM typed.panes ORDER BY (substr(device, 8))::int LIMIT 3"
    expected = [tuple(UUID(v) if v == UUID_TEXT else v for v in value) for value in values]
    assert fetch(database_url, query) == expected
    moments = fetch(database_url, "SELECT DISTINCT window_start, window_end, interval_id, bundle FROM typed.panes")
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert moments == [(epoch, epoch + timedelta(minutes=1), owner.deployment.intervals[0].interval_id, 1)]


@pytest.mark.parametrize("count", [9, COPY_ROWS_MIN], ids=["insert", "copy"])
async def test_extreme_numbers_are_stored_exactly(owner: Owner, database_url: str, count: int) -> None:
    wholes = [0, 9_999, 10_000, -10_000, 2**63 - 1, -(2**63), 10**45, -(10**39) - 1, 70_000]
    reals = [float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308, -0.0, 1.0, 2.0, 3.0, 4.0]
    values = [(*ROW[:2], real, *ROW[3:8], whole, *ROW[9:]) for whole, real in zip(wholes, reals, strict=True)]

    await commit(owner, panes(owner, values, arrow=False, count=count))

    query = "SELECT wide, real FROM typed.panes ORDER BY (substr(device, 8))::int LIMIT 9"
    assert fetch(database_url, query) == list(zip(wholes, reals, strict=True))


async def test_bulk_rows_replace_one_row_a_key(owner: Owner, database_url: str) -> None:
    rows = panes(owner, [ROW], arrow=False, count=COPY_ROWS_MIN)
    rows.columns[0] = [f"device {row % 7}" for row in range(COPY_ROWS_MIN)]
    rows.columns[1] = [row * MINUTE for row in range(COPY_ROWS_MIN)]

    await commit(owner, rows)

    found = fetch(database_url, "SELECT device, window_start FROM typed.panes ORDER BY ctid")
    assert len(found) == COPY_ROWS_MIN
    assert found == sorted(found)


@pytest.mark.parametrize("count", [3, COPY_ROWS_MIN], ids=["few", "many"])
async def test_next_pane_replaces_every_column(owner: Owner, database_url: str, count: int) -> None:
    await commit(owner, panes(owner, [ROW], arrow=True, count=count))

    await commit(owner, panes(owner, [NULLS], arrow=True, count=count, index=1))

    query = "SELECT count(*), count(words), count(parts), min(pane_index), min(bundle) FROM typed.panes"
    assert fetch(database_url, query) == [(count, 0, 0, 1, 2)]


@pytest.mark.parametrize("count", [3, COPY_ROWS_MIN], ids=["insert", "copy"])
async def test_first_pane_on_a_present_row_is_corruption(owner: Owner, count: int) -> None:
    await commit(owner, panes(owner, [ROW], arrow=False, count=count))

    with pytest.raises(PaneOrderError):
        await commit(owner, panes(owner, [ROW], arrow=False, count=count))


@pytest.mark.parametrize("count", [3, COPY_ROWS_MIN], ids=["insert", "copy"])
@pytest.mark.parametrize(
    ("constraint", "sqlstate"),
    [
        ("ADD CONSTRAINT only_once UNIQUE (whole)", "23505"),
        ("ALTER COLUMN words SET NOT NULL", "23502"),
        ("ADD CHECK (whole > 0)", "23514"),
    ],
)
async def test_row_that_violates_a_users_constraint_is_poison(
    owner: Owner, database_url: str, count: int, constraint: str, sqlstate: str
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(f"ALTER TABLE typed.panes {constraint}")  # type: ignore[call-overload]

    with pytest.raises(PoisonError) as caught:
        await commit(owner, panes(owner, [ROW, ROW, NULLS] if sqlstate == "23502" else [ROW], arrow=False, count=count))

    assert (caught.value.table, caught.value.sqlstate) == ("panes", sqlstate)
    assert fetch(database_url, "SELECT count(*) FROM typed.panes") == [(0,)]
    assert fetch(database_url, "SELECT max(bundle) FROM mill.intervals") == [(0,)]


async def test_row_that_makes_a_users_trigger_raise_is_poison(owner: Owner, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "CREATE FUNCTION typed.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;"
            "CREATE TRIGGER no BEFORE INSERT ON typed.panes FOR EACH ROW EXECUTE FUNCTION typed.no()"
        )

    with pytest.raises(PoisonError):
        await commit(owner, panes(owner, [ROW], arrow=False, count=1))


async def test_null_in_a_key_rejects_its_row(owner: Owner) -> None:
    rows = panes(owner, [ROW], arrow=False, count=1)
    rows.columns[0] = [None]

    with pytest.raises(PoisonError):  # a trigger of the user's may have emptied it
        await commit(owner, rows)


async def test_window_is_final_once_nothing_can_join_it(owner: Owner, database_url: str) -> None:
    final = "SELECT is_final FROM typed.panes_status"
    await commit(owner, panes(owner, [ROW], arrow=False, count=1))
    before = fetch(database_url, final)
    (interval,) = owner.deployment.intervals

    for watermark in (2 * MINUTE - 1, 2 * MINUTE):  # the window's end plus its allowed lateness
        await owner.commit(owner.checkpoint(interval, input_watermark=Instant(watermark), low_watermark=INSTANT_MIN))
        before += fetch(database_url, final)

    assert before == [(False,), (False,), (True,)]


async def test_foreign_table_is_not_taken_over(owner: Owner, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE SCHEMA other; CREATE TABLE other.panes (a int)")

    with pytest.raises(GraphError, match="exists already"):
        await owner.store.deploy(a_graph("other"))

    assert fetch(database_url, "SELECT count(*) FROM mill.graphs") == [(1,)]


@pytest.mark.parametrize("name", ["mill", "millpy", "public", "pg_catalog", "", "x" * 64, "a\nb"])
async def test_graph_with_a_used_name_is_refused(owner: Owner, name: str) -> None:
    with pytest.raises(GraphError):
        await owner.store.deploy(a_graph(name))


async def test_integers_of_any_width_are_stored_exactly(owner: Owner, database_url: str) -> None:
    wide = [0, 1, -1, 9_999, 10_000, 10_001, -(10**8), 2**63, -(2**63), 2**64, 10**37, -(10**37) - 1, 120_000_000]
    values = [(*NULLS[:-3], value, None, None) for value in wide]

    await commit(owner, panes(owner, values, arrow=False, count=len(wide)))

    found = fetch(database_url, "SELECT wide::text FROM typed.panes ORDER BY (substr(device, 8))::int")
    assert [int(row[0]) for row in found] == wide
