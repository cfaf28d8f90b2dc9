"""SIGKILL of a worker whose windows give early panes, in every mode: none is lost or counted twice.

Panes are due by the clock and by their records. What comes of them must not depend on when they were: tables and totals
over the panes are compared with a plain recount of the file, and histories with their tables.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from millpy import Accumulation
from millpy.embedded import EmbeddedPostgres
from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import trap
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.world import Case, World

GRAPH = Path(__file__).parents[1] / "early_graph.py"
RECORDS, DEVICES = 1_500, 12
SIZE, EVERY, GAP, GROUP_SIZE = 20, 10, 3, 60
WORKERS = {"bundle_records_max": 25, "turn_panes_max": 9}
WITHOUT_ROOM = {**WORKERS, "fold_every_s": 0.05, "closed_windows_bytes_max": 1, "unfired_windows_bytes_max": 1}
"""Workers with room for no pane: each leaves memory when it is folded, and is read when it is needed."""


def cases() -> Iterator[Case]:
    """Each point."""
    yield from map(early_case, Failpoint)
    yield from map(counted_case, Failpoint)


def early_case(point: Failpoint) -> Case:
    """Return the case in which one of two workers is killed, and started again."""
    return Case(f"SIGKILL at {point}, with early panes", "", partial(_play, point=point))


def counted_case(point: Failpoint) -> Case:
    """Return the case of triggers that count records, whose panes leave memory before their window fires."""
    where = "with early panes in the database"
    return Case(f"SIGKILL at {point}, {where}", "", partial(_play, point=point, counted=True))


def write_readings(directory: Path, *, counted: bool = False) -> tuple[Path, list[tuple[str, int, int]]]:
    """Write the graph and its file, out of order and with late readings; return the graph and (device, at, value)."""
    chance = random.Random(1)
    found = []
    with (directory / "early.ndjson").open("w") as file:
        for place in range(RECORDS):
            device, value = f"d{chance.randrange(DEVICES)}", chance.randrange(100)
            at = max(0, place // 10 - chance.choice([0, 0, 0, 1, 2, 25]))
            file.write(json.dumps({"device": device, "group": 0, "at": at, "value": value}) + "\n")
            found.append((device, at, value))
    graph = directory / "early.py"
    text = GRAPH.read_text()
    graph.write_text(_counting(text) if counted else text)
    return graph, found


def _counting(text: str) -> str:
    """Return the graph with a trigger that no clock makes ready, and with panes that have no time of their records."""
    for was, now in (
        ("AfterAny(AfterCount(9), Every(tick))", "AfterCount(3)"),
        ("timestamp_combiner=COMBINERS[mode],", ""),
    ):
        assert was in text, was
        text = text.replace(was, now)
    return text


def _play(world: World, point: Failpoint, *, counted: bool = False) -> None:
    graph, readings = write_readings(world.directory, counted=counted)
    kill_one_of_two(world, point, graph, **(WITHOUT_ROOM if counted else WORKERS))
    world.oracle = partial(faults_of, world.url, readings)


def kill_one_of_two(world: World, point: Failpoint, graph: Path, **settings: float) -> None:
    """Kill one of two workers of a small graph, start it again, and wait until the graph has finished."""
    # Only an injector decodes: the victim has all of them, so that it has its moment.
    mine, theirs = _apart(graph) if point is Failpoint.AFTER_DECODE else ("", "")
    one = world.worker(graph=graph, only=mine, failpoint=trap(point), gated=True, **settings)
    other = world.worker(graph=graph, only=theirs, gated=True, **{**settings, "epoch_s": 60})
    one.await_ready()
    other.await_ready()
    one.begin()
    other.begin()
    spring(one, point)
    recovery = world.await_killed(one)
    again = world.worker(graph=graph, only=mine, **settings)
    recovery.wait(watched=again)
    world.await_finished(other, again)


def _apart(graph: Path) -> tuple[str, str]:
    """Return the names of a graph's sources, and of its steps."""
    kinds = [(node.kind == "injector", node.name) for node in load_graph(str(graph)).spec().computations]
    return tuple(",".join(name for is_source, name in kinds if is_source is which) for which in (True, False))  # type: ignore[return-value]


def kill_server_twice(world: World, server: EmbeddedPostgres, **how: Any) -> None:
    """Kill PostgreSQL under two workers of a small graph, restart it, and wait until the graph has finished."""
    workers = [world.worker(**how), world.worker(**how)]
    workers[0].await_reached(Failpoint.AFTER_COMMIT, 5)
    for _ in range(2):
        started = time.monotonic()
        server.kill()
        world.kills += 1
        server.restart()
        recovery = world.hurt()
        recovery.started = started
        recovery.wait(watched=workers[0])
    world.await_finished(*workers)


