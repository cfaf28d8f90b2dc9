"""Dedupe ids are read in pieces: a day of them, over a slow link, takes no statement and no watchdog to its limit."""

from __future__ import annotations

import random

import psycopg
import pytest

from millpy.model.checkpoint import Grant
from millpy.store.postgres import recovery as reading
from millpy.store.postgres.store import PostgresStore

ID, TIME = b"0123456789abcdef", bytes(8)


@pytest.mark.parametrize("seed", range(3))
async def test_all_live_runs_are_read_in_pieces(database_url: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    # (bundle, ids, expires_at, clock, whole), in slots at random
    runs = [
        (b, rng.randrange(40), rng.randrange(200), b, rng.random() < 0.02) for b in sorted(rng.sample(range(500), 100))
    ]
    latest = max(clock for _, _, _, clock, _ in runs)
    whole = max((bundle for bundle, _, _, _, is_whole in runs if is_whole), default=0)
    monkeypatch.setattr(reading, "PIECE_BYTES", 2_000)
    monkeypatch.setattr(reading, "PIECE_ROWS", 7)
    with psycopg.connect(database_url, autocommit=True) as connection:
        for bundle, ids, expires_at, clock, is_whole in runs:
            connection.execute(
                "INSERT INTO mill.dedupe_runs (slot, interval_id, bundle, expires_at, clock, ids, times, whole)"
                " VALUES (%s, 1, %s, %s, %s, %s, %s, %s)",
                [rng.randrange(16), bundle, expires_at + latest - 100, clock, ids * ID, TIME, is_whole],
            )
    pieces = 0

    def progressed() -> None:
        nonlocal pieces
        pieces += 1

    async with PostgresStore(database_url, progressed=progressed) as store:
        found = await store.load_dedupe_runs(Grant(1, 1))
        nothing = await store.load_dedupe_runs(Grant(2, 1))

    expected = [(b, n) for b, n, expires_at, _, _ in runs if expires_at >= 100 and b >= whole]
    assert [(run.clock, len(run.ids) // len(ID)) for run in found] == expected
    assert nothing == []
    assert pieces >= max(len(expected) / 7, sum(n for _, n in expected) * len(ID) / 4_000)
