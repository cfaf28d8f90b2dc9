"""Workers that continue behind a hand-over commit what they would have committed from the beginning.

Half of a feed goes through the tasks of a streaming query, is handed over under kills, and the rest goes through a
hosted graph over the same database. Another host takes it all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.hosting.host import HostedGraph
from millpy.ingest.protocol import SourceBatch
from millpy.model.checkpoint import Checkpoint, Kind
from millpy.model.stage import StoredInterval
from millpy.spark import hand_over, stream_state
from millpy.spark.hand_over import HandOver
from millpy.spark.hosted_task import taken
from millpy.spark.job import BatchJob, HostedPlan
from millpy.spark.stream_tables import StreamTables
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.state import MemoryState
from tests.property.test_hosting import GRAPHS, TWO_SOURCES, contents, graph_of
from tests.property.test_spark_stream_tasks import Query, forget, streamed
from tests.property.test_spark_tasks import NOW_US, feeds, job_of, payloads

pytestmark = pytest.mark.usefixtures("small_blocks")


class KilledError(Exception):
    """The driver is dead."""


class MemoryStreamStore:
    """The database of one driver; it dies before or after a commit, by chance."""

    def __init__(self, database: MemoryDatabase, hosted: HostedPlan, chance: Callable[[], float]) -> None:
        self._state, self._chance = MemoryState(database), chance
        self.deployment = self._state.deploy(hosted.live_graph.spec())
        ids = {(i.computation, i.index): i.interval_id for i in self.deployment.intervals}
        self.ids = {i.interval_id: ids[i.computation, i.index] for i in hosted.plan.deployment.intervals}
        grants = self._state.claim([interval.interval_id for interval in self.deployment.intervals])
        self.grants = {grant.interval_id: grant for grant in grants}
        self.is_given = False

    def read(self) -> list[StoredInterval]:
        return [self._state.read(grant, state_rows_max=0).recovered for grant in self.grants.values()]

    def commit(self, checkpoints: list[Checkpoint]) -> None:
        self._live()
        self._state.commit(checkpoints, graph_version=self.deployment.version)
        self._live()

    def fold(self, interval_id: int) -> None:
        pass

    def give_to_workers(self) -> None:
        self._live()
        self.is_given = True

    def _live(self) -> None:
        if self._chance() < 0.15:
            raise KilledError


def handing_over(job: BatchJob) -> BatchJob:
    return msgspec.structs.replace(streamed(job), hands_over=True)


def handed_over(query: Query, database: MemoryDatabase, directory: Path, chance: random.Random) -> HostedGraph:
    """Run a history, hand it over, each driver until it is killed, and return the workers."""
    is_given = False
    while not is_given:
        query.restart()
        store: Any = MemoryStreamStore(database, query.hosted, chance.random)
        tables = StreamTables(store, query.hosted, directory / "out")
        with suppress(KilledError):
            tables.open(query.commits.newest, hands_over=True)
            while not query.commits.newest.finished:
                commit = query.attempt()
                query.commits.commit(commit)
                query.output.publish(commit.outputs)
                tables.publish(commit)
            HandOver(store, query.hosted, query.commits.newest, query.commits.state).run()
        is_given = store.is_given
    return HostedGraph(query.hosted.live_graph, MemoryState(database), query.job.limits, NOW_US)


def another_graph() -> MemoryDatabase:
    """A database in which the ids of the graph are not those of a first deployment."""
    database = MemoryDatabase()
    database.deploy(replace(graph_of("fixed")[0].spec(), name="another"))
    return database


def whole(job: BatchJob, database: MemoryDatabase) -> HostedGraph:
    """A host that has taken the history, bundle by bundle, as something that does not end."""
    hosted = HostedPlan(job)
    host = HostedGraph(hosted.live_graph, MemoryState(database), job.limits, NOW_US)
    sources = {of.name: i for i, of in hosted.plan.by_interval.items() if of.stage is None}
    theirs = {name: host.plan.deployment.intervals_of(name)[0].interval_id for name in sources}
    batches = {theirs[name]: list(taken(hosted, source)) for name, source in sources.items()}
    for turn in range(max(map(len, batches.values()))):
        host.turn({i: replace(found[turn], finished=False) for i, found in batches.items() if turn < len(found)})
    return host


def go_on(host: HostedGraph, rest: Sequence[Sequence[Any]], names: Sequence[str], *, ends: bool) -> None:
    for name, feed in zip(names, rest, strict=False):
        for at in range(0, len(feed), 7):
            made = list(payloads(feed))[at : at + 7]
            host.take(name, SourceBatch("json", NOW_US, payloads=made))
    if ends:
        for name in names:
            host.end(name)


def comparable(database: MemoryDatabase) -> Any:
    """Everything that is committed, but for numbers of bundles, which a hand-over adds to, and positions in files."""
    found = contents(database)
    return {
        "rows": {
            name: sorted(({n: v for n, v in row.items() if n != "bundle"} for row in rows), key=repr)
            for name, rows in found["rows"].items()
        },
        "entries": sorted(
            (
                _without_bundles(name, value)
                for name, value in found["entries"].items()
                if name[1] is not Kind.POSITION or name[2] not in ("source", "notes")
            ),
            key=repr,
        ),
        "watermarks": {i: header[1:3] for i, header in found["headers"].items()},
        "cursors": {
            i: {producer: watermark for producer, (_, watermark) in header[5].items()}
            for i, header in found["headers"].items()
        },
        "ids": {i: header[6] for i, header in found["headers"].items()},
        "late": sorted(
            (i, stream, computation, input_, whole or [True] * len(keys), marks or [False] * len(keys), keys, *columns)
            for i, _, (stream, computation, input_, whole, marks, keys, *columns) in found["late"]
        ),
        "dead letters": sorted((i, *rest) for i, _, *rest in found["dead letters"]),
        "accounting": astuple(database.accounting(2)),
    }


def _without_bundles(name: Any, entry: tuple[bytes | None, int]) -> Any:
    value = msgspec.json.decode(entry[0] or b"null")
    if isinstance(value, dict):
        value = {n: v for n, v in value.items() if n not in ("bundle", "ticket")}
    return *name[: 3 if name[1] is Kind.PARKED else 5], value, entry[1]  # waiting records are named after their bundle


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(GRAPHS)), feeds, feeds, st.integers(1, 25), st.booleans(), st.integers(0, 2**32))
def test_workers_continue_as_from_their_own_commit(
    kind: str, history: Any, rest: Any, bundle: int, ends: bool, seed: int
) -> None:
    names = ["left", "right"] if kind in TWO_SOURCES else ["notes"]
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_state, "FOLD_EVERY", 3)
        patch.setattr(hand_over, "DOCUMENT_BYTES_MAX", 300)
        patch.setattr(hand_over, "RUN_IDS_MAX", 7)
        job = handing_over(job_of(kind, history, Path(name), bundle))
        database, expected = another_graph(), another_graph()
        host = handed_over(Query(job, Path(name)), database, Path(name), random.Random(seed))
        forget()
        go_on(host, rest, names, ends=ends)
        go_on(whole(job, expected), rest, names, ends=ends)
        assert comparable(database) == comparable(expected)
