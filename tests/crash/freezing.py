"""A worker that is frozen past its lease and resumed (MillWheel's figure 12): the scenario, for tests and canaries."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

from millpy.runtime.probe import Point
from tests.crash.checks import Observer, faults, orphans
from tests.crash.harness import GRAPH, Worker, await_true, owned_by, owners
from tests.crash.workload import Expected


@dataclass
class Outcome:
    """What was seen."""

    takeover_s: float
    faults: list[str]
    frozen_log: str
    refused: int
    """Times that a fence has refused somebody (MW001), as the events tell."""
    uncommitted: int
    """Commits of the frozen worker that were begun and did not succeed."""


def freeze_and_thaw(
    directory: Path, url: str, source: Path, expected: Expected, point: Point, only: str = "", graph: Path = GRAPH
) -> Outcome:
    """Freeze one of two workers at a point until the other owns all, then let it go on.

    Who comes first keeps a source: the one that freezes does when it is about the source, else the other does.
    """

    probe = f"{point}:{30 if only else 5}:stop"
    with (
        Observer(url) as observer,
        Worker(directory, url, source, graph=graph, gated=True, bundle_records_max=30) as heir,
        Worker(
            directory, url, source, graph=graph, gated=True, bundle_records_max=30, only=only, probe=probe
        ) as frozen,
    ):
        heir.await_ready()
        frozen.await_ready()
        for worker in (frozen, heir) if only else (heir, frozen):
            worker.begin()
            worker.await_reached(Point.AFTER_CLAIM)
        frozen.await_frozen()
        lost = owned_by(url, frozen)
        assert lost, frozen.log
        before = owners(url)
        frozen_at = time.monotonic()
        await_true(lambda: all(owners(url)[i][1] > before[i][1] for i in lost), "taken over", 10)
        takeover_s = time.monotonic() - frozen_at
        frozen.thaw()
        found = _finish(url, observer, heir, frozen)
        found += faults(url, expected) + observer.faults
        uncommitted = frozen.reached(Point.BEFORE_COMMIT) - frozen.reached(Point.AFTER_COMMIT)
        return Outcome(takeover_s, found, frozen.log, _refused(url), uncommitted)


def _finish(url: str, observer: Observer, other: Worker, frozen: Worker) -> list[str]:
    found = []
    for worker in (other, frozen):
        try:
            worker.await_finished()
        except AssertionError as error:
            found.append(f"a worker failed: {error}")
    observer.look_now()
    with psycopg.connect(url, autocommit=True) as connection:
        return found + orphans(connection)


def _refused(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM mill.events WHERE kind = 'fence_refused'").fetchone()
    return row[0] if row else 0
