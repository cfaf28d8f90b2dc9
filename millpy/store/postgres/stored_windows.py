"""The reads of closed windows, which may stay in the store until a record or their expiry needs them.

A row is read as it was folded, without deltas: what has changed since the last fold is in the owner's memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from psycopg.rows import TupleRow

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Entries, Grant, Kind
from millpy.store.postgres.arrays import Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import check_fold

PIECE_ROWS = 20_000
PIECE_BYTES = 4_000_000
"""Bytes that one statement reads; a single row may be larger."""
PAIRS = 2_000
"""Windows of keys that one statement reads."""


async def subkeys(connection: Connection, grant: Grant, rows_max: int) -> list[str] | None:
    """Return the subkeys of all folded windows of an interval; None if it has at most `rows_max` rows of them."""
    of_interval = {"interval": grant.interval_id}
    ((count,),) = await all_rows(connection, statement("count_windows"), of_interval | {"rows_max": rows_max})
    if count <= rows_max:
        return None
    return [subkey for (subkey,) in await all_rows(connection, statement("read_subkeys"), of_interval)]


async def read_window(connection: Connection, grant: Grant, subkey: str) -> AsyncIterator[list[TupleRow]]:
    """Yield the folded rows of a window in pieces of (subkey, key, key_hash, fire_at, value, text_hash, rows left)."""
    place: dict[str, Any] = {"interval": grant.interval_id, "subkey": subkey, "text_hash": -(2**63), "key": ""}
    place |= {"rows_max": PIECE_ROWS, "bytes_max": PIECE_BYTES}
    while rows := await all_rows(connection, statement("read_window"), place):
        yield rows
        if len(rows) == rows[-1][-1] < PIECE_ROWS:
            return
        place |= {"key": rows[-1][1], "text_hash": rows[-1][5]}


async def load(
    connection: Connection,
    grant: Grant,
    folded_bundle: int,
    subkeys: Sequence[str],
    keys: Sequence[bytes] | None,
    progressed: Callable[[], None],
) -> Entries:
    """Read folded rows of windows; see `Store.load_windows`. `progressed` is called after each piece."""
    of_grant: dict[str, Any] = {"interval": grant.interval_id, "sequencer": grant.sequencer}
    header = await all_rows(connection, statement("read_folded_bundle"), of_grant)
    if not header:
        raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
    check_fold(grant, header[0][1], folded_bundle)
    found = Entries(Kind.WINDOW, "")
    if keys is None:
        for subkey in subkeys:
            async for rows in read_window(connection, grant, subkey):
                _add(found, rows)
                progressed()
        return found
    for lo in range(0, len(keys), PAIRS):
        pairs = {"subkeys": Texts(list(subkeys[lo : lo + PAIRS])), "keys": Texts(keys[lo : lo + PAIRS])}
        _add(found, await all_rows(connection, statement("load_windows"), of_grant | pairs))
        progressed()
    return found


def _add(entries: Entries, rows: Sequence[TupleRow]) -> None:
    for subkey, key, key_hash, fire_at, value, *_ in rows:
        entries.add(key.encode(), key_hash, subkey, value.encode(), fire_at)