def faults_of(url: str, readings: list[tuple[str, int, int]]) -> list[Fault]:
    """Compare all tables with a recount."""
    found = []
    with psycopg.connect(url, autocommit=True) as connection:
        for kind, wanted in (
            ("fixed", recount(readings, SIZE)),
            ("sliding", recount(readings, EVERY)),
            ("sessions", sessions(readings)),
        ):
            for mode in Accumulation:
                found += _compared(connection, f"{kind}_{mode.value}", "device", wanted)
                found += _history_faults(connection, f"{kind}_{mode.value}", retracts=mode is Accumulation.RETRACTING)
        totals = grouped(recount(readings, SIZE))
        for mode in (Accumulation.DISCARDING, Accumulation.RETRACTING):
            found += _compared(connection, f"totals_{mode.value}", '"group"', totals)
        early = connection.execute("SELECT count(*) FROM early.fixed_retracting WHERE pane_index > 1").fetchone()
        if early == (0,):
            found.append(Fault("violation", "no window had early panes"))
        return [*found, *accounting_faults(connection)]


def _history_faults(connection: psycopg.Connection, table: str, *, retracts: bool) -> list[Fault]:
    """Compare a history with its table: each pane once, each but the newest taken back once if that is the mode."""
    found = []
    columns = "device, window_start, window_end, n, total, pane_index, bundle"
    rows = f"SELECT {columns} FROM early.{table}"
    believed = f"SELECT {columns} FROM millpy.as_of(NULL::early.{table}, now())"
    for one, other, kind in ((rows, believed, "lost"), (believed, rows, "doubled")):
        if differing := connection.execute(f"{one} EXCEPT {other}").fetchall():  # type: ignore[call-overload]
            found.append(Fault(kind, f"history of {table}: {len(differing)} rows differ, such as {differing[0]}"))
    windows = connection.execute(
        f"SELECT h.device, h.window_start, h.window_end, t.device IS NULL,"
        f" array_agg(h.pane_index ORDER BY h.pane_index) FILTER (WHERE NOT h.is_retraction),"
        f" coalesce(array_agg(h.pane_index ORDER BY h.pane_index) FILTER (WHERE h.is_retraction), ARRAY[]::bigint[])"
        f" FROM early.{table}_history AS h LEFT JOIN early.{table} AS t USING (device, window_start, window_end)"
        f" GROUP BY 1, 2, 3, 4"  # type: ignore[call-overload]
    ).fetchall()
    for *name, vanished, panes, taken_back in windows:
        older = panes[:-1] if retracts else []
        if panes != [*range(len(panes))] or taken_back != [*older, *panes[-1:]][: len(older) + vanished]:
            found.append(Fault("violation", f"history of {table}: {name} has {panes} and takes back {taken_back}"))
    return found


def _compared(
    connection: psycopg.Connection, table: str, key: str, wanted: dict[tuple[str, int], tuple[int, int]]
) -> list[Fault]:
    query = f"SELECT {key}::text, extract(epoch FROM window_start)::int, n::int, total::int FROM early.{table}"
    rows = connection.execute(query).fetchall()  # type: ignore[call-overload]
    return differences(table, {row[:2]: row[2:] for row in rows}, wanted)


def recount(readings: list[tuple[str, int, int]], every: int) -> dict[tuple[str, int], tuple[int, int]]:
    """(device, start) -> number and sum of the readings."""
    counts: Counter[tuple[str, int]] = Counter()
    sums: Counter[tuple[str, int]] = Counter()
    for device, at, value in readings:
        for start in range(at // every * every, at - SIZE, -every):
            counts[device, start] += 1
            sums[device, start] += value
    return {name: (count, sums[name]) for name, count in counts.items()}


def sessions(readings: list[tuple[str, int, int]]) -> dict[tuple[str, int], tuple[int, int]]:
    """(device, start) -> number and sum of the readings of a session."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    name, before = ("", 0), 0
    for device, at, value in sorted(readings):
        if device != name[0] or at - before >= GAP:
            name = device, at
        before = at
        count, total = found.get(name, (0, 0))
        found[name] = count + 1, total + value
    return found


def grouped(windows: dict[tuple[str, int], tuple[int, int]]) -> dict[tuple[str, int], tuple[int, int]]:
    """Add up windows by group and larger window."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for (device, start), (count, total) in windows.items():
        name = (str(int(device[1:]) % 3), start // GROUP_SIZE * GROUP_SIZE)
        before = found.get(name, (0, 0))
        found[name] = (before[0] + count, before[1] + total)
    return found
