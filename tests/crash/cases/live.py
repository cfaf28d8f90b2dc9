"""SIGKILL while operators change a graph in place and correct its finished windows: of their commands, and of workers.

Each command is killed in the middle of its transaction, and repeated. A worker dies at its point while it adds late
records to finished windows, or with records in flight that the next version of the graph reads again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.graph_files import done, one, rows
from tests.crash.harness import await_true
from tests.crash.world import Case, World
from tests.forked import fork_millpy

GRAPH = Path(__file__).parents[1] / "live_graph.py"
DEVICES = 4
Reading = tuple[str, int, int]
"""(device, at in s, value)."""
ON_TIME = (0, 200)
LATE = (10, 20, 75)
"""They miss the windows from 0 and 60 s."""
IN_FLIGHT, BEHIND = (200, 320), (320, 400)
"""In seconds: what is taken around the change, and behind it."""
SETTINGS = {"bundle_records_max": 40, "closed_windows_bytes_max": 1, "unfired_windows_bytes_max": 1}
TIMES = {Failpoint.AFTER_FENCE: 2, Failpoint.AFTER_STEP: 2}
WAITS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
"""
OTHERS = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'millpy%'
"""
CONSUMED = "SELECT coalesce(sum(consumed + late), 0) FROM millpy.accounting WHERE consumer = 'minutes'"
REQUESTED = "SELECT count(*) FROM millpy.late_records WHERE state = 'requested'"
VERSION = "SELECT version FROM mill.graphs"
ROWS = "SELECT count(*) FROM live.minutes"
CORRECTED_TOTAL = -7
CORRECTED = "SELECT count(*) FROM live.minutes WHERE total = -7"
MADE = "SELECT count(*), count(late_record_id), count(DISTINCT late_record_id) FROM millpy.corrections"
STATES = "SELECT extract(epoch FROM event_time)::int, state, count(*) FROM millpy.late_records GROUP BY 1, 2 ORDER BY 1"
MINUTES = """
SELECT device, extract(epoch FROM window_start)::int, n::int, total::int FROM live.minutes
 WHERE NOT (device = 'd0' AND window_start = to_timestamp(120))
"""
FORGOTTEN = """
SELECT count(*) FROM (
    (SELECT * FROM live.minutes EXCEPT SELECT * FROM millpy.as_of(NULL::live.minutes, now())) UNION ALL
    (SELECT * FROM millpy.as_of(NULL::live.minutes, now()) EXCEPT SELECT * FROM live.minutes)) AS d
