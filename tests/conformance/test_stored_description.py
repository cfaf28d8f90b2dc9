"""The description of a graph as the database keeps it: equal to the graph that was deployed, or refused."""

from __future__ import annotations

import math

import psycopg
import pytest

from millpy import Count, File, FixedWindows, Graph, minutes
from millpy.errors import GraphError, GraphVersionError
from millpy.model.deployment import GraphSpec
from millpy.store.postgres.store import PostgresStore
from tests.unit.model.described_graph import Range, Reading, described_graph
from tests.unit.model.test_described_parts import first, made

NUMBERS = [1e23, 1.7e308, 5e-324, -0.0, 0.1, 1e16, 2.0**53, math.inf, -math.inf]


def extreme_graph() -> GraphSpec:
    graph = Graph("extreme")
    readings = graph.inject(
        "readings",
        File("ü \u2028.ndjson"),
        schema=Reading,
        event_time=made("EventTime", first("EventTime") | {"field": "at"}),
    )
    for place, low in enumerate(NUMBERS):
        window = readings.key_by("device").window(FixedWindows(minutes(1)), name=f"windows_{place}", intervals=1)
        window.aggregate(n=Count(), range=Range(low, set()))
    return graph.spec()


@pytest.mark.parametrize("spec", [described_graph().spec(), extreme_graph()], ids=lambda spec: spec.name)
async def test_deployed_graph_is_found_unchanged(spec: GraphSpec, database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        await store.deploy(spec)

        assert await store.compare(spec) == (1, [])
        assert (await store.deploy(spec)).version == 1


@pytest.mark.parametrize(("format", "error"), [("2", GraphVersionError), ("0", GraphError), ("null", GraphError)])
async def test_description_of_another_format_is_refused_and_kept(
    format: str, error: type[GraphError], database_url: str
) -> None:
    spec = described_graph().spec()
    async with PostgresStore(database_url) as store:
        await store.deploy(spec)
        with psycopg.connect(database_url, autocommit=True) as connection:
            changed = "UPDATE mill.graphs SET description = jsonb_set(description, '{format}', %s::text::jsonb)"
            connection.execute(changed, [format])

        with pytest.raises(error, match="cannot compare with deployed graph 'described'"):
            await store.compare(spec)
        with pytest.raises(error, match="cannot compare with deployed graph 'described'"):
            await store.deploy(spec, on_purpose=True)

        with psycopg.connect(database_url) as connection:
            assert connection.execute("SELECT version, description ->> 'format' FROM mill.graphs").fetchall() == [
                (1, None if format == "null" else format)
            ]
