"""The tasks of a Spark batch commit what a hosted graph commits, bit for bit, however the shuffle cuts their input.

The tasks are called here as Spark calls them, with Arrow batches; tests/spark/test_random_cases.py runs them on Spark.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpy.hosting.host import HostedGraph
from millpy.limits import Limits
from millpy.model.checkpoint import Kind, LateRows
from millpy.model.delta import decode_document
from millpy.model.deployment import TableSpec
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.spark.hosted_rows import BUNDLE, decode_payloads, late_batch
from millpy.spark.hosted_task import ORDER, PARTS, IntervalEnd, host_stage, read_source, taken
from millpy.spark.job import BatchJob, HostedPlan, SourceHistory
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.state import MemoryState
from tests.property.test_hosting import ALL_GRAPHS, TWO_SOURCES, Note, contents

pytestmark = pytest.mark.usefixtures("small_blocks")

NOW_US = Instant(1_700_000_000_000_000)
TEXT = "from tests.property.test_hosting import graph_of\ngraph, _ = graph_of({!r})\n"
Row = dict[str, Any]
Fault = Callable[[list[Row]], list[Row]]

notes = st.tuples(st.integers(0, 60), st.sampled_from("abcd"), st.integers(-25, 10), st.integers(0, 12))
feeds = st.tuples(st.lists(notes, max_size=60), st.lists(notes, max_size=60))


def payloads(drawn: Sequence[tuple[int, str, int, int]]) -> Iterator[bytes]:
    """Event times rise, with some disorder; a value of 12 does not decode, one of 9 fails in a stage."""
    for place, (id_, device, offset, value) in enumerate(drawn):
        note = Note(id_, device, max(0, 2 * place + offset), float(value))
        yield b"{" if value == 12 else msgspec.json.encode(note)


def job_of(kind: str, drawn: Sequence[Any], directory: Path, bundle: int) -> BatchJob:
    names = ["left", "right"] if kind in TWO_SOURCES else ["notes"]
    histories = {}
    for name, feed in zip(names, drawn, strict=False):
        path = directory / f"{name}.ndjson"
        path.write_bytes(b"".join(line + b"\n" for line in payloads(feed)))
        histories[name] = SourceHistory((str(path),), "json")
    limits = Limits(bundle_records_max=bundle, state_cache_bytes_max=1_000)
    return BatchJob("graph.py", TEXT.format(kind), histories, limits, NOW_US, keeps_state=True)


def by_a_host(job: BatchJob) -> Any:
    """One turn for each place in the sources' bundles, until all have ended."""
    hosted = HostedPlan(job)
    database = MemoryDatabase()
    host = HostedGraph(job.load_graph(), MemoryState(database), job.limits, NOW_US)
    sources = [i for i, of in hosted.plan.by_interval.items() if of.stage is None]
    batches = {source: list(taken(hosted, source)) for source in sources}
    for turn in range(max(map(len, batches.values()))):
        host.turn({source: found[turn] for source, found in batches.items() if turn < len(found)})
    found = contents(database)
    return {
        "rows": comparable(found["rows"]),
        "entries": {name: value for name, value in found["entries"].items()},
        "dead letters": sorted((reason, payload) for _, _, reason, payload in found["dead letters"]),
        "late": sorted(chain.from_iterable(_late(late) for _, _, late in database.late_records), key=repr),
        "balanced": found["balanced"],
    }


