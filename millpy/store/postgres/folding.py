"""Folding: delta documents into rows, off the hot path, in bounded pieces on its own connection.

A piece is one transaction: the rows of a contiguous range of documents after the folded bundle, newest per key, then
the sequencer check, which advances the folded bundle. So the header is locked for an instant only, a stale owner's
piece is undone whole, and a crash between pieces loses nothing.
"""

from __future__ import annotations

from typing import Any

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Grant
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement

PIECE_BYTES = 8_000_000
_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"


async def fold(connection: Connection, grant: Grant, bytes_max: int) -> int:
    """Fold about bytes_max of documents; see `Store.fold`."""
    of_grant: dict[str, Any] = {"interval": grant.interval_id, "sequencer": grant.sequencer}
    done = 0
    while True:
        piece_bytes = max(1, min(PIECE_BYTES, bytes_max - done))
        found = await all_rows(connection, statement("choose_piece"), of_grant | {"piece_bytes": piece_bytes})
        if not found:
            raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
        folded, upto, size, slots = found[0]
        if upto is None or (done and done >= bytes_max):
            return int(folded)
        piece = of_grant | {"folded": folded, "upto": upto, "slots": slots}
        async with connection.pipeline():
            # Losing a piece to a crash costs only its repetition.
            # The planner knows nothing of a document's size; an index probe a key is right for any.
            for query in (_BEGIN, b"SET LOCAL synchronous_commit = off", b"SET LOCAL enable_seqscan = off"):
                await connection.execute(query)
            await connection.execute(statement("fold_piece"), piece)
            await connection.execute(statement("end_fold"), piece)
            await connection.execute(b"COMMIT")
        done += int(size)
