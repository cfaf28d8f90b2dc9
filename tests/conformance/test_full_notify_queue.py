"""A server whose queue of notifications is full, because somebody listens in a transaction that does not end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from millpy.embedded import EmbeddedPostgres
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import a_graph
from tests.conformance.test_users_tables import fetch, plant, run
from tests.databases import fresh_database, make_template


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    settings = {"max_notify_queue_pages": "64"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("queue"), version="18", settings=settings) as found:
        make_template(found)
        yield found


@pytest.fixture
def url(server: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(server) as name:
        yield server.url(name)


@pytest.fixture
def listener(url: str) -> Iterator[psycopg.Connection]:
    """Fill the notify queue behind a connection that idles in a transaction; the queue empties when it is closed."""
    with psycopg.connect(url, autocommit=True) as idle, psycopg.connect(url, autocommit=True) as sender:
        idle.execute("LISTEN somebody")
        idle.execute("BEGIN")
        idle.execute("SELECT 1")
        sender.execute("SELECT pg_notification_queue_usage()")  # drops what earlier tests have left
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            for _ in range(1_000):
                sender.execute("SELECT pg_notify('somebody', repeat('x', 7000) || g) FROM generate_series(1, 20) AS g")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            while True:
                sender.execute("NOTIFY somebody")
        yield idle


async def test_a_hint_is_skipped_when_the_notify_queue_is_full(url: str, listener: psycopg.Connection) -> None:
    async with PostgresStore(url) as store:
        deployment = await store.deploy(a_graph())

        await store.notify(deployment.graph_id)
        listener.close()
        async with PostgresStore(url) as other:
            waiting = asyncio.create_task(other.wait_hint(deployment.graph_id, 60.0))
            while not waiting.done():
                await store.notify(deployment.graph_id)
                await asyncio.sleep(0)
            assert await waiting


async def test_workers_continue_by_polling(url: str, listener: psycopg.Connection, tmp_path: Path) -> None:
    path = write(tmp_path)

    async with asyncio.timeout(60):
        await asyncio.gather(*(run_worker(plant(path), url, limits=Limits(bundle_records_max=30)) for _ in range(2)))

    assert_complete(url)


async def test_commits_with_a_notifying_trigger_resume_when_the_queue_empties(
    url: str, listener: psycopg.Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path)
    async with PostgresStore(url) as store:
        await store.deploy(plant(path).spec())
    run(
        url,
        "CREATE FUNCTION public.mine() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_notify('somebody', NEW.device); RETURN NEW; END $$",
        "CREATE TRIGGER mine AFTER INSERT OR UPDATE ON plant.counts FOR EACH ROW EXECUTE FUNCTION public.mine()",
    )

    async with asyncio.timeout(60):
        limits = Limits(bundle_records_max=30, retry_s_max=0.2)
        worker = asyncio.create_task(run_worker(plant(path), url, limits=limits))
        while caplog.text.count("cannot commit a transaction with NOTIFY") < 3:
            await asyncio.sleep(0)
            assert not worker.done(), worker
        assert fetch(url, "SELECT count(*) FROM plant.counts") == [(0,)]
        listener.close()
        await worker

    assert_complete(url)


def write(folder: Path) -> Path:
    path = folder / "readings.ndjson"
    moments = [datetime.fromtimestamp(1_700_000_000 + 10 * window, UTC).isoformat() for window in range(4)]
    path.write_text("".join(json.dumps({"device": f"d{n}", "at": at}) + "\n" for at in moments for n in range(20)))
    return path


def assert_complete(url: str) -> None:
    rows = fetch(url, "SELECT device, count(*)::int, sum(n)::int FROM plant.counts GROUP BY 1 ORDER BY 1")
    assert sorted(rows) == sorted((f"d{n}", 4, 4) for n in range(20))
    assert fetch(url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]
    assert fetch(url, "SELECT count(*) FROM millpy.accounting WHERE NOT balanced") == [(0,)]
