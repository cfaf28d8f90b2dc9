"""Tables that are altered, and publications that are dropped, while they are read: nothing is missed in silence."""

from __future__ import annotations

import itertools
from datetime import timedelta

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from millpy import ChangeFields, PolledTable, PostgresTable, milliseconds
from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.ingest.protocol import Source
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.postgres import polled_thread, table_thread
from tests.conformance.table_reading import followed, reader, reader_of, table_of

_secrets = itertools.count(1)
CHANGES = ("insert", "update", "delete")
PUBLICATION = "CREATE PUBLICATION millpy_public_t"
WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.fixture
def secret() -> str:
    return f"altered {next(_secrets)}"


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_thread, "_LOOK_EVERY_S", 0.05)


@pytest.mark.usefixtures("looks_often")
async def test_reader_stops_when_its_publication_is_dropped_and_does_not_make_it_anew(
    database_url: str, secret: str
) -> None:
    async with followed(database_url, secret) as (connection, found):
        connection.execute("DROP PUBLICATION millpy_public_t; INSERT INTO t VALUES (1)")
        with pytest.raises(ConfigError, match="publication millpy_public_t was dropped, so changes are missing"):
            await found.take()
        assert connection.execute("SELECT FROM pg_publication WHERE pubname = 'millpy_public_t'").fetchall() == []


@pytest.mark.parametrize(
    ("publication", "meanwhile"),
    [
        (
            "FOR TABLE t",
            "ALTER PUBLICATION millpy_public_t DROP TABLE t; {change};"
            " ALTER PUBLICATION millpy_public_t ADD TABLE t",
        ),
        ("FOR TABLE t", "DROP PUBLICATION millpy_public_t; {change}; CREATE PUBLICATION millpy_public_t FOR TABLE t"),
        (
            "FOR TABLES IN SCHEMA public",
            "ALTER PUBLICATION millpy_public_t DROP TABLES IN SCHEMA public; {change};"
            " ALTER PUBLICATION millpy_public_t ADD TABLES IN SCHEMA public",
        ),
        (
            "FOR ALL TABLES",
            "CREATE TABLE other (LIKE t INCLUDING ALL); INSERT INTO other VALUES (7); DROP TABLE t;"
            " ALTER TABLE other RENAME TO t",
        ),
    ],
    ids=["table", "publication", "schema", "renamed"],
)  # fmt: skip
async def test_reader_stops_when_the_table_was_unpublished_meanwhile(
    database_url: str, secret: str, publication: str, meanwhile: str
) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        connection.execute(f"{PUBLICATION} {publication}")  # type: ignore[call-overload]
        async with reader(database_url, secret=secret, operations=CHANGES) as found:
            assert await found.take() == []
        connection.execute(meanwhile.format(change="INSERT INTO t VALUES (1)"))
        connection.execute("INSERT INTO t VALUES (2)")
        try:
            with pytest.raises(ConfigError, match="was made anew, so changes are missing"):
                async with reader(database_url, found.position, secret=secret, operations=CHANGES) as again:
                    await again.take()
        finally:
            connection.execute("DROP PUBLICATION millpy_public_t")


