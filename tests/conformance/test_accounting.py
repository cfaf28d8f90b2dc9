"""The comparisons of the accounting, on counts that somebody has changed: each sees one too many and one too few."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest
import pytest_asyncio

from millpy.model.checkpoint import Cursor, Kind
from millpy.model.time import Instant
from millpy.store.memory.tables import SourceAccount, StoredAccounting, SubscriptionAccount, TableAccount
from millpy.store.postgres.statements import statement
from millpy.store.postgres.store import PostgresStore
from millpy.testing.crash_test.database import UNBALANCED
from tests.conformance.store_builders import Owner, a_graph, a_segment, a_slice, counters, entries

SOURCE = {"injected": 10, "accepted": 7, "duplicate": 2, "dead_lettered": 1}
SUBSCRIPTION = {"produced": 12, "added": 4, "filtered": 3, "consumed": 5, "late": 2, "dead_lettered": 1}
PARKED, PENDING = 2, 3
TABLE = {"emitted": 4, "written": 4}
STORED = {"source": [*SOURCE], "subscription": [*SUBSCRIPTION, "parked", "pending"], "table": [*TABLE]}
LEFT_SIDE = {"injected", "produced", "added", "emitted"}
TERMS = [(part, name) for part, names in STORED.items() for name in names]
ALL = {"source", "subscription", "table"}
ROWS = """
SELECT balanced, CASE
       WHEN source_partition IS NOT NULL THEN 'source' WHEN consumer IS NOT NULL THEN 'subscription' ELSE 'table' END
  FROM millpy.accounting
"""
COMPARISONS = {
    "source": "injected = accepted + duplicate + dead_lettered",
    "subscription": "produced + coalesce(added, 0)"
    " = coalesce(filtered, 0) + consumed + late + dead_lettered + coalesce(parked, 0) + pending",
    "table": "produced = consumed",
}


def broken(comparison: str) -> Iterator[str]:
    """Another operator, no comparison at all, and each side without each of its terms."""
    left, right = comparison.split(" = ")
    for operator in ("<=", ">=", "<>"):
        yield f"{left} {operator} {right}"
    yield "true"
    yield "false"
    sides = (left.split(" + "), right.split(" + "))
    for side, other in (sides, sides[::-1]):
        for term in side:
            rest = " + ".join(t for t in side if t != term) or "0"
            yield f"{rest} = {' + '.join(other)}"


MUTANTS = [(part, mutant) for part, comparison in COMPARISONS.items() for mutant in broken(comparison)]


class StoredAccounts:
    """A source partition, a subscription and a table that balance, and ways to change their stored counts."""

    def __init__(self, connection: psycopg.Connection, keys: dict[str, str]) -> None:
        self.connection = connection
        self.keys = keys

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo all changes of a `with` block."""
        with self.connection.transaction(force_rollback=True):
            yield

    def change(self, part: str, name: str, by: int) -> None:
        """Change a term of the accounting."""
        if name == "pending":
            done = self.connection.execute("UPDATE mill.segments SET records = ARRAY[0, records[2] + %s]", [by])
        elif name == "parked" and by < 0:
            done = self.connection.execute("DELETE FROM mill.keyed WHERE kind = 'parked' AND subkey = '0'")
        elif name == "parked":
            done = self.connection.execute(
                "INSERT INTO mill.keyed SELECT interval_id, kind, namespace, key, 'one more', key_hash, fire_at,"
                " bundle, value FROM mill.keyed WHERE kind = 'parked' AND subkey = '0'"
            )
        else:
            done = self.connection.execute(
                "UPDATE mill.keyed SET value = (value::bigint + %s)::text"
                " WHERE kind = 'counter' AND namespace = %s AND subkey = %s",
                [by, name, self.keys[part]],
            )
        assert done.rowcount == 1

    def balanced(self) -> set[str]:
        """Return the parts of which every row balances."""
        rows = self.connection.execute(ROWS).fetchall()
        assert {part for _, part in rows} == ALL
        return ALL - {part for balances, part in rows if not balances}

    def judges_rightly(self, part: str) -> bool:
        """Tell whether one part is judged rightly: as stored, and with each term one too high and one too low."""
        if self.balanced() != ALL:
            return False
        for name in STORED[part]:
            for by in (1, -1):
                with self.undone():
                    self.change(part, name, by)
                    if self.balanced() != ALL - {part}:
                        return False
        return True


