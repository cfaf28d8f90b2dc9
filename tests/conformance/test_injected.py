"""`millpy.inject` and its reader, on a real PostgreSQL: what commits is read once, what does not is not."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from examples.orders_app import TABLE
from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, InjectedStream, Sum, hours, seconds
from millpy.admin import doctor_injections
from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError
from millpy.graph.loader import load_graph
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.finding import Severity
from millpy.process.assembly import run_worker
from millpy.sources.postgres.injected_position import InjectedPosition
from millpy.sources.postgres.injected_reader import InjectedReader
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.statements import statement
from millpy.store.postgres.store import PostgresStore
from tests.pgbouncer import Pgbouncer, program


class Order(msgspec.Struct):
    customer: str
    at: int
    amount: int
    id: str | None = None


def graph_of(name: str = "shop", waiting_max: int = 1_000_000) -> Graph:
    graph = Graph(name)
    source = InjectedStream("orders", id_field="id", waiting_max=waiting_max)
    how: dict[str, Any] = {"event_time": EventTime("at", unit="s", max_disorder=seconds(5)), "schema": Order}
    orders = graph.inject("incoming", source, dedupe=Dedupe("id", within=hours(1)), **how)
    windows = orders.key_by("customer").window(FixedWindows(seconds(10)))
    windows.aggregate(n=Count(), total=Sum("amount")).to_table("per_ten_s")
    return graph


async def deploy(url: str, *graphs: Graph) -> None:
    async with PostgresStore(url) as store:
        for graph in graphs:
            await store.deploy(graph.spec(), on_purpose=True)


def order(number: int, **more: Any) -> str:
    return json.dumps({"customer": "a", "at": number, "amount": number, **more})


def inject(connection: psycopg.Connection[Any], *numbers: int, stream: str = "orders") -> None:
    for number in numbers:
        connection.execute("SELECT millpy.inject(%s, %s::jsonb, %s)", [stream, order(number), f"id-{number}"])


class Reader:
    def __init__(self, injector: InjectedReader, setup: SourceSetup) -> None:
        self.injector, self.setup = injector, setup
        self.position: bytes | None = None

    async def take(self) -> tuple[SourceBatch, list[int]]:
        while (taken := await self.injector.take()) is None:
            self.setup.ready.clear()
            await self.setup.ready.wait()
        self.position = taken.position
        return taken, [json.loads(payload)["amount"] for payload in taken.payloads]

    async def amounts(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            taken, amounts = await self.take()
            await self.injector.acknowledge(taken.token)
            found += amounts
        return found


@asynccontextmanager
async def reader(url: str, position: bytes | None = None, graph: str = "shop", **limits: Any) -> AsyncIterator[Reader]:
    source = graph_of(graph).injectors()[0].source
    setup = SourceSetup(
        graph=graph, stream="incoming", partition="orders", limits=Limits(**limits), clock=SystemClock(),
        ready=asyncio.Event(), record_type=graph_of().injectors()[0].record_type, database=url,
    )  # fmt: skip
    found = Reader(source.connect(setup), setup)  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        try:
            await found.injector.open(position)
            yield found
        finally:
            await found.injector.close()


async def test_reset_source_reads_what_waited_for_it(database_url: str) -> None:
    await deploy(database_url, graph_of())
    with psycopg.connect(database_url, autocommit=True) as connection, psycopg.connect(database_url) as other:
        inject(connection, 1, 2)
        async with reader(database_url) as found:
            assert await found.amounts(2) == [1, 2]
        inject(other, 3)
        inject(connection, 4)
        async with PostgresStore(database_url) as store:
            await store.reset(graph_of().spec(), ["incoming", "per_ten_s"])
        other.commit()
        inject(connection, 5)

        async with reader(database_url) as found:
            amounts: list[int] = []
            while not {3, 4, 5} <= set(amounts):
                amounts += await found.amounts(1)
            assert sorted(set(amounts) - {1, 2}) == [3, 4, 5], "what was read just before may come again"


def stored(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT (record ->> 'amount')::int FROM mill.injected_records ORDER BY number")
        return [amount for (amount,) in rows]


async def until_waiting(url: str) -> None:
    """Wait until the reader has noted that it sleeps: from then on it writes nothing of its own accord."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(is_waiting, url):
            await SystemClock().sleep(0.02)


