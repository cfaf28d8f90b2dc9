"""Upgrading stored state: folds the unfolded deltas of a computation, then rewrites its cells key by key.

This happens in the transaction that raises the version, whose locks keep every other writer out. A deployment that is
killed, or a function that raises at the last key, has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from millpy.model.checkpoint import Grant
from millpy.model.deployment import StateRow, Upgrade
from millpy.store.postgres.arrays import Bigints, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.fold import PIECE_BYTES, FoldPiece
from millpy.store.postgres.statements import statement

progress = logging.getLogger("millpy.observability.status_line")
ROWS = 2_000
"""Number of rows that are read at a time, and about the number that are written at a time."""


async def upgrade(connection: Connection, graph_id: int, upgrades: Mapping[str, Upgrade]) -> None:
    """Rewrite the state of these computations by the user's functions. The caller has locked the headers.

    Raises:
        GraphError: a function fails.
    """
    for computation, function in upgrades.items():
        named = {"graph_id": graph_id, "computation": computation}
        for interval_id, sequencer, bundle in await all_rows(connection, statement("read_headers_of"), named):
            progress.debug("folding the state of %s", computation)
            await fold(connection, interval_id, sequencer)
            await _rewrite(connection, interval_id, bundle, computation, function)


async def fold(connection: Connection, interval_id: int, sequencer: int) -> None:
    """Fold all deltas of an interval into rows, in the caller's transaction."""
    piece = FoldPiece(Grant(interval_id, sequencer))
    while await piece.choose(connection, PIECE_BYTES):
        await piece.fold(connection)


async def _rewrite(connection: Connection, interval_id: int, bundle: int, computation: str, function: Upgrade) -> None:
    """Rewrite the state of an interval, read through a cursor that does not see the rewritten rows."""
    of_interval = {"interval": interval_id}
    done = 0
    async with connection.cursor("upgrade") as cursor:
        await cursor.execute(statement("read_state"), of_interval)
        rest: list[Any] = []
        while rows := await cursor.fetchmany(ROWS):
            rest += rows
            last = rest[-1][:2]
            whole = [row for row in rest if row[:2] != last]
            rest = [row for row in rest if row[:2] == last]
            await _write(connection, interval_id, bundle, whole, function)
            done += len(whole)
            progress.debug("upgrading the state of %s: %s rows of interval %s", computation, f"{done:,}", interval_id)
        await _write(connection, interval_id, bundle, rest, function)


async def _write(connection: Connection, interval_id: int, bundle: int, rows: Sequence[Any], function: Upgrade) -> None:
    """Replace the stored rows of some keys, which `rows` contains completely, by the results of `function`."""
    if not rows:
        return
    keys: list[tuple[int, str]] = []
    made: list[tuple[int, str, StateRow]] = []
    for (key_hash, key), of_key in groupby(rows, key=lambda row: (row[0], row[1])):
        stored = [(namespace, subkey, value.encode()) for _, _, namespace, subkey, value in of_key]
        keys.append((key_hash, key))
        made += [(key_hash, key, row) for row in function(key.encode(), stored)]
    gone: dict[str, Any] = {
        "interval": interval_id,
        "key_hashes": Bigints([key_hash for key_hash, _ in keys]),
        "keys": Texts([key for _, key in keys]),
    }
    await connection.execute(statement("delete_state"), gone)
    parameters: dict[str, Any] = {
        "interval": interval_id,
        "bundle": bundle,
        "key_hashes": Bigints([key_hash for key_hash, _, _ in made]),
        "keys": Texts([key for _, key, _ in made]),
        "namespaces": Texts([row[0] for _, _, row in made]),
        "subkeys": Texts([row[1] for _, _, row in made]),
        "documents": Texts([row[2].decode() for _, _, row in made]),
    }
    await connection.execute(statement("insert_state"), parameters)
