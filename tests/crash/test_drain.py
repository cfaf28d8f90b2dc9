"""An operator's request that a worker drains: it ends with 0, others take over, and no kill loses anything."""

from __future__ import annotations

import asyncio
import http.client
import signal
import threading
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from millpy.admin.tokens import Role
from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoint, NoFailpoints
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.runtime.observer import Observers
from millpy.runtime.worker import Worker as EngineWorker
from tests.api_server import running_api
from tests.commands import millpy, millpy_json
from tests.crash import memory_world
from tests.crash.graph_files import DEVICES, END, EVERY_MINUTE, GRAPH, MIDDLE, consumed, drop, one, rows, sums
from tests.crash.harness import LEASE_S, Worker, await_true, owned_by
from tests.crash.test_interrupt import GRAPH as ENDLESS
from tests.crash.test_interrupt import children_of, ended, start

ID = "SELECT worker_id::text FROM mill.workers WHERE pid = {}"
NOTED = "SELECT detail ->> 'worker', detail ->> 'by' FROM millpy.events WHERE kind = 'drain_requested'"
LOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a graph and an endless feed."""
    (tmp_path / "feed").mkdir()
    (tmp_path / "graph.py").write_text(GRAPH)
    monkeypatch.chdir(tmp_path)
    drop(tmp_path, 0, MIDDLE)
    return tmp_path


def worker(place: Path, url: str, **more: str) -> Worker:
    return Worker(place, url, place, graph=place / "graph.py", **more)  # type: ignore[arg-type]


def id_of(url: str, process: Worker) -> str:
    process.await_while_running(lambda: bool(rows(url, ID.format(process.process.pid))), "registered")
    return str(one(url, ID.format(process.process.pid)))


def request(url: str, worker_id: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        (row,) = connection.execute("SELECT millpy.drain_worker('factory', %s)", [worker_id]).fetchall()
        return int(row[0])


def finish(place: Path, url: str, left: Worker) -> None:
    """The worker that is left owns everything, and reads the rest of the feed."""
    left.await_while_running(lambda: len(owned_by(url, left)) == one(url, "SELECT count(*) FROM mill.intervals"), "all")
    drop(place, MIDDLE, END)
    drop(place, 1_000, 1_001)
    left.await_while_running(consumed(url, (END + 1) * DEVICES), "all of it")
    assert rows(url, EVERY_MINUTE) == [row for start in range(0, END, 60) for row in sums(start, start + 60)]
    assert rows(url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


def test_a_drained_worker_ends_with_0_and_another_has_its_intervals(place: Path, database_url: str) -> None:
    with worker(place, database_url) as first, worker(place, database_url) as second:
        for one_of in (first, second):
            one_of.await_while_running(lambda who=one_of: bool(owned_by(database_url, who)), "it owns some")
        drained = id_of(database_url, first)
        said = millpy("workers", "drain", drained[:13], "--why", "a new kernel", "--database", database_url)
        first.await_finished(30)
        assert f"worker {drained} drains" in said
        assert "there is no worker" in millpy("workers", "drain", drained, "--database", database_url, status=2)

        finish(place, database_url, second)

    assert rows(database_url, NOTED) == [(drained, "millpy")]
    assert rows(database_url, "SELECT count(*) FROM mill.drain_requests") == [(0,)]


@pytest.mark.parametrize("moment", ["before it knows", "while it drains"])
def test_a_worker_that_is_killed_when_it_has_to_drain_is_replaced(place: Path, database_url: str, moment: str) -> None:
    trap = {"failpoint": f"{Failpoint.BEFORE_RELEASE}:1:kill"} if moment == "while it drains" else {}
    with worker(place, database_url, **trap) as first:
        first.await_while_running(consumed(database_url, MIDDLE * DEVICES), "the first part")
        if trap:
            request(database_url, id_of(database_url, first))
            first.await_killed()
        else:
            first.freeze()
            request(database_url, id_of(database_url, first))
            first.kill()
        with worker(place, database_url) as second:
            finish(place, database_url, second)
            assert rows(database_url, "SELECT drain_requested_at FROM millpy.workers WHERE live") == [(None,)]


def test_a_worker_that_was_frozen_past_its_lease_drains_when_it_is_back(place: Path, database_url: str) -> None:
    with worker(place, database_url) as first:
        first.await_while_running(consumed(database_url, MIDDLE * DEVICES), "the first part")
        drained = id_of(database_url, first)
        first.freeze()
        requested = request(database_url, drained)
        with worker(place, database_url) as second:
            second.await_while_running(lambda: bool(owned_by(database_url, second)), "the lease has ended")
            late = request(database_url, drained)
            first.thaw()
            first.await_finished(30)
            finish(place, database_url, second)

    assert (requested, late) == (1, 0)


class Deploying(NoFailpoints):
    """At the third commit, deploy another version, and let the worker learn that it has to drain."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._commits = 0
        self.lives: list[EngineWorker] = []

    async def reach(self, point: Failpoint) -> None:
        self._commits += point is Failpoint.BEFORE_COMMIT
        if self._commits == 3 and point is Failpoint.BEFORE_COMMIT:
            await asyncio.to_thread(self._change)

    def _change(self) -> None:
        (worker,) = self.lives
        request(self._url, str(worker.context.worker_id))
        millpy("deploy", "next.py", "--database", self._url)
        await_true(lambda: worker.context.lease.drain_requested, "it knows")


