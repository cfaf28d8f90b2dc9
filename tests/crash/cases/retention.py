"""SIGKILL of a worker, and of PostgreSQL, while result tables get partitions and lose them."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.early import kill_one_of_two, kill_server_twice
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.retention_graph import GAP_MIN
from tests.crash.world import Case, World

GRAPH = Path(__file__).parents[1] / "retention_graph.py"
RECORDS, DEVICES, STEP_S = 2_000, 5, 360
WORKERS = {"bundle_records_max": 40, "epoch_s": 0.2}
SPAN = "extract(epoch FROM window_start)::int, extract(epoch FROM window_end)::int"
ROWS = {
    "sums": f"SELECT device, {SPAN}, n::int, total::int FROM kept.sums",
    "history": f"SELECT device, {SPAN}, n::int, total::int FROM millpy.as_of(NULL::kept.sums, now())",
    "raw": "SELECT device, value::int, extract(epoch FROM event_time)::int AS at, count(*)::int, 0"
    " FROM kept.raw GROUP BY device, value, event_time",
}
Reading = tuple[str, int, int]
"""(device, at in s, value)."""
Rows = dict[tuple[str, int, int], tuple[int, int]]
"""(device, something, time by which it is kept) -> count and sum."""


def cases() -> Iterator[Case]:
    """Each point, of which one follows the dropping of partitions, and the server."""
    for point in Failpoint:
        yield Case(f"SIGKILL at {point}, with a retention", "", partial(_play, point=point))
    yield Case("PostgreSQL killed and restarted, with a retention", "", _server_killed)


def _play(world: World, point: Failpoint) -> None:
    graph, readings = write_readings(world.directory)
    kill_one_of_two(world, point, graph, **WORKERS)
    world.oracle = partial(faults_of, world.url, readings)


def _server_killed(world: World) -> None:
    server = world.own_server()
    graph, readings = write_readings(world.directory)
    kill_server_twice(world, server, graph=graph, **WORKERS)
    world.oracle = partial(faults_of, world.url, readings)


def write_readings(directory: Path) -> tuple[Path, list[Reading]]:
    """Write the graph and its file, of eight days; return the graph and its readings."""
    chance = random.Random(3)
    found = []
    for number in range(RECORDS):
        at = number * STEP_S + chance.randrange(60) - chance.choice((0, 0, 0, 1_200))
        found.append((f"d{chance.randrange(DEVICES)}", max(at, 0), number))
    lines = [json.dumps(dict(zip(("device", "at", "value"), reading, strict=True))) + "\n" for reading in found]
    (directory / "kept.ndjson").write_text("".join(lines))
    graph = directory / "kept.py"
    graph.write_text(GRAPH.read_text())
    return graph, found


def faults_of(url: str, readings: Sequence[Reading]) -> list[Fault]:
    """Compare each table, from its oldest partition on, with a recount; something must have been dropped."""
    wanted = {"sums": sessions(readings), "raw": {(d, value, at): (1, 0) for d, at, value in readings}}
    found: list[Fault] = []
    with psycopg.connect(url, autocommit=True) as connection:
        for name, query in ROWS.items():
            table = "sums" if name == "history" else name
            of_table = "SELECT extract(epoch FROM min(starts_at))::int FROM millpy.partitions WHERE result_table = %s"
            (oldest,) = connection.execute(of_table, [table]).fetchone() or (0,)
            stored: Rows = {row[:3]: row[3:] for row in connection.execute(query).fetchall()}  # type: ignore[call-overload]
            found += differences(name, stored, {key: row for key, row in wanted[table].items() if key[2] >= oldest})
            told = (
                "SELECT max(detail ->> 'to') FROM millpy.events WHERE kind = 'rows_expired' AND detail ->> 'table' = %s"
            )
            if connection.execute(told, [table]).fetchone() == (None,):
                found.append(Fault("violation", f"nothing of {table} was dropped"))
        return [*found, *accounting_faults(connection)]


def sessions(readings: Sequence[Reading]) -> Rows:
    """Return the sessions of each device."""
    of_device: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for device, at, value in readings:
        of_device[device].append((at, value))
    found: Rows = {}
    for device, own in of_device.items():
        open_: list[Any] = []
        for at, value in sorted(own):
            if open_ and at >= open_[1]:
                found[device, open_[0], open_[1]] = (open_[2], open_[3])
                open_ = []
            open_ = open_ or [at, 0, 0, 0]
            open_[1:] = [at + GAP_MIN * 60, open_[2] + 1, open_[3] + value]
        found[device, open_[0], open_[1]] = (open_[2], open_[3])
    return found
