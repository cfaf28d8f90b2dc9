"""Feeds of a graph that archives its takes, and what an exact batch makes of the archives, against what is committed.

The graph is `tests/spark/graphs/replayed.py`: windows, sessions and a computation over three source partitions. The
batch's tasks are called here as Spark calls them, so no Java starts.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.rows import dict_row

from millpy.clock import SystemClock
from millpy.limits import Limits
from millpy.spark import Archive
from millpy.spark.hosted_rows import BUNDLE, decode_payloads, decode_state
from millpy.spark.job import HostedPlan, make_job
from tests.crash.checks import Fault, accounting_faults
from tests.property.replayed_workers import ends_of, parts_of

GRAPH = Path(__file__).parents[1] / "spark/graphs/replayed.py"
MAX_DISORDER = "max_disorder=seconds(4)"
KEPT = ("state", "timer", "window")
LATE = """
stream, computation, key, payload, event_time, greatest(least(watermark, '9999-12-31Z'), '0001-01-02Z') AS watermark,
window_start, window_end, retracts
"""
"""Columns of late records. A processing timer may fire when the input has ended, and what it produces be late then; a
trigger may close a window before there is a watermark."""
Rows = Counter[str]


def write_feeds(directory: Path, seed: int, records: int, *, event_time: str = MAX_DISORDER) -> Path:
    """Copy the graph, with three files of records: event times are out of order, and some are late.

    Args:
        directory: where to write.
        seed: decides the records.
        records: their number in each file.
        event_time: the arguments of the graph's event time that bound the disorder.
    """
    chance = random.Random(seed)
    for number in range(3):
        with (directory / f"feed-{number}.ndjson").open("w") as feed:
            for place in range(records):
                at = 100 + place // 3 + chance.choice([0, 0, 1, -3, -3, -25])
                reading = {"device": f"d{chance.randint(0, 9)}", "at": at, "value": chance.uniform(-9, 9)}
                feed.write(json.dumps(reading) + "\n")
    graph = directory / GRAPH.name
    text = GRAPH.read_text()
    assert text.count(MAX_DISORDER) == 1
    graph.write_text(text.replace(MAX_DISORDER, event_time))
    return graph


def replay_faults(url: str, graph: Path, archive: Path) -> list[Fault]:
    """Make every bundle of a finished graph again; return what differs from the database."""
    job = make_job(str(graph), Archive(archive, exact=True), limits=Limits(), now_us=SystemClock().now_us(), state=True)
    hosted, parts = parts_of(job)
    ends = ends_of(hosted, parts)
    reached = {place: last for of in hosted.job.takes.values() for place, last in of.through.items()}
    found = _made(hosted, parts, reached)
    with psycopg.connect(url, row_factory=dict_row) as connection:
        wanted = _committed(connection, hosted)
    with psycopg.connect(url, autocommit=True) as connection:
        wrong = accounting_faults(connection)
    if empty := sorted(what for what in wanted if not wanted[what] and what not in ("timer", "window")):
        wrong.append(Fault("violation", f"workers have no {', '.join(empty)}: nothing was compared"))
    for what in found.keys() | wanted.keys():
        lost, more = wanted[what] - found[what], found[what] - wanted[what]
        if lost or more:
            differ = f"{what}: workers have {[*lost][:2]}, the replay {[*more][:2]}"
            wrong.append(Fault("changed", differ, max(lost.total(), more.total())))
    if pending := sum(sum(end.pending.values()) for end in ends.values()):
        wrong.append(Fault("lost", f"{pending} records have no take", pending))
    return wrong


def _made(hosted: HostedPlan, parts: list[dict[str, Any]], reached: dict[str, int]) -> dict[str, Rows]:
    """The rows, late records, states and last bundles that the tasks of a batch have made."""
    places = {interval.interval_id: interval.place for interval in hosted.plan.deployment.intervals}
    tables = {hosted.plan.deployment.table_ids[spec.name]: spec for spec in hosted.spec.tables}
    windows: dict[tuple[str, str], tuple[int, bool, str]] = {}
    found: dict[str, Rows] = {name: Counter() for name in ("late records", "bundles", *KEPT)}
    found |= {f"rows of {spec.name}": Counter() for spec in tables.values()}
    for part in parts:
        place = places[part["owner"]]
        if part["kind"] in ("rows", "later_rows", "absorbed"):
            spec = tables[part["subject"]]
            identity = [column.name for column in spec.columns()[: len(spec.keys) + 2]]
            for row in _rows(part):
                bundle, is_row = row.pop(BUNDLE), part["kind"] != "absorbed"
                text = _text({**row, "place": place, "bundle": bundle})
                if spec.kind == "records":
                    found[f"rows of {spec.name}"][text] += 1
                    continue
                window = spec.name, _text({name: row[name] for name in identity})
                windows[window] = max(windows.get(window, (0, False, "")), (bundle, is_row, text))
        elif part["kind"] == "late":
            found["late records"].update(map(_text, _rows(part)))
        elif part["kind"] == "state":
            for entry in _state(part):
                if entry["kind"] in KEPT:
                    found[entry["kind"]][_text({**entry, "interval": place, "value": json.loads(entry["value"])})] += 1
    for (table, _), (_, is_row, text) in windows.items():
        found[f"rows of {table}"][text] += is_row
    found["bundles"].update(f"{place}: {last}" for place, last in reached.items())
    return found


def _committed(connection: psycopg.Connection[dict[str, Any]], hosted: HostedPlan) -> dict[str, Rows]:
    """The same of the database."""
    graph = hosted.spec.name
    places = {
        row["interval_id"]: f"{row['computation']}/{row['place']}"
        for row in connection.execute("SELECT interval_id, computation, place FROM mill.places WHERE kind = 'stage'")
    }
    found: dict[str, Rows] = {}
    for spec in hosted.spec.tables:
        rows = connection.execute(f'SELECT * FROM "{graph}"."{spec.name}"').fetchall()  # type: ignore[call-overload]
        names = [column.name for column in spec.columns() if column.name != "emitted_at"]
        found[f"rows of {spec.name}"] = Counter(
            _text({**{name: row[name] for name in names}, "place": places[row["interval_id"]], "bundle": row["bundle"]})
            for row in rows
        )
    late = connection.execute(f"SELECT {LATE} FROM millpy.late_records")  # type: ignore[call-overload]
    found["late records"] = Counter(map(_text, late))
    for kind in KEPT:
        entries = connection.execute(
            "SELECT interval_id AS interval, kind, namespace, key, subkey, value, fire_at FROM mill.entries"
            " WHERE kind = %s",
            [kind],
        ).fetchall()
        found[kind] = Counter(
            _text({**entry, "interval": places[entry["interval"]]}) for entry in entries if entry["interval"] in places
        )
    headers = connection.execute("SELECT interval_id, bundle FROM mill.intervals").fetchall()
    found["bundles"] = Counter(
        f"{places[row['interval_id']]}: {row['bundle']}" for row in headers if row["interval_id"] in places
    )
    return found


def _rows(part: dict[str, Any]) -> list[dict[str, Any]]:
    batch = pa.record_batch({"payload": pa.array([part["payload"]], pa.binary())})
    return [row for rows in decode_payloads([batch]) for row in rows.to_pylist()]


def _state(part: dict[str, Any]) -> list[dict[str, Any]]:
    batch = pa.record_batch(
        {"owner": pa.array([part["owner"]], pa.int32()), "payload": pa.array([part["payload"]], pa.binary())}
    )
    return [row for rows in decode_state([batch]) for row in rows.to_pylist()]


def _text(row: dict[str, Any]) -> str:
    plain = {
        name: value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
        for name, value in row.items()
        if name != "emitted_at"
    }
    return repr(sorted((name, bytes(v) if isinstance(v, memoryview) else v) for name, v in plain.items()))
