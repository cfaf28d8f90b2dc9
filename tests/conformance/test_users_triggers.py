"""Triggers of every kind on result tables of every kind: what they refuse is dead-lettered, the rest commits."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from datetime import UTC, datetime

import msgspec
import psycopg
import pytest

from millpy import (
    Computation,
    Context,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    SessionWindows,
    SlidingWindows,
    Timer,
    hours,
    seconds,
)
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.store import PostgresStore
from tests.conformance.test_users_tables import fetch, run
from tests.feed import Feed

WINDOWS = {
    "fixed": FixedWindows(seconds(10)),
    "slices": SlidingWindows(seconds(10), every=seconds(5)),
    "sliding": SlidingWindows(seconds(10), every=seconds(4)),
    "sessions": SessionWindows(seconds(10)),
}
TABLES = (*WINDOWS, "echoed_sessions", "echoes")
BODIES = {
    "raise": "RAISE EXCEPTION 'no'",
    "state": "RAISE EXCEPTION 'no' USING ERRCODE = 'ZZ123'",
    "assert": "ASSERT false, 'no'",
    "divide": "PERFORM 1 / 0",
}
BAD, FILTERED, GOOD = "bad", "filtered", "good"
EVENTS = ("INSERT", "UPDATE", "DELETE")
TRIGGERS = [
    *((when, event, level) for when in ("BEFORE", "AFTER") for event in EVENTS for level in ("ROW", "STATEMENT")),
    *(("DEFERRED", event, "ROW") for event in EVENTS),
]
SHORT = [("BEFORE", "INSERT", "ROW"), ("AFTER", "UPDATE", "STATEMENT")]
SHORT += [("BEFORE", "DELETE", "ROW"), ("BEFORE", "DELETE", "STATEMENT"), ("DEFERRED", "DELETE", "ROW")]
PLAYED = TRIGGERS if os.environ.get("TRIGGER_MATRIX") == "whole" else SHORT
"""All of them take minutes: `make trigger-matrix`."""
SESSIONS = ("sessions", "echoed_sessions")
START, SECONDS = 1_700_000_000, (0, 7, 4)
TURN = 8
TAKEN = "SELECT sum(injected) = {} AND sum(pending) = 0 FROM millpy.accounting"
PASSED = "SELECT min(input_watermark) >= to_timestamp({}) FROM millpy.watermarks WHERE computation <> 'readings'"


class Reading(msgspec.Struct):
    device: str
    at: datetime


class Echo(Computation):
    """Produces each record; a late one only when a timer fires, so in a turn without its input."""

    def process_record(self, context: Context, record: Reading) -> None:
        if context.late:
            context.set_timer("late", at=context.input_watermark + seconds(50), event_time=context.event_time)
        else:
            context.produce(record)

    def process_timer(self, context: Context, timer: Timer) -> None:
        device = context.key
        assert isinstance(device, str), device
        context.produce(Reading(device, context.event_time))


def plant(feed: Feed) -> Graph:
    graph = Graph("plant")
    readings = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", max_disorder=seconds(1)))
    by_device = readings.filter(lambda reading: reading.device in (BAD, FILTERED, GOOD)).key_by("device")
    for name, windows in WINDOWS.items():
        stream = by_device.window(windows, name=f"{name}_windows", allowed_lateness=hours(1))
        stream.aggregate(n=Count()).to_table(name)
    echoing = readings.filter(lambda reading: reading.device.startswith("echo")).key_by("device")
    echoes = echoing.process(Echo(), name="echo", output=Reading).to_table("echoes")
    sessions = echoes.key_by("device").window(SessionWindows(seconds(10)), name="echoed", allowed_lateness=hours(1))
    sessions.aggregate(n=Count()).to_table("echoed_sessions")
    return graph


def put_trigger(url: str, when: str, event: str, level: str, body: str) -> None:
    """Create triggers that refuse the rows of one device and filter those of another, or refuse whole statements."""
    row = "OLD" if event == "DELETE" else "NEW"
    does = f"IF {row}.device LIKE '%{BAD}' THEN {body}; END IF;"
    transition = ""
    if when == "BEFORE" and level == "ROW":
        does += f" IF {row}.device LIKE '%{FILTERED}' THEN RETURN NULL; END IF;"
    elif when == "BEFORE":
        does = f"{body};"
    elif level == "STATEMENT":
        does = f"IF EXISTS (SELECT FROM rows WHERE device LIKE '%{BAD}') THEN {body}; END IF;"
        transition = f" REFERENCING {row} TABLE AS rows"
    returned = row if level == "ROW" else "NULL"
    run(
        url,
        f"CREATE FUNCTION public.mine() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does} RETURN {returned}; END $$",
    )
    always = when == "BEFORE" and level == "STATEMENT"
    for table in SESSIONS if always else TABLES:
        head = f"CREATE TRIGGER mine {when} {event} ON plant.{table}{transition}"
        if when == "DEFERRED":
            head = f"CREATE CONSTRAINT TRIGGER mine AFTER {event} ON plant.{table} DEFERRABLE INITIALLY DEFERRED"
        run(url, f"{head} FOR EACH {level} EXECUTE FUNCTION public.mine()")


def payloads(second: int, *devices: str) -> list[bytes]:
    at = datetime.fromtimestamp(START + second, UTC).isoformat()
    return [json.dumps({"device": device, "at": at}).encode() for device in devices]


async def give(feed: Feed, url: str) -> None:
    """Each device at its seconds; in between another brings the watermark so far that all windows emit.

    Each is waited for: a step that is behind would take all of it in one turn, and a session that has grown there was
    never written.
    """
    devices = [prefix + name for prefix in ("", "echo ") for name in (BAD, FILTERED, GOOD)]
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:

        async def until(query: str) -> None:
            while await (await connection.execute(query)).fetchone() != (True,):  # type: ignore[arg-type]
                await connection.execute("SELECT pg_sleep(0.02)")

        for place, second in enumerate(SECONDS, start=1):
            feed.push(*payloads(second, *devices))
            await until(TAKEN.format(feed.pushed))
            feed.push(*payloads(100 * place, "tick"))
            await until(PASSED.format(START + 100 * place - 1))
    feed.end()


def complete(table: str) -> list[tuple[object, ...]]:
    """The expected windows of a device without refusals: (start, end, records), in seconds."""
    if table == "echoes":
        return [(second,) for second in sorted(SECONDS)]
    if table in SESSIONS:
        return [(min(SECONDS), max(SECONDS) + 10, len(SECONDS))]
    every = {"fixed": 10, "slices": 5, "sliding": 4}[table]
    found = Counter(
        start - start % every for second in SECONDS for start in range(second - second % every, second - 10, -every)
    )
    return [(start, start + 10, n) for start, n in sorted(found.items())]


async def play(url: str, feed: Feed) -> dict[str, list[tuple[object, ...]]]:
    """The expected rows, by table, of the device without refusals."""
    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        group.create_task(run_worker(plant(feed), url, limits=Limits(bundle_records_max=TURN)))
        await give(feed, url)
    assert fetch(url, "SELECT count(*) FROM millpy.accounting WHERE NOT balanced") == [(0,)]
    found: dict[str, list[tuple[object, ...]]] = {}
    for table in TABLES:
        columns = ["at"] if table == "echoes" else ["window_start", "window_end"]
        seconds_of = ", ".join(f"extract(epoch FROM {column})::int - {START}" for column in columns)
        count = "" if table == "echoes" else ", n::int"
        found[table] = fetch(
            url, f"SELECT {seconds_of}{count} FROM plant.{table} WHERE device LIKE '%{GOOD}' ORDER BY 1"
        )
    return found


@pytest.mark.parametrize(("when", "event", "level"), PLAYED, ids=[" ".join(t).lower() for t in PLAYED])
async def test_rows_that_a_trigger_refuses_are_dead_lettered_and_the_rest_commits(
    database_url: str, when: str, event: str, level: str
) -> None:
    feed = Feed()
    body = list(BODIES.values())[TRIGGERS.index((when, event, level)) % len(BODIES)]
    async with PostgresStore(database_url) as store:
        await store.deploy(plant(feed).spec())
    put_trigger(database_url, when, event, level, body)

    found = await play(database_url, feed)

    refused = fetch(database_url, "SELECT DISTINCT computation FROM millpy.dead_letters WHERE reason = 'refused'")
    assert refused
    assert event != "DELETE" or ("echoed",) in refused
    if (when, level) != ("BEFORE", "STATEMENT"):
        assert found == {table: complete(table) for table in TABLES}
