"""The tasks of a streaming query commit what a hosted graph commits, through attempts that fail and restarts.

The tasks are called here as Spark calls them; tests/spark/test_stream.py runs them on Spark.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpy.errors import CorruptionError, OwnershipError, UsageError
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.model.delta import decode_document
from millpy.spark import stream_commits, stream_state, stream_task
from millpy.spark.hosted_rows import BUNDLE
from millpy.spark.hosted_task import ORDER, PARTS
from millpy.spark.job import BatchJob, HostedPlan
from millpy.spark.stream import commit_of
from millpy.spark.stream_commits import StreamCommit, StreamCommits
from millpy.spark.stream_output import DELETED, StreamOutput
from millpy.spark.stream_task import StreamedEnd, StreamTasks, host_stages, read_sources
from tests.property.test_hosting import GRAPHS
from tests.property.test_spark_tasks import NOW_US, by_a_host, feeds, job_of

pytestmark = pytest.mark.usefixtures("small_blocks")

Row = dict[str, Any]
Fault = Callable[[list[Row]], list[Row]]


def forget() -> None:
    """Lose what Python workers keep."""
    while stream_task._opened:
        stream_task._opened.popitem()[1].close()


class Query:
    """A query in a directory, whose driver and Python workers can be lost."""

    def __init__(self, job: BatchJob, directory: Path, bundles_max: int = 3) -> None:
        self.job = job
        self.hosted = HostedPlan(job)
        self._directory = directory
        self._bundles_max = bundles_max
        self.until: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Start another driver."""
        self.output = StreamOutput(self._directory / "out", self.hosted.query_spec)
        self.commits = StreamCommits(self._directory / "checkpoint", self.hosted.query_spec)
        self.output.publish(self.commits.newest.outputs)
        self.output.sweep()

    def attempt(self, fault: Fault = list) -> StreamCommit:
        """Run the next batch; `fault` changes what reaches the stages."""
        newest = self.commits.newest
        tasks = StreamTasks(
            self.job.encoded(),
            str(self._directory / "checkpoint"),
            str(self._directory / "out"),
            newest.batch + 1,
            NOW_US,
            self._bundles_max,
            newest.intervals,
            self.until,
        )
        sources = [i for i, of in self.hosted.plan.by_interval.items() if of.stage is None]
        rows = _rows(read_sources(tasks, [pa.record_batch({"owner": pa.array(sources, pa.int32())})]))
        for computation in self.hosted.plan:
            if computation.stage is not None:
                random.Random(len(rows)).shuffle(rows)
                rows = sorted(fault(rows), key=lambda row: tuple(row[name] for name in ORDER))
                rows = _rows(host_stages(tasks, computation.name, _cut(rows)))
        ends = [row for row in rows if row["kind"] == "end"]
        assert sorted(row["owner"] for row in ends) == sorted(self.hosted.plan.by_interval)
        assert len(ends) == len(rows), "parts reached the driver"
        self.ends = {row["owner"]: msgspec.json.decode(row["payload"], type=StreamedEnd) for row in ends}
        return commit_of(self.hosted, newest, tasks, self.ends)

    def run(self, chance: random.Random) -> None:
        """Run to the end; some attempts fail, drivers stop before and after publishing, workers forget."""
        while not self.commits.newest.finished:
            commit = self.attempt()
            if chance.random() < 0.2:
                commit = self.attempt()
            self.commits.commit(commit)
            if chance.random() < 0.3:
                self.restart()
            self.output.publish(commit.outputs)
            if chance.random() < 0.3:
                forget()

    def contents(self) -> Any:
        """Everything that is published, and the state."""
        late = [row for row in self.published("late_records")]
        times = ("event_time", "watermark", "window_start", "window_end")
        return {
            "rows": {
                spec.name: sorted(map(_as_stored, _newest(self.published(f"tables/{spec.name}"), spec)), key=repr)
                for spec in self.hosted.spec.tables
            },
            "entries": dict(self._entries()),
            "dead letters": sorted((row["reason"], row["payload"]) for row in self.published("dead_letters")),
            "late": sorted(
                ((row["key"].encode(), row["payload"], *(_us(row[name]) for name in times)) for row in late), key=repr
            ),
            "balanced": True,
        }

    def published(self, folder: str) -> list[Row]:
        files = sorted((self._directory / "out" / folder).glob("[!.]*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def _entries(self) -> Iterator[tuple[Any, Any]]:
        for interval_id, header in self.commits.newest.intervals.items():
            changes = self.commits.state.read(header.files)
            changes.forget_the_past()
            documents = changes.documents()
            for entries in (e for d in (documents.documents if documents else []) for e in decode_document(d)):
                columns = (entries.keys, entries.subkeys, entries.values, entries.fire_ats)
                for key, subkey, value, fire_at in () if entries.kind is Kind.FLEET else zip(*columns, strict=True):
                    yield (interval_id, entries.kind, entries.namespace, key, subkey), (value, fire_at)


def _rows(batches: Any) -> list[Row]:
    return [row for batch in batches for row in batch.to_pylist()]


def _cut(rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(rows), 7):
        yield pa.RecordBatch.from_pylist(rows[at : at + 7], schema=PARTS)


def _newest(rows: list[Row], spec: Any) -> Iterator[Row]:
    if spec.kind == "records":
        yield from rows
        return
    key = [column.name for column in spec.keys] + ["window_start", "window_end"]
    stored: dict[Any, Row] = {}
    for row in sorted(rows, key=lambda row: (row[BUNDLE], not row[DELETED])):
        stored[tuple(row[name] for name in key)] = row
    yield from (row for row in stored.values() if not row[DELETED])


def _as_stored(row: Row) -> Row:
    return {"bundle" if n == BUNDLE else n: _us(value) for n, value in row.items() if n != DELETED}


def _us(value: Any) -> Any:
    return round(value.timestamp() * 1e6) if hasattr(value, "timestamp") else value


def streamed(job: BatchJob) -> BatchJob:
    return msgspec.structs.replace(job, streams=True, keeps_state=False)


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(GRAPHS)), feeds, st.integers(1, 25), st.randoms(use_true_random=False))
def test_streamed_tasks_commit_what_a_hosted_graph_commits(
    monkeypatch: pytest.MonkeyPatch, kind: str, drawn: Any, bundle: int, chance: random.Random
) -> None:
    monkeypatch.setattr(stream_state, "FOLD_EVERY", 3)
    with TemporaryDirectory() as name:
        job = streamed(job_of(kind, drawn, Path(name), bundle))
        query = Query(job, Path(name))
        query.run(chance)
        forget()
        assert query.contents() == by_a_host(job)


