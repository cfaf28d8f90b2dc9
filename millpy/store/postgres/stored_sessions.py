"""The reads of sessions that may stay in the store until a record, their end or their expiry needs them.

As with `stored_windows.py`, a row is read as it was folded, without deltas.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from psycopg.rows import TupleRow

from millpy.model.checkpoint import Entries, Grant, Kind
from millpy.model.stored_windows import (
    LAST_HASH,
    EndedSessions,
    SessionPlace,
    SpanOfEnds,
    TouchedSessions,
    UnfiredPanes,
    WindowQuery,
    last_place,
)
from millpy.model.time import INSTANT_MAX, Instant
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
    if isinstance(query, EndedSessions):
        ended = await _load_ended(connection, grant, query)
        progressed()
        return ended
    return await _load_touched(connection, grant, query, progressed)


async def _load_ended(connection: Connection, grant: Grant, query: EndedSessions) -> Entries:
    """Read the next sessions that end by a time."""
    end, start, key_hash = query.after
    asked = {"interval": grant.interval_id, "after_end": end, "after_start": start, "after_hash": key_hash}
    asked |= {"ended_by": query.ended_by, "rows_max": query.rows_max}
    found = Entries(Kind.WINDOW, "")
    if not query.unfired:
        for subkey, key, hashed, fire_at in await all_rows(connection, statement("read_ended_sessions"), asked):
            found.add(key.encode(), hashed, subkey, None, fire_at)
        return found
    for subkey, key, hashed, fire_at, value in await all_rows(connection, statement("read_unfired_sessions"), asked):
        found.add(key.encode(), hashed, subkey, value.encode(), fire_at)
    return found


async def _load_touched(
    connection: Connection, grant: Grant, query: TouchedSessions, progressed: Callable[[], None]
) -> Entries:
    """Read the sessions that records touch, in pieces of whole keys."""
    found = Entries(Kind.WINDOW, "")
    of_interval: dict[str, Any] = {"interval": grant.interval_id, "others_max": query.others_max}
    lo = 0
    while lo < len(query.keys):
        hi = lo + SPANS
        while hi < len(query.keys) and query.keys[hi] == query.keys[hi - 1]:
            hi += 1  # the spans of a key are asked for together, so that no row is read twice
        spans = {"keys": Texts(query.keys[lo:hi]), "lows": Bigints(query.starts[lo:hi])}
        spans["highs"] = Bigints(query.ends[lo:hi])
        for subkey, key, key_hash, fire_at, value in await all_rows(
            connection, statement("load_sessions"), of_interval | spans
        ):
            found.add(key.encode(), key_hash, subkey, value.encode(), fire_at)
        progressed()
        lo = hi
    return found


class StoredSessions(NamedTuple):
    """What a new owner knows of the sessions of an interval that it leaves in the store.

    Attributes:
        closed_ends: when those end that may have fired; None without any.
        unfired_from: when the first of the others ends, or before; INSTANT_MAX without any.
    """

    closed_ends: SpanOfEnds | None
    unfired_from: Instant = INSTANT_MAX


async def left(
    connection: Connection, grant: Grant, fired_by: int, ended_by: int | None, rows_max: int
) -> StoredSessions | None:
    """Return what is known of the folded sessions of an interval; None if all are to be read.

    Args:
        connection: a connection.
        grant: the grant.
        fired_by: the sessions that end by it have fired.
        ended_by: no other has fired that ends after it; None if those that have not fired are read.
        rows_max: up to this number of rows, all are read.
    """
    of_interval = {"interval": grant.interval_id}
    ((count,),) = await all_rows(connection, statement("count_windows"), of_interval | {"rows_max": rows_max})
    if count <= rows_max:
        return None
    upto = fired_by if ended_by is None else ended_by
    ((first, last),) = await all_rows(connection, statement("read_closed_ends"), of_interval | {"ended_by": upto})
    ends = None if first is None else SpanOfEnds(first, last)
    if ended_by is None:
        return None if ends is None else StoredSessions(ends)
    after = SessionPlace(fired_by, INSTANT_MAX, LAST_HASH)
    unfired = await _load_ended(connection, grant, EndedSessions(INSTANT_MAX, after, 1, unfired=True))
    return StoredSessions(ends, Instant(last_place(unfired).end) if len(unfired) else INSTANT_MAX)


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
