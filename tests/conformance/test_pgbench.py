"""Tables of pgbench under its load: what readers deliver that die at any position equals a recount of the tables."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psycopg

from millpy import ChangeFields, PostgresTable
from millpy.embedded import EmbeddedPostgres
from millpy.limits import Limits
from tests.conformance.table_reading import drop_slots, end_readers, reader_of

CLIENTS, TRANSACTIONS = 4, 400
READ_S_MAX = 240.0
KEYS = {"pgbench_history": "id", "pgbench_tellers": "tid", "pgbench_accounts": "aid"}
LAST = {
    "pgbench_history": "INSERT INTO pgbench_history (tid) VALUES (-1)",
    "pgbench_tellers": "INSERT INTO pgbench_tellers VALUES (-1, 1, 0)",
    "pgbench_accounts": "INSERT INTO pgbench_accounts VALUES (-1, 1, 0)",
}
END = {
    "pgbench_history": "UPDATE pgbench_history SET bid = NULL WHERE tid = -1",
    "pgbench_tellers": "UPDATE pgbench_tellers SET tbalance = 0 WHERE tid = -1",
    "pgbench_accounts": "UPDATE pgbench_accounts SET abalance = 0 WHERE aid = -1",
}
"""Executed until every reader has ended: a first copy that begins late has the last row in its middle."""


async def read_table(url: str, table: str, chance: random.Random) -> list[dict[str, Any]]:
    """Read until the last row; of what was read before a death, only a part is committed."""
    source = PostgresTable(table, fields=ChangeFields(operation="operation"))
    committed: list[dict[str, Any]] = []
    position: bytes | None = None
    while not is_end(committed):
        limits = Limits(bundle_records_max=chance.choice([50, 700, 5_000]))
        async with reader_of(source, url, position, secret=table, limits=limits, within_s=READ_S_MAX) as found:
            for _ in range(chance.randrange(2, 12)):
                records = await found.take()
                if chance.random() < 0.1:
                    break  # it was delivered, and its position was not committed
                committed += records
                position = found.position
                if is_end(records):
                    break
    return committed


def is_end(records: list[dict[str, Any]]) -> bool:
    """Tell whether the last record is a change that END has made."""
    last = records[-1] if records else {}
    return last.get("operation") == "update" and -1 in (last.get("tid"), last.get("aid"))


async def test_changes_under_load_equal_a_recount(postgres: EmbeddedPostgres, database_url: str) -> None:
    chance = random.Random(8)

    async def pgbench(*arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            postgres._bin("pgbench"), *arguments, database_url, env={"PGOPTIONS": "-c search_path=public"}
        )

    assert await (await pgbench("--initialize", "--quiet")).wait() == 0
    with psycopg.connect(database_url, autocommit=True, options="-c search_path=public") as connection:
        connection.execute("ALTER TABLE pgbench_history ADD COLUMN id bigserial PRIMARY KEY")
        load = await pgbench(f"--client={CLIENTS}", f"--transactions={TRANSACTIONS}", "--no-vacuum")
        reading = [asyncio.create_task(read_table(database_url, table, random.Random(table))) for table in KEYS]
        try:
            while load.returncode is None:
                await asyncio.wait([asyncio.create_task(load.wait())], timeout=chance.random())
                end_readers(connection)
            for last in LAST.values():
                connection.execute(last)
            async with asyncio.timeout(READ_S_MAX):
                while not all(task.done() for task in reading):
                    for end in END.values():
                        connection.execute(end)
                    await asyncio.wait(reading, timeout=1)
            delivered = {table: task.result() for table, task in zip(KEYS, reading, strict=True)}
            wanted = {
                table: {row[key]: row for (row,) in connection.execute(f"SELECT to_jsonb(t) FROM {table} AS t")}  # type: ignore[call-overload]
                for table, key in KEYS.items()
            }
        finally:
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)
            drop_slots(connection)

    assert len(wanted["pgbench_history"]) == CLIENTS * TRANSACTIONS + 1
    for table, key in KEYS.items():
        found: dict[int, dict[str, Any]] = {}
        for record in delivered[table]:
            is_known = record[key] in found
            assert is_known == (record.pop("operation") == "update"), (table, record)
            found[record[key]] = record
        assert found.keys() == wanted[table].keys()
        assert all(
            {**record, "mtime": None} == {**wanted[table][number], "mtime": None} for number, record in found.items()
        )
