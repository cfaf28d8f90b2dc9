"""SIGKILL of a worker with windows of functions, bounded sessions and closing triggers, and of what trims histories.

Tables and totals are compared with a plain recount of the file, and histories with a witness: triggers that log each
change of a table. Which panes fire early depends on bundles; what they add up to does not.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoint
from millpy.store.postgres.store import PostgresStore
from tests.crash.cases.early import kill_one_of_two, kill_server_twice
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.histories import add_witness, history_faults, trimming
from tests.crash.pane_graph import CUT, ENOUGH, GAP, GROUP_SIZE, KEPT_S, LARGE, LENGTH, PART, RECORDS_MAX, SHIFT, SIZE
from tests.crash.world import Case, World

GRAPH = Path(__file__).parents[1] / "pane_graph.py"
RECORDS, DEVICES, DISORDER = 1_500, 12, 8
DELAYS = (0, 0, 0, 1, 2, 4, 6, 25)
TABLES = {"shifts": True, "visits": False, "cut": False, "full": False, "large": False, "most": False}
CLOSING = {"closing": False, "closing_sessions": False}
"""Table -> whether its windows retract."""
TRIMMED = "visits"
WORKERS = {"bundle_records_max": 25, "turn_panes_max": 9}
US = 1_000_000

Reading = tuple[str, int, int, int]
"""(device, at, value, gap)."""
Rows = dict[tuple[str, int, int], tuple[int, int]]
"""(device, start, end) -> number and sum, with times in µs."""


def cases() -> Iterator[Case]:
    """Each point, and the server."""
    yield from map(pane_case, Failpoint)
    yield Case("PostgreSQL killed and restarted, with own windows and histories", "", _server_killed)


def pane_case(point: Failpoint) -> Case:
    """Return the case in which one of two workers is killed, and started again."""
    return Case(f"SIGKILL at {point}, with own windows and histories", "", partial(_play, point=point))


def write_readings(directory: Path) -> tuple[Path, list[Reading]]:
    """Write the graph and its file, out of order; return the graph and its readings."""
    chance = random.Random(2)
    found = []
    for place in range(RECORDS):
        device, value = f"d{chance.randrange(DEVICES)}", chance.randrange(50)
        found.append((device, max(0, place // 10 - chance.choice(DELAYS)), value, chance.randint(1, 4)))
    # A session that is seen, then full and soon over; late readings open it again, unless one turn has them all. Others
    # fill the bundles between.
    for device, at, number in (("d99", 0, 4), ("d1", 0, 30), ("d99", 1, 1), ("d1", 11, 30), ("d99", 0, 4)):
        found += [(device, RECORDS // 10 + 50 + at, number, 1)] * number
    with (directory / "panes.ndjson").open("w") as file:
        for reading in found:
            file.write(json.dumps(dict(zip(("device", "at", "value", "gap"), reading, strict=True))) + "\n")
    graph = directory / "panes.py"
    graph.write_text(GRAPH.read_text())
    return graph, found


async def deploy(graph: Path, url: str) -> None:
    """Make the tables."""
    async with PostgresStore(url) as store:
        await store.deploy(load_graph(str(graph)).spec())


def _play(world: World, point: Failpoint) -> None:
    graph, readings = _prepared(world)
    with trimming(world.url, f"panes.{TRIMMED}") as since:
        kill_one_of_two(world, point, graph, **WORKERS)
    world.oracle = partial(faults_of, world.url, readings, since)


def _server_killed(world: World) -> None:
    server = world.own_server()
    graph, readings = _prepared(world)
    with trimming(world.url, f"panes.{TRIMMED}") as since:
        kill_server_twice(world, server, graph=graph, **WORKERS)
    world.oracle = partial(faults_of, world.url, readings, since)


def _prepared(world: World) -> tuple[Path, list[Reading]]:
    graph, readings = write_readings(world.directory)
    asyncio.run(deploy(graph, world.url))
    add_witness(world.url, "panes", [*TABLES, *CLOSING])
    return graph, readings


def faults_of(url: str, readings: Sequence[Reading], since: Sequence[datetime] = ()) -> list[Fault]:
    """Compare all tables with a recount, and all histories with their witness.

    Args:
        since: what `trimming` has yielded.
    """
    found: list[Fault] = []
    with psycopg.connect(url, autocommit=True) as connection:
        (now,) = connection.execute("SELECT now()").fetchone() or (None,)
        assert isinstance(now, datetime)
        fixed = recount(
            (device, value, [(at // SIZE * SIZE, at // SIZE * SIZE + SIZE)]) for device, at, value, _ in readings
        )
        full, late = full_sessions(readings)
        wanted = {
            "shifts": recount((device, value, shifts(device, at, value)) for device, at, value, _ in readings),
            "visits": merged(
                (device, at, value, min(at + gap, at // CUT * CUT + CUT)) for device, at, value, gap in readings
            ),
            "cut": merged(
                (device, at, value, min(at + GAP, at // LENGTH * LENGTH + LENGTH)) for device, at, value, _ in readings
            ),
            "full": full,
            "large": fixed,
            "most": fixed,
        }
        for table, rows in wanted.items():
            found += differences(table, rows_of(connection, table), rows)
        for table in ("shifts", "most"):
            found += differences(f"{table}_totals", totals_of(connection, table), grouped(wanted[table]))
        found += differences("late of full", late_of(connection, "full"), late)
        found += _closing_faults(connection, fixed, Counter(device for device, _, _, _ in readings))
        found += _pane_faults(connection)
        for table, retracts in (TABLES | CLOSING).items():
            trimmed = since[0] if since and table == TRIMMED else None
            trimmed = now - timedelta(seconds=KEPT_S) if table == "cut" else trimmed
            found += history_faults(connection, "panes", table, retracts=retracts, since=trimmed)
        return [*found, *accounting_faults(connection)]


def rows_of(connection: psycopg.Connection, table: str, schema: str = "panes") -> dict[Any, Any]:
    """Return the rows of a table of devices."""
    query = (
        f"SELECT device, (extract(epoch FROM window_start) * {US})::bigint,"
        f" (extract(epoch FROM window_end) * {US})::bigint, n::int, coalesce(total, 0)::int FROM {schema}.{table}"
    )
    return {row[:3]: row[3:] for row in connection.execute(query).fetchall()}  # type: ignore[call-overload]


def late_of(connection: psycopg.Connection, step: str) -> Counter[str]:
    """Return the number of late records by device."""
    query = "SELECT key::jsonb #>> '{}', count(*) FROM mill.late_records WHERE computation = %s GROUP BY 1"
    return Counter(dict(connection.execute(query, [step]).fetchall()))


def totals_of(connection: psycopg.Connection, table: str, schema: str = "panes") -> dict[Any, Any]:
    """Return the rows of the totals over a table."""
    columns = '"group"::int, extract(epoch FROM window_start)::int, n::int, total::int'
    query = f"SELECT {columns} FROM {schema}.{table}_totals"
    return {row[:2]: row[2:] for row in connection.execute(query).fetchall()}  # type: ignore[call-overload]


def _closing_faults(connection: psycopg.Connection, fixed: Rows, of_device: Counter[str]) -> list[Fault]:
    """Check that a closed window has enough records or all of its own, and that the others are late records."""
    found = []
    late: Counter[Any] = Counter()
    query = (
        "SELECT key::jsonb #>> '{}', window_start, window_end, count(*) FROM mill.late_records"
        " WHERE computation = 'closing' GROUP BY 1, 2, 3"
    )
    for *name, count in connection.execute(query):  # type: ignore[call-overload]
        late[tuple(name)] = count
    stored = rows_of(connection, "closing")
    counted = {name: (count + late[name]) for name, (count, _) in stored.items()}
    found += differences("closing", counted, {name: count for name, (count, _) in fixed.items()})
    for name, (count, _) in stored.items():
        if count < ENOUGH and late[name]:
            found.append(Fault("violation", f"{name} was closed by {count} records"))
    if not late:
        found.append(Fault("violation", "no window was closed before its last record"))
    sessions = late_of(connection, "closing_sessions")
    for (device, _, _), (count, _) in rows_of(connection, "closing_sessions").items():
        sessions[device] += count
    return [*found, *differences("closing_sessions", sessions, of_device)]


def _pane_faults(connection: psycopg.Connection) -> list[Fault]:
    """Check what panes say of themselves: one is on time, one is the last, and early ones have a reason."""
    found, early = [], 0
    for table in ("large", "most"):
        query = (
            "SELECT device, window_start,"
            " array_agg((pane_timing, pane_on_time_index, pane_last)::text ORDER BY pane_index)"
            f" FROM panes.{table}_history WHERE NOT is_retraction GROUP BY 1, 2"
        )
        for device, start, panes in connection.execute(query).fetchall():  # type: ignore[call-overload]
            split = [pane.strip("()").split(",") for pane in panes]
            timings = [timing for timing, _, _ in split]
            first = timings.count("early")
            early += first
            indexes = [int(index) for _, index, _ in split]
            # The first one after the end is late if late records are in it.
            wrong = timings[first : first + 1] not in (["on_time"], ["late"]) or {*timings[first + 1 :]} - {"late"}
            wrong = wrong or indexes != [*[-1] * first, *range(len(split) - first)]
            if wrong or [last for _, _, last in split] != [*["f"] * (len(split) - 1), "t"]:
                found.append(Fault("violation", f"panes of {table}: {device} {start} has {panes}"))
    if not early:
        found.append(Fault("violation", "no window has an early pane"))
    small = "SELECT count(*) FROM panes.large_history WHERE pane_timing = 'early' AND total < %s"
    if (count := connection.execute(small, [LARGE]).fetchone()) != (0,):
        found.append(Fault("violation", f"{count} panes came before they were large"))
    return found


# Plain loops.


def recount(assigned: Any) -> Rows:
    """Add up (device, value, [(start, end)]), with times in seconds."""
    found: Rows = {}
    for device, value, windows in assigned:
        for start, end in windows:
            count, total = found.get((device, start * US, end * US), (0, 0))
            found[device, start * US, end * US] = count + 1, total + value
    return found


def shifts(device: str, at: int, value: int) -> list[tuple[int, int]]:
    """Return the windows of `Shifts`."""
    first = int(device[1:]) % SHIFT
    found = [(start, start + SHIFT) for start in range(first - SHIFT, at + 1, SHIFT) if at < start + SHIFT]
    return found + [(at - PART, at + 1)] * (value % 2)


def merged(spans: Any) -> Rows:
    """Join (device, start, value, end) that intersect, with times in seconds."""
    found: Rows = {}
    name: tuple[str, int, int] = ("", 0, 0)
    for device, start, value, end in sorted(spans):
        joins = device == name[0] and start * US < name[2]
        count, total = found.pop(name) if joins else (0, 0)
        name = (device, name[1] if joins else start * US, max(name[2], end * US) if joins else end * US)
        found[name] = count + 1, total + value
    return found


def full_sessions(readings: Sequence[Reading]) -> tuple[Rows, Counter[str]]:
    """Replay bounded sessions, record by record, with one second of allowed lateness; return them and the late ones."""
    allowed, clock = 1 * US, -DISORDER * US * 1_000
    open_of: dict[str, list[list[int]]] = {}
    over: list[tuple[str, list[int]]] = []
    late: Counter[str] = Counter()
    for device, at_s, value, _ in readings:
        at, watermark = at_s * US, clock - DISORDER * US
        clock = max(clock, at)
        mine = open_of.setdefault(device, [])  # [start, end, count, sum, last]
        over += [(device, one) for one in mine if one[1] + allowed <= watermark]
        mine[:] = [one for one in mine if one[1] + allowed > watermark]
        taking = next((one for one in mine if one[2] >= RECORDS_MAX and one[0] <= at < one[1]), None)
        if taking is None:
            after = [one[0] for one in mine if one[2] >= RECORDS_MAX and one[0] > at]
            end = min([at + GAP * US, *after])
            met = [one for one in mine if one[2] < RECORDS_MAX and at < one[1] and one[0] < end]
            if not met and end + allowed <= watermark:
                late[device] += 1
                continue
            mine[:] = [one for one in mine if one not in met]
            taking = [min([at, *(one[0] for one in met)]), max([end, *(one[1] for one in met)]), 0, 0, 0]
            for one in met:
                taking[2:] = [taking[2] + one[2], taking[3] + one[3], max(taking[4], one[4])]
            mine.append(taking)
            taking[4] = max(taking[4], at)
            if taking[2] + 1 >= RECORDS_MAX:
                taking[1] = min(taking[1], max(taking[4], watermark) + 1)
        taking[2:4] = [taking[2] + 1, taking[3] + value]
    over += [(device, one) for device, mine in open_of.items() for one in mine]
    return {(device, one[0], one[1]): (one[2], one[3]) for device, one in over}, late


def grouped(windows: Rows) -> dict[tuple[int, int], tuple[int, int]]:
    """Add up windows by group and larger window, into which the last µs of each falls."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for (device, _, end), (count, total) in windows.items():
        name = (int(device[1:]) % 3, (end - 1) // (GROUP_SIZE * US) * GROUP_SIZE)
        before = found.get(name, (0, 0))
        found[name] = (before[0] + count, before[1] + total)
    return found