def is_waiting(url: str) -> bool:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT bool_and(waits) FROM mill.injection_readers").fetchone() == (True,)


async def until_forgotten(url: str) -> None:
    async with asyncio.timeout(10):
        while await asyncio.to_thread(stored, url):
            await SystemClock().sleep(0.02)


async def test_record_exists_if_and_only_if_its_transaction_commits(database_url: str) -> None:
    await deploy(database_url, graph_of())
    with psycopg.connect(database_url) as early, psycopg.connect(database_url) as late:
        inject(early, 1)
        with suppress(ZeroDivisionError), late.transaction():
            inject(late, 2)
            raise ZeroDivisionError
        inject(late, 3)
        with late.transaction(force_rollback=True):  # a savepoint
            inject(late, 4)
        late.commit()
        async with reader(database_url) as first:
            assert await first.amounts(1) == [3]  # nobody waits for the open transaction
            position = first.position
        early.commit()
        inject(late, 5)
        late.commit()

        async with reader(database_url, position) as second:
            assert await second.amounts(2) == [1, 5]
            await until_forgotten(database_url)
        async with reader(database_url, position) as again:  # as after a crash before the commit of 1 and 5
            assert again.injector.quiet() is False


async def test_record_of_a_transaction_younger_than_the_last_that_ended_is_read_when_it_commits(
    database_url: str,
) -> None:
    await deploy(database_url, graph_of())
    with psycopg.connect(database_url) as older, psycopg.connect(database_url) as younger:
        async with reader(database_url) as first:
            await until_waiting(database_url)
            older.execute("SELECT pg_current_xact_id()")
            inject(younger, 1)
            inject(older, 2)
            older.commit()  # now the last that has ended: no snapshot names the younger one
            assert await first.amounts(1) == [2]
            position = first.position
        younger.commit()
        async with reader(database_url, position) as second:
            assert await second.amounts(1) == [1]
            await until_forgotten(database_url)


async def test_concurrent_transactions_are_read_once_and_in_the_order_of_their_locks(database_url: str) -> None:
    await deploy(database_url, graph_of())
    chance, wanted, got = random.Random(7), set[int](), list[int]()
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("CREATE TABLE counters (key int PRIMARY KEY, n int); INSERT INTO counters VALUES (0, 0), (1, 0)")
        lines = [psycopg.connect(database_url) for _ in range(4)]
        numbers, holders = iter(range(1, 10_000)), dict[int, int]()  # key -> which line has its lock
        held: list[list[int]] = [[] for _ in lines]
        position: bytes | None = None
        for _ in range(12):
            for _ in range(20):
                which = chance.randrange(len(lines))
                key = chance.choice([0, 1, None])
                if key is None or holders.get(key, which) == which:
                    if key is not None:
                        lines[which].execute("UPDATE counters SET n = n + 1 WHERE key = %s", [key])
                        holders[key] = which
                    amount = next(numbers) * 10 + (9 if key is None else key)
                    inject(lines[which], amount)
                    held[which].append(amount)
                if chance.random() < 0.3:
                    if chance.random() < 0.7:
                        lines[which].commit()
                        wanted.update(held[which])
                    else:
                        lines[which].rollback()
                    held[which] = []
                    holders = {key: line for key, line in holders.items() if line != which}
            async with reader(database_url, position, bundle_records_max=3) as found:
                missing = len(wanted - set(got))
                for _ in range(chance.randrange(3)):
                    if missing > 0:
                        taken, amounts = await found.take()
                        got += amounts
                        missing -= len(amounts)
                        if chance.random() < 0.8:
                            await found.injector.acknowledge(taken.token)
                        position = found.position
        for line, amounts in zip(lines, held, strict=True):
            line.commit()
            wanted.update(amounts)
            line.close()
        async with reader(database_url, position, bundle_records_max=3) as found:
            got += await found.amounts(len(wanted) - len(got))

    assert sorted(got) == sorted(wanted)
    for key in (0, 1):
        of_key = [amount for amount in got if amount % 10 == key]
        assert of_key == sorted(of_key)


