"""An exact batch makes every bundle of the workers again, from archives of records and takes, whatever happened.

Workers share a graph whose sources have several producers; they crash, take over from each other, and have small
budgets. What they committed is compared with what the tasks of Spark make of the archives, bundle by bundle.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from millpy.errors import CorruptionError, GraphError, UsageError
from millpy.hosting.takes import TakeWriter
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Checkpoint
from millpy.model.record import Records
from millpy.model.take import TAKE_TYPE, StepInput
from millpy.model.time import Instant
from millpy.spark import Archive
from millpy.spark.job import BatchJob, HostedPlan, make_job
from tests.property import replayed_workers
from tests.property.replayed_workers import (
    GRAPHS,
    archived,
    by_place,
    by_workers,
    compared,
    everything,
    exact_job,
    feeds_of,
    graph_of,
    made_again,
    pending,
    pending_on_spark,
    sources,
)


def made_of(job: BatchJob, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], dict[str, Any]]:
    return comparable(*made_again(job, monkeypatch)[:2])


def comparable(found: dict[tuple[str, int], Checkpoint], hosted: HostedPlan) -> dict[tuple[str, int], dict[str, Any]]:
    tables = {table_id: name for name, table_id in hosted.plan.deployment.table_ids.items()}
    stages = {interval.place for of in hosted.plan if of.stage is not None for interval in of.intervals}
    return {name: compared(each, tables) for name, each in found.items() if name[0] in stages}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("seed", [0])
def test_every_bundle_is_made_again(kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = asyncio.run(by_workers(kind, seed))
    archived(workers, tmp_path, chosen=everything)
    job = exact_job(kind, tmp_path)

    made, hosted, ends = made_again(job, monkeypatch)

    found, expected = comparable(made, hosted), by_place(workers)
    assert found.keys() == expected.keys()
    for name, checkpoint in expected.items():
        assert found[name] == checkpoint, name
    assert pending_on_spark(hosted, ends) == pending(workers)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("seed", [1])
def test_a_source_partition_that_was_added_later_joins_where_it_joined(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, chance = asyncio.run(by_workers(kind, seed, grows=True)), random.Random(seed)
    archived(workers, tmp_path, chosen=lambda _, found: found[: round(len(found) * chance.choice([1.0, 1.0, 0.5]))])

    found = made_of(exact_job(kind, tmp_path, grows=True), monkeypatch)

    expected = by_place(workers)
    assert 0 < len(found) <= len(expected)
    assert {name: expected[name] for name in found} == found


def test_workers_take_over_what_a_crashed_one_has_stored() -> None:
    assert sum(asyncio.run(by_workers("windows", seed)).taken_over for seed in range(3)) > 0


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("seed", [102])
def test_archives_that_have_come_to_different_ends_give_the_bundles_before_them(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, chance = asyncio.run(by_workers(kind, seed)), random.Random(seed)
    archived(workers, tmp_path, chosen=lambda _, found: found[: round(len(found) * chance.choice([1.0, 0.9, 0.5]))])
    job = exact_job(kind, tmp_path)

    found = made_of(job, monkeypatch)

    expected = by_place(workers)
    assert 0 < len(found) <= len(expected)
    for name, checkpoint in found.items():
        assert checkpoint == expected[name], name
    for history in job.takes.values():
        for place, through in history.through.items():
            assert {number for of, number in found if of == place} == set(range(1, through + 1))


def sorted_runs(taken: StepInput) -> StepInput:
    """How far each producer was consumed, without the order."""
    return msgspec.structs.replace(taken, runs=sorted(taken.runs, key=lambda run: run.producer))


def without_moves(taken: StepInput) -> StepInput:
    return msgspec.structs.replace(taken, moved=[])


def without_bound(taken: StepInput) -> StepInput:
    return msgspec.structs.replace(taken, panes_max=None)


def without_timers(taken: StepInput) -> StepInput:
    return msgspec.structs.replace(taken, timers=None)


def without_empty_runs(taken: StepInput) -> StepInput:
    """Leave out the positions of producers without records."""
    return msgspec.structs.replace(taken, runs=[run for run in taken.runs if run.records])


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("windows", sorted_runs), ("windows", without_moves), ("windows", without_bound), ("timers", without_timers),
        ("sessions", without_empty_runs),
    ],
)  # fmt: skip
def test_a_take_that_says_less_is_seen(
    kind: str, fault: Callable[[StepInput], StepInput], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = TakeWriter.add

    def changed(take: Any) -> Any:
        said = fault(msgspec.json.decode(take.input, type=StepInput))
        return msgspec.structs.replace(take, input=msgspec.json.encode(said).decode())

    def adds(self: TakeWriter, interval: Any, consumed: Any, work: Any, result: Any, unarchived: str) -> None:
        add(self, interval, consumed, work, result, unarchived)
        if consumed is None:
            return
        records = result.productions[interval.plan.takes]
        result.productions[interval.plan.takes] = Records(
            TAKE_TYPE, records.event_times, objects=[changed(take) for take in records.objects()]
        )

    monkeypatch.setattr(TakeWriter, "add", adds)
    seen = 0
    for seed in range(20):
        if seen:
            break
        directory = tmp_path / str(seed)
        directory.mkdir()
        workers = asyncio.run(by_workers(kind, seed))
        archived(workers, directory, chosen=everything)
        try:
            seen += made_of(exact_job(kind, directory), monkeypatch) != by_place(workers)
        except (CorruptionError, AssertionError):
            seen += 1

    assert seen


def without_first(name: str, found: list[Bundle]) -> list[Bundle]:
    return [bundle for bundle in found if bundle.seq > 1] if name == "once_takes" else found


def without_one(name: str, found: list[Bundle]) -> list[Bundle]:
    return [*found[:9], *found[10:]] if name == "counts_takes" else found


def unarchived(why: str) -> Callable[[str, list[Bundle]], list[Bundle]]:
    """Mark one take as made by more than what is archived."""

    def chosen(name: str, found: list[Bundle]) -> list[Bundle]:
        return [
            marked(bundle, why) if name == "once_takes" and place == 4 else bundle for place, bundle in enumerate(found)
        ]

    return chosen


def marked(bundle: Bundle, unarchived: str) -> Bundle:
    takes = [msgspec.structs.replace(take, unarchived=unarchived) for take in bundle.records.objects()]
    return replace(bundle, records=Records(TAKE_TYPE, bundle.records.event_times, objects=takes))


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (without_first, "the take of bundle 1 of once/. is not archived"),
        (without_one, "the take of bundle .* of counts/. is not archived"),
        (unarchived("replay"), "was made by more than what is archived: it replayed dead letters or late records"),
        (unarchived("release"), "was made by more than what is archived: an operator released a parked key"),
        (unarchived("refused"), "was made by more than what is archived: the database refused some of its records"),
        (unarchived("lookup"), "was made by more than what is archived: an earlier version of the graph looked its"),
    ],
)
def test_what_cannot_be_made_again_is_refused(
    chosen: Callable[[str, list[Bundle]], list[Bundle]], reason: str, tmp_path: Path
) -> None:
    archived(asyncio.run(by_workers("deduplicated", 3)), tmp_path, chosen=chosen)

    with pytest.raises(UsageError, match=reason):
        exact_job("deduplicated", tmp_path)


def changed_graph(kind: str, old: str, new: str, directory: Path) -> Path:
    """A graph with one change, in a file beside the archive."""
    path = directory / f"{uuid4().hex}.py"  # a name of its own: Python compares the second and the size with its cache
    path.write_text(Path(replayed_workers.__file__).read_text().replace(old, new) + f"\n\ngraph = graph_of({kind!r})\n")
    return path


def test_a_graph_that_has_changed_since_is_refused_where_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(asyncio.run(by_workers("sessions", 3)), tmp_path, chosen=everything)
    archive = Archive(tmp_path / "archive", exact=True)
    for old, new, reason in (
        ("note.value > 2", "note.value > 3", "cannot be made again: it took . records of in_./feed, the replay has"),
        ('intervals=2, name="panes"', 'intervals=1, name="panes"', "takes of panes/1 are archived, which the graph"),
        ("    graph.archive_takes()\n", "", "does not archive takes"),
    ):
        path = changed_graph("sessions", old, new, tmp_path)
        with pytest.raises((CorruptionError, UsageError), match=reason):
            made_again(make_job(str(path), archive, limits=Limits(), now_us=Instant(1)), monkeypatch)


def test_an_exact_batch_is_of_a_whole_history() -> None:
    with pytest.raises(UsageError, match="reads the whole archive"):
        Archive("archive", datetime(2026, 11, 24, tzinfo=UTC), exact=True)


def test_takes_are_archived_when_all_steps_are_declared() -> None:
    graph = graph_of("windows")

    with pytest.raises(GraphError, match=r"comes behind archive_takes\(\)"):
        sources(graph, feeds_of())
