"""What a commit sends in one round trip fails with the error of the first command that fails."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import AsyncConnection

from millpy.store.postgres.commit_pipeline import BEGIN, COMMIT, DURABLE, Command, send_commands
from millpy.store.postgres.statement_runs import CommitProgress

FAILS = b"SELECT 1 / 0"
FAILS_LATER = b"SELECT 1 / length(pg_sleep(0.1)::text)"
PASSES = b"SELECT 1"


@pytest.mark.parametrize("failing", [FAILS, FAILS_LATER])
@pytest.mark.parametrize("others", [[], [PASSES], [PASSES] * 5])
async def test_error_is_that_of_the_statement_that_fails(
    database_url: str, failing: bytes, others: list[bytes]
) -> None:
    sent: list[Command] = [(query, []) for query in (BEGIN, *others, failing, *others, DURABLE, COMMIT)]
    sending = CommitProgress()

    async with await AsyncConnection.connect(database_url, autocommit=True) as connection:
        for _ in range(100 if failing == FAILS else 7):  # answers come in other pieces each time
            with pytest.raises(psycopg.errors.DivisionByZero):
                await send_commands(connection, sent, sending)
            await connection.rollback()
            assert sending.failed_statement == failing


async def test_error_of_a_deferred_constraint_is_that_of_commit(database_url: str) -> None:
    sending = CommitProgress()

    async with await AsyncConnection.connect(database_url, autocommit=True) as connection:
        await connection.execute("CREATE TABLE n (n integer PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)")
        with pytest.raises(psycopg.errors.UniqueViolation):
            await send_commands(
                connection, [(BEGIN, []), (b"INSERT INTO n VALUES (1), (1)", []), (DURABLE, []), (COMMIT, [])], sending
            )

    assert sending.failed_statement == COMMIT


async def test_one_cursor_is_returned_for_each_answered_command(database_url: str) -> None:
    async with await AsyncConnection.connect(database_url, autocommit=True) as connection:
        found = await send_commands(
            connection,
            [(BEGIN, []), (b"SELECT 1", []), (DURABLE, []), (b"SELECT 2", []), (COMMIT, [])],
            CommitProgress(),
        )

        assert [await cursor.fetchone() for cursor in found] == [(1,), (2,)]
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