def a_feed(records: int) -> list[tuple[int, str, int, int]]:
    """Only one device, and so one interval, is heard in the end."""
    return [(i, "abcd"[i % 4 if i < records // 2 else 0], -(i % 3) * 8, i % 7) for i in range(records)]


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Query]:
    yield Query(streamed(job_of("session", [a_feed(90)], tmp_path, 10)), tmp_path)
    forget()


def without(kind: str, name: str = "kind") -> Fault:
    def fault(rows: list[Row]) -> list[Row]:
        found = [place for place, row in enumerate(rows) if row[name] == kind]
        del rows[found[len(found) // 2]]
        return rows

    return fault


def without_the_last_position(rows: list[Row]) -> list[Row]:
    """Lose the position, with the watermark there, of the last turn without records for an interval."""
    with_records = {(row["owner"], row["turn"]) for row in rows if row["kind"] == "segment"}
    last = max(row["turn"] for row in rows if row["kind"] == "position")
    lost = [row for row in rows if row["kind"] == "position" and row["turn"] == last]
    return [row for row in rows if row not in lost or (row["owner"], last) in with_records]


def of_another_attempt(rows: list[Row]) -> list[Row]:
    """Give a consumer the output of a source task that was run again."""
    next(row for row in rows if row["kind"] == "tick")["payload"] = b"another"
    return rows


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param(without("tick"), "its tick says nothing", id="a forgotten tick"),
        pytest.param(without_the_last_position, "its tick says", id="a forgotten position, which leaves windows open"),
        pytest.param(without("segment"), "does not balance|follows", id="a lost slice"),
        pytest.param(of_another_attempt, "another attempt", id="another attempt of a source"),
    ],
)
def test_a_batch_that_is_not_whole_is_not_committed(query: Query, fault: Fault, error: str) -> None:
    query.commits.commit(query.attempt())

    with pytest.raises(CorruptionError, match=error):
        query.attempt(fault)

    query.restart()
    query.run(random.Random(1))
    assert query.contents()["rows"] == by_a_host(query.job)["rows"]


def test_a_driver_that_was_replaced_commits_nothing(query: Query) -> None:
    zombie = query.commits
    late = query.attempt()
    query.restart()  # another driver, which has committed nothing yet

    with pytest.raises(OwnershipError, match="another driver has started"):
        zombie.commit(late)

    query.run(random.Random(1))
    assert query.contents()["rows"] == by_a_host(query.job)["rows"]


def test_a_driver_that_was_frozen_until_its_number_was_free_again_commits_nothing(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_commits, "COMMITS_KEPT", 1)
    zombie, late = query.commits, query.attempt()
    query.restart()
    query.commits.commit(query.attempt())

    with pytest.raises(OwnershipError):
        zombie.commit(late)

    assert query.commits.newest.batch == 0
    query.restart()
    assert query.commits.newest.batch == 0, "the late commit counts"


def test_a_changed_graph_is_refused(query: Query, tmp_path: Path) -> None:
    other = HostedPlan(streamed(job_of("fixed", [a_feed(60)], tmp_path, 10)))

    with pytest.raises(UsageError, match=r"is one of another graph: .*panes"):
        StreamCommits(tmp_path / "checkpoint", other.spec)
    with pytest.raises(UsageError, match="is not empty"):
        StreamOutput(tmp_path, query.hosted.spec)


def test_a_state_file_that_has_changed_is_not_read(query: Query, tmp_path: Path) -> None:
    query.commits.commit(query.attempt())
    forget()
    for path in (tmp_path / "checkpoint/state").iterdir():
        path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CorruptionError, match="is not what was written"):
        query.attempt()


WATCHED = """
import msgspec
from datetime import timedelta
from millpy import Count, Directory, EventTime, FixedWindows, Graph, seconds

class Note(msgspec.Struct):
    device: str
    at: int

graph = Graph("watched")
source = Directory({directory!r}, settle=timedelta(seconds=0.7), every=timedelta(seconds=0.1))
notes = graph.inject("notes", source, schema=Note, event_time=EventTime("at", unit="s", max_disorder=seconds(1)))
notes.key_by("device").window(FixedWindows(seconds(10))).aggregate(n=Count()).to_table("counts")
"""


def test_a_file_settles_although_each_batch_is_read_by_another_process(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "one.ndjson").write_text("".join(f'{{"device": "d", "at": {at}}}\n' for at in range(100)))
    text = WATCHED.format(directory=str(inputs))
    job = BatchJob("graph.py", text, {}, Limits(), NOW_US, keeps_state=False, streams=True, hands_over=True)
    query = Query(job, tmp_path)
    for _ in range(4):
        forget()
        commit = query.attempt()
        query.commits.commit(commit)
        query.output.publish(commit.outputs)
    forget()

    assert commit.finished
    assert sum(row["n"] for row in query.published("tables/counts")) == 90
