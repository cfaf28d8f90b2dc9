"""Tables as sources, on a real PostgreSQL: the first copy and the changes, without a gap and without a double."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import psycopg
import pytest

from millpy import (
    ChangeFields,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    PolledTable,
    PostgresTable,
    Sum,
    milliseconds,
    seconds,
)
from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.ingest.protocol import Source
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.sources.postgres import table_thread
from millpy.sources.postgres.page_thread import COPY_IS_LONG
from millpy.store.postgres.store import PostgresStore
from tests.conformance.table_reading import SLOTS, Reader, drop_slots, end_readers, reader, reader_of, table_of

_secrets = itertools.count(1)


@pytest.fixture
def secret() -> str:
    return f"secret {next(_secrets)}"


COLUMNS = """
    id int PRIMARY KEY, small smallint DEFAULT -1, big bigint DEFAULT 9223372036854775807, real float8 DEFAULT 1e20,
    exact numeric DEFAULT 1.50,
    yes boolean DEFAULT true, name text DEFAULT E'q"u\\\\o\\te\\n', code char(3) DEFAULT 'a',
    at timestamptz DEFAULT '2026-01-02 03:04:05.678+02', local timestamp DEFAULT '2026-01-02 03:04:05',
    day date DEFAULT '2026-01-02', id2 uuid DEFAULT '12345678-1234-5678-1234-567812345678',
    doc jsonb DEFAULT '{"a": [1, null]}', raw json DEFAULT E'{"b":\\n1}', list int[] DEFAULT '{1,NULL,3}',
    grid int[] DEFAULT '{{1,2},{3,4}}', words text[] DEFAULT ARRAY['a b', 'NULL', E'c"\\\\d', ''],
    none text, positive positive DEFAULT 7, mood mood DEFAULT 'calm', pair int4range DEFAULT '[1,4)'
