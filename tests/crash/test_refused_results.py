"""Result tables that refuse turns of a real worker: it waits longer each time, tells it, and continues by itself."""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner

from millpy import Count, FixedWindows, Graph, seconds
from millpy.cli.app import app
from tests.crash.graph_files import rows
from tests.crash.test_lookups import execute, until
from tests.crash.test_sinks import TABLE, UPSERT, reading, readings, working
from tests.feed import Feed


def windows(feed: Feed) -> Graph:
    graph = Graph("plant")
    found = readings(graph, feed)
    found.key_by("device").window(FixedWindows(seconds(10)), name="windows").aggregate(n=Count()).to_table("counts")
    found.to_sql(UPSERT, key="device", name="to_app")
    return graph


REFUSALS = {
    "column": ("counts", "ALTER TABLE plant.counts RENAME n TO m", "ALTER TABLE plant.counts RENAME m TO n"),
    "table": ("counts", "ALTER TABLE plant.counts RENAME TO c", "ALTER TABLE plant.c RENAME TO counts"),
    "statement": ("to_app", "ALTER TABLE app.log RENAME TO l", "ALTER TABLE app.l RENAME TO log"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_worker_waits_for_a_table_that_refuses_tells_it_and_continues(database_url: str, refusal: str) -> None:
    refused, breaks, restores = REFUSALS[refusal]
    execute(database_url, TABLE)
    feed = Feed()
    events = "SELECT kind, detail ->> 'table' FROM millpy.events WHERE kind ~ '^results_' ORDER BY event_id"
    async with working(database_url, lambda: windows(feed)):
        feed.push(reading("a", 1.0, 0))
        await until(database_url, "SELECT device FROM app.log", [("a",)])
        execute(database_url, breaks)
        feed.push(reading("b", 2.0, 100))
        await until(database_url, events, [("results_refused", refused)])
        ((why,),) = rows(database_url, "SELECT detail ->> 'why' FROM millpy.events WHERE kind = 'results_refused'")
        assert refused in why and "does not exist" in why
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["status", "plant", "--database", database_url])
        assert "refused" in shown.output and refused in shown.output, shown.output
        found = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "--database", database_url])
        assert f"plant.{refused}: a worker cannot write since" in " ".join(found.output.split())

        execute(database_url, restores)
        await until(database_url, "SELECT device, n FROM plant.counts", [("a", 1)])
        await until(database_url, "SELECT device FROM app.log ORDER BY 1", [("a",), ("b",)])
        await until(database_url, events, [("results_refused", refused), ("results_written", refused)])
        found = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "--database", database_url])
        assert "a worker cannot write" not in " ".join(found.output.split())
    assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]


async def test_dead_letter_of_a_single_row_has_the_reason_of_the_database(database_url: str) -> None:
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, lambda: windows(feed)):
        feed.push(reading("a", 1.0, 0))
        await until(database_url, "SELECT device FROM app.log", [("a",)])
        execute(database_url, "ALTER TABLE plant.counts ADD CONSTRAINT none_at_all CHECK (n < 0)")
        feed.push(reading("b", 2.0, 100))
        letters = "SELECT computation, detail ~ 'none_at_all' FROM millpy.dead_letters"
        await until(database_url, letters, [("windows", True)])


async def test_attempts_become_rare_although_each_begins_with_a_turn_that_is_stepped(database_url: str) -> None:
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, lambda: windows(feed)):
        feed.push(reading("a", 1.0, 0))
        await until(database_url, "SELECT device FROM app.log", [("a",)])
        execute(database_url, "ALTER TABLE plant.counts RENAME n TO m")
        feed.push(reading("b", 2.0, 100))
        events = "SELECT count(*) FROM millpy.events WHERE kind = 'results_refused'"
        await until(database_url, events, [(1,)])
        await asyncio.sleep(6)
        execute(database_url, "ALTER TABLE plant.counts RENAME m TO n")
        written = "SELECT count(*) FROM millpy.events WHERE kind = 'results_written'"
        await until(database_url, written, [(1,)])
        attempts = rows(
            database_url, "SELECT (detail ->> 'attempts')::int FROM millpy.events WHERE kind = 'results_written'"
        )
    assert attempts[0][0] < 20  # 7 or 8 in 6 s, and one more for each doubling of the time; it was 8 a second