REFUSED: Sequence[tuple[str, str]] = [
    ("SELECT millpy.inject('order', '{}')", "no graph reads the injected stream 'order'"),
    ("SELECT millpy.inject(NULL, '{}')", "no graph reads the injected stream NULL"),
    ("SELECT millpy.inject('orders', '[1]')", "must be a JSON object, not array"),
    ("SELECT millpy.inject('orders', NULL)", "must be a JSON object, not NULL"),
    ("SELECT millpy.inject('orders', jsonb_build_object('a', repeat('x', 1000000)))", "may have 1000000 bytes"),
]


async def test_refusals_say_what_to_do_and_waiting_records_are_bounded(database_url: str) -> None:
    await deploy(database_url, graph_of())
    async with reader(database_url):
        pass
    with psycopg.connect(database_url, autocommit=True) as connection:
        for statement, said in REFUSED:
            with pytest.raises(psycopg.Error, match=said) as caught:
                connection.execute(statement)
            assert caught.value.diag.message_hint
        connection.execute("UPDATE mill.injection_readers SET waiting_max = 3")
        inject(connection, 1, 2, 3)
        with pytest.raises(psycopg.Error, match="3 records wait in the injected stream 'orders'"):
            inject(connection, 4)
        found = [f for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "injected records"]
        assert [f.severity for f in found] == [Severity.WARNING]
    async with reader(database_url) as found_reader:
        assert await found_reader.amounts(3) == [1, 2, 3]
        await until_forgotten(database_url)
        with psycopg.connect(database_url, autocommit=True) as connection:
            inject(connection, 5, 6)  # it is not refused for ever
        assert await found_reader.amounts(2) == [5, 6]


async def test_transactions_of_workers_have_not_injected(database_url: str) -> None:
    await deploy(database_url, graph_of())
    ours = psycopg.conninfo.make_conninfo(database_url, application_name="millpy injected")
    with psycopg.connect(ours) as worker, psycopg.connect(database_url) as connection:
        worker.execute("DELETE FROM mill.injected_records")
        inject(connection, 1)

        (row,) = read_facts(database_url, SystemClock()).injections

    assert row["open_transactions"] == 1


async def test_prepared_transaction_is_open_since_it_was_prepared(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_injections, "OPEN_S_MAX", 0.0)
    await deploy(database_url, graph_of())
    with psycopg.connect(database_url) as connection:
        connection.tpc_begin("orders")
        with connection.cursor() as cursor:
            cursor.execute("SAVEPOINT s")
        inject(connection, 1)
        connection.tpc_prepare()
        facts = read_facts(database_url, SystemClock())
        connection.tpc_commit()

    assert [row["open_transactions"] for row in facts.injections] == [1]
    (warning,) = (
        f for f in examine(facts, Limits()) if f.check == "injected records" and f.severity is not Severity.OK
    )
    assert "have injected records, the oldest has been open for" in warning.found
    assert "pg_prepared_xacts" in warning.action
    assert stored(database_url) == [1]


async def test_many_records_of_a_transaction_are_not_counted_for_each_beside_a_busy_stream(database_url: str) -> None:
    await deploy(database_url, graph_of(waiting_max=1_000))
    async with reader(database_url):
        pass
    bulk = "SELECT count(millpy.inject('orders', jsonb_build_object('id', i::text))) FROM generate_series(1, %s) AS i"
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE mill.injection_readers SET waiting_max = 1000")
        connection.execute("SELECT setval('mill.injected_records_number_seq', 5000)")  # numbers of another stream
        connection.commit()
        connection.execute(bulk, [700])
        connection.execute(bulk, [300])
        assert looked_at(connection) <= 1_000
        with pytest.raises(psycopg.Error, match="1000 records wait in the injected stream 'orders'"):
            connection.execute(bulk, [1])
        connection.rollback()
        connection.execute(bulk, [1_000])
        connection.commit()
        with pytest.raises(psycopg.Error, match="1000 records wait in the injected stream 'orders'"):
            connection.execute(bulk, [1])


