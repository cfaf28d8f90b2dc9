"""Connections lost around COMMIT, and a database that dies: unknown outcomes are resolved, nothing happens twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from millpy.embedded import EmbeddedPostgres
from millpy.runtime.probe import Point
from millpy.testing.proxy import Fault, PostgresProxy
from tests.crash.checks import Observer, faults
from tests.crash.harness import Worker, await_true
from tests.crash.workload import Expected


@pytest.fixture
def proxy(postgres: EmbeddedPostgres) -> Iterator[PostgresProxy]:
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    with PostgresProxy(str(parts["host"]), int(str(parts["port"]))) as running:
        yield running


def _through(proxy: PostgresProxy, url: str) -> str:
    parts = conninfo.conninfo_to_dict(url)
    return f"postgresql://{parts['user']}@127.0.0.1:{proxy.port}/{parts['dbname']}"


# What the server says to a commit whose client is gone, and what it must not say.
ANSWERS = {
    Fault.SWALLOW: b"COMMIT\0",
    Fault.LATE_COMMIT: b"COMMIT\0",
    Fault.LATE_PIPELINE: b"MW001",
    Fault.CUT_COMMIT: b"",
}


@pytest.mark.parametrize("fault", list(Fault))
def test_lost_answer_to_commit(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, proxy: PostgresProxy, fault: Fault
) -> None:
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, _through(proxy, database_url), source) as worker,
    ):
        for times in (1, 2, 3):
            already = proxy.commits
            await_true(lambda already=already: proxy.commits > already + 8, f"commits; {worker.log[-2000:]}")
            proxy.arm(fault)
            await_true(lambda times=times: proxy.struck >= times, "struck")
            if fault is not Fault.CUT_COMMIT:
                assert proxy.landed.wait(10)
                assert ANSWERS[fault] in b"".join(proxy.lost_answers[-1:]), proxy.lost_answers[-1:]
        worker.await_finished()

    assert faults(database_url, expected) == []
    assert observer.faults == []


def test_connections_cut_and_stalled(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, proxy: PostgresProxy
) -> None:
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, _through(proxy, database_url), source) as worker,
    ):
        for _ in range(3):
            already = proxy.commits
            await_true(lambda already=already: proxy.commits > already + 8, f"commits; {worker.log[-2000:]}")
            proxy.cut()
        worker.await_reached(Point.AFTER_COMMIT, 30)
        proxy.stall(True)
        observer.look_now()
        proxy.cut()
        proxy.stall(False)
        worker.await_finished()

    assert faults(database_url, expected) == []
    assert observer.faults == []


def test_database_killed_and_restarted(tmp_path: Path, source: Path, expected: Expected) -> None:
    from millpy.store.migrate import migrate

    with EmbeddedPostgres(tmp_path / "postgres", tcp=True) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE own")
        url = server.url("own")
        migrate(url)
        with (
            Observer(url) as observer,
            Worker(tmp_path, url, source) as one,
            Worker(tmp_path, url, source) as two,
        ):
            for times in (10, 40):
                one.await_reached(Point.AFTER_COMMIT, times)
                server.kill()
                server.restart()
            one.await_finished()
            two.await_finished()

        assert faults(url, expected) == []
        assert observer.faults == []
