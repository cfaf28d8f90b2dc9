"""Folding: delta documents into rows, off the hot path, in bounded pieces on a separate connection.

A piece is one transaction. It writes the rows of a contiguous range of documents after the folded bundle, newest per
key; then it checks the sequencer, and advances the folded bundle to the last one whose documents are all folded. So
the header is locked for an instant only, a stale owner's piece is undone as a whole, and a crash between pieces loses
nothing: until the last document of a bundle is folded all of them count, and agree with the rows already written.
A deployment that changes rows of state waits for the piece before it locks a header, and the next piece waits for it.

The commands of a piece go one by one: to the server, a process that is frozen within a pipeline does not idle in its
transaction, and no timeout would release the header. A commit may be a pipeline, because its backend is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Grant
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement

PIECE_BYTES = 8_000_000
_BEGIN = b"""
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL synchronous_commit = off;
SET LOCAL enable_seqscan = off;
"""
"""A piece that is lost to a crash is only repeated, so it need not be durable. The planner does not know the size of a
document; one index probe per key suits any size."""


class FoldPiece:
    """A position in the deltas of an interval, from which it chooses and folds piece after piece.

    Attributes:
        folded: the last bundle whose documents were all folded when the piece was chosen.
        size: bytes of the chosen piece.
        parameters: those of the statements that fold it.
    """

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._after = (0, -1)
        self.folded = 0
        self.size = 0
        self.parameters: dict[str, Any] = {}

    @property
    def begins_a_bundle(self) -> bool:
        """Whether all documents before this piece belong to completely folded bundles."""
        return self._after[0] <= self.folded

    async def choose(self, connection: Connection, bytes_max: int) -> bool:
        """Choose about bytes_max of the next documents. Return False when none is left. Raises StaleSequencerError."""
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
        """Fold the piece into rows, within a transaction."""
        await connection.execute(statement("fold_piece"), self.parameters)
        await connection.execute(statement("end_fold"), self.parameters)
        self._after = self.parameters["upto"], self.parameters["upto_part"]


async def fold(connection: Connection, grant: Grant, bytes_max: int, progressed: Callable[[], None]) -> int:
    """Fold about bytes_max of documents; see `Store.fold`."""
    done = 0
    piece = FoldPiece(grant)
    while await piece.choose(connection, min(PIECE_BYTES, max(1, bytes_max - done))):
        if done >= bytes_max and piece.begins_a_bundle:
            break
        await connection.execute(_BEGIN)
        await piece.fold(connection)
        await connection.execute(b"COMMIT")
        done += piece.size
        progressed()
    return int(piece.folded)
