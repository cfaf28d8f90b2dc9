"""One Spark job checks hundreds of random cases, each with the tasks and the order of a batch.

Spark sorts and cuts what goes from stage to stage. A case is a graph, the records of its sources out of order and late,
a bound of a bundle; or workers that share three sources, crash and take over from each other, and their archives.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, lit, when

from millpy.spark.hosted_task import ORDER, PARTS, PARTS_DDL, host_stage, read_source
from millpy.spark.job import BatchJob, HostedPlan
from millpy.spark.replayed_task import replay_source, replay_stage
from tests.property import replayed_workers, test_hosting
from tests.property.replayed_workers import archived, by_workers, everything, exact_job
from tests.property.test_spark_tasks import (
    Fault,
    by_a_host,
    by_the_last_watermark,
    comparable,
    contents_of,
    cut,
    elsewhere,
    job_of,
    lost,
    remainder,
    swapped,
    without_ticks,
)

SEEDS = 14
CASE_PARTS = PARTS.append(pa.field("case_number", pa.int32()))
CASE_DDL = f"{PARTS_DDL}, case_number int"


@dataclass(frozen=True)
class RandomCase:
    """A job, and what a broken shuffle does to its parts."""

    job: BatchJob
    fault: Fault | None = None


def of_case(made: Iterable[pa.RecordBatch], number: int) -> Iterator[pa.RecordBatch]:
    for batch in made:
        numbers = pa.array([number] * len(batch), pa.int32())
        yield pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=CASE_PARTS)


def levels_of(hosted: HostedPlan) -> dict[int, int]:
    """Return the greatest distance of each interval from the sources."""
    found: dict[int, int] = {}
    for of in hosted.plan:
        level = 1 + max((found[producer] for producer in of.producers), default=-1)
        found.update((interval.interval_id, level) for interval in of.intervals)
    return found


def read_cases(cases: list[RandomCase], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for row in batch.to_pylist():
            job = cases[row["case_number"]].job
            read = replay_source if job.takes else read_source
            owners = pa.record_batch({"owner": pa.array([row["owner"]], pa.int32())})
            yield from of_case(read(job.encoded(), [owners]), row["case_number"])


def step_cases(
    cases: list[RandomCase], levels: list[dict[int, int]], level: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Step the intervals of a level, and hand on all that is not theirs; a broken case that fails leaves nothing."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, own in groupby(rows, key=lambda row: row["case_number"]):
        case, mine, others = cases[number], [], []
        for row in own:
            taken = row["kind"] in ("segment", "position") and levels[number][row["owner"]] == level
            (mine if taken else others).append(row)
        if others:
            yield pa.RecordBatch.from_pylist(others, schema=CASE_PARTS)
        if not mine:
            continue
        step = replay_stage if case.job.takes else host_stage
        mine = mine if case.fault is None else case.fault(mine)
        try:
            made = [*of_case(step(case.job.encoded(), cut(mine, random.Random(number))), number)]
        except Exception:
            if case.fault is None:
                raise
            continue
        yield from made


def in_one_job(spark: SparkSession, cases: list[RandomCase]) -> list[Any]:
    """Return what each case commits, or None of a broken one whose parts are incomplete."""
    plans = [HostedPlan(case.job) for case in cases]
    levels = [levels_of(hosted) for hosted in plans]
    sources = [(owner, n) for n, found in enumerate(levels) for owner, level in found.items() if level == 0]
    frame = spark.createDataFrame(sources, "owner int, case_number int").repartition(4)
    frame = frame.mapInArrow(partial(read_cases, cases), CASE_DDL)
    broken = col("case_number").isin([number for number, case in enumerate(cases) if case.fault])
    exact = col("case_number").isin([number for number, case in enumerate(cases) if case.job.takes])
    place = when(broken, lit(0)).otherwise(col("owner"))  # a fault sees all intervals of a case
    order = [*ORDER[:3], when(exact, col("seq")).otherwise(col("rank")), when(~exact, col("kind")), "subject"]
    for level in range(1, 1 + max(max(found.values()) for found in levels)):
        frame = frame.repartition(4, "case_number", place).sortWithinPartitions("case_number", *order)
        frame = frame.mapInArrow(partial(step_cases, cases, levels, level), CASE_DDL)
    parts: list[list[dict[str, Any]]] = [[] for _ in cases]
    for row in frame.toArrow().to_pylist():
        parts[row["case_number"]].append(row)
    return [found_of(case, hosted, own) for case, hosted, own in zip(cases, plans, parts, strict=True)]


def found_of(case: RandomCase, hosted: HostedPlan, parts: list[dict[str, Any]]) -> Any:
    parts.sort(key=lambda row: tuple(row[name] for name in ORDER))
    try:
        return contents_of(hosted, parts)
    except AssertionError:
        if case.fault is None:
            raise
        return None


def drawn(chance: random.Random) -> list[Any]:
    """Two feeds, with late records, some that do not decode and some that fail in a stage."""
    return [
        [
            (chance.randint(0, 60), chance.choice("abcd"), chance.randint(-25, 10), chance.randint(0, 12))
            for _ in range(chance.randint(0, 90))
        ]
        for _ in range(2)
    ]


def folder(directory: Path, *names: object) -> Path:
    path = directory.joinpath(*map(str, names))
    path.mkdir(parents=True)
    return path


def test_hundreds_of_cases_give_what_a_hosted_graph_and_crashing_workers_give(
    spark: SparkSession, tmp_path: Path
) -> None:
    cases, expected = [], []
    for kind in test_hosting.GRAPHS:
        for seed in range(SEEDS):
            chance = random.Random(f"{kind} {seed}")
            job = job_of(kind, drawn(chance), folder(tmp_path, kind, seed), chance.randint(1, 25))
            cases.append(RandomCase(job))
            expected.append(by_a_host(job))
    hosted = len(cases)
    for kind in replayed_workers.GRAPHS:
        for seed in (1, 2):
            workers, directory = asyncio.run(by_workers(kind, seed)), folder(tmp_path, "workers", kind, seed)
            archived(workers, directory, chosen=everything)
            cases.append(RandomCase(exact_job(kind, directory)))
            expected.append(comparable(test_hosting.contents(workers.database)["rows"]))

    found = in_one_job(spark, cases)

    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one if number < hosted else one["rows"]) == other, cases[number].job
    assert sum(len(rows) for one in found for rows in one["rows"].values()) > 2_000


def test_each_fault_of_a_shuffle_is_seen_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    # Only one device, and so one interval, is heard in the end.
    feed = [(id_, "abcd"[id_ % 4 if id_ < 80 else 0], -(id_ % 3) * 8, id_ % 7) for id_ in range(120)]
    job = job_of("session", [feed], tmp_path, 10)
    faults: list[Fault] = [lost, without_ticks, elsewhere, by_the_last_watermark, remainder, swapped]

    sound, *broken = in_one_job(spark, [RandomCase(job, fault) for fault in (None, *faults)])

    assert sound == by_a_host(job)
    for fault, found in zip(faults, broken, strict=True):
        assert found != sound, fault.__name__
