"""The reads of closed sessions, which may stay in the store until a late record or their expiry needs them.

As with `stored_windows.py`, a row is read as it was folded, without deltas.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from psycopg.rows import TupleRow

from millpy.model.checkpoint import Entries, Grant, Kind
from millpy.model.stored_windows import EndedSessions, SpanOfEnds, UnfiredPanes, WindowQuery
from millpy.store.postgres.arrays import Bigints, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.postgres.stored_windows import PIECE_BYTES, PIECE_ROWS, check_folded, load_unfired

SPANS = 2_000
"""Spans of keys whose sessions one statement reads."""
_FIRST = {"text_hash": -(2**63), "subkey_hash": -(2**63), "key_hash": -(2**63)}


async def load(
    connection: Connection, grant: Grant, folded_bundle: int, query: WindowQuery, progressed: Callable[[], None]
) -> Entries:
    """Read the rows that a query asks for; see `Store.query_windows`. `progressed` is called after each piece."""
    await check_folded(connection, grant, folded_bundle)
    if isinstance(query, UnfiredPanes):
        unfired = await load_unfired(connection, grant, query)
        progressed()
        return unfired
    found = Entries(Kind.WINDOW, "")
    of_interval: dict[str, Any] = {"interval": grant.interval_id}
    if isinstance(query, EndedSessions):
        ended = of_interval | {"ended_by": query.ended_by, "rows_max": query.rows_max}
        rows = await all_rows(connection, statement("read_ended_sessions"), ended | await _place(connection, query))
        for subkey, key, key_hash, fire_at in rows:
            found.add(key.encode(), key_hash, subkey, None, fire_at)
        progressed()
        return found
    for lo in range(0, len(query.keys), SPANS):
        part = slice(lo, lo + SPANS)
        spans = {"keys": Texts(query.keys[part]), "lows": Bigints(query.starts[part])}
        spans["highs"] = Bigints(query.ends[part])
        for subkey, key, key_hash, fire_at, value in await all_rows(
            connection, statement("load_sessions"), of_interval | spans
        ):
            found.add(key.encode(), key_hash, subkey, value.encode(), fire_at)
        progressed()
    return found


async def _place(connection: Connection, query: EndedSessions) -> dict[str, int]:
    """Return where the next session is, in index order."""
    if query.after is None:
        return _FIRST
    name = {"key": query.after.key.decode(), "subkey": query.after.subkey}
    ((text_hash, subkey_hash),) = await all_rows(connection, statement("place_of_session"), name)
    return {"text_hash": text_hash, "subkey_hash": subkey_hash, "key_hash": query.after.key_hash}


async def closed_ends(connection: Connection, grant: Grant, ended_by: int, rows_max: int) -> SpanOfEnds | None:
    """Return when the folded sessions end that end by a time; None without any, or with at most `rows_max` windows."""
    of_interval = {"interval": grant.interval_id}
    ((count,),) = await all_rows(connection, statement("count_windows"), of_interval | {"rows_max": rows_max})
    if count <= rows_max:
        return None
    ((first, last),) = await all_rows(connection, statement("read_closed_ends"), of_interval | {"ended_by": ended_by})
    return None if first is None else SpanOfEnds(first, last)


async def read_open(connection: Connection, grant: Grant, ended_by: int) -> AsyncIterator[list[TupleRow]]:
    """Yield the folded panes of windows that end after a time, and those that wait.

    They come in pieces of (subkey, key, key hash, fire_at, value, …).
    """
    place: dict[str, Any] = {"interval": grant.interval_id, "ended_by": ended_by, **_FIRST}
    place |= {"rows_max": PIECE_ROWS, "bytes_max": PIECE_BYTES}
    while rows := await all_rows(connection, statement("read_open_panes"), place):
        yield rows
        if len(rows) == rows[-1][-1] < PIECE_ROWS:
            return
        place |= {"key_hash": rows[-1][2], "text_hash": rows[-1][5], "subkey_hash": rows[-1][6]}
