"""Keys that stopped, over real PostgreSQL: through kills, a release and a discard, every record counts once."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.clock import SystemClock
from millpy.limits import Limits
from tests.crash.checks import accounting_faults
from tests.crash.harness import Worker

GRAPH = Path(__file__).with_name("parking_graph.py")
DEVICES, COUNT, FAULTY = 12, 1_500, 13
REFUSED = -1


def write_feeds(folder: Path) -> list[dict[str, Any]]:
    """Each record is heard by one gateway or both, once or twice; three devices send something that fails."""
    rng = random.Random(5)
    records = []
    for n in range(COUNT):
        device = rng.randrange(DEVICES)
        value = rng.choice([REFUSED, *range(14, 40)])
        if device < 3 and n > COUNT // 3 and rng.random() < 0.05:
            value = FAULTY
        records.append({"id": f"n{n}", "device": f"d{device}", "at": 1_000 * n, "value": value})
    both = {"north": records, "south": records}
    for gateway, heard in both.items():
        lines = [
            msgspec.json.encode(record)
            for record in heard
            for _ in range(rng.choice([1, 1, 2]) if gateway == "north" else rng.choice([0, 1]))
        ]
        (folder / gateway).write_bytes(b"".join(line + b"\n" for line in lines))
    return [record for record in records if record["value"] != REFUSED]


def fetch(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(statement).fetchall()  # type: ignore[arg-type]


def adds_up(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as connection:
        return accounting_faults(connection) == []


def parked(url: str) -> dict[str, int]:
    return dict(fetch(url, "SELECT key::jsonb #>> '{}', records FROM millpy.parked"))


def totals(url: str) -> dict[str, list[tuple[str, int, int]]]:
    found: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for device, *row in fetch(url, "SELECT device, id, number, total FROM parking.totals ORDER BY device, number"):
        found[device].append(tuple(row))
    return found


def test_parked_records_count_once_through_kills_and_a_release(tmp_path: Path, database_url: str) -> None:
    records = write_feeds(tmp_path)
    by_device: dict[str, dict[str, int]] = defaultdict(dict)
    for record in records:
        by_device[record["device"]][record["id"]] = record["value"]

    def all_waits() -> bool:
        """Tell whether every record is processed: parked or in the table."""
        counted = sum(map(len, totals(database_url).values())) + sum(parked(database_url).values())
        return counted == len(records)

    with Worker(tmp_path, database_url, tmp_path, graph=GRAPH) as first:
        first.await_while_running(
            lambda: (
                bool(fetch(database_url, "SELECT 1 FROM pg_views WHERE schemaname = 'parking'"))
                and len(parked(database_url)) >= 1
            ),
            "a key is parked",
        )
        first.kill()
    with Worker(tmp_path, database_url, tmp_path, graph=GRAPH) as second:
        second.await_while_running(all_waits, "everything is parked or counted")
        assert set(parked(database_url)) == {"d0", "d1", "d2"}
        assert adds_up(database_url)
        assert " of totals parked (user_error): " in first.log + second.log
        (finding,) = [f for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "parked keys"]
        assert finding.found.startswith("parking.totals, 3 of its keys: ")
        ((held_by, detail),) = fetch(
            database_url,
            "SELECT held_by, detail FROM millpy.explain_watermark('parking', 'totals') ORDER BY step DESC LIMIT 1",
        )
        assert (held_by, "stopped by a failing record" in detail) == ("parked", True)
        # What cannot be mended fails again, and waits on.
        fetch(database_url, "SELECT millpy.release_parked('parking', 'totals', 'd1')")
        second.await_while_running(
            lambda: not fetch(database_url, "SELECT 1 FROM mill.releases"), "the release was tried"
        )
        assert set(parked(database_url)) == {"d0", "d1", "d2"}
        # One is given up as long as it fails: its other records go on up to the next that fails.
        (lost,) = fetch(database_url, "SELECT failing_record ->> 'id' FROM millpy.parked WHERE key = '\"d2\"'")
        assert fetch(database_url, "SELECT millpy.discard_parked('parking', 'totals', 'd2')") == [(1,)]
        second.kill()
    (tmp_path / "mended").touch()
    with Worker(tmp_path, database_url, tmp_path, graph=GRAPH) as third:
        assert fetch(database_url, "SELECT millpy.release_parked('parking', 'totals', 'd0')") == [(1,)]
        third.await_while_running(lambda: "d0" not in parked(database_url), "a released key continues")
        fetch(database_url, "SELECT millpy.release_parked('parking', 'totals')")
        third.kill()
    with Worker(tmp_path, database_url, tmp_path, graph=GRAPH) as last:
        fetch(database_url, "SELECT millpy.release_parked('parking', 'totals')")
        last.await_while_running(lambda: not parked(database_url), "all go on")
        assert last.process.wait(60) == 0

    found = totals(database_url)
    del by_device["d2"][lost[0]]
    for device, values in by_device.items():
        assert [number for _, number, _ in found[device]] == list(range(1, len(values) + 1))
        assert {id_ for id_, _, _ in found[device]} == set(values)
        assert found[device][-1][2] == sum(values.values())
    assert adds_up(database_url)
    dead_letters = fetch(database_url, "SELECT computation, reason, payload FROM mill.dead_letters")
    assert [
        (computation, reason, msgspec.json.decode(payload)["id"]) for computation, reason, payload in dead_letters
    ] == [("totals", "user_error", lost[0])]
    assert fetch(database_url, "SELECT count(*) FROM mill.keyed WHERE kind = 'parked'") == [(0,)]
    assert fetch(database_url, "SELECT count(*) FROM mill.releases") == [(0,)]
