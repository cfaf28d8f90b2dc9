"""Archived takes make every bundle again, after any kill or live change. All points: `make crash ONLY=takes`."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoint
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.process.assembly import archives_of
from millpy.spark import Archive
from millpy.spark.job import make_job
from millpy.spark.takes import takes_of
from tests.crash.cases.takes import archiver_case, worker_case
from tests.crash.conftest import Survives
from tests.crash.graph_files import done, rows
from tests.crash.growing_graph import graph_text, write, write_end
from tests.crash.harness import Worker
from tests.crash.takes import replay_faults, write_feeds
from tests.forked import fork_millpy
from tests.property.test_spark_tasks import by_tasks


def test_no_kill_of_a_worker_changes_what_its_takes_make(survives: Survives) -> None:
    verdict = survives(worker_case(Failpoint.AFTER_FENCE))

    assert (verdict.kills, len(verdict.recovered)) == (1, 1)


def test_no_kill_of_an_archiver_loses_or_doubles_a_take(survives: Survives) -> None:
    verdict = survives(archiver_case(Failpoint.AFTER_COMMIT))

    assert verdict.kills + verdict.idle_kills == 1


def test_takes_make_again_what_a_learned_bound_made_late(tmp_path: Path, database_url: str) -> None:
    learned = "max_disorder=seconds(30), percentile=0.6"
    graph, archive = write_feeds(tmp_path, 2, 2_000, event_time=learned), tmp_path / "archive"
    for failpoint in ("before_commit:8:kill", "after_commit:5:kill", ""):
        with Worker(tmp_path, database_url, Path("none"), graph=graph, failpoint=failpoint) as worker:
            (worker.await_killed if failpoint else worker.await_finished)()
    only = ",".join(archives_of(load_graph(str(graph))))
    with Worker(tmp_path, database_url, Path("none"), graph=graph, archive=archive, only=only) as archiver:
        archiver.await_finished()

    assert replay_faults(database_url, graph, archive) == []
    (late, bound) = rows(database_url, "SELECT sum(late_by_percentile), min(bound) FROM millpy.disorder")[0]
    assert late > 50
    assert bound < timedelta(seconds=30) / 5


def test_a_source_partition_is_added_to_running_workers_and_every_bundle_is_made_again(
    tmp_path: Path, database_url: str
) -> None:
    graph, archive = tmp_path / "growing.py", tmp_path / "archive"
    graph.write_text(graph_text("one", takes=True))
    write(tmp_path, "one", 0, 60)
    with running(tmp_path, database_url, graph) as old:
        old.await_while_running(lambda: consumed(database_url) == 180, "the first part is consumed")
        graph.write_text(graph_text("one", "two", takes=True))
        write(tmp_path, "two", 20, 120)
        with running(tmp_path, database_url, graph) as new:
            new.await_while_running(lambda: consumed(database_url) == 480, "the new partition is consumed")
            write(tmp_path, "one", 60, 120)
            write_end(tmp_path, "one", "two")
            new.await_finished()
    with running(tmp_path, database_url, graph, archive=archive) as archiver:
        archiver.await_finished()

    assert replay_faults(database_url, graph, archive) == []
    assert rows(database_url, "SELECT count(*) FROM millpy.late_records")[0][0] > 0


def test_takes_that_are_added_to_a_running_graph_begin_there_and_are_refused_as_exact(
    tmp_path: Path, database_url: str
) -> None:
    graph, archive = tmp_path / "growing.py", tmp_path / "archive"
    graph.write_text(graph_text("one", takes=False))
    write(tmp_path, "one", 0, 60)
    with running(tmp_path, database_url, graph) as old:
        old.await_while_running(lambda: consumed(database_url) == 180, "the first part is consumed")
        graph.write_text(graph_text("one", takes=True))
        status, out, err = done(fork_millpy(tmp_path, "deploy", str(graph), "--database", database_url))
        assert (status, err) == (0, ""), err
        assert "windows_takes: the archive is new" in out
        at_deploy = dict(rows(database_url, BUNDLES))
        with running(tmp_path, database_url, graph, failpoint="after_fence:9:kill") as new:
            write(tmp_path, "one", 60, 120)
            new.await_killed()
        with running(tmp_path, database_url, graph) as again:
            write_end(tmp_path, "one")
            again.await_finished()
    with running(tmp_path, database_url, graph, archive=archive) as archiver:
        archiver.await_finished()

    assert rows(database_url, "SELECT consumer FROM millpy.accounting WHERE NOT balanced") == []
    for place, last in rows(database_url, BUNDLES):
        stage = place.partition("/")[0]
        files = [str(path) for path in sorted((archive / f"growing/{stage}_takes").rglob("hour=*/*.parquet"))]
        taken = [take.bundle for take in takes_of(files, place)]
        assert taken == list(range(at_deploy[place] + 1, last + 1)), place
    with pytest.raises(UsageError, match=r"the take of bundle 1 of windows/. is not archived") as refused:
        make_job(str(graph), Archive(archive, exact=True), limits=Limits(), now_us=Instant(1))
    assert "takes are needed from the first bundle on; leave out --exact" in str(refused.value.hint)
    assert windows_of(graph, archive) == rows(database_url, WINDOWS), "the records are archived from the beginning"


def test_a_computation_that_was_added_to_a_running_graph_is_refused_as_exact(tmp_path: Path, database_url: str) -> None:
    graph, archive = tmp_path / "growing.py", tmp_path / "archive"
    text = graph_text("one", takes=True)
    graph.write_text("".join(line for line in text.splitlines(True) if "Following()" not in line))
    write(tmp_path, "one", 0, 60)
    with running(tmp_path, database_url, graph) as old:
        old.await_while_running(lambda: consumed(database_url) == 180, "the first part is consumed")
    graph.write_text(text)
    write_end(tmp_path, "one")
    with running(tmp_path, database_url, graph) as new:
        new.await_finished()
    with running(tmp_path, database_url, graph, archive=archive) as archiver:
        archiver.await_finished()

    with pytest.raises(UsageError, match=r"following was added to the running graph, behind bundle \d+ of notes/one"):
        make_job(str(graph), Archive(archive, exact=True), limits=Limits(), now_us=Instant(1))


BUNDLES = "SELECT computation || '/' || place, bundle FROM mill.places WHERE kind = 'stage' ORDER BY 1"
WINDOWS = """
SELECT device, (extract(epoch FROM window_start) * 1000000)::bigint, n, total FROM growing.windows ORDER BY 1, 2
"""


def running(directory: Path, url: str, graph: Path, *, archive: Path | None = None, failpoint: str = "") -> Worker:
    only = ",".join(archives_of(load_graph(str(graph)))) if archive else ""
    return Worker(directory, url, directory, graph=graph, archive=archive, only=only, failpoint=failpoint)


def consumed(url: str) -> int:
    """How many records the windows have got."""
    counted = "SELECT coalesce(sum(consumed + late), 0)::int FROM millpy.accounting WHERE consumer = 'windows'"
    return int(rows(url, counted)[0][0]) if rows(url, "SELECT to_regnamespace('growing')")[0][0] else 0


def windows_of(graph: Path, archive: Path) -> list[tuple[Any, ...]]:
    """The rows of a batch over the archives, by its tasks, which are called as Spark calls them."""
    job = make_job(str(graph), Archive(archive), limits=Limits(), now_us=Instant(1))
    found = by_tasks(job, random.Random(1))["rows"]["windows"]
    return sorted((row["device"], row["window_start"], row["n"], row["total"]) for row in found)
