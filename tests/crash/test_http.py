"""Clients that post over HTTP and send again what was not answered, while workers are killed, frozen and cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from psycopg import conninfo

from millpy.embedded import EmbeddedPostgres, free_port
from millpy.hosting.failpoints import Failpoint
from millpy.testing.crash_test.database import url_through_proxy
from millpy.testing.proxy import CommitFault, PostgresProxy
from tests.crash.harness import Worker, await_true
from tests.crash.posts import WITHIN_S, Ids, Posts, expected, listens, windows

GRAPH = Path(__file__).with_name("http_graph.py")


class Scene:
    """Workers that share a port, and clients that post there."""

    def __init__(self, directory: Path, url: str, ids: Ids, running: ExitStack) -> None:
        self.url, self.posts = url, Posts(free_port(), ids)
        self._directory, self._running = directory, running
        self._variables = {"HTTP_URL": f"http://127.0.0.1:{self.posts.port}", "HTTP_IDS": ids}

    def worker(self, failpoint: str = "", url: str = "") -> Worker:
        worker = Worker(
            self._directory, url or self.url, self._directory, graph=GRAPH, failpoint=failpoint,
            environment=self._variables,
        )  # fmt: skip
        return self._running.enter_context(worker)

    def begin(self, worker: Worker) -> None:
        """Let the clients begin when a worker listens."""
        worker.await_while_running(lambda: listens(self.posts.port), "listens")
        self.posts.begin()

    def await_share(self, share: float, worker: Worker) -> None:
        worker.await_while_running(lambda: self.posts.share >= share, f"{share:.0%} are answered", WITHIN_S)

    def finish(self, *workers: Worker) -> None:
        """Await all answers, close the windows, and let the workers leave; nothing may be lost or doubled."""
        workers[0].await_while_running(self.posts.are_over, "all are answered", WITHIN_S)
        self.posts.close_windows()
        await_true(lambda: len(windows(self.url)) >= len(expected()), "windows close")
        for worker in workers:
            worker.drain()
        for worker in workers:
            worker.await_finished()
        assert self.posts.faults(self.url) == []


Begin = Callable[[Ids], Scene]


@pytest.fixture
def begin(tmp_path: Path, database_url: str) -> Iterator[Begin]:
    with ExitStack() as running:
        yield lambda ids: Scene(tmp_path, database_url, ids, running)


@pytest.mark.parametrize("ids", ["request", "record"])
def test_each_record_counts_once_through_kills_with_clients_that_send_again(begin: Begin, ids: Ids) -> None:
    scene = begin(ids)
    first, second = scene.worker("after_commit:12:kill"), scene.worker("before_commit:18:kill")
    scene.begin(first)
    first.await_killed()
    second.await_killed()
    third, fourth = scene.worker("after_fence:9:kill"), scene.worker()
    third.await_killed()

    scene.finish(fourth)


@pytest.mark.parametrize("point", ["after_poll", "before_commit", "after_commit"])
def test_each_record_counts_once_when_a_worker_is_frozen_and_comes_back(begin: Begin, point: str) -> None:
    scene = begin("record" if point == "before_commit" else "request")
    frozen, other = scene.worker(f"{point}:12:stop"), scene.worker()
    scene.begin(other)
    frozen.await_frozen()
    before = scene.posts.share
    scene.await_share(min(0.9, before + 0.3), other)
    frozen.thaw()

    scene.finish(other, frozen)


def test_each_record_counts_once_when_a_worker_is_cut_off_from_the_database(
    begin: Begin, postgres: EmbeddedPostgres
) -> None:
    scene = begin("record")
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    with PostgresProxy(str(parts["host"]), int(str(parts["port"]))) as proxy:
        by_tcp = postgres.tcp_url(str(conninfo.conninfo_to_dict(scene.url)["dbname"]))
        cut_off = scene.worker(url=url_through_proxy(by_tcp, proxy.port))
        scene.begin(cut_off)
        scene.await_share(0.1, cut_off)
        proxy.arm(CommitFault.SWALLOW)
        cut_off.await_while_running(lambda: proxy.struck == 1, "the answer to a commit is lost")
        scene.await_share(0.25, cut_off)
        other = scene.worker()
        proxy.arm(CommitFault.LATE_PIPELINE)
        cut_off.await_while_running(lambda: proxy.struck == 2, "a commit comes late")
        proxy.stall(True)
        before = scene.posts.share
        scene.await_share(min(0.8, before + 0.3), other)
        proxy.stall(False)
        proxy.cut()

        scene.finish(other, cut_off)


def test_each_record_counts_once_while_workers_are_replaced(begin: Begin) -> None:
    scene = begin("request")
    running = scene.worker()
    scene.begin(running)
    for share in (0.2, 0.4, 0.6, 0.8):
        scene.await_share(share, running)
        following = scene.worker()
        if share < 0.5:
            following.await_reached(Failpoint.AFTER_CLAIM)
        running.drain()
        running.await_finished()
        running = following

    scene.finish(running)
