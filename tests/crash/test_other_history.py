"""A standby becomes the primary without the newest commits: no worker continues there with state of the old primary.

A worker whose steps need no checkpoint knows more than the database: its cursors have moved on in memory. When it finds
its connections dead beside its turns, all channels come back to the new server, and no turn has failed.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from millpy.embedded import EmbeddedPostgres
from millpy.errors import StoreUnavailableError
from millpy.store.postgres.connection import Channel, ConnectionGroup, ConnectionSettings
from millpy.testing.crash_test.database import url_through_proxy
from millpy.testing.proxy import PostgresProxy
from tests.crash.cases.failover import _alter, _one, _standby
from tests.crash.harness import Worker, await_true, committed
from tests.crash.world import Inputs, World

GRAPH = Path(__file__).with_name("directory_graph.py")
SOON_S = 20.0
RUBBISH = 20
BUNDLE = """
SELECT bundle FROM mill.intervals JOIN mill.computations USING (computation_id) WHERE name = %s
"""
POLLED = "SELECT max(query_start) FROM pg_stat_activity WHERE application_name = 'millpy poll'"
AHEAD = """
SELECT count(*) FROM mill.cursors AS c JOIN mill.intervals AS p ON p.interval_id = c.producer WHERE c.seq > p.bundle
"""


@pytest.mark.parametrize("rubbish", [0, RUBBISH], ids=["idle", "steps without checkpoints"])
def test_consumer_rereads_what_a_promoted_standby_lacks(
    tmp_path: Path, postgres: EmbeddedPostgres, inputs: Inputs, rubbish: int
) -> None:
    with World(tmp_path, postgres, inputs) as world:
        primary = world.own_server()
        standby = _standby(world, primary)
        old, new = primary.url("own"), standby.url("own")
        proxy = world.stack.enter_context(PostgresProxy(*address(primary)))
        inbox = tmp_path / "inbox"
        inbox.mkdir()
        add(inbox, "0", line("a"))
        reader = started(world, inbox, old, only="in_1", bundle_records_max=1)
        # It renews its lease rarely and its progress never, so every commit is due to a record.
        behind = url_through_proxy(primary.tcp_url("own"), proxy.port)
        consumer = started(world, inbox, behind, only="totals_1", lease_s=60, progress_every_s=1000)
        consumer.await_while_running(lambda: rows(old) == [("a", 1, 1)], "a row")
        await_true(lambda: committed(old) == committed(standby.url("own")), "the standby has all")

        _alter(standby, "primary_conninfo", "")
        await_true(lambda: _one(primary, "SELECT count(*) FROM pg_stat_replication") == 0, "nobody listens")
        read = bundle(old, "in_1")
        add(inbox, "1", b"rubbish\n" * rubbish)
        reader.await_while_running(lambda: bundle(old, "in_1") >= read + rubbish, "the rubbish is dead-lettered")
        for _ in range(2):  # the answer to the first is in its memory when it asks again
            asked = asked_last(old)
            consumer.await_while_running(lambda asked=asked: asked_last(old) > asked, "it polls")
        assert bundle(old, "totals_1") == bundle(new, "totals_1"), "it has committed"

        reader.kill()
        add(inbox, "2", line("b"))
        _one(standby, "SELECT pg_promote()")
        proxy.server_address = address(standby)
        proxy.cut()
        # Larger bundles: where the consumer was, there is another record now.
        again = started(world, inbox, new, only="in_1", bundle_records_max=100)
        consumer.await_while_running(lambda: len(rows(new)) > 1, "the other row", SOON_S)

        assert rows(new) == [("a", 1, 1), ("b", 2, 2)]
        assert value(new, AHEAD) == 0, "a cursor is ahead of its producer"
        for worker in (again, consumer):
            worker.drain()
            worker.await_finished()


async def test_channels_report_another_server_until_all_is_read_again(
    tmp_path: Path, postgres: EmbeddedPostgres, inputs: Inputs
) -> None:
    with World(tmp_path, postgres, inputs) as world:
        primary = world.own_server()
        standby = _standby(world, primary)
        async with AsyncExitStack() as channels:
            proxy = channels.enter_context(PostgresProxy(*address(primary)))
            group = ConnectionGroup(url_through_proxy(primary.tcp_url("own"), proxy.port), ConnectionSettings())
            poll, commit = (Channel(group, name, serves_turns=True) for name in ("poll", "commit"))
            hint, admin = (Channel(group, name) for name in ("hint", "admin"))
            for channel in (poll, commit, hint, admin):
                channels.push_async_callback(channel.close)
            await follow_server(admin, group)
            for channel in (poll, commit, hint):
                await ask(channel)
            proxy.cut()
            with pytest.raises(StoreUnavailableError):
                await ask(hint)
            for channel in (poll, commit, hint):  # the same server: they go on
                await ask(channel)
            _one(standby, "SELECT pg_promote()")
            proxy.server_address = address(standby)
            proxy.cut()
            with pytest.raises(StoreUnavailableError):
                await ask(hint)
            for _ in range(2):
                for channel in (poll, commit):
                    with pytest.raises(StoreUnavailableError, match="restarted or replaced"):
                        await ask(channel)
            await follow_server(admin, group)
            await ask(poll)
            # A connection to a server other than the one that was read from is closed, too.
            proxy.server_address = address(primary)
            await admin.drop()
            await follow_server(admin, group)
            assert await ask(poll) == await ask(admin)


async def follow_server(channel: Channel, group: ConnectionGroup) -> None:
    async with channel.use() as connection:
        await group.follow_server(connection)


async def ask(channel: Channel) -> object:
    """Which server a channel is connected to."""
    async with channel.use() as connection:
        return await (await connection.execute("SELECT pg_catalog.pg_postmaster_start_time()")).fetchone()


def address(server: EmbeddedPostgres) -> tuple[str, int]:
    parts = conninfo.conninfo_to_dict(server.tcp_url())
    return str(parts["host"]), int(str(parts["port"]))


def started(world: World, inbox: Path, url: str, **options: float | str) -> Worker:
    return world.stack.enter_context(Worker(world.directory, url, inbox, graph=GRAPH, **options))  # type: ignore[arg-type]


def add(inbox: Path, name: str, content: bytes) -> None:
    """Another file, renamed into place."""
    (inbox / f".{name}").write_bytes(content)
    (inbox / f".{name}").rename(inbox / f"{name}.ndjson")


def line(name: str) -> bytes:
    return b'{"id":"%s","device":"d","at":%d,"value":1}\n' % (name.encode(), int(time.time()))


def value(url: str, query: str, *parameters: object) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


def bundle(url: str, computation: str) -> int:
    """How often it has committed."""
    return value(url, BUNDLE, computation)


def asked_last(url: str) -> object:
    """When the consumer began its newest poll."""
    return value(url, POLLED)


def rows(url: str) -> list[tuple[str, int, int]]:
    with psycopg.connect(url, autocommit=True) as connection:
        try:
            found = connection.execute("SELECT id, number, total FROM inbox.totals_1 ORDER BY number").fetchall()
        except psycopg.errors.UndefinedTable:
            return []
    return [(row[0], row[1], row[2]) for row in found]
