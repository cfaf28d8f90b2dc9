"""The proxy works as described, seen with plain psycopg; otherwise the tests with it would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo

from millpy.embedded import EmbeddedPostgres
from millpy.testing.crash_test.database import url_through_proxy
from millpy.testing.proxy import CommitFault, PostgresProxy
from tests.crash.harness import await_true

FORMS = ["one pipeline", "pipeline in a block", "COPY between", "simple queries"]


@pytest.fixture
def direct(empty_database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE numbers (n integer)")
        connection.execute("CREATE TABLE stale (n integer)")
        connection.execute(
            "CREATE FUNCTION hold_grants() RETURNS void LANGUAGE plpgsql AS $$ BEGIN"
            " IF EXISTS (SELECT FROM stale) THEN RAISE EXCEPTION 'stale' USING ERRCODE = 'MW001'; END IF; END $$"
        )
        yield connection


@pytest.fixture
def proxy(postgres: EmbeddedPostgres) -> Iterator[PostgresProxy]:
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    with PostgresProxy(str(parts["host"]), int(str(parts["port"])), delay_s=0.2) as running:
        yield running


@pytest.fixture
def through(
    postgres: EmbeddedPostgres, direct: psycopg.Connection, proxy: PostgresProxy
) -> Iterator[psycopg.Connection]:
    with psycopg.connect(
        url_through_proxy(postgres.tcp_url(direct.info.dbname), proxy.port), autocommit=True
    ) as connection:
        yield connection


def commit(connection: psycopg.Connection, n: int, form: str = "one pipeline") -> None:
    """Insert a number as a checkpoint is committed."""
    if form == "one pipeline":
        with connection.pipeline():
            connection.execute("BEGIN")
            connection.execute("SELECT hold_grants()", prepare=True)
            connection.execute("INSERT INTO numbers VALUES (%s)", [n])
            connection.execute("COMMIT", prepare=True)
        return
    if form == "pipeline in a block":
        with connection.pipeline(), connection.transaction():
            connection.execute("SELECT hold_grants()")
            connection.execute("INSERT INTO numbers VALUES (%s)", [n])
        return
    with connection.transaction():
        connection.execute("SELECT hold_grants()")
        if form == "simple queries":
            connection.execute("INSERT INTO numbers VALUES (%s)", [n])
            return
        with connection.cursor() as cursor, cursor.copy("COPY numbers FROM STDIN") as copy:
            copy.write_row([n])


def stored(direct: psycopg.Connection) -> list[int]:
    return [row[0] for row in direct.execute("SELECT n FROM numbers ORDER BY n")]


@pytest.mark.parametrize("form", FORMS)
def test_proxy_passes_everything(
    direct: psycopg.Connection, through: psycopg.Connection, proxy: PostgresProxy, form: str
) -> None:
    for n in range(7):
        commit(through, n, form)
    through.execute("SELECT repeat('x', 3000000)").fetchone()

    assert stored(direct) == list(range(7))
    assert proxy.commits == 7


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("fault", "lands"), [(CommitFault.SWALLOW, True), (CommitFault.LATE_COMMIT, True), (CommitFault.CUT_COMMIT, False)]
)
def test_proxy_injects_each_fault_of_a_commit(
    direct: psycopg.Connection,
    through: psycopg.Connection,
    proxy: PostgresProxy,
    form: str,
    fault: CommitFault,
    lands: bool,
) -> None:
    commit(through, 1, form)
    proxy.arm(fault)
    with pytest.raises(psycopg.OperationalError):
        commit(through, 2, form)
    at_loss = stored(direct)

    assert proxy.struck == 1
    if lands:
        assert proxy.landed.wait(60)
        assert b"COMMIT\0" in proxy.lost_answers[0]
    assert at_loss == ([1, 2] if fault is CommitFault.SWALLOW else [1])
    assert stored(direct) == ([1, 2] if lands else [1])


def test_late_pipeline_includes_the_fence(
    direct: psycopg.Connection, through: psycopg.Connection, proxy: PostgresProxy
) -> None:
    commit(through, 1)
    proxy.arm(CommitFault.LATE_PIPELINE)
    with pytest.raises(psycopg.OperationalError):
        commit(through, 2)
    direct.execute("INSERT INTO stale VALUES (1)")

    assert proxy.landed.wait(60)
    assert b"MW001" in proxy.lost_answers[0]
    assert stored(direct) == [1]


def test_proxy_cuts_and_stalls(
    postgres: EmbeddedPostgres, direct: psycopg.Connection, through: psycopg.Connection, proxy: PostgresProxy
) -> None:
    proxy.stall(True)
    proxy.cut()
    with pytest.raises(psycopg.OperationalError):
        through.execute("SELECT 1")
    await_true(lambda: through.closed, "closed")
    proxy.stall(False)
    with psycopg.connect(url_through_proxy(postgres.tcp_url(direct.info.dbname), proxy.port)) as another:
        assert another.execute("SELECT 1").fetchone() == (1,)
