"""SIGKILL of a worker with the tools per key: patterns, changes, rates, grids, a ranking equal plain loops."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.early import kill_one_of_two
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.tool_graph import BEST, DISORDER, GRIDS, MODES, PATTERNS, SILENCE, SIZE
from tests.crash.world import Case, World
from tests.property.test_per_key_tools import NOON, Event, beyond, changed, grid, matches, rates

GRAPH = Path(__file__).parents[1] / "tool_graph.py"
NUMBER, DEVICES = 700, 6
WORKERS = {"bundle_records_max": 15, "turn_panes_max": 9}


def cases() -> Iterator[Case]:
    """Each point."""
    return map(tool_case, Failpoint)


def tool_case(point: Failpoint) -> Case:
    """Return the case in which one of two workers is killed, and started again."""
    return Case(f"SIGKILL at {point}, with tools per key", "", partial(_play, point=point))


def write_events(directory: Path) -> tuple[Path, list[Event]]:
    """Write the graph and its file, out of order, with late events and long gaps; return the graph and its events."""
    chance, now, found = random.Random(3), 0, []
    for number in range(NUMBER):
        now += chance.choice([0, 0, 0, 1, 1, 2, 30 * (number % 90 == 0)])
        event = Event(
            f"d{chance.randrange(DEVICES)}",
            NOON + timedelta(seconds=now - chance.choice([0, 0, 1, 2, DISORDER, DISORDER + 3])),
            number,
            chance.choice(["a", "a", "b", "b", "c", "ab", "bc", ""]),
            chance.choice([None, 0.0, 1.0, 1.5, 2.5, -3.0, 10.0]),
            chance.randrange(12),
        )
        found.append(event)
    (directory / "events.ndjson").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in found))
    graph = directory / "tools.py"
    graph.write_text(GRAPH.read_text())
    return graph, found


def _play(world: World, point: Failpoint) -> None:
    graph, events = write_events(world.directory)
    kill_one_of_two(world, point, graph, **WORKERS)
    world.oracle = partial(faults_of, world.url, events)


def faults_of(url: str, events: Sequence[Event]) -> list[Fault]:
    """Compare all tables, the late records and the dead letters with plain loops over the events in order."""
    clock, in_time = -math.inf, []
    for event in events:
        if event.second >= clock - DISORDER:
            in_time.append(event)
        clock = max(clock, event.second)
    in_time.sort(key=lambda event: event.second)
    wanted: dict[str, Counter[Any]] = {name: Counter() for name in (*PATTERNS, "changed", "rates")}
    wanted |= {f"grid_{method}": Counter() for method in GRIDS}
    for device in {event.device for event in events}:
        mine = [event for event in in_time if event.device == device]
        for name, pattern in PATTERNS.items():
            wanted[name].update((device, at, *numbers) for at, numbers in matches(pattern, MODES[name], mine))
        differs = partial(changed, mine, lambda one, other: beyond(one.value, other.value, lambda _: 1))
        wanted["changed"].update((device, number) for number in differs(SILENCE))
        wanted["rates"].update((device, at, rise, round(per_s, 9), reset) for at, rise, per_s, reset in rates(mine))
        for method, (every, limit, offset) in GRIDS.items():
            wanted[f"grid_{method}"].update((device, *point) for point in grid(mine, method, every, limit, offset))
    found: list[Fault] = []
    second = f"round(extract(epoch FROM {{}}) - {NOON.timestamp():.0f})::int"
    with psycopg.connect(url, autocommit=True) as connection:

        def compare(name: str, columns: str, table: str, expected: Counter[Any]) -> None:
            rows = connection.execute(f"SELECT {columns} FROM {table}").fetchall()  # type: ignore[call-overload]
            found.extend(differences(name, Counter(rows), expected))
            if not expected:
                found.append(Fault("violation", f"nothing is expected of {name}"))

        for name, pattern in PATTERNS.items():
            steps = [f"({step.name} ->> 'number')::int" for step in pattern.steps if not step.absent]
            columns = ", ".join(["device", second.format("event_time"), *steps])
            compare(name, columns, f"tools.{name}", wanted[name])
        compare("changed", "device, number", "tools.changed", wanted["changed"])
        columns = f"device, {second.format('at')}, increase::int, round(per_second::numeric, 9)::float8, reset"
        compare("rates", columns, "tools.rates", wanted["rates"])
        for method in GRIDS:
            rows = connection.execute(
                f"SELECT device, {second.format('at')}, value, filled FROM tools.grid_{method}"  # type: ignore[call-overload]
            ).fetchall()
            points = Counter((device, at, repr(value), filled) for device, at, value, filled in rows)
            found += differences(f"grid_{method}", points, wanted[f"grid_{method}"])
        compare("late", "computation", "mill.late_records", Counter({("ordered",): len(events) - len(in_time)}))
        refused = sum(event.counter >= 10 for event in in_time)
        compare("dead letters", "computation", "mill.dead_letters", Counter({("rates",): refused}))
        found += _ranking_faults(connection, events)
        return [*found, *accounting_faults(connection)]


def _ranking_faults(connection: psycopg.Connection, events: Sequence[Event]) -> list[Fault]:
    totals: Counter[tuple[int, str]] = Counter()
    for event in events:
        totals[event.second // SIZE * SIZE, event.device] += event.counter
    start = f"round(extract(epoch FROM window_start) - {NOON.timestamp():.0f})::int"
    best: dict[int, list[tuple[str, int]]] = {}
    for (window, device), total in sorted(totals.items(), key=lambda item: (-item[1], item[0][1])):
        best.setdefault(window, []).append((device, total))
    rows = connection.execute(f"SELECT {start}, top FROM tools.top").fetchall()  # type: ignore[call-overload]
    stored = {window: (1, [(each["device"], each["total"]) for each in top]) for window, top in rows}
    found = differences("top", stored, {window: (1, ranked[:BEST]) for window, ranked in best.items()})
    table, believed = "SELECT * FROM tools.top", "SELECT * FROM millpy.as_of(NULL::tools.top, now())"
    for one, other in ((table, believed), (believed, table)):
        if differing := connection.execute(f"{one} EXCEPT {other}").fetchall():  # type: ignore[call-overload]
            found.append(Fault("changed", f"history of top: {differing[0]}", len(differing)))
    return found