def comparable(tables: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Sort the rows of each table, and leave out the ids of intervals, which differ between deployments."""
    return {
        table: sorted(({name: row[name] for name in row if name != "interval_id"} for row in rows), key=repr)
        for table, rows in tables.items()
    }


def _late(late: Any) -> Iterator[tuple[Any, ...]]:
    yield from zip(
        late.keys, late.payloads, late.event_times, late.watermarks, late.window_starts, late.window_ends, strict=True
    )


def by_tasks(job: BatchJob, chance: random.Random, fault: Fault = list) -> Any:
    """The tasks over a shuffle of our own: `fault` changes what reaches the stages."""
    text, hosted = job.encoded(), HostedPlan(job)
    parts: dict[str, list[Row]] = {}
    for computation in hosted.plan:
        ids = [interval.interval_id for interval in computation.intervals]
        if computation.stage is None:
            made = read_source(text, [pa.record_batch({"owner": pa.array(ids, pa.int32())})])
        else:
            producers = {hosted.plan.by_interval[producer].name for producer in computation.producers}
            mail = [row for producer in producers for row in parts[producer]]
            mail = [row for row in mail if row["kind"] in ("segment", "position") and row["owner"] in ids]
            chance.shuffle(mail)
            mail.sort(key=lambda row: tuple(row[name] for name in ORDER))
            made = host_stage(text, cut(fault(mail), chance))
        parts[computation.name] = [row for batch in made for row in batch.to_pylist()]
    return contents_of(hosted, [row for rows in parts.values() for row in rows])


def cut(rows: list[Row], chance: random.Random) -> Iterator[pa.RecordBatch]:
    """Yield parts in batches of random sizes."""
    at = 0
    while at < len(rows):
        size = chance.randint(1, 9)
        yield pa.RecordBatch.from_pylist(rows[at : at + size], schema=PARTS)
        at += size


def contents_of(hosted: HostedPlan, parts: Sequence[Row]) -> Any:
    """Return what a job has committed, from all its parts in the order of each interval's turns."""
    ends = [part for part in parts if part["kind"] == "end"]
    assert sorted(part["owner"] for part in ends) == sorted(hosted.plan.by_interval)
    for part in ends:
        assert part["turn"] == INSTANT_MAX
        msgspec.json.decode(part["payload"], type=IntervalEnd)
    letters = [row for part in parts if part["kind"] == "dead_letters" for row in _decoded(part)]
    late = [row for part in parts if part["kind"] == "late" for row in _decoded(part)]
    times = ("event_time", "watermark", "window_start", "window_end")
    return {
        "rows": {
            table.spec.name: sorted(_stored_rows(table.spec, [p for p in parts if p["subject"] == table_id]), key=repr)
            for table_id, table in hosted.database.tables.items()
        },
        "entries": dict(entry for part in parts if part["kind"] == "state" for entry in _entries(part)),
        "dead letters": sorted((row["reason"], row["payload"]) for row in letters),
        "late": sorted(
            ((row["key"].encode(), row["payload"], *(_us(row[name]) for name in times)) for row in late), key=repr
        ),
        "balanced": True,
    }


def _stored_rows(spec: TableSpec, parts: Sequence[Row]) -> list[Row]:
    """The rows that are left after all commits, each of which deletes before it writes."""
    stored: dict[tuple[Any, ...], Row] = {}
    key_of = [column.name for column in spec.keys] + ["window_start", "window_end"]
    for part in parts:
        for row in _decoded(part) if part["kind"] in ("rows", "later_rows", "deleted") else ():
            if spec.kind == "records":
                key = (part["owner"], row[BUNDLE], row["ordinal"])
            else:
                key = tuple(row[name] for name in key_of)
            if part["kind"] != "deleted":
                stored[key] = row
            elif key in stored and stored[key][BUNDLE] < row[BUNDLE]:
                del stored[key]
    return [_as_stored(row) for row in stored.values()]


def _entries(part: Row) -> Iterator[tuple[Any, Any]]:
    for entries in decode_document(part["payload"]):
        columns = (entries.keys, entries.subkeys, entries.values, entries.fire_ats)
        for key, subkey, value, fire_at in zip(*columns, strict=True):
            if entries.kind is not Kind.FLEET:
                yield (part["owner"], entries.kind, entries.namespace, key, subkey), (value, fire_at)


def _decoded(part: Row) -> list[Row]:
    batch = pa.record_batch({"payload": [part["payload"]]})
    return [row for decoded in decode_payloads([batch]) for row in decoded.to_pylist()]


def _as_stored(row: Row) -> Row:
    stored = {name: _us(value) for name, value in row.items() if name != BUNDLE}
    return {**stored, "bundle": row[BUNDLE]}


def _us(value: Any) -> Any:
    return round(value.timestamp() * 1e6) if hasattr(value, "timestamp") else value


@pytest.mark.parametrize(
    ("watermark", "shown"),
    [(INSTANT_MAX, "9999-12-31T00:00:00+00:00"), (INSTANT_MIN, "0001-01-02T00:00:00+00:00")],
)
def test_a_record_that_is_late_under_an_infinite_watermark_can_be_read_in_python(
    watermark: Instant, shown: str
) -> None:
    late = LateRows("notes", "counts", whole=[True], keys=[b'"a"'], payloads=[b"{}"], event_times=[1])
    late.watermarks.append(watermark)
    late.window_starts.append(None)
    late.window_ends.append(None)

    (row,) = late_batch(late).to_pylist()

    assert row["watermark"].isoformat() == shown


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(ALL_GRAPHS)), feeds, st.integers(1, 25), st.randoms(use_true_random=False))
def test_tasks_commit_what_a_hosted_graph_commits(
    tmp_path: Path, kind: str, drawn: Any, bundle: int, chance: random.Random
) -> None:
    job = job_of(kind, drawn, tmp_path, bundle)

    assert by_tasks(job, chance) == by_a_host(job)