class Lives(Observers):
    def __init__(self, lives: list[EngineWorker]) -> None:
        super().__init__()
        self._lives = lives

    def begun(self, worker: EngineWorker) -> None:
        self._lives.append(worker)


async def test_a_worker_that_has_to_drain_does_not_begin_again_for_another_version(
    place: Path, database_url: str
) -> None:
    more = 'keyed.window(FixedWindows(minutes(2))).aggregate(n=Count()).to_table("twos")'
    (place / "next.py").write_text(f"{GRAPH}\n{more}\n")
    failpoints = Deploying(database_url)
    limits = Limits(progress_every_s=0.02, bundle_records_max=100)

    async with asyncio.timeout(60):
        await run_worker(
            load_graph("graph.py"), database_url, limits=limits, failpoints=failpoints, observer=Lives(failpoints.lives)
        )

    assert len(failpoints.lives) == 1
    assert rows(database_url, "SELECT worker_id FROM mill.workers") == []
    with Worker(place, database_url, place, graph=place / "next.py") as second:
        finish(place, database_url, second)


def test_an_api_that_is_killed_in_the_middle_has_requested_all_or_nothing(place: Path, database_url: str) -> None:
    with worker(place, database_url) as first, running_api(database_url) as api:
        first.await_while_running(consumed(database_url, MIDDLE * DEVICES), "the first part")
        drained, token = id_of(database_url, first), api.token("olga", Role.OPERATOR)

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException):
                api.post(f"/v1/graphs/factory/workers/{drained}/drain", token)

        waiting = threading.Thread(target=ask)
        with psycopg.connect(database_url) as holder:
            holder.execute("LOCK TABLE mill.events IN SHARE ROW EXCLUSIVE MODE")
            waiting.start()
            await_true(lambda: one(database_url, LOCKED) > 0, "the request is in the middle")
            before = one(database_url, "SELECT lease_deadline FROM mill.workers")
            api.process.send_signal(signal.SIGKILL)
            api.process.wait()
            waiting.join()
            renewed = f"SELECT lease_deadline > '{before}'::timestamptz + interval '{LEASE_S} s' FROM mill.workers"
            first.await_while_running(lambda: one(database_url, renewed), "its lease is renewed all the time")
        await_true(lambda: one(database_url, LOCKED) == 0, "the server has noticed")
        if noted := rows(database_url, NOTED):  # the server had not noticed the death before the lock was free
            first.await_finished(30)
            assert noted == [(drained, "olga")]
        else:
            assert rows(database_url, "SELECT drain_requested_at FROM millpy.workers") == [(None,)]
            first.kill()
        with worker(place, database_url) as second:
            finish(place, database_url, second)


def test_the_supervisor_does_not_start_a_drained_worker_again(tmp_path: Path, database_url: str) -> None:
    (tmp_path / "graph.py").write_text(ENDLESS)
    (tmp_path / "inbox").mkdir()
    running = start(database_url, tmp_path, "--workers", "2")
    try:
        await_true(lambda: one(database_url, "SELECT count(*) FROM pg_namespace WHERE nspname = 'endless'") == 1, "up")
        await_true(lambda: one(database_url, "SELECT count(*) FROM mill.workers") == 2, "both have registered")
        (first, _), (second, left) = rows(database_url, "SELECT worker_id::text, pid FROM mill.workers ORDER BY pid")
        millpy("workers", "drain", first, "--database", database_url)
        await_true(lambda: children_of(running) == {left}, "one has ended")
        await_true(lambda: one(database_url, "SELECT bool_and(live) FROM millpy.watermarks"), "the other has it all")
        document = millpy_json("workers", "drain", second, "--database", database_url)
    finally:
        said = ended(running)

    assert document == {"graph": "endless", "worker_id": second, "requested": 1}
    assert running.returncode == 0, said
    assert "restarting worker" not in said


async def test_a_drain_is_for_one_worker_of_those_with_one_stop(tmp_path: Path) -> None:
    records = memory_world.readings(20_000)
    async with memory_world.running_world(memory_world.two_stages(tmp_path / "readings", records)) as world:
        other = world.start()
        await memory_world.until(world, lambda: len(world.database.workers) == 2, "both have registered")
        drained = next(iter(world.database.workers))
        assert world.database.requests.drain(drained)
        await memory_world.until(world, lambda: drained not in world.database.workers, "one has left")
        assert not other.done() and len(world.results()) < len(records)
        await world.finish()

        assert not world.stop.is_set()
        assert world.results() == memory_world.expected(records)
        assert world.adds_up()