async def test_each_record_is_looked_at_a_few_times_though_the_last_vacuum_found_none(database_url: str) -> None:
    await deploy(database_url, graph_of())
    bulk = "SELECT millpy.inject('orders', jsonb_build_object('id', i::text)) FROM generate_series(1, %s) AS i"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(bulk, [300])
        connection.execute("DELETE FROM mill.injected_records")
        connection.execute("VACUUM (TRUNCATE off) mill.injected_records")  # so the planner expects one row
        connection.execute(bulk, [1_000])
        connection.execute("SET plan_cache_mode = force_generic_plan")
        where = InjectedPosition(300).parameters()
        bounds = {"stream": "orders", "records_max": 65_536, "bytes_max": 16_000_000}
        with connection.transaction():
            found = connection.execute(statement("read_injected"), {**where, **bounds}, prepare=True)
            numbers = [row[0] for row in found]
            assert len(numbers) == 1_000
            assert looked_at(connection) <= 10 * 1_000
            connection.execute("UPDATE mill.injection_readers SET read_number = %s", [numbers[-1]])
            named = {"stream": "orders", "numbers": numbers}
            connection.execute(statement("delete_injected"), named, prepare=True)
            assert looked_at(connection) <= 20 * 1_000
        assert stored(database_url) == []


async def test_records_that_wait_for_another_reader_are_not_looked_at_again(database_url: str) -> None:
    await deploy(database_url, graph_of("shop"), graph_of("audit"))
    bulk = "SELECT max(millpy.inject('orders', jsonb_build_object('id', i::text))) FROM generate_series(1, %s) AS i"
    with psycopg.connect(database_url, autocommit=True) as connection:
        (last,) = connection.execute(bulk, [1_000]).fetchone() or (0,)
        connection.execute("VACUUM ANALYZE mill.injected_records")
        connection.execute(bulk, [3])
        connection.execute("SET plan_cache_mode = force_generic_plan")
        where = InjectedPosition(last).parameters()
        bounds = {"stream": "orders", "records_max": 65_536, "bytes_max": 16_000_000}
        with connection.transaction():
            found = connection.execute(statement("read_injected"), {**where, **bounds}, prepare=True)
            assert len(found.fetchall()) == 3
            assert looked_at(connection) <= 10


def looked_at(connection: psycopg.Connection[Any]) -> int:
    """Return the rows of injected records that this transaction has looked at."""
    (read,) = connection.execute(
        "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_all_tables"
        " WHERE relid = 'mill.injected_records'::regclass"
    ).fetchone() or (0,)
    return int(read)


async def test_two_graphs_read_the_same_stream_and_a_dropped_one_holds_nothing(database_url: str) -> None:
    await deploy(database_url, graph_of("shop"), graph_of("audit"))
    with psycopg.connect(database_url, autocommit=True) as connection:
        inject(connection, 1, 2)
        async with reader(database_url, graph="shop") as shop:
            assert await shop.amounts(2) == [1, 2]
        async with reader(database_url, shop.position, graph="shop"):
            pass
        assert stored(database_url) == [1, 2]  # the other has not read them
        inject(connection, 3)
        async with reader(database_url, graph="audit") as audit:
            assert await audit.amounts(3) == [1, 2, 3]
        async with reader(database_url, audit.position, graph="audit"):
            assert stored(database_url) == [3]
        async with PostgresStore(database_url) as store:
            await store.drop("shop")
        assert stored(database_url) == []
        inject(connection, 4)
    with pytest.raises(ConfigError, match="is not deployed"):
        async with reader(database_url, graph="shop"):
            pass
    with pytest.raises(ConfigError, match="is read by workers only"):
        async with reader(""):
            pass


async def test_a_record_is_kept_until_each_graph_that_was_deployed_before_it_has_read_it(database_url: str) -> None:
    await deploy(database_url, graph_of("shop"))
    with psycopg.connect(database_url, autocommit=True) as connection:
        inject(connection, 0)
        await deploy(database_url, graph_of("audit"))
        inject(connection, 1, 2)
        places = connection.execute("SELECT number, xid::text FROM mill.injected_records ORDER BY number").fetchall()
        numbers, (*_, last) = [number for number, _ in places], [int(xid) for _, xid in places]

        def left(graph: str, *, read: int, opened: str = "{}", rest: str = "{}", after: int = 0) -> list[int]:
            """What is left when a graph has noted what it has read."""
            connection.execute(
                "UPDATE mill.injection_readers SET read_number = %s, open_xids = %s, rest_xids = %s, rest_after = %s"
                " WHERE graph_id = (SELECT graph_id FROM mill.graphs WHERE name = %s)",
                [read, opened, rest, after, graph],
            )
            connection.execute(statement("delete_injected"), {"stream": "orders", "numbers": numbers})
            return stored(database_url)

        of_last = f"{{[{last},{last + 1})}}"
        assert left("shop", read=numbers[-1]) == [1, 2], "the other graph was deployed behind the first one"
        assert left("audit", read=numbers[-1], opened=of_last) == [2], "its transaction was open"
        assert left("audit", read=numbers[-1], rest=of_last, after=numbers[0]) == [2], "it was behind a cut page"
        assert left("audit", read=numbers[-1], rest=of_last, after=numbers[-1]) == []


