"""Deltas of one bundle that are too large for one document: written, folded and read in parts, with the same effect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from psycopg.conninfo import conninfo_to_dict

from millpy.embedded import EmbeddedPostgres
from millpy.model.checkpoint import Delta, Entries, Kind
from millpy.model.delta import decode_document, encode_document, encode_documents
from millpy.store.postgres.commit import STATEMENT_BYTES
from millpy.store.postgres.fold import PIECE_BYTES, FoldPiece
from millpy.store.postgres.recovery import PIECE_BYTES as READ_BYTES
from millpy.store.postgres.store import PostgresStore
from tests.conformance.postgres_subject import PostgresSubject
from tests.conformance.store_builders import World, a_world, contents, entries

TEXT = "x" * 1_000
KEYS = 9_000
ROWS_MAX = 100_000


@pytest_asyncio.fixture
async def world(postgres: EmbeddedPostgres, database_url: str) -> AsyncIterator[World]:
    subject = PostgresSubject(postgres.tcp_url(str(conninfo_to_dict(database_url)["dbname"])))
    try:
        yield await a_world(subject)
    finally:
        await subject.close()


def bundle(number: int) -> Delta:
    """Build a value or sometimes a tombstone for every key, a window of each, and one entry larger than a document."""
    values = [(f"k{key}", None if number and (key + number) % 3 == 0 else [number, key, TEXT]) for key in range(KEYS)]
    windows = [(f"k{key}", [number] if (key + number) % 5 else None, "0/60", 60) for key in range(0, KEYS, 4)]
    large = [("large", [number, "y" * (STATEMENT_BYTES + 1_000)])]
    return entries(Kind.STATE, "cell", *large, *values), entries(Kind.WINDOW, "", *windows)


def after(*deltas: Delta) -> dict[Any, Any]:
    """Return the final state."""
    table: dict[Any, Any] = {}
    for delta in deltas:
        for part in delta:
            for name in zip(
                [part.kind.value] * len(part), [part.namespace] * len(part), part.keys, part.subkeys, strict=False
            ):
                table.pop((*name[:2], name[2].decode(), name[3]), None)
        table |= contents(delta)
    return table


@pytest.mark.parametrize("bytes_max", [1, 100, 3_000, 10**9])
def test_documents_of_a_delta_decode_like_one(bytes_max: int) -> None:
    rows = [(f"k{n}", "z" * (n % 7 * 30) if n % 5 else None, str(n)) for n in range(60)]
    delta = (entries(Kind.STATE, "cell", *rows), entries(Kind.WINDOW, ""), entries(Kind.TIMER, "event", *rows))

    parts = [decode_document(document) for document in encode_documents(delta, bytes_max)]

    assert len(parts) == {1: 120, 10**9: 1}.get(bytes_max, len(parts))
    assert all(len(encode_document(part)) < 2 * bytes_max + 500 for part in parts)
    assert rows_of([found for part in parts for found in part]) == rows_of(delta)


def rows_of(delta: Sequence[Entries]) -> list[tuple[bytes, str, bytes | None]]:
    return [row for part in delta for row in zip(part.keys, part.subkeys, part.values, strict=True)]


async def test_deltas_of_several_documents_are_folded_and_read_as_one(world: World, database_url: str) -> None:
    old = await world.owner()
    interval, deltas = world.sums[0], (bundle(0), bundle(1), (entries(Kind.STATE, "cell", ("k1", "small")),))
    for delta in deltas:
        await old.commit(old.checkpoint(interval, delta=delta))
    expected = after(*deltas)

    with psycopg.connect(database_url, autocommit=True) as connection:
        sizes = connection.execute("SELECT bundle, count(*), max(bytes) FROM mill.deltas GROUP BY 1").fetchall()
        assert all((parts > 2 or bundle == 3) and size < 2 * STATEMENT_BYTES for bundle, parts, size in sizes), sizes
        await old.expire()
        new = await world.owner(interval)

        async def stored() -> None:
            opened = await new.opened(interval, state_rows_max=ROWS_MAX)
            assert contents(opened.recovered) == expected
            (count,) = connection.execute("SELECT count(*) FROM millpy.state").fetchone() or ()
            assert count == sum(name[0] == "state" for name in expected)
            loaded = await new.store.load_state(new.grants[interval.interval_id], [b'"k1"', b'"k2"', b'"large"'])
            assert contents(loaded).items() <= expected.items()

        await stored()
        await _fold_a_piece(database_url, new.grants[interval.interval_id])
        (folded, rows) = connection.execute(
            "SELECT folded_bundle, (SELECT count(*) FROM mill.keyed WHERE interval_id = i.interval_id)"
            "  FROM mill.intervals AS i WHERE interval_id = %s",
            [interval.interval_id],
        ).fetchone() or (None, None)
        assert (folded, 0 < rows < KEYS) == (0, True), "a part of the first bundle is rows, and it is not folded"
        await stored()
        folded = await new.store.fold(new.grants[interval.interval_id], bytes_max=1)
        assert folded == 1, "what is begun is folded, however little it may be"
        await stored()
        pieces: list[None] = []
        grant = new.grants[interval.interval_id]
        await new.store.fold(grant, bytes_max=10**9, progressed=lambda: pieces.append(None))
        assert len(pieces) > 1, "a worker that waits for a large fold hears of each piece"
        await stored()
        (rows,) = connection.execute("SELECT count(*) FROM mill.keyed").fetchone() or ()
        assert rows == len(expected)


async def _fold_a_piece(url: str, grant: Any) -> None:
    """As a worker that dies after the first piece."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        piece = FoldPiece(grant)
        assert await piece.choose(connection, PIECE_BYTES)
        await piece.fold(connection)


async def test_rows_that_compress_well_are_read_in_pieces_by_their_expanded_size(
    world: World, database_url: str
) -> None:
    owner = await world.owner()
    interval = world.sums[0]
    rows = [(f"k{n}", "z" * 500_000, f"{n}/{n + 1}") for n in range(60)]
    for place in range(0, 60, 20):
        delta = (entries(Kind.WINDOW, "", *rows[place : place + 20]),)
        await owner.commit(owner.checkpoint(interval, delta=delta))
    await owner.fold(interval, bytes_max=10**9)
    reported: list[None] = []
    assert isinstance(owner.store, PostgresStore)
    owner.store._progressed = lambda: reported.append(None)

    opened = await owner.opened(interval, state_rows_max=ROWS_MAX)

    assert len(contents(opened.recovered)) == 60
    with psycopg.connect(database_url) as connection:
        (stored,) = connection.execute("SELECT sum(pg_column_size(value)) FROM mill.keyed").fetchone() or (0,)
    assert stored < READ_BYTES < 30_000_000 / 5
    assert len(reported) >= 30_000_000 // READ_BYTES