async def test_publication_that_another_worker_creates_at_this_moment_is_used(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection, psycopg.connect(database_url) as other:
        other.execute(f"{PUBLICATION} FOR TABLE public.t")
        async with reader(database_url, secret=secret, operations=CHANGES) as found:
            while not connection.execute(WAITING).fetchone():
                await SystemClock().sleep(0.02)
            other.commit()
            assert await found.take() == []
            assert found.setup.connection.outage is None


@pytest.mark.usefixtures("looks_often")
async def test_other_table_of_a_publication_is_dropped_while_the_reader_looks(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection, psycopg.connect(database_url) as other:
        connection.execute(f"CREATE TABLE others (id int); {PUBLICATION} FOR TABLE t, others")
        opens = connection.info.server_version >= 160000
        async with reader(database_url, secret=secret, operations=CHANGES) as found:
            assert await found.take() == []
            connection.execute("INSERT INTO t VALUES (1)")
            read = await found.records(1)
            other.execute("DROP TABLE public.others")
            while opens and not connection.execute(WAITING).fetchone():
                await SystemClock().sleep(0.02)
            other.commit()
            connection.execute("INSERT INTO t VALUES (2)")
            read += await found.records(1)
            assert [record["id"] for record in read] == [1, 2]
            assert found.setup.connection.outage is None


async def test_table_is_dropped_while_the_first_reader_looks(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection, psycopg.connect(database_url) as other:
        connection.execute(f"{PUBLICATION} FOR TABLE t")
        opens = connection.info.server_version >= 160000
        other.execute("DROP TABLE public.t")
        async with reader(database_url, secret=secret, operations=CHANGES) as found:
            while opens and not connection.execute(WAITING).fetchone():
                await SystemClock().sleep(0.02)
            other.commit()
            while "there is no table public.t" not in found.setup.connection.why:
                await SystemClock().sleep(0.02)


@pytest.mark.parametrize(
    ("columns", "narrowed", "said"),
    [
        ("id int PRIMARY KEY", "publish = 'insert'", "lacks each update and delete of table public.t"),
        (
            "id int PRIMARY KEY) PARTITION BY RANGE (id",
            "publish_via_partition_root = false",
            r"does not publish table public.t as one table \(publish_via_partition_root\) any more",
        ),
    ],
    ids=["operations", "partitions"],
)
async def test_reader_stops_when_its_publication_leaves_out_changes(
    database_url: str, secret: str, columns: str, narrowed: str, said: str
) -> None:
    with table_of(database_url, columns) as connection:
        async with reader(database_url, secret=secret, operations=CHANGES) as found:
            assert await found.take() == []
        connection.execute(f"ALTER PUBLICATION millpy_public_t SET ({narrowed})")  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match=f"{said}, so changes are missing") as stopped:
            async with reader(database_url, found.position, secret=secret, operations=CHANGES) as again:
                await again.take()

    assert "new generation" in (stopped.value.hint or "")


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    "unlogged",
    [
        "ALTER TABLE t_1 SET UNLOGGED",
        "CREATE UNLOGGED TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
    ],
)
async def test_reader_stops_when_a_partition_is_not_in_the_log(database_url: str, secret: str, unlogged: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY) PARTITION BY RANGE (id") as connection:
        connection.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
        connection.execute(f"{PUBLICATION} FOR TABLE t WITH (publish_via_partition_root)")
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            connection.execute(unlogged)  # type: ignore[call-overload]
            with pytest.raises(ConfigError, match=r"table public\.t_[12] is unlogged, so changes are missing"):
                await found.take()
        with pytest.raises(ConfigError, match=r"table public\.t_[12] is unlogged, so its changes are not in the log"):
            async with reader(database_url, secret=f"{secret} anew") as found:
                await found.take()


async def test_changes_are_read_that_the_table_had_under_another_name(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            connection.execute("ALTER TABLE t RENAME TO moved; INSERT INTO moved VALUES (1)")
            connection.execute("ALTER TABLE moved RENAME TO t; INSERT INTO t VALUES (2)")
            assert [record["id"] for record in await found.records(2)] == [1, 2]
        connection.execute("ALTER TABLE t RENAME TO moved; INSERT INTO moved VALUES (3); ALTER TABLE moved RENAME TO t")
        async with reader(database_url, found.position, secret=secret) as again:
            assert [record["id"] for record in await again.records(1)] == [3]


@pytest.mark.usefixtures("looks_often")
async def test_primary_key_that_is_made_anew_is_waited_for(database_url: str, secret: str) -> None:
    async with followed(database_url, secret) as (connection, found):
        connection.execute("ALTER TABLE t DROP CONSTRAINT t_pkey; INSERT INTO t VALUES (1)")
        while "has no primary key" not in found.setup.connection.why:
            await SystemClock().sleep(0.02)
        connection.execute("ALTER TABLE t ALTER id TYPE bigint, ADD PRIMARY KEY (id); INSERT INTO t VALUES (2)")
        assert [record["id"] for record in await found.records(2)] == [1, 2]


async def test_publication_that_gets_other_tables_and_columns_is_read_on(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
        connection.execute("CREATE TABLE others (id int); ALTER PUBLICATION millpy_public_t ADD TABLE others")
        connection.execute("ALTER TABLE t ADD more int; INSERT INTO t VALUES (1, 2)")
        async with reader(database_url, found.position, secret=secret) as again:
            assert [(record["id"], record["more"]) for record in await again.records(1)] == [(1, 2)]
        connection.execute("DROP TABLE others")


@pytest.mark.parametrize(
    ("columns", "alter", "said"),
    [
        ("id int PRIMARY KEY", "ALTER TABLE t REPLICA IDENTITY NOTHING", "has no replica identity"),
        ("id int PRIMARY KEY DEFERRABLE", "", "has no replica identity"),
        ("id int PRIMARY KEY", "ALTER TABLE t SET UNLOGGED", "is unlogged"),
        (
            "id int PRIMARY KEY",
            "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id);"
            " CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (9); ALTER TABLE t_1 REPLICA IDENTITY NOTHING",
            "has no replica identity",
        ),
    ],
    ids=["nothing", "deferrable", "unlogged", "partition"],
)
async def test_table_is_not_published_where_that_would_forbid_the_application_to_change_it(
    database_url: str, secret: str, columns: str, alter: str, said: str
) -> None:
    with table_of(database_url, columns) as connection:
        connection.execute(f"{alter}; INSERT INTO t VALUES (1)")  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match=said):
            async with reader(database_url, secret=secret) as found:
                await found.take()
        connection.execute("UPDATE t SET id = 2; DELETE FROM t")


async def test_tables_that_inherit_from_the_table_are_not_published(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        connection.execute("CREATE TABLE child () INHERITS (t); INSERT INTO child VALUES (1)")
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            connection.execute("UPDATE child SET id = 2; INSERT INTO t VALUES (3)")  # the child has no primary key
            assert [record["id"] for record in await found.records(1)] == [3]
        connection.execute("DROP TABLE child")


async def test_copied_rows_are_not_dated_behind_changes_that_follow(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY, n int DEFAULT 0") as connection:
        connection.execute("INSERT INTO t SELECT generate_series(1, 400)")
        limits = Limits(bundle_records_max=50)
        async with reader(database_url, secret=secret, limits=limits) as found:
            copied = await found.records(50)
            connection.execute("UPDATE t SET n = 1 WHERE id = 1")
            await SystemClock().sleep(0.3)
        async with reader(
            database_url, found.position, secret=secret, limits=limits
        ) as again:  # with a second snapshot
            copied += await again.records(350)
            (updated,) = await again.records(1)

    assert {record["operation"] for record in copied} == {"snapshot"}
    assert updated["operation"] == "update"
    assert max(record["committed_at"] for record in copied) < updated["committed_at"]


async def test_polling_goes_by_the_values_of_a_column_and_not_by_their_text(database_url: str, secret: str) -> None:
    source = PolledTable("t", column="n", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, n int") as connection:
        connection.execute("INSERT INTO t SELECT i, i FROM generate_series(-2, 102) AS i")
        async with reader_of(source, database_url, secret=secret) as found:
            read = await found.records(105)

    assert [record["n"] for record in read] == list(range(-2, 103))


async def test_polling_follows_an_altered_table_unless_its_order_is_another_one(database_url: str, secret: str) -> None:
    source = PolledTable("t", column="n", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, n int, more int") as connection:
        connection.execute("INSERT INTO t VALUES (1, 9), (2, 10)")
        async with reader_of(source, database_url, secret=secret) as found:
            read = await found.records(2)
            connection.execute("ALTER TABLE t ALTER n TYPE bigint; INSERT INTO t VALUES (3, 5000000000)")
            read += await found.records(1)
            connection.execute("ALTER TABLE t DROP more; INSERT INTO t VALUES (4, 5000000001)")
            read += await found.records(1)
            connection.execute("ALTER TABLE t ADD price int; INSERT INTO t VALUES (5, 5000000002, 7)")
            read += await found.records(1)
            connection.execute("ALTER TABLE t ALTER n TYPE text; INSERT INTO t VALUES (6, '6')")
            with pytest.raises(ConfigError, match="was changed, so its order is another one"):
                await found.take()

    large = [(3, 5000000000), (4, 5000000001), (5, 5000000002)]
    assert [(record["id"], record["n"]) for record in read] == [(1, 9), (2, 10), *large]
    assert [record.get("price") for record in read[-2:]] == [None, 7]


@pytest.mark.parametrize(
    ("before", "after", "values"),
    [
        ("numeric(10, 2)", "numeric(12, 4)", ("1.25", "1.2645", "1.3")),
        ("varchar(3)", "varchar(9)", ("aaa", "aaab", "aaac")),
    ],
)
async def test_polling_reads_each_row_once_when_values_become_longer(
    database_url: str, secret: str, before: str, after: str, values: tuple[str, ...]
) -> None:
    source = PolledTable("t", column="n", lag=timedelta(0), every=milliseconds(10))
    first, *others = values
    read = []
    with table_of(database_url, f"id int PRIMARY KEY, n {before}") as connection:
        connection.execute("INSERT INTO t VALUES (1, %s)", [first])
        async with reader_of(source, database_url, secret=secret) as found:
            read += await found.records(1)
            connection.execute(f"ALTER TABLE t ALTER n TYPE {after}")  # type: ignore[call-overload]
            for number, value in enumerate(others, start=2):
                connection.execute("INSERT INTO t VALUES (%s, %s)", [number, value])
                read += await found.records(1)

    assert [record["id"] for record in read] == [1, 2, 3]


async def test_polling_follows_a_text_that_gets_another_bound(database_url: str, secret: str) -> None:
    source = PolledTable("t", column="n", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id text PRIMARY KEY, n varchar(3)") as connection:
        connection.execute("INSERT INTO t VALUES ('1', 'a')")
        async with reader_of(source, database_url, secret=secret) as found:
            read = await found.records(1)
        connection.execute(
            "ALTER TABLE t ALTER n TYPE text, ALTER id TYPE varchar(9); INSERT INTO t VALUES ('2', 'abcd')"
        )
        async with reader_of(source, database_url, found.position, secret=secret) as again:
            read += await again.records(1)

    assert [record["id"] for record in read] == ["1", "2"]


async def test_polling_stops_when_values_get_another_order_while_no_row_is_new(
    database_url: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server converts them by the time zone of the session that alters the table, so new values may be smaller."""
    monkeypatch.setattr(polled_thread, "_LOOK_EVERY_S", 0.05)
    source = PolledTable("t", column="at", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, at timestamp") as connection:
        connection.execute("INSERT INTO t VALUES (1, '2026-01-01 10:00')")
        async with reader_of(source, database_url, secret=secret) as found:
            assert [record["id"] for record in await found.records(1)] == [1]
            connection.execute("SET timezone TO 'Europe/Berlin'; ALTER TABLE t ALTER at TYPE timestamptz")
            connection.execute("INSERT INTO t VALUES (2, '2026-01-01 10:30')")
            with pytest.raises(ConfigError, match="was changed, so its order is another one"):
                await found.take()


async def test_polling_leaves_out_no_row_when_the_order_changes_between_two_pages(
    database_url: str, secret: str
) -> None:
    """By the position in the old order, rows of the next hour would lie behind."""
    source = PolledTable("t", column="at", lag=timedelta(0), every=milliseconds(10))
    read: list[int] = []
    with table_of(database_url, "id int PRIMARY KEY, at timestamp") as connection:
        minutes = "generate_series(1, 10) AS n"
        connection.execute(
            f"INSERT INTO t SELECT n, '2026-01-01 10:00'::timestamp + n * interval '1 min' FROM {minutes}"
        )
        connection.execute(f"INSERT INTO t SELECT n + 10, '2026-01-01 14:00'::timestamp FROM {minutes}")
        async with reader_of(source, database_url, secret=secret, limits=Limits(bundle_records_max=2)) as found:
            read += [record["id"] for record in await found.records(2)]
            connection.execute("SET timezone TO 'Europe/Berlin'; ALTER TABLE t ALTER at TYPE timestamptz")
            with pytest.raises(ConfigError, match="was changed, so its order is another one"):
                while True:
                    read += [record["id"] for record in await found.take()]

    assert read == list(range(1, len(read) + 1))


@pytest.mark.parametrize(
    ("breaks", "said", "repairs"),
    [
        ("ALTER TABLE t RENAME TO base; CREATE VIEW t AS SELECT * FROM base", "there is no table public.t",
         "DROP VIEW t; ALTER TABLE base RENAME TO t"),
        ("ALTER TABLE t RENAME TO base; CREATE MATERIALIZED VIEW t AS SELECT * FROM base", "there is no table public.t",
         "DROP MATERIALIZED VIEW t; ALTER TABLE base RENAME TO t"),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey", "lacks a primary key", "ALTER TABLE t ADD PRIMARY KEY (id)"),
        ("ALTER TABLE t RENAME n TO m", "lacks column 'n'", "ALTER TABLE t RENAME m TO n"),
    ],
    ids=["view", "materialized view", "primary key", "column"],
)  # fmt: skip
async def test_polling_waits_for_a_table_that_it_cannot_read_for_a_while(
    database_url: str, secret: str, monkeypatch: pytest.MonkeyPatch, breaks: str, said: str, repairs: str
) -> None:
    monkeypatch.setattr(polled_thread, "_LOOK_EVERY_S", 0.05)
    source = PolledTable("t", column="n", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY, n int") as connection:
        connection.execute("INSERT INTO t VALUES (1, 1)")
        async with reader_of(source, database_url, secret=secret) as found:
            read = await found.records(1)
            connection.execute(breaks)  # type: ignore[call-overload]
            while said not in found.setup.connection.why:
                await SystemClock().sleep(0.02)
            connection.execute(f"{repairs}; INSERT INTO t VALUES (2, 2)")  # type: ignore[call-overload]
            read += await found.records(1)

    assert [record["id"] for record in read] == [1, 2]


async def test_missing_right_names_the_table(database_url: str, secret: str) -> None:
    source = PolledTable("t", column="id", lag=timedelta(0), every=milliseconds(10))
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        connection.execute(
            "INSERT INTO t VALUES (1); CREATE ROLE table_guest LOGIN PASSWORD 'table_guest';"
            " GRANT SELECT ON t TO table_guest"
        )
        url = make_conninfo(database_url, user="table_guest", password="table_guest")
        try:
            async with reader_of(source, url, secret=secret) as found:
                assert [record["id"] for record in await found.records(1)] == [1]
                connection.execute("REVOKE SELECT ON t FROM table_guest")
                with pytest.raises(ConfigError, match="table t cannot be read: permission denied") as caught:
                    await found.take()
            assert "SELECT on the table" in str(caught.value.hint)
        finally:
            connection.execute("DROP OWNED BY table_guest; DROP ROLE table_guest")


class Item(msgspec.Struct):
    id: int
    n: int = 0
    operation: str = ""


@pytest.mark.parametrize(
    "source",
    [
        PostgresTable("t", fields=ChangeFields(operation="operation")),
        PolledTable("t", column="id", lag=timedelta(0), every=milliseconds(10)),
    ],
    ids=["changes", "polled"],
)
async def test_field_that_no_column_fills_any_more_is_warned_of_once(
    database_url: str, secret: str, caplog: pytest.LogCaptureFixture, source: Source
) -> None:
    with table_of(database_url, "id int PRIMARY KEY, n int, operation text") as connection:
        connection.execute("INSERT INTO t VALUES (1, 1)")
        async with reader_of(source, database_url, secret=secret, record_type=RecordType(Item)) as found:
            read = await found.records(1)
            assert caplog.messages == []
            connection.execute("ALTER TABLE t RENAME n TO m; INSERT INTO t VALUES (2, 2)")
            read += await found.records(1)
            connection.execute("ALTER TABLE t ADD more int; INSERT INTO t VALUES (3, 3)")
            read += await found.records(1)

    assert [record.get("n") for record in read] == [1, None, None]
    assert [message for message in caplog.messages if "default" in message] == [
        "table t has no column for field n of Item, so each record has its default"
    ]
