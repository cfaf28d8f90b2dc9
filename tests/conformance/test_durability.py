"""Commits are durable whatever the defaults of the server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import psycopg

from millpy import Count, EventTime, FixedWindows, Graph, seconds
from millpy.clock import SystemClock
from millpy.process.assembly import run_worker
from millpy.store.postgres.store import PostgresStore
from tests.feed import Feed


async def test_commits_are_durable_whatever_the_default_of_the_database(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off")

    async with PostgresStore(database_url) as store:
        async with store._commit.use() as channel:
            commit = await (await channel.execute("SHOW synchronous_commit")).fetchone()
        async with store._admin.use() as channel:
            ownership = await (await channel.execute("SHOW synchronous_commit")).fetchone()

    assert (commit, ownership) == (("on",), ("on",))


class Reading(msgspec.Struct):
    device: str
    at: int


SET_OFF = """
CREATE SCHEMA app;
CREATE TABLE app.settings (of text, synchronous_commit text);
CREATE FUNCTION app.log(device text) RETURNS void LANGUAGE plpgsql AS
$$BEGIN SET LOCAL synchronous_commit TO off; INSERT INTO app.settings VALUES (device); END$$;
CREATE FUNCTION app.off() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN SET LOCAL synchronous_commit TO off; RETURN NEW; END$$;
CREATE FUNCTION app.look() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN
    UPDATE app.settings SET synchronous_commit = current_setting('synchronous_commit') WHERE of = NEW.of;
    RETURN NULL;
END$$;
CREATE CONSTRAINT TRIGGER look AFTER INSERT ON app.settings DEFERRABLE INITIALLY DEFERRED
   FOR EACH ROW EXECUTE FUNCTION app.look();
CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN INSERT INTO app.settings VALUES ('window'); RETURN NULL; END$$;
"""  # `look` runs within COMMIT


async def test_commits_are_durable_whatever_functions_of_users_set(database_url: str) -> None:
    feed, stop = Feed(), asyncio.Event()
    graph = Graph("plant")
    how: dict[str, Any] = {"schema": Reading, "event_time": EventTime("at", unit="s", max_disorder=seconds(0))}
    readings = graph.inject("readings", feed, **how)
    readings.to_sql("SELECT app.log(%(device)s)", key="device", name="to_app")
    readings.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count()).to_table("counts")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(SET_OFF)
        async with PostgresStore(database_url) as store:
            await store.deploy(graph.spec(), on_purpose=True)
        for when, function in (("BEFORE", "off"), ("AFTER", "note")):
            connection.execute(
                f"CREATE TRIGGER {function} {when} INSERT ON plant.counts"
                f" FOR EACH ROW EXECUTE FUNCTION app.{function}()"
            )
        worker = asyncio.create_task(run_worker(graph, database_url, stop=stop))
        feed.push(*[msgspec.json.encode(Reading("a", at)) for at in (0, 100)])
        found: list[Any] = []
        async with asyncio.timeout(30):
            while len(found) < 2:
                found = connection.execute("SELECT DISTINCT * FROM app.settings ORDER BY 1").fetchall()
                await SystemClock().sleep(0.02)
        stop.set()
        await worker

    assert found == [("a", "on"), ("window", "on")]
