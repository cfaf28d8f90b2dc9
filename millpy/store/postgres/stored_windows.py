"""The reads of windows that may stay in the store until a record, their end or their expiry needs them.

A row is read as it was folded, without deltas: what has changed since the last fold is in the owner's memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from psycopg.rows import TupleRow

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Entries, Grant, Kind
from millpy.model.stored_windows import UnfiredPanes
from millpy.store.postgres.arrays import Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import check_fold

PIECE_ROWS = 20_000
PIECE_BYTES = 4_000_000
"""Bytes that one statement reads; a single row may be larger."""
PAIRS = 10_000
"""Windows of keys that one statement reads."""
_values = msgspec.json.Decoder(list[msgspec.Raw]).decode


async def subkeys(connection: Connection, grant: Grant, rows_max: int) -> list[str] | None:
    """Return the subkeys of all folded windows of an interval; None if it has at most `rows_max` rows of them."""
    of_interval = {"interval": grant.interval_id}
    ((count,),) = await all_rows(connection, statement("count_windows"), of_interval | {"rows_max": rows_max})
    if count <= rows_max:
        return None
    return [subkey for (subkey,) in await all_rows(connection, statement("read_subkeys"), of_interval)]


async def read_window(connection: Connection, grant: Grant, subkey: str) -> AsyncIterator[list[TupleRow]]:
    """Yield the folded rows of a window in pieces of (subkey, key, key_hash, fire_at, value, rows left)."""
    place: dict[str, Any] = {"interval": grant.interval_id, "subkey": subkey, "key_hash": -1, "key": ""}
    place |= {"rows_max": PIECE_ROWS, "bytes_max": PIECE_BYTES}
    while rows := await all_rows(connection, statement("read_window"), place):
        yield rows
        if len(rows) == rows[-1][-1] < PIECE_ROWS:
            return
        place |= {"key": rows[-1][1], "key_hash": rows[-1][2]}


async def check_folded(connection: Connection, grant: Grant, folded_bundle: int) -> None:
    """Check that a grant is current, and that the store has the fold of this bundle. Raises as `Store.load_windows`."""
    of_grant = {"interval": grant.interval_id, "sequencer": grant.sequencer}
    header = await all_rows(connection, statement("read_folded_bundle"), of_grant)
    if not header:
        raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
    check_fold(grant, header[0][1], folded_bundle)


async def load(
    connection: Connection,
    grant: Grant,
    folded_bundle: int,
    subkeys: Sequence[str],
    keys: Sequence[bytes],
    progressed: Callable[[], None],
) -> Entries:
    """Read folded rows of windows; see `Store.load_windows`. `progressed` is called after each piece."""
    await check_folded(connection, grant, folded_bundle)
    found = Entries(Kind.WINDOW, "")
    of_interval: dict[str, Any] = {"interval": grant.interval_id, "bytes_max": PIECE_BYTES}
    lo = 0
    while lo < len(keys):
        pairs = {"subkeys": Texts(list(subkeys[lo : lo + PAIRS])), "keys": Texts(keys[lo : lo + PAIRS])}
        ((places, key_hashes, fire_ats, values),) = await all_rows(
            connection, statement("load_windows"), of_interval | pairs
        )
        progressed()
        if places is not None:
            asked = [lo + place - 1 for place in places]
            found.keys += [keys[at] for at in asked]
            found.subkeys += [subkeys[at] for at in asked]
            found.key_hashes += key_hashes
            found.fire_ats += fire_ats
            found.values += map(bytes, _values(b"[" + values + b"]"))
        # Fewer bytes than the bound: the statement has read all.
        lo = lo + PAIRS if places is None or len(values) < PIECE_BYTES else max(asked) + 1
    return found


async def load_unfired(connection: Connection, grant: Grant, query: UnfiredPanes) -> Entries:
    """Read the next folded panes of a window that need something."""
    place = {"interval": grant.interval_id, "subkey": query.subkey, "key": query.after.key.decode()}
    bounds: dict[str, Any] = {"rows_max": query.rows_max, "bytes_max": query.bytes_max, "need": query.need.value}
    bounds["key_hash"] = query.after.key_hash
    found = Entries(Kind.WINDOW, "")
    for key, key_hash, fire_at, value in await all_rows(connection, statement("load_unfired"), place | bounds):
        found.add(key.encode(), key_hash, query.subkey, value.encode(), fire_at)
    return found


async def delete(connection: Connection, grant: Grant, subkeys: Sequence[str], progressed: Callable[[], None]) -> None:
    """Delete the folded rows of windows that have expired, in pieces; see `Store.delete_windows`."""
    expired: dict[str, Any] = {"interval": grant.interval_id, "sequencer": grant.sequencer, "rows_max": PIECE_ROWS}
    expired["subkeys"] = Texts(subkeys)
    while True:
        found = await all_rows(connection, statement("delete_windows"), expired)
        if not found:
            raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
        progressed()
        if found[0][0] < PIECE_ROWS:
            return
