"""SIGKILL of a worker, and of PostgreSQL, while sessions that have not fired are only in the database.

The bounds have room for no session: each leaves memory when it is folded, and is read again by the next record of its
device, or at its end, nine in a turn. Tables and totals are compared with a plain recount of the file, and histories
with a witness.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psycopg

from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoint
from millpy.store.postgres.store import PostgresStore
from tests.crash.cases.early import kill_one_of_two, kill_server_twice
from tests.crash.cases.panes import Reading, full_sessions, grouped, late_of, merged, rows_of, totals_of
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.histories import add_witness, history_faults
from tests.crash.session_graph import GAP, LENGTH
from tests.crash.world import Case, World

GRAPH = Path(__file__).parents[1] / "session_graph.py"
RECORDS, DEVICES = 700, 40
DELAYS = (0, 0, 0, 1, 2, 4, 6, 25)
TABLES = {"plain": True, "cut": False, "full": False}
"""Table -> whether its windows retract."""
WORKERS = {
    "bundle_records_max": 35,
    "turn_panes_max": 9,
    "fold_every_s": 0.05,
    "closed_windows_bytes_max": 1,
    "unfired_windows_bytes_max": 1,
}
UNFIRED = "SELECT count(*) FROM mill.keyed WHERE kind = 'window' AND value::json ->> 'emitted' IS DISTINCT FROM 'true'"


def cases() -> Iterator[Case]:
    """Each point, and the server."""
    yield from map(session_case, Failpoint)
    yield Case("PostgreSQL killed and restarted, with sessions in the database", "", _server_killed)


def session_case(point: Failpoint) -> Case:
    """Return the case in which one of two workers is killed, and started again."""
    return Case(f"SIGKILL at {point}, with sessions in the database", "", partial(_play, point=point))


def _play(world: World, point: Failpoint) -> None:
    graph, readings = _prepared(world)
    kill_one_of_two(world, point, graph, **WORKERS)
    world.oracle = partial(faults_of, world.url, readings)


def _server_killed(world: World) -> None:
    server = world.own_server()
    graph, readings = _prepared(world)
    kill_server_twice(world, server, graph=graph, **WORKERS)
    world.oracle = partial(faults_of, world.url, readings)


def _prepared(world: World) -> tuple[Path, list[Reading]]:
    """Write the graph and its file, out of order; deploy it, and return it with its readings."""
    chance = random.Random(5)
    found: list[Reading] = []
    for place in range(RECORDS):
        device, value = f"d{chance.randrange(DEVICES)}", chance.randrange(50)
        found.append((device, max(0, place // 10 - chance.choice(DELAYS)), value, 1))
    with (world.directory / "stays.ndjson").open("w") as file:
        for reading in found:
            file.write(json.dumps(dict(zip(("device", "at", "value", "gap"), reading, strict=True))) + "\n")
    graph = world.directory / "stays.py"
    graph.write_text(GRAPH.read_text())
    asyncio.run(_deploy(graph, world.url))
    add_witness(world.url, "stays", list(TABLES))
    return graph, found


async def _deploy(graph: Path, url: str) -> None:
    async with PostgresStore(url) as store:
        await store.deploy(load_graph(str(graph)).spec())


def faults_of(url: str, readings: Sequence[Reading]) -> list[Fault]:
    """Compare all tables with a recount, and all histories with their witness."""
    full, late = full_sessions(readings)
    plain = merged((device, at, value, at + GAP) for device, at, value, _ in readings)
    cut = merged((d, at, value, min(at + GAP, at // LENGTH * LENGTH + LENGTH)) for d, at, value, _ in readings)
    found: list[Fault] = []
    with psycopg.connect(url, autocommit=True) as connection:
        for table, rows in (("plain", plain), ("cut", cut), ("full", full)):
            found += differences(table, rows_of(connection, table, "stays"), rows)
            found += history_faults(connection, "stays", table, retracts=TABLES[table])
        found += differences("plain_totals", totals_of(connection, "plain", "stays"), grouped(plain))
        found += differences("late of full", late_of(connection, "full"), late)
        if not late:
            found.append(Fault("violation", "no record is late"))
        return [*found, *accounting_faults(connection)]