@pytest_asyncio.fixture
async def accounts(database_url: str) -> AsyncIterator[StoredAccounts]:
    async with PostgresStore(database_url) as store:
        deployment = await store.deploy(a_graph())
        owner = Owner(store, deployment)
        await owner.register()
        await owner.claim()
        (a, _), (first, second) = deployment.intervals_of("readings"), deployment.intervals_of("sums")
        subscription = str(deployment.subscription_ids["readings", "sums", 0])
        table = str(deployment.table_ids["sums_1m"])
        source = {name: ("readings", count) for name, count in SOURCE.items()}
        made = {"produced": (subscription, SUBSCRIPTION["produced"])}
        rest = {name: (subscription, count) for name, count in SUBSCRIPTION.items() if name != "produced"}
        parked = entries(Kind.PARKED, subscription, *(("k", {}, str(n)) for n in range(PARKED)))
        segment = a_segment(int(subscription), 1, [None, a_slice(*range(PENDING))])
        await owner.commit(owner.checkpoint(a, delta=counters(**source, **made), segments=[segment]))
        cursor = Cursor(a.interval_id, 1, Instant(0))
        delta = (*counters(**rest, **{name: (table, count) for name, count in TABLE.items()}), parked)
        await owner.commit(owner.checkpoint(first, delta=delta, cursors=[cursor]))
        for interval in (a, first, second):
            await owner.fold(interval)
        with psycopg.connect(database_url, autocommit=True) as connection:
            yield StoredAccounts(connection, {"source": "readings", "subscription": subscription, "table": table})


async def test_one_too_many_or_too_few_of_any_term_is_reported_in_its_place(accounts: StoredAccounts) -> None:
    assert [part for part in STORED if accounts.judges_rightly(part)] == [*STORED]


async def test_records_that_move_between_terms_still_balance(accounts: StoredAccounts) -> None:
    for part, names in STORED.items():
        first = names[0]
        for name in names[1:]:
            with accounts.undone():
                accounts.change(part, first, 1)
                accounts.change(part, name, -1 if name in LEFT_SIDE else 1)
                assert accounts.balanced() == ALL, (first, name)


async def test_every_wrong_comparison_is_detected(accounts: StoredAccounts) -> None:
    (definition,) = accounts.connection.execute("SELECT pg_get_functiondef('mill.account'::regproc)").fetchone() or (
        "",
    )
    alike = []
    for part, mutant in MUTANTS:
        comparison = COMPARISONS[part]
        assert definition.count(comparison) == 1, comparison
        with accounts.undone():
            accounts.connection.execute(definition.replace(comparison, f"({mutant})").encode())
            if accounts.judges_rightly(part):
                alike.append((part, mutant))

    assert alike == []


async def test_doctor_and_crash_test_name_an_imbalance(accounts: StoredAccounts) -> None:
    def named() -> list[int]:
        return [
            len(accounts.connection.execute(question).fetchall())
            for question in (statement("look_at_balance"), UNBALANCED)
        ]

    assert named() == [0, 0]
    for part in STORED:
        with accounts.undone():
            accounts.change(part, STORED[part][0], 1)
            assert named() == [1, 1], part


@pytest.mark.parametrize(("part", "name"), TERMS)
@pytest.mark.parametrize("by", [1, -1])
def test_accounting_of_the_memory_store_detects_it_too(part: str, name: str, by: int) -> None:
    names = {"emitted": "produced", "written": "consumed"}
    source = SourceAccount("readings", "a", **SOURCE)
    subscription = SubscriptionAccount(1, "readings", "sums", parked=PARKED, pending=PENDING, **SUBSCRIPTION)
    table = TableAccount("sums", "sums_1m", **{names[name]: count for name, count in TABLE.items()})
    account = StoredAccounting((source,), (subscription,), (table,))
    assert account.balanced

    field, kept = names.get(name, name) if part == "table" else name, f"{part}s"
    (row,) = getattr(account, kept)
    changed = replace(account, **{kept: (replace(row, **{field: getattr(row, field) + by}),)})

    assert not changed.balanced
