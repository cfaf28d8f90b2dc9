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
from tests.crash.harness import Worker
from tests.crash.workload import Expected


@pytest.fixture
def proxy(postgres: EmbeddedPostgres) -> Iterator[PostgresProxy]:
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    with PostgresProxy(str(parts["host"]), int(str(parts["port"]))) as running:
        yield running


def _through(proxy: PostgresProxy, url: str) -> str:
    parts = conninfo.conninfo_to_dict(url)
    return f"postgresql://{parts['user']}@127.0.0.1:{proxy.port}/{parts['dbname']}"


@pytest.mark.parametrize(
    ("fault", "delay_s", "answer"),  # of the server to a commit whose client is gone
    [
        (Fault.SWALLOW, 0.0, b"COMMIT\0"),
        (Fault.LATE_COMMIT, 0.05, b"COMMIT\0"),  # who takes over from itself waits for it
        (Fault.LATE_COMMIT, 0.8, b"57P01"),  # but not for ever
        (Fault.LATE_PIPELINE, 0.3, b"MW001"),
        (Fault.CUT_COMMIT, 0.0, b""),
    ],
)
def test_lost_answer_to_commit(
    tmp_path: Path,
    database_url: str,
    source: Path,
    expected: Expected,
    proxy: PostgresProxy,
    fault: Fault,
    delay_s: float,
    answer: bytes,
) -> None:
    proxy.delay_s = delay_s
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, _through(proxy, database_url), source, epoch_s=60, bundle_records_max=30) as worker,
    ):
        for times in (1, 2, 3):
            already = proxy.commits
            worker.await_while_running(lambda already=already: proxy.commits > already + 8, "commits")
            proxy.arm(fault)
            worker.await_while_running(lambda times=times: proxy.struck >= times, "struck")
            if fault is not Fault.CUT_COMMIT:
                assert proxy.landed.wait(10)
                assert answer in proxy.lost_answers[-1], proxy.lost_answers[-1]
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
            worker.await_while_running(lambda already=already: proxy.commits > already + 8, "commits")
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
                two.await_reached(Point.AFTER_COMMIT)
                one.await_reached(Point.AFTER_COMMIT, times)
                server.kill()
                server.restart()
            one.await_finished()
            two.await_finished()

        assert faults(url, expected) == []
        assert observer.faults == []
