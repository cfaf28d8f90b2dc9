"""Run the day: `python -m tests.plant [--devices N] [--every MINUTES] [--hour-s SECONDS] [--only WORDS]` (make plant).

Prints a line for each disturbance with the seconds after which it was told, then what is wrong. The last line is JSON:
devices, dialects, disturbances, differences, peak_rss_mb. The exit status is 0 only if every window equals the oracle,
every disturbance was told in time, and every worker stayed below RSS_MB_MAX.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.plant.disturbances import ALL, DiskFull, Disturbance, FirmwareCorrected, LatenessChanged, NewHall
from tests.plant.fleet import DAY_S, DEVICES_OF_GATEWAY, DIALECTS, HOUR, TICK_S, TICKS, Options, a_day_before
from tests.plant.oracle import differences, expected
from tests.plant.plant import CATCHES_UP_S_MAX, GRAPH, Plant, until

RSS_MB_MAX = 500
DEVICES_MIN = 2 * DEVICES_OF_GATEWAY * len(DIALECTS)
STARTS_S_MAX = 180.0
SHOWN_MAX = 20
LATE = """
SELECT count(*) AS n FROM millpy.late_records WHERE computation IN ('devices', 'relayed') AND state <> 'replayed'
"""
CLOSED = """
SELECT bool_and(low_watermark >= :closes) AS done FROM millpy.watermarks WHERE computation IN ('devices', 'relayed')
"""


def main() -> int:
    """Run the day; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.plant", description="A day in the plant.")
    parser.add_argument("--devices", type=int, default=3_000)
    parser.add_argument("--every", type=int, default=10, help="minutes between two readings of a device")
    parser.add_argument("--hour-s", type=float, default=10.0, help="seconds in which an hour of the day passes")
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of disturbances")
    parser.add_argument("--keep", help="a directory for logs, which stays")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and unmount the disk
    if given.devices < DEVICES_MIN:
        parser.error(f"--devices: at least {DEVICES_MIN}, so that another gateway sends while one is offline")
    chosen = [kind() for kind in ALL if not given.only or any(word in kind.name for word in given.only)]
    with_hall = any(isinstance(each, NewHall) for each in chosen)
    options = Options(given.devices, given.every * 60, a_day_before(datetime.now(UTC)), with_hall)
    with tempfile.TemporaryDirectory(prefix="millpy-plant-") as place:
        directory = Path(given.keep or place).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        with Plant(directory, options) as plant:
            if not plant.has_own_disk:  # never fill a disk of somebody else
                chosen = [each for each in chosen if not isinstance(each, DiskFull)]
            return _day(plant, chosen, given.hour_s)


def _day(plant: Plant, chosen: list[Disturbance], hour_s: float) -> int:
    if not any(isinstance(each, LatenessChanged) for each in chosen):
        plant.change_settings(**LatenessChanged.settings)
    plant.start()
    assert until(lambda: _all_connected(plant), STARTS_S_MAX) is not None, "the sources did not connect"
    running: dict[Disturbance, threading.Thread] = {}
    begun = at = time.monotonic()
    for tick in range(TICKS):
        for disturbance in chosen:
            if disturbance.tick == tick:  # one at a time, and each finds workers that keep up
                _join(running, *running)
                _catch_up(plant, tick)
                print(f"{tick * TICK_S / HOUR:5.1f} h  {disturbance.name}", flush=True)
                running[disturbance] = threading.Thread(target=disturbance.run, args=(plant,), daemon=True)
                running[disturbance].start()
            elif disturbance.until is not None and disturbance.until <= tick * TICK_S / HOUR:
                _join(running, disturbance)
        plant.publish(str(tick))
        pace_s = TICK_S / HOUR * hour_s
        time.sleep(max(0.0, pace_s - (time.monotonic() - at)))
        at = time.monotonic()
    _join(running, *running)
    plant.publish("close")
    assert until(lambda: plant.closed, CATCHES_UP_S_MAX) is not None, "the broker did not get everything"
    closes = datetime.fromtimestamp(plant.options.start + DAY_S, UTC)
    closed = until(lambda: _all_closed(plant, closes), CATCHES_UP_S_MAX)
    tables = expected(plant.options, corrected=any(isinstance(each, FirmwareCorrected) for each in chosen))
    found = differences(plant.url, tables)
    faults = [fault for disturbance in chosen for fault in disturbance.outcome.faults()]
    faults += [] if closed is not None else ["the windows of the day were not closed"]
    faults += _unaccounted(plant)
    status = plant.drain()
    faults += [f"millpy run ended with status {status}"] if status else []
    faults += [f"a worker took {plant.peak_rss_mb:.0f} MB"] if plant.peak_rss_mb > RSS_MB_MAX else []
    _print(plant, chosen, sum(map(len, tables.values())), found, faults, time.monotonic() - begun)
    return int(bool(found or faults))


def _join(running: dict[Disturbance, threading.Thread], *disturbances: Disturbance) -> None:
    for disturbance in disturbances:
        if (thread := running.pop(disturbance, None)) is not None:
            thread.join()


def _catch_up(plant: Plant, tick: int) -> None:
    """Wait until what was published is in the tables."""
    second = tick * TICK_S
    assert until(lambda: plant.published >= tick - 1, CATCHES_UP_S_MAX, 0.05) is not None, (
        "the broker has not caught up"
    )
    assert until(lambda: plant.caught_up(second), CATCHES_UP_S_MAX) is not None, "the workers have not caught up"


def _all_connected(plant: Plant) -> bool:
    sources = plant.admin().sources(GRAPH)
    return len(sources) >= len(DIALECTS) and all(row["connected"] for row in sources)


def _all_closed(plant: Plant, closes: datetime) -> bool:
    """Tell whether every windowed step has given its results of the day, and nothing waits."""
    return bool(plant.admin().ask(CLOSED, closes=closes)[0]["done"])


def _unaccounted(plant: Plant) -> list[str]:
    """Return what the accounting says that should not be."""
    admin = plant.admin()
    late = admin.ask(LATE)[0]["n"]
    unequal = admin.ask("SELECT * FROM millpy.accounting WHERE NOT balanced")
    return [f"{late} late records"] * bool(late) + [f"the accounting does not add up: {row}" for row in unequal]


def _print(
    plant: Plant, chosen: list[Disturbance], rows: int, found: list[str], faults: list[str], seconds: float
) -> None:
    for disturbance in chosen:
        outcome = disturbance.outcome
        told = [f"{sign} {'never' if s is None else f'{s:.1f} s'}" for sign, s in outcome.told.items()]
        print(f"{outcome.name}: {'; '.join([*told, *outcome.notes])}")
    if not plant.has_own_disk:
        print("no right to mount a small disk: the disk was not filled")
    for line in [*faults, *found[:SHOWN_MAX]]:
        print(line)
    print(f"{rows:,} windows in {seconds:.0f} s; PostgreSQL was started again {plant.server_starts} times by itself")
    told = {
        "devices": plant.options.devices,
        "dialects": len(DIALECTS),
        "disturbances": len(chosen),
        "differences": len(found),
        "peak_rss_mb": round(plant.peak_rss_mb),
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads that still look for a sign would hold up the end
