"""The stream over a real server: each promise of its page, under open transactions, repeated batches and restarts."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from millpy.errors import ConfigError, MillError, TableSwitchedError
from millpy.model.deployment import ColumnSpec, ComputationSpec, GraphSpec, StreamSpec, SubscriptionSpec, TableSpec
from millpy.spark import MillpyDataSource
from millpy.spark.pane_stream import PaneStreamReader
from millpy.store.postgres.store import PostgresStore

T0 = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
SUMS = TableSpec(
    "sums", "windowed", "sums", "sums", keys=(ColumnSpec("device", "text", False),),
    values=(ColumnSpec("n", "bigint", False),),
)  # fmt: skip
NOTES = replace(SUMS, name="notes", kind="records", keys=())
GRAPH = GraphSpec(
    name="plant",
    computations=(
        ComputationSpec("readings", "injector", partitions=("a",)),
        ComputationSpec("sums", "stage", intervals=3, identity={}),
    ),
    streams=tuple(StreamSpec(name, name, pa.schema([("device", pa.string())])) for name in ("readings", "sums")),
    subscriptions=(SubscriptionSpec("readings", "sums", 0, ("device",)),),
    tables=(SUMS, NOTES),
)
FENCE = "UPDATE mill.intervals SET bundle = bundle + 1 WHERE interval_id = %s RETURNING bundle"
PANE = """
INSERT INTO plant.sums (device, window_start, window_end, n, late_count, pane_index, pane_timing, interval_id, bundle)
VALUES (%s, %s, %s, %s, 0, %s, 'on_time', %s, %s)
ON CONFLICT (device, window_start, window_end)
DO UPDATE SET n = excluded.n, pane_index = excluded.pane_index, bundle = excluded.bundle, emitted_at = now()
"""
NOTE = "INSERT INTO plant.notes (n, event_time, ordinal, interval_id, bundle) VALUES (%s, %s, %s, %s, %s)"
Window = tuple[str, int]


async def deployed(url: str) -> list[int]:
    async with PostgresStore(url) as store:
        found = await store.deploy(GRAPH)
    return [one.interval_id for one in found.intervals if one.computation == "sums"]


@dataclass
class Writer:
    """An interval's owner: each transaction of it fences, as a worker's commit does, and writes panes and notes."""

    interval: int
    connection: psycopg.Connection
    numbers: Iterator[int]
    panes: dict[Window, tuple[int, int]] = field(default_factory=dict)
    """window -> (pane_index, n) of the newest committed pane."""
    notes: set[int] = field(default_factory=set)
    open: tuple[dict[Window, tuple[int, int]], set[int]] | None = None

    def begin(self, windows: list[int]) -> None:
        cursor = self.connection.execute(FENCE, [self.interval])
        (bundle,) = cursor.fetchone()  # type: ignore[misc]
        panes, notes = {}, set()
        for ordinal, place in enumerate(windows):
            window, n = (f"{self.interval}", place), next(self.numbers)
            index = self.panes[window][0] + 1 if window in self.panes else 0
            start = T0 + dt.timedelta(minutes=place)
            self.connection.execute(
                PANE, [window[0], start, start + dt.timedelta(minutes=1), n, index, self.interval, bundle]
            )
            self.connection.execute(NOTE, [n, start, ordinal, self.interval, bundle])
            panes[window] = index, n
            notes.add(n)
        self.open = panes, notes

    def end(self, *, commits: bool = True) -> None:
        assert self.open is not None
        if commits:
            self.connection.commit()
            self.panes.update(self.open[0])
            self.notes |= self.open[1]
        else:
            self.connection.rollback()
        self.open = None

    def write(self, *windows: int) -> None:
        self.begin([*windows])
        self.end()


@pytest.fixture
def writers(database_url: str) -> Iterator[list[Writer]]:
    numbers = itertools.count(1)
    made = [
        Writer(interval, psycopg.connect(database_url), numbers) for interval in asyncio.run(deployed(database_url))
    ]
    yield made
    for writer in made:
        writer.connection.close()


def reader(url: str, table: str = "plant.sums", **options: str) -> PaneStreamReader:
    source = MillpyDataSource({"url": url, "table": table, **options})
    made = source.streamReader(source.schema())
    assert isinstance(made, PaneStreamReader)
    return made


def rows(stream: PaneStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    partitions = stream.partitions(start, end)
    return [row for one in partitions for batch in stream.read(one) for row in batch.to_pylist()]


class Sink:
    """A checkpointed sink: it keeps what the last attempt of each batch brought."""

    def __init__(self, url: str, table: str) -> None:
        self.url, self.table = url, table
        self.stream = reader(url, table)
        self.offsets = [self.stream.initialOffset()]
        self.batches: list[list[dict[str, Any]]] = []

    def restart(self) -> None:
        self.stream = reader(self.url, self.table)

    def step(self, limit: ReadLimit, *, again: bool = False) -> bool:
        """Read the next batch, or the last one again; False if there is none."""
        if again and self.batches:
            self.batches.pop()
            self.offsets.pop()
            end = self.logged
        else:
            end = self.logged = self.stream.latestOffset(self.offsets[-1], limit)
            if end == self.offsets[-1]:
                self.restart()  # a reader waits after a look that found nothing
                return False
        self.batches.append(rows(self.stream, self.offsets[-1], end))
        self.offsets.append(end)
        return True


def panes_by_window(batches: list[list[dict[str, Any]]]) -> dict[Window, list[tuple[int, int]]]:
    """Window -> (pane_index, n) in order of arrival; no batch has two panes of a window."""
    found: dict[Window, list[tuple[int, int]]] = {}
    for batch in batches:
        windows = [(row["device"], int((row["window_start"] - T0) / dt.timedelta(minutes=1))) for row in batch]
        assert len(windows) == len({*windows})
        for window, row in zip(windows, batch, strict=True):
            found.setdefault(window, []).append((row["pane_index"], row["n"]))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_commits_loses_or_repeats_a_row(database_url: str, writers: list[Writer], seed: int) -> None:
    rng = random.Random(seed)
    sums, notes = Sink(database_url, "plant.sums"), Sink(database_url, "plant.notes")
    for _ in range(60):
        writer = rng.choice(writers)
        if writer.open is None:
            writer.begin(rng.choices(range(6), k=1) if rng.random() < 0.5 else rng.sample(range(6), k=3))
        elif rng.random() < 0.6:
            writer.end(commits=rng.random() < 0.8)
        if rng.random() < 0.5:
            limit = ReadMaxRows(rng.randint(1, 9)) if rng.random() < 0.7 else ReadAllAvailable()
            for sink in (sums, notes):
                if rng.random() < 0.2:
                    sink.restart()
                sink.step(limit, again=rng.random() < 0.2)
    for writer in writers:
        if writer.open is not None:
            writer.end()
    while sums.step(ReadMaxRows(5)) | notes.step(ReadMaxRows(5)):
        pass

    written = [n for writer in writers for n in writer.notes]
    assert sorted(row["n"] for batch in notes.batches for row in batch) == sorted(written)
    found = panes_by_window(sums.batches)
    newest = {window: pane for writer in writers for window, pane in writer.panes.items()}
    assert {window: panes[-1] for window, panes in found.items()} == newest
    for panes in found.values():
        assert [index for index, _ in panes] == sorted({index for index, _ in panes})
        assert {n for _, n in panes} <= {*written}  # nothing of a transaction that was rolled back


def test_a_limit_takes_whole_bundles_in_order_of_their_commits(database_url: str, writers: list[Writer]) -> None:
    first, second, _ = writers
    first.write(0, 1)
    second.write(0)
    first.write(2, 3, 4, 5)
    sink = Sink(database_url, "plant.sums")
    while sink.step(ReadMaxRows(3)):
        pass

    assert [len(batch) for batch in sink.batches] == [3, 4]  # the second is one bundle, larger than the limit


def test_a_query_over_what_is_available_ends_although_rows_keep_coming(
    database_url: str, writers: list[Writer]
) -> None:
    for writer in writers:
        writer.write(0, 1, 2)
    sink = Sink(database_url, "plant.notes")
    sink.stream.prepareForTriggerAvailableNow()
    while sink.step(ReadMaxRows(3)):
        writers[0].write(9)

    assert [len(batch) for batch in sink.batches] == [3, 3, 3]
    assert sink.step(ReadAllAvailable())  # by a reader that has no such target
    assert len(sink.batches[-1]) == 3


def test_a_restored_database_is_noticed_and_read_as_the_option_says(database_url: str, writers: list[Writer]) -> None:
    writers[0].write(0, 1)
    stream = reader(database_url)
    begin = stream.initialOffset()
    before = stream.latestOffset(begin, ReadAllAvailable())
    elsewhere = {**before, "database": before["database"][:-1] + "F"}
    ahead = {**before, "bundles": {i: bundle + 5 for i, bundle in before["bundles"].items()}}
    foreign = {**before, "bundles": {"999999": 1}}
    writers[1].write(0)

    def result(start: dict[str, Any], option: str) -> int | str:
        stream = reader(database_url, after_restore=option)
        try:
            return len(rows(stream, start, stream.latestOffset(start, ReadAllAvailable())))
        except MillError as error:
            return error.message.partition(" ")[2]

    found = {option: [result(start, option) for start in (before, elsewhere, ahead)]
             for option in ("refuse", "continue", "reread")}  # fmt: skip

    restored = "of plant.sums was restored, upgraded, or failed over since the checkpoint"
    lost = "has lost commits that the stream has read, so the database was set back"
    database = "database "
    assert found["refuse"] == [1, database + restored, lost]
    assert found["continue"] == [1, 1, lost]
    assert found["reread"] == [1, 3, 3]
    with pytest.raises(TableSwitchedError, match="is not the table of the checkpoint"):
        stream.latestOffset(foreign, ReadAllAvailable())


def test_what_cannot_be_streamed_is_refused(spark: SparkSession, database_url: str, writers: list[Writer]) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE plant.own (k bigint PRIMARY KEY)")
        connection.execute("CREATE ROLE streaming LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA plant, millpy TO streaming")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA plant TO streaming")
    try:
        writers[0].write(0, 1)
        least = reader(database_url.replace("//millpy@", "//streaming@"))
        with pytest.raises(MillError, match="missing rights"):
            least.initialOffset()
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA millpy TO streaming")
        begin = least.initialOffset()
        assert len(rows(least, begin, least.latestOffset(begin, ReadAllAvailable()))) == 2
    finally:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("DROP OWNED BY streaming")
            connection.execute("DROP ROLE streaming")
    with pytest.raises(ConfigError, match=r"plant\.own is no result table of millpy"):
        reader(database_url, "plant.own").initialOffset()
    with pytest.raises(ConfigError, match="option after_restore is 'never'"):
        reader(database_url, after_restore="never")
    with pytest.raises(AnalysisException, match="option max_rows_per_trigger is one of streams"):
        spark.read.format("millpy").options(
            url=database_url, table="plant.sums", max_rows_per_trigger="5"
        ).load().count()


def test_a_checkpointed_query_brings_each_pane_once_through_failures(
    spark: SparkSession, database_url: str, writers: list[Writer], tmp_path: Path
) -> None:
    target, attempts = tmp_path / "out", Counter[int]()

    def write(batch: DataFrame, number: int) -> None:
        attempts[number] += 1
        batch.coalesce(1).write.mode("overwrite").parquet(str(target / f"batch={number}"))
        if number == 1 and attempts[number] == 1:
            writers[0].write(0, 1)  # panes of the batch are replaced before it is tried again
            raise RuntimeError("killed before the batch is recorded")

    def run() -> None:
        frame = (
            spark.readStream.format("millpy")
            .options(url=database_url, table="plant.sums", max_rows_per_trigger="2")
            .load()
        )
        query = frame.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()

    writers[1].write(0, 1)
    writers[0].write(0, 1)
    writers[2].begin([0])  # older than all that follows, and visible last
    writers[0].write(2)
    with pytest.raises(StreamingQueryException, match="killed before"):
        run()
    run()
    writers[2].end()
    run()

    read = spark.read.parquet(str(target)).select("device", "window_start", "pane_index", "n").collect()
    assert attempts[1] == 2
    assert len(read) == len({(row[0], row[1], row[2]) for row in read})
    newest = {(row[0], row[1]): (row[2], row[3]) for row in sorted(read, key=lambda row: row[2])}
    assert sorted(newest.values()) == sorted(pane for writer in writers for pane in writer.panes.values())