"""


def cases() -> Iterator[Case]:
    """Each point."""
    return map(live_case, Failpoint)


def live_case(point: Failpoint) -> Case:
    """Return the case in which workers are killed at a point, and every command in its middle."""
    return Case(f"SIGKILL at {point}, and of operators' commands", "", partial(_play, point=point))


def _play(world: World, point: Failpoint) -> None:
    (world.directory / "feed").mkdir()
    old, new = world.directory / "old.py", world.directory / "new.py"
    old.write_text(GRAPH.read_text())
    new.write_text(GRAPH.read_text().replace("LATENESS_S, FILTERED = 0, False", "LATENESS_S, FILTERED = 600, True"))
    assert old.read_text() != new.read_text()
    taken = [(f"d{device}", at, 1 + at % 7) for at in range(*ON_TIME) for device in range(DEVICES)]
    late = [(f"d{device}", at, 3) for at in LATE for device in range(DEVICES)]
    _drop(world, [*taken, *late])
    first = world.worker(graph=old, **SETTINGS)
    first.await_while_running(_consumed(world, len(taken) + len(late)), "what is late is late")
    first.drain()
    first.await_finished()

    _requested(world)
    in_flight = [(f"d{device}", at, 1 + at % 7) for at in range(*IN_FLIGHT) for device in range(DEVICES)]
    victim = world.worker(graph=old, failpoint=f"{point}:{TIMES.get(point, 1)}:kill", **SETTINGS)
    victim.await_reached(Failpoint.AFTER_CLAIM)
    _drop(world, in_flight)
    if point is Failpoint.BEFORE_RELEASE:
        victim.await_reached(Failpoint.AFTER_COMMIT)
        victim.drain()
    recovery = world.await_killed(victim)

    _deployed(world, new)
    behind = [(f"d{device}", at, 1 + at % 7) for at in range(*BEHIND) for device in range(DEVICES)]
    amends = [("d0", 330, 50), ("d1", 390, 60)]
    lost = [("d2", 340, -1), ("d3", 350, 0)]
    again = [("d1", 30, 9)]
    _drop(world, [*behind, *amends, *lost, *again])
    last = world.worker(graph=new, **SETTINGS)
    recovery.wait(watched=last)
    everything = [*taken, *late, *in_flight, *behind, *amends, *again]
    last.await_while_running(_consumed(world, len(everything)), "everything is taken")
    last.await_while_running(lambda: one(world.url, REQUESTED) == 0, "the requests are settled")
    _corrected(world)
    _drop(world, [("closing", 2_000, 1)])
    last.await_while_running(_consumed(world, len(everything) + 1), "all windows are over")
    last.drain()
    world.await_finished(last)
    counted = [*taken, *late, *in_flight, *behind, *amends]
    world.oracle = partial(faults_of, world.url, counted)


def _consumed(world: World, count: int) -> Callable[[], bool]:
    deployed = "SELECT count(*) FROM mill.graphs"
    return lambda: one(world.url, deployed) == 1 and one(world.url, CONSUMED) == count


def _drop(world: World, readings: list[Reading]) -> None:
    """Add a file to the directory."""
    place = world.directory / "feed"
    hidden = place / ".next"
    lines = (msgspec.json.encode(dict(zip(("device", "at", "value"), reading, strict=True))) for reading in readings)
    hidden.write_bytes(b"".join(line + b"\n" for line in lines))
    hidden.rename(place / f"{len(list(place.glob('*.ndjson'))):03}.ndjson")


def _requested(world: World) -> None:
    """Late records are to be added to their windows."""
    command = ("late", "replay", "--all", "--computation", "minutes", "--into-window", "--why", "a gateway")
    _killed(world, "SELECT FROM mill.late_records FOR UPDATE", *command)
    assert one(world.url, REQUESTED) == 0, "the killed command has requested some"
    _did(world, *command)
    assert one(world.url, REQUESTED) == len(LATE) * DEVICES


def _deployed(world: World, graph: Path) -> None:
    """The graph is changed in place."""
    _killed(world, "SELECT FROM mill.result_tables FOR UPDATE", "deploy", str(graph))
    assert one(world.url, VERSION) == 1, "the killed command has deployed"
    _did(world, "deploy", str(graph))
    assert one(world.url, VERSION) == 2
    rows_before = one(world.url, ROWS)
    _killed(world, "LOCK TABLE live.minutes IN ACCESS SHARE MODE", "deploy", str(graph), "--reset", "minutes")
    assert (one(world.url, VERSION), one(world.url, ROWS)) == (2, rows_before), "the killed command has reset a step"


def _corrected(world: World) -> None:
    """The row of a window is corrected by hand."""
    where = ("--window", "device=d0", "--window", "window_start=1970-01-01T00:02:00Z")
    command = ("correct", "live.minutes", *where, "--set", f"total={CORRECTED_TOTAL}", "--why", "bad firmware")
    _killed(world, "SELECT FROM live.minutes FOR UPDATE", *command)
    assert one(world.url, CORRECTED) == 0, "the killed command has corrected a row"
    _did(world, *command)


def _did(world: World, *arguments: str) -> None:
    status, out, err = done(fork_millpy(world.directory, *arguments, "--database", world.url))
    assert status == 0, (arguments, status, out, err)


def _killed(world: World, held: str, *arguments: str) -> None:
    """Kill a command while it waits for rows that another session has locked, in the middle of its transaction."""
    with psycopg.connect(world.url) as holding:
        holding.execute(held)  # type: ignore[call-overload]
        process = fork_millpy(world.directory, *arguments, "--database", world.url)
        await_true(lambda: process.poll() is not None or one(world.url, WAITS) > 0, f"{arguments[0]} waits")
        process.kill()
        status, out, err = done(process)
        assert status < 0, (arguments, status, out, err)
        world.kills += 1
        holding.rollback()


def faults_of(url: str, counted: list[Reading]) -> list[Fault]:
    """Compare the table with a recount, and what was settled with what was requested."""
    sums: Counter[tuple[str, int]] = Counter()
    counts: Counter[tuple[str, int]] = Counter()
    for device, at, value in [*counted, ("closing", 2_000, 1)]:
        counts[device, at // 60 * 60] += 1
        sums[device, at // 60 * 60] += value
    wanted = {name: (n, sums[name]) for name, n in counts.items() if name not in (("d0", 120), ("closing", 1_980))}
    found = differences("minutes", {row[:2]: row[2:] for row in rows(url, MINUTES)}, wanted)
    late = len(LATE) * DEVICES
    expected = [(at, "replayed", DEVICES) for at in LATE]
    for what, query, right in (
        ("corrections", MADE, [(late + 1, late, late)]),
        ("states of late records", STATES, sorted([*expected, (30, "open", 1)])),
        ("rows that differ from the history", FORGOTTEN, [(0,)]),
        ("corrected rows", CORRECTED, [(1,)]),
    ):
        if (seen := rows(url, query)) != right:
            found.append(Fault("violation", f"{what}: {seen} instead of {right}"))
    with psycopg.connect(url, autocommit=True) as connection:
        return [*found, *accounting_faults(connection)]