async def test_role_that_may_only_inject(database_url: str) -> None:
    migrate(database_url, "millpy")
    await deploy(database_url, graph_of())
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE webshop LOGIN; GRANT USAGE ON SCHEMA millpy TO webshop")
        connection.execute("GRANT EXECUTE ON FUNCTION millpy.inject TO webshop")
        try:
            with psycopg.connect(database_url.replace("//millpy@", "//webshop@"), autocommit=True) as shop:
                inject(shop, 1)
                for forbidden in ("SELECT FROM mill.injected_records", "SELECT FROM millpy.injections"):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        shop.execute(forbidden)
            migrate(database_url, "millpy")  # it does not take the grants away
            with psycopg.connect(database_url.replace("//millpy@", "//webshop@"), autocommit=True) as shop:
                inject(shop, 2)
        finally:
            connection.execute("DROP OWNED BY webshop; DROP ROLE webshop")
    assert stored(database_url) == [1, 2]


@pytest.mark.skipif(program() is None, reason="pgbouncer is not installed")
async def test_injecting_through_a_pooler_of_transactions(
    postgres: EmbeddedPostgres, database_url: str, tmp_path: Path
) -> None:
    await deploy(database_url, graph_of())
    with Pgbouncer(tmp_path / "pool", postgres.tcp_url(), "transaction", 1) as pool:
        pooled = pool.url(str(conninfo_to_dict(database_url)["dbname"]))
        for number, commits in ((1, True), (2, False), (3, True)):
            with psycopg.connect(pooled, prepare_threshold=None) as connection:
                inject(connection, number)
                if not commits:
                    connection.rollback()
    assert stored(database_url) == [1, 3]


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WANTED = """
SELECT customer, date_bin('10 s', ordered_at, 'epoch'), count(*), sum(cents) FROM orders
 WHERE customer <> 'end' GROUP BY 1, 2 ORDER BY 1, 2
"""
FOUND = "SELECT customer, window_start, orders, cents FROM shop.revenue WHERE customer <> 'end' ORDER BY 1, 2"


async def test_windows_equal_the_orders_of_an_application_that_is_killed_at_random(database_url: str) -> None:
    chance, stop = random.Random(11), asyncio.Event()
    graph = load_graph(str(EXAMPLES / "orders.py"))
    await deploy(database_url, graph)
    limits = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)
    worker = asyncio.create_task(run_worker(graph, database_url, limits=limits, stop=stop))
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:

        async def fetch(query: str) -> list[Any]:
            return await (await connection.execute(query)).fetchall()

        await connection.execute(TABLE)
        for life in range(3):
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(EXAMPLES / "orders_app.py"), database_url, "60"
            )
            ((before,),) = await fetch("SELECT count(*) FROM orders")
            while (await fetch("SELECT count(*) FROM orders"))[0][0] < before + 50:
                await SystemClock().sleep(0.01)
            await SystemClock().sleep(chance.random() / 20)
            process.kill()
            await process.wait()
            if life == 1:
                worker.cancel()
                await asyncio.wait([worker])
                worker = asyncio.create_task(run_worker(graph, database_url, limits=limits, stop=stop))
        await connection.execute(
            "WITH ended AS (INSERT INTO orders VALUES (gen_random_uuid(), 'end', now(), 0)"
            " RETURNING *) SELECT millpy.inject('orders', to_jsonb(ended)) FROM ended"
        )
        wanted = await fetch(WANTED)
        async with asyncio.timeout(30):
            while len(await fetch(FOUND)) < len(wanted):
                await SystemClock().sleep(0.02)
        stop.set()
        await worker
        assert await fetch(FOUND) == wanted
        assert len(wanted) >= 3
