"""A graph that looks up in a table that changes all the time, its input, and what must be true of its results.

All rows of the table have one generation, which a transaction raises. So a turn that mixes two versions of the table
shows it, and so does a version that never existed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psycopg

from millpy import Computation, Context, EventTime, Graph, LookupTable, milliseconds, seconds
from millpy.ingest.protocol import Source
from millpy.ingest.table_rows import version_of
from tests.crash.checks import Fault
from tests.crash.graph_files import rows

DEVICES, UNKNOWN = "abcdef", "z"
NUMBER = 1_500
CHANGE_EVERY_S = 0.01
TABLE = """
CREATE SCHEMA registry;
CREATE TABLE registry.devices (device text PRIMARY KEY, generation bigint NOT NULL);
INSERT INTO registry.devices SELECT chr(ascii('a') + i), 1 FROM generate_series(0, 5) AS i;
CREATE TABLE registry.history (generation bigint PRIMARY KEY);
INSERT INTO registry.history VALUES (1);
"""
CHANGE = """
WITH changed AS (UPDATE registry.devices SET generation = generation + 1 RETURNING generation)
INSERT INTO registry.history SELECT DISTINCT generation FROM changed
"""


class Reading(msgspec.Struct):
    number: int
    device: str
    at: int


class Device(msgspec.Struct, frozen=True):
    device: str
    generation: int


class Seen(msgspec.Struct):
    number: int
    least: int
    most: int


DEVICES_TABLE = LookupTable("registry.devices", Device, key="device", refresh=milliseconds(100))


class Watch(Computation):
    """Sees the whole table."""

    devices = DEVICES_TABLE

    def process_record(self, context: Context, record: Reading) -> None:
        found = [row.generation for row in context.table(Watch.devices).values()]
        context.produce(Seen(record.number, min(found), max(found)))


def graph_of(source: Source) -> Graph:
    """Return the graph: each way to look up, over one source."""
    graph = Graph("plant")
    event_time = EventTime("at", unit="s", max_disorder=seconds(5))
    readings = graph.inject("readings", source, schema=Reading, event_time=event_time)
    how = {"table": "registry.devices", "row": Device, "key": "device", "refresh": milliseconds(100)}
    readings.lookup(**how).to_table("known")  # type: ignore[arg-type]
    readings.lookup(**how, missing="drop", intervals=2).to_table("kept")  # type: ignore[arg-type]
    readings.key_by("device").process(Watch(), name="watch", output=Seen).to_table("seen")
    return graph


def write(path: Path, seed: int, number: int = NUMBER) -> list[Reading]:
    """Write the file that `lookup_graph.py` reads."""
    rng = random.Random(seed)
    drawn = [Reading(i, rng.choice(DEVICES + UNKNOWN), i // 10 + rng.randrange(5)) for i in range(number)]
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in drawn))
    return drawn


@contextmanager
def changing(url: str) -> Iterator[None]:
    """Change the table again and again, whatever happens to the server."""
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            with suppress(psycopg.OperationalError), psycopg.connect(url, autocommit=True) as connection:
                while not stop.wait(CHANGE_EVERY_S):
                    connection.execute(CHANGE)
            stop.wait(CHANGE_EVERY_S)

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


GENERATIONS = "SELECT number, generation FROM plant.known UNION ALL SELECT number, generation FROM plant.kept"
MIXED = """
SELECT commit, array_agg(DISTINCT generation) FROM (
    SELECT xmin::text AS commit, generation FROM plant.known WHERE generation IS NOT NULL
     UNION ALL SELECT xmin::text, generation FROM plant.kept
     UNION ALL SELECT xmin::text, least FROM plant.seen
     UNION ALL SELECT xmin::text, most FROM plant.seen) AS found
 GROUP BY commit HAVING count(DISTINCT generation) > 1
"""
LAST = """
SELECT v.interval_id, v.version, found.generation
  FROM millpy.lookup_versions AS v
 CROSS JOIN LATERAL (SELECT k.generation FROM plant.known AS k WHERE k.interval_id = v.interval_id
                        AND k.generation IS NOT NULL ORDER BY k.bundle DESC LIMIT 1) AS found
 WHERE v.computation = 'known'
   -- A bundle behind that one may have seen a newer version, and made no row.
   AND NOT EXISTS (SELECT FROM mill.intervals AS i JOIN plant.known AS k ON k.interval_id = i.interval_id
                    WHERE i.interval_id = v.interval_id GROUP BY i.bundle HAVING i.bundle > max(k.bundle))
"""


def text_of(generation: int) -> bytes:
    """Return the rows of a generation as they are read."""
    return b"\n".join(msgspec.json.encode(Device(device, generation)) for device in DEVICES)


def lookup_faults(url: str, drawn: Sequence[Reading]) -> list[Fault]:
    """Check that no record is lost or doubled, and that each commit saw one version of the table that existed."""
    found = []
    known = [record.number for record in drawn if record.device in DEVICES]
    unknown = [record.number for record in drawn if record.device not in DEVICES]
    expected = {
        "SELECT number FROM plant.known WHERE generation IS NOT NULL": known,
        "SELECT number FROM plant.known WHERE generation IS NULL": unknown,
        "SELECT number FROM plant.kept": known,
        "SELECT number FROM plant.seen": known + unknown,
    }
    for query, numbers in expected.items():
        stored, wanted = Counter(number for (number,) in rows(url, query)), Counter(numbers)
        for kind, left in (("lost", wanted - stored), ("doubled", stored - wanted)):
            if left:
                found.append(Fault(kind, f"{query}: {sorted(left)[:3]}", left.total()))
    existed = {generation for (generation,) in rows(url, "SELECT generation FROM registry.history")} | {None}
    seen = {generation for _, generation in rows(url, GENERATIONS)}
    if strange := seen - existed:
        found.append(Fault("violation", f"generations that never were: {strange}"))
    for commit, generations in rows(url, MIXED):
        found.append(Fault("violation", f"commit {commit} has the generations {generations}"))
    for interval_id, version, generation in rows(url, LAST):
        if version != version_of(text_of(generation)):
            found.append(Fault("violation", f"interval {interval_id}: {version} is not generation {generation}"))
    for row in rows(url, "SELECT * FROM millpy.accounting WHERE NOT balanced"):
        found.append(Fault("violation", f"accounting: {row}"))
    return found
