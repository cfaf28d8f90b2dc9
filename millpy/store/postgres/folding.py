"""Folding: delta documents into rows, off the hot path, in bounded pieces on its own connection.

A piece is one transaction: the rows of a contiguous range of documents after the folded bundle, newest per key, then
the sequencer check, which advances the folded bundle to the last one of which all documents are folded. So the header
is locked for an instant only, a stale owner's piece is undone whole, and a crash between pieces loses nothing: until
the last document of a bundle is folded all of them count, and say what rows of them say already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Grant
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement

PIECE_BYTES = 8_000_000
_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"


class Piece:
    """The documents that are folded next; one after the other."""

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._after = (0, -1)
        self.folded = 0
        self.size = 0
        self.parameters: dict[str, Any] = {}

    @property
    def begins_a_bundle(self) -> bool:
        """Whether no document before it belongs to a bundle that is not all folded."""
        return self._after[0] <= self.folded

    async def choose(self, connection: Connection, bytes_max: int) -> bool:
        """Go to the next about bytes_max of documents; False when there are none. Raises StaleSequencerError."""
        interval_id, (after, after_part) = self._grant.interval_id, self._after
        of_grant = {"interval": interval_id, "sequencer": self._grant.sequencer}
        place = of_grant | {"after": after, "after_part": after_part}
        found = await all_rows(connection, statement("choose_piece"), place | {"piece_bytes": bytes_max})
        if not found:
            raise StaleSequencerError(f"stale grants {[interval_id]}", stale=[interval_id])
        self.folded, upto, upto_part, complete, size, slots = found[0]
        if upto is None:
            return False
        self.size = int(size)
        upto_place = {"upto": upto, "upto_part": upto_part, "complete": complete}
        self.parameters = {**place, **upto_place, "folded": self.folded, "slots": slots}
        return True

    async def fold(self, connection: Connection) -> None:
        """Bring it into rows, within a transaction."""
        await connection.execute(statement("fold_piece"), self.parameters)
        await connection.execute(statement("end_fold"), self.parameters)
        self._after = self.parameters["upto"], self.parameters["upto_part"]


async def fold(connection: Connection, grant: Grant, bytes_max: int, progressed: Callable[[], None]) -> int:
    """Fold about bytes_max of documents; see `Store.fold`."""
    done = 0
    piece = Piece(grant)
    while await piece.choose(connection, min(PIECE_BYTES, max(1, bytes_max - done))):
        if done >= bytes_max and piece.begins_a_bundle:
            break
        async with connection.pipeline():
            # Losing a piece to a crash costs only its repetition.
            # The planner knows nothing of a document's size; an index probe a key is right for any.
            for query in (_BEGIN, b"SET LOCAL synchronous_commit = off", b"SET LOCAL enable_seqscan = off"):
                await connection.execute(query)
            await piece.fold(connection)
            await connection.execute(b"COMMIT")
        done += piece.size
        progressed()
    return int(piece.folded)
