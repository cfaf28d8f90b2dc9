"""The tables that a streaming query writes in PostgreSQL: the rows, panes and bundles of a worker, each once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.rows import dict_row

from millpy.errors import StaleSequencerError, UsageError
from millpy.spark.stream_commits import StreamCommit
from millpy.spark.stream_store import StreamStore
from millpy.spark.stream_tables import StreamTables
from tests.property.test_spark_stream_tasks import Query, forget, streamed
from tests.property.test_spark_tasks import by_a_host, job_of

Row = dict[str, Any]


@pytest.fixture
def kind() -> str:
    return "union"


@pytest.fixture
def query(kind: str, tmp_path: Path) -> Iterator[Query]:
    # Bursts of each device, with some records from between two of its sessions.
    feeds = [[(i, "abcd"[i // 4 % 4], -(i % 3 == 0) * 22, i % 7) for i in range(s, s + 120)] for s in (0, 9)]
    yield Query(streamed(job_of(kind, feeds, tmp_path, 10)), tmp_path)
    forget()


class Opened:
    """The tables of a driver, with its connection."""

    def __init__(self, url: str, query: Query, directory: Path) -> None:
        self.store = StreamStore(url, query.commits.worker_id, query.hosted)
        tables = StreamTables(self.store, query.hosted, directory / "out")
        self.publish, self.close = tables.publish, self.store.close
        try:
            self.store.open()
            self.store.own()
            tables.open(query.commits.newest)
        except BaseException:
            self.store.close()
            raise


def run_batch(query: Query) -> StreamCommit:
    commit = query.attempt()
    query.commits.commit(commit)
    query.output.publish(commit.outputs)
    return commit


def stored(url: str) -> list[Row]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        rows = connection.execute("SELECT * FROM hosted.panes").fetchall()
    found = [{n: _us(value) for n, value in row.items() if n not in ("emitted_at", "interval_id")} for row in rows]
    return sorted(found, key=repr)


def _us(value: Any) -> Any:
    return round(value.timestamp() * 1e6) if hasattr(value, "timestamp") else value


def expected(query: Query) -> list[Row]:
    rows = [dict(row) for row in by_a_host(query.job)["rows"]["panes"]]
    for row in rows:
        row.pop("emitted_at", None)
    return sorted(rows, key=repr)


@pytest.mark.parametrize("kind", ["union", "fixed"])  # sessions that absorb others, and windows with later panes
def test_tables_are_those_of_a_worker_through_restarts_and_repeated_batches(
    database_url: str, query: Query, kind: str, tmp_path: Path
) -> None:
    chance = random.Random(1)
    tables = Opened(database_url, query, tmp_path)
    while not query.commits.newest.finished:
        commit = run_batch(query)
        is_published = chance.random() < 0.6
        if not is_published:
            tables.publish(_moved(commit, -1))  # the driver dies between two bundles
        for _ in range(2 * is_published):
            tables.publish(commit)
        if not is_published or chance.random() < 0.3:
            tables.close()
            query.restart()
            tables = Opened(database_url, query, tmp_path)
    tables.close()

    with psycopg.connect(database_url) as connection:
        watermarks = connection.execute("SELECT bool_and(low_watermark = 4611686018427387904) FROM mill.intervals")
        assert watermarks.fetchone() == (True,)
    emitted = query.published("tables/panes")
    assert any(row["_deleted"] if kind == "union" else row["pane_index"] for row in emitted)
    assert stored(database_url) == expected(query)


def test_a_zombie_driver_is_refused_by_the_tables(database_url: str, query: Query, tmp_path: Path) -> None:
    zombie = Opened(database_url, query, tmp_path)
    zombie.publish(run_batch(query))
    zombie.publish(run_batch(query))
    late = run_batch(query)
    query.restart()
    tables = Opened(database_url, query, tmp_path)
    before = stored(database_url)

    with pytest.raises(StaleSequencerError):
        zombie.publish(_moved(late, 1))

    assert stored(database_url) == before != []
    zombie.close()
    tables.close()


def _moved(commit: StreamCommit, by: int) -> StreamCommit:
    """A commit with fewer or more bundles."""
    headers = {i: msgspec.structs.replace(h, bundle=h.bundle + by) for i, h in commit.intervals.items()}
    return msgspec.structs.replace(commit, intervals=headers)


def test_tables_of_another_query_are_refused(database_url: str, query: Query, tmp_path: Path) -> None:
    tables = Opened(database_url, query, tmp_path)
    tables.publish(run_batch(query))
    other_directory = tmp_path / "other"
    other = Query(query.job, other_directory)

    with pytest.raises(UsageError, match="another query writes the tables of hosted"):
        Opened(database_url, other, other_directory)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE mill.workers SET lease_deadline = clock_timestamp()")
    with pytest.raises(UsageError, match="the tables of hosted are not those of this checkpoint"):
        Opened(database_url, other, other_directory)
    tables.close()