"""


async def test_values_are_those_of_row_to_json_in_the_copy_and_in_changes(database_url: str, secret: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET search_path TO public; CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
        connection.execute("CREATE TYPE mood AS ENUM ('calm', 'wild')")
    with table_of(database_url, COLUMNS) as connection:
        connection.execute("SET timezone TO 'UTC'; ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t (id) VALUES (1)")
        (wanted,) = connection.execute("SELECT row_to_json(t) FROM t").fetchone() or ({},)
        async with reader(database_url, secret=secret) as found:
            (copied,) = await found.records(1)
            connection.execute("INSERT INTO t (id) VALUES (2)")
            connection.execute("UPDATE t SET id = 3, small = 5 WHERE id = 2")
            connection.execute("DELETE FROM t WHERE id = 3; TRUNCATE t")
            inserted, updated, deleted, truncated = await found.records(4)

    own = ("operation", "before", "committed_at")
    of = [{key: value for key, value in record.items() if key not in own} for record in (copied, inserted, updated)]
    assert of == [wanted, {**wanted, "id": 2}, {**wanted, "id": 3, "small": 5}]
    assert updated["before"] == {**wanted, "id": 2}
    assert deleted["before"] == {**wanted, "id": 3, "small": 5}
    assert {**deleted, "before": None} == {**updated, "operation": "delete", "before": None} | {
        "committed_at": deleted["committed_at"]
    }
    named = [record["operation"] for record in (copied, inserted, updated, deleted, truncated)]
    assert named == ["snapshot", "insert", "update", "delete", "truncate"]
    assert set(truncated) == set(own)


class Writers:
    """Two sessions that change rows, each change raising n of its row by one; one leaves its transactions open."""

    def __init__(self, url: str, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        self.connection, self.slow, self.chance = connection, psycopg.connect(url), chance
        self.held = set[int]()

    async def write(self) -> None:
        chance = self.chance
        for _ in range(chance.randrange(1, 6)):
            if chance.random() < 0.4 and len(self.held) < 5:
                key = chance.randrange(40)
                self.held.add(key)
                self.slow.execute("UPDATE t SET n = n + 1 WHERE b = %s", [key])
            if chance.random() < 0.3:
                self.commit()
            for key in chance.sample(range(40), 3):
                if key not in self.held:
                    self.change(key)

    def commit(self) -> None:
        self.slow.commit()
        self.held.clear()

    def change(self, key: int) -> None:
        if self.chance.random() < 0.8:
            self.connection.execute("UPDATE t SET n = n + 1 WHERE b = %s", [key])
        else:
            self.connection.execute("DELETE FROM t WHERE b = %s", [key])
            self.connection.execute("INSERT INTO t VALUES ('z', %s, 0)", [key])


def replayed(records: Iterable[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """What the rows are behind the records; each must be the next of its row."""
    state: dict[tuple[str, int], int] = {}
    for record in records:
        key, operation = (record["a"], record["b"]), record["operation"]
        assert (key in state) == (operation in ("update", "delete")), record
        assert operation != "update" or record["n"] == state[key] + 1, record
        if operation == "delete":
            del state[key]
        else:
            state[key] = record["n"]
    return state


async def test_copy_and_changes_are_exact_when_readers_die_at_any_position(database_url: str, secret: str) -> None:
    chance, limits = random.Random(5), Limits(bundle_records_max=7)
    with table_of(database_url, "a text, b int, n int NOT NULL, PRIMARY KEY (a, b)") as connection:
        connection.execute("INSERT INTO t SELECT chr(97 + i % 5), i, 0 FROM generate_series(0, 39) AS i")
        writers = Writers(database_url, connection, chance)
        position: bytes | None = None
        read: list[dict[str, Any]] = []
        for _ in range(14):
            async with reader(database_url, position, secret=secret, limits=limits) as found:
                for _ in range(chance.randrange(1, 4)):
                    await writers.write()
                    if position is None:  # a slot begins when the transactions before it have ended
                        writers.commit()
                    if position is None or chance.random() < 0.8:
                        read += await found.take()
                        position = found.position
        writers.slow.commit()
        writers.slow.close()
        connection.execute("INSERT INTO t VALUES ('end', 1000, 0)")
        async with reader(database_url, position, secret=secret) as found:
            while not read or read[-1].get("a") != "end":
                read += await found.take()
        wanted = {(a, b): n for a, b, n in connection.execute("SELECT a, b, n FROM t").fetchall()}

    assert replayed(read) == wanted
    assert sum(record["operation"] == "snapshot" for record in read) > 20


async def test_changes_are_read_once_when_the_replication_connection_breaks_among_them(
    database_url: str, secret: str
) -> None:
    with table_of(database_url, "id int PRIMARY KEY, name text") as connection:
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            read: list[int] = []
            for first in range(0, 60_000, 20_000):
                connection.execute(
                    "INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(%s::int, %s) AS i",
                    [first, first + 19_999],
                )
                read += [record["id"] for record in await found.records(3_000)]
                end_readers(connection)
            while read[-1] != 59_999:
                read += [record["id"] for record in await found.take()]

    assert read == list(range(60_000))


async def test_table_without_changes_and_reader_without_room_are_not_taken_for_a_lost_connection(
    database_url: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_thread, "_SILENT_S_MAX", 1.5)
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        async with reader(database_url, secret=secret, limits=Limits(bundle_records_max=1_000)) as found:
            assert await found.take() == []
            await SystemClock().sleep(3)  # idle
            connection.execute("INSERT INTO t SELECT generate_series(1, 9000)")
            await SystemClock().sleep(3)  # nobody takes
            assert [record["id"] for record in await found.records(9_000)] == list(range(1, 9_001))
            assert (found.setup.connection.is_connected, found.setup.connection.outage) == (True, None)


async def test_large_value_that_did_not_change_is_a_dead_letter_without_full_identity(
    database_url: str, secret: str
) -> None:
    with table_of(database_url, "id int PRIMARY KEY, n int, big text") as connection:
        connection.execute(
            "ALTER TABLE t ALTER big SET STORAGE EXTERNAL; INSERT INTO t VALUES (1, 0, repeat('x', 9000))"
        )
        async with reader(database_url, secret=secret) as found:
            assert (await found.records(1))[0]["big"] == "x" * 9000
            connection.execute("UPDATE t SET n = 1")
            (record,) = await found.records(1)
            assert "big" not in record
            assert found.refused[0].endswith("ALTER TABLE public.t REPLICA IDENTITY FULL")
            connection.execute("ALTER TABLE t REPLICA IDENTITY FULL")
            connection.execute("UPDATE t SET n = 2")
            assert (await found.records(1))[0]["big"] == "x" * 9000
            assert len(found.refused) == 1


@pytest.mark.parametrize(
    ("of_table", "of_partition", "before"),
    [
        ("USING INDEX t_b_key", "DEFAULT", {"a": 1, "b": 2}),
        ("DEFAULT", "USING INDEX t_1_b_key", {"b": 2}),
        ("FULL", "USING INDEX t_1_b_key", {"b": 2}),
        ("FULL", "FULL", {"a": 1, "b": 2, "n": None}),
        ("DEFAULT", "FULL", {"a": 1, "b": 2, "n": None}),
    ],
)
async def test_row_before_a_change_has_what_the_identity_of_its_partition_keeps(
    database_url: str, secret: str, of_table: str, of_partition: str, before: dict[str, Any]
) -> None:
    columns = "a int, b int NOT NULL UNIQUE, n int, PRIMARY KEY (a, b)) PARTITION BY RANGE (b"
    with table_of(database_url, columns) as connection:
        connection.execute(f"CREATE TABLE t_1 PARTITION OF t DEFAULT; ALTER TABLE t REPLICA IDENTITY {of_table}")
        connection.execute(f"ALTER TABLE t_1 REPLICA IDENTITY {of_partition}")
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            connection.execute("INSERT INTO t VALUES (1, 2, NULL); DELETE FROM t")
            (_, deleted) = await found.records(2)

    assert deleted["before"] == before
    assert {name: deleted[name] for name in deleted.keys() & {"a", "b", "n"}} == before


async def test_partition_without_full_identity_of_its_own_has_no_values_that_the_log_lacks(
    database_url: str, secret: str
) -> None:
    with table_of(database_url, "id int PRIMARY KEY, n int, big text) PARTITION BY RANGE (id") as connection:
        connection.execute("CREATE TABLE t_1 PARTITION OF t DEFAULT; ALTER TABLE t_1 ALTER big SET STORAGE EXTERNAL")
        connection.execute("ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, 0, repeat('x', 9000))")
        async with reader(database_url, secret=secret) as found:
            assert (await found.records(1))[0]["big"] == "x" * 9000
            connection.execute("UPDATE t SET id = 2; DELETE FROM t")
            updated, deleted = await found.records(2)
            assert "REPLICA IDENTITY FULL, and each partition of it" in found.refused[0]
            whole = []
            for identity in ("FULL", "DEFAULT"):
                connection.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}; ALTER TABLE t_1 REPLICA IDENTITY FULL")
                connection.execute("INSERT INTO t VALUES (3, NULL, repeat('x', 9000)); UPDATE t SET id = 4")
                connection.execute("DELETE FROM t")
                whole += (await found.records(3))[1:]

    assert (updated["before"], updated.keys() & {"id", "n", "big"}) == ({"id": 1}, {"id", "n"})
    assert (deleted["before"], deleted.keys() & {"id", "n", "big"}) == ({"id": 2}, {"id"})
    assert [record["before"] for record in whole] == [{"id": n, "n": None, "big": "x" * 9000} for n in (3, 4)] * 2
    assert [record["big"] for record in whole] == ["x" * 9000] * 4
    assert len(found.refused) == 1


async def test_partition_that_is_added_while_its_table_is_read_has_what_its_own_identity_keeps(
    database_url: str, secret: str
) -> None:
    with table_of(database_url, "id int PRIMARY KEY, n int) PARTITION BY RANGE (id") as connection:
        connection.execute("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)")
        connection.execute("ALTER TABLE t_1 REPLICA IDENTITY FULL")
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            connection.execute("INSERT INTO t VALUES (1, NULL); DELETE FROM t")
            read = await found.records(2)
            connection.execute("CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20)")
            connection.execute("INSERT INTO t VALUES (10, 7); DELETE FROM t")
            read += await found.records(2)

    assert [record["before"] for record in read[1::2]] == [{"id": 1, "n": None}, {"id": 10}]
    assert "n" not in read[3]


async def until_told(found: Reader, words: str) -> None:
    while words not in found.setup.connection.why:
        await SystemClock().sleep(0.02)


@pytest.mark.parametrize("source", [PostgresTable("t"), PolledTable("t", column="id", lag=milliseconds(0))])
async def test_table_that_is_locked_is_told_and_read_afterwards(
    database_url: str, secret: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COPY_IS_LONG, "lock_timeout", "100")
    with table_of(database_url, "id int PRIMARY KEY") as connection, psycopg.connect(database_url) as other:
        connection.execute("INSERT INTO t VALUES (1)")
        other.execute("LOCK TABLE public.t IN ACCESS EXCLUSIVE MODE")
        async with reader_of(source, database_url, secret=secret) as found:
            await until_told(found, "is locked")
            other.rollback()
            assert await found.records(1) == [{"id": 1}]


async def test_table_that_is_locked_while_it_is_followed_stays_connected(
    database_url: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COPY_IS_LONG, "lock_timeout", "50")
    monkeypatch.setattr(table_thread, "_LOOK_EVERY_S", 0.05)
    with table_of(database_url, "id int PRIMARY KEY") as connection, psycopg.connect(database_url) as other:
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            connection.execute("INSERT INTO t VALUES (1)")
            read = await found.records(1)
            other.execute("LOCK TABLE public.t IN ACCESS EXCLUSIVE MODE")
            await SystemClock().sleep(0.5)
            other.rollback()
            connection.execute("INSERT INTO t VALUES (2)")
            read += await found.records(1)
            assert [record["id"] for record in read] == [1, 2]
            assert found.setup.connection.outage is None and found.setup.connection.why == ""


async def test_what_an_operator_has_to_do_is_said(database_url: str, secret: str) -> None:
    async with reader(database_url, secret=secret) as found:
        await until_told(found, "there is no table public.t")
    with table_of(database_url, "id int, name text") as connection:
        with pytest.raises(ConfigError, match=r"table public\.t has no primary key"):
            async with reader(database_url, secret=secret) as found:
                await found.take()
        connection.execute("ALTER TABLE t ADD PRIMARY KEY (id)")
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []  # the table is empty, and that is committed
            position = found.position
        drop_slots(connection)
        with pytest.raises(ConfigError, match="was dropped, so changes are missing"):
            async with reader(database_url, position, secret=secret) as found:
                await found.take()


async def test_generated_columns_are_copied_exactly_where_the_log_has_them(database_url: str, secret: str) -> None:
    columns = "id int PRIMARY KEY, value int, twice int GENERATED ALWAYS AS (value * 2) STORED"
    with table_of(database_url, columns) as connection:
        connection.execute("INSERT INTO t VALUES (1, 10)")
        async with reader(database_url, secret=secret, fields=ChangeFields()) as found:
            copied = await found.records(1)
            connection.execute("INSERT INTO t VALUES (2, 10)")
            inserted = await found.records(1)
        more = {"twice": 20} if connection.info.server_version >= 180000 else {}
        assert (copied, inserted) == ([{"id": 1, "value": 10} | more], [{"id": 2, "value": 10} | more])


async def test_publication_without_the_primary_key_is_refused(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY, value int") as connection:
        connection.execute("DROP PUBLICATION IF EXISTS partly; INSERT INTO t VALUES (1, 10)")
        connection.execute("CREATE PUBLICATION partly FOR TABLE t (value) WITH (publish = 'insert')")
        operations = ("snapshot", "insert")
        with pytest.raises(ConfigError, match="lack column id of its primary key"):
            async with reader(database_url, secret=secret, publication="partly", operations=operations) as found:
                await found.take()


async def test_reader_ends_the_session_of_a_frozen_owner_before_it(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        async with reader(database_url, secret=secret) as frozen:
            assert await frozen.take() == []
            connection.execute("INSERT INTO t VALUES (1)")
            assert [record["id"] for record in await frozen.records(1)] == [1]
            async with reader(database_url, frozen.position, secret=secret) as successor:
                connection.execute("INSERT INTO t VALUES (2)")
                assert [record["id"] for record in await successor.records(1)] == [2]


class Transfer(msgspec.Struct):
    id: int
    account: str
    at: int
    amount: int


def graph_of() -> Graph:
    graph = Graph("bank")
    how: dict[str, Any] = {"event_time": EventTime("at", unit="s", max_disorder=seconds(5)), "schema": Transfer}
    transfers = graph.inject("transfers", PostgresTable("t", operations=("snapshot", "insert")), **how)
    windows = transfers.key_by("account").window(FixedWindows(seconds(10)))
    windows.aggregate(n=Count(), total=Sum("amount")).to_table("per_ten_s")
    return graph


async def test_windows_equal_the_table_and_the_slot_goes_with_the_graph(database_url: str) -> None:
    chance, stop = random.Random(3), asyncio.Event()
    with table_of(database_url, "id int PRIMARY KEY, account text, at int, amount int") as connection:
        numbers = iter(range(1, 10_000))

        def insert(count: int) -> None:
            rows = [(n, chance.choice("abc"), n // 8, n % 100) for n in itertools.islice(numbers, count)]
            connection.cursor().executemany("INSERT INTO t VALUES (%s, %s, %s, %s)", rows)

        insert(200)
        async with PostgresStore(database_url) as store:
            await store.deploy(graph_of().spec(), on_purpose=True)
            limits = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1, bundle_records_max=64)
            worker = asyncio.create_task(run_worker(graph_of(), database_url, limits=limits, stop=stop))
            for life in range(3):
                for _ in range(5):
                    insert(chance.randrange(40))
                    await SystemClock().sleep(0.02)
                if life < 2:
                    worker.cancel()
                    await asyncio.wait([worker])
                    worker = asyncio.create_task(run_worker(graph_of(), database_url, limits=limits, stop=stop))
            connection.execute("INSERT INTO t VALUES (100000, 'end', 100000, 0)")
            wanted = connection.execute(
                "SELECT account, at / 10 * 10, count(*), sum(amount) FROM t WHERE account <> 'end'"
                " GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()
            found: list[Any] = []
            async with asyncio.timeout(30):
                while len(found) < len(wanted):
                    found = connection.execute(
                        "SELECT account, extract(epoch FROM window_start)::int, n, total FROM bank.per_ten_s"
                        " ORDER BY 1, 2"
                    ).fetchall()
                    await SystemClock().sleep(0.02)
            findings = examine(read_facts(database_url, SystemClock()), Limits())
            stop.set()
            await worker
            assert found == wanted
            assert [f.found for f in findings if f.check == "replication slot"] != []

            await store.drop("bank")
            assert connection.execute(f"SELECT count(*) {SLOTS}").fetchone() == (0,)


async def test_a_source_that_lost_its_slot_copies_its_table_anew_after_a_reset(database_url: str) -> None:
    limits = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)
    rows_of = "SELECT account, n, total FROM bank.per_ten_s ORDER BY window_start"
    with table_of(database_url, "id int PRIMARY KEY, account text, at int, amount int") as connection:

        async def works_until(*wanted: tuple[Any, ...]) -> None:
            stop = asyncio.Event()
            worker = asyncio.create_task(run_worker(graph_of(), database_url, limits=limits, stop=stop))
            async with asyncio.timeout(30):
                while connection.execute(rows_of).fetchall() != list(wanted):
                    await SystemClock().sleep(0.02)
            stop.set()
            await worker

        connection.execute("INSERT INTO t VALUES (1, 'a', 0, 5), (2, 'end', 100, 0), (3, 'end', 200, 0)")
        async with PostgresStore(database_url) as store:
            await store.deploy(graph_of().spec())
        await works_until(("a", 1, 5), ("end", 1, 0))
        connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {SLOTS}")
        connection.execute("INSERT INTO t VALUES (4, 'end', 300, 0)")
        with pytest.raises(ConfigError, match="was dropped") as refused:
            async with asyncio.timeout(30):
                await run_worker(graph_of(), database_url, limits=limits, stop=asyncio.Event())
        assert "reset the source with all its readers" in (refused.value.hint or "")

        async with PostgresStore(database_url) as store:
            names = [computation.name for computation in graph_of().spec().computations]
            await store.reset(graph_of().spec(), names)
            await works_until(("a", 1, 5), ("end", 1, 0), ("end", 1, 0))
            await store.drop("bank")


async def test_polling_reads_each_row_once_when_its_transaction_ends_within_the_lag(
    database_url: str, secret: str
) -> None:
    source = PolledTable("t", column="number", lag=milliseconds(300), every=milliseconds(10))

    def polling(position: bytes | None) -> AbstractAsyncContextManager[Reader]:
        return reader_of(source, database_url, position, secret=secret, limits=Limits(bundle_records_max=3))

    with table_of(database_url, "id text PRIMARY KEY, number bigint") as connection:
        connection.execute("INSERT INTO t SELECT 'a' || i, i / 2 FROM generate_series(1, 7) AS i")
        with psycopg.connect(database_url) as slow:
            slow.execute("INSERT INTO public.t VALUES ('slow', 50)")
            connection.execute("INSERT INTO t VALUES ('quick', 60), ('null', NULL)")
            async with polling(None) as found:
                first = await found.take()  # at least 300 ms later
                position = found.position
            slow.commit()
        async with polling(position) as found:
            read = first + await found.records(9 - len(first))
            connection.execute("UPDATE t SET number = 70 WHERE id = 'a1'")
            read += await found.records(1)

    assert [row["id"] for row in read] == ["a1", "a2", "a3", "a4", "a5", "a6", "a7", "slow", "quick", "a1"]
    with pytest.raises(ConfigError, match="lacks column 'number'"), table_of(database_url, "id int PRIMARY KEY"):
        async with polling(None) as found:
            await found.take()