def lost(rows: list[Row]) -> list[Row]:
    """Lose one slice in the middle."""
    slices = [place for place, row in enumerate(rows) if row["kind"] == "segment"]
    del rows[slices[len(slices) // 2]]
    return rows


def without_ticks(rows: list[Row]) -> list[Row]:
    """Lose the positions, with the watermarks there, of turns without records for an interval."""
    with_records = {(row["owner"], row["turn"], row["producer"]) for row in rows if row["kind"] == "segment"}
    return [row for row in rows if (row["owner"], row["turn"], row["producer"]) in with_records]


def elsewhere(rows: list[Row]) -> list[Row]:
    """Give one slice to another interval."""
    owners = sorted({row["owner"] for row in rows})
    moved = next(row for row in rows if row["kind"] == "segment")
    moved["owner"] = next(owner for owner in owners if owner != moved["owner"])
    return sorted(rows, key=lambda row: tuple(row[name] for name in ORDER))


def by_the_last_watermark(rows: list[Row]) -> list[Row]:
    """Judge lateness by the watermark at the end of the input, as a whole batch has one."""
    for row in rows:
        row["turn"] = 1
    return rows


def remainder(rows: list[Row]) -> list[Row]:
    """Leave out the last turns, as a step that takes only a part of its input."""
    last = max(row["turn"] for row in rows)
    return [row for row in rows if row["turn"] < last - 1]


def swapped(rows: list[Row]) -> list[Row]:
    """Give the records of two turns in the wrong order."""
    slices = [row for row in rows if row["kind"] == "segment"]
    first = slices[0]
    other = next(
        row for row in reversed(slices) if (row["owner"], row["subject"]) == (first["owner"], first["subject"])
    )
    for name in ("payload", "checksum", "records"):
        first[name], other[name] = other[name], first[name]
    return rows


@pytest.mark.parametrize("fault", [lost, without_ticks, elsewhere, by_the_last_watermark, remainder, swapped])
def test_a_fault_of_the_shuffle_is_seen(tmp_path: Path, fault: Fault) -> None:
    # Only one device, and so one interval, is heard in the end.
    drawn = [(id_, "abcd"[id_ % 4 if id_ < 80 else 0], -(id_ % 3) * 8, id_ % 7) for id_ in range(120)]
    job = job_of("session", [drawn], tmp_path, 10)
    expected = by_a_host(job)
    assert by_tasks(job, random.Random(1)) == expected

    try:
        found = by_tasks(job, random.Random(1), fault)
    except Exception as error:
        found = repr(error)

    assert found != expected
