"""How far a table was read: its first copy, and then its changes.

The copy goes along the primary key, in a transaction that sees one snapshot. When that is interrupted, the next owner
continues behind the last committed key with a new snapshot. The slot exists before the first snapshot, so that each
change is either seen by the snapshot under which its row was copied, or comes from the slot:

    a change is dropped if the snapshot of its row's part of the copy shows its transaction (`CopiedPart.shows`)

That is decided by ids of transactions, not by positions of the log, because a commit is in the log before snapshots
show it. From `until` on, no snapshot shows a transaction, and the parts are forgotten.
"""

from __future__ import annotations

import msgspec

_HALF = 1 << 31


class CopiedPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the first copy.

    Attributes:
        snapshot: the snapshot that it shows, `xmin:xmax:xid,…`.
        upto: the last key that was copied, as text; None if the copy has reached the end of the table.
    """

    snapshot: str
    upto: tuple[str, ...] | None = None

    def shows(self, xid: int) -> bool:
        """Tell whether the snapshot shows a committed transaction, by its 32-bit id."""
        xmin, xmax, xids = self.snapshot.split(":")
        top = int(xmax)
        # The lower half of the id is known: the transaction is within 2^31 of the snapshot.
        distance = (xid - top) & 0xFFFFFFFF
        whole = top + distance - (1 << 32 if distance >= _HALF else 0)
        if whole < int(xmin):
            return True
        return whole < top and str(whole) not in xids.split(",")


class TablePosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read.

    Attributes:
        copied: whether the first copy has ended, or was not wanted.
        copies: its parts, in the order of the key; the last one may go on.
        until: the position of the log before which a snapshot of the copy may show a transaction.
        lsn: the position of the log up to which changes were read: at first where the slot begins, then that of a
            commit. The slot never hears of more than what is committed here, so one that is further lacks changes.
        done: the number of changes that were read of the transaction that commits there.
        commit: the position of the last commit of which a change was read; 0 for none.
        committed_at: the time of that commit, in µs, by which it is known again.
        key: the order of the copy (`TableFacts.order`), until it is forgotten.
        copied_at: when the copy began, in µs, until it is forgotten.
        published: what was read, as `TableFacts.published`.
    """

    copied: bool = False
    copies: tuple[CopiedPart, ...] = ()
    until: int = 0
    lsn: int = 0
    done: int = 0
    commit: int = 0
    committed_at: int = 0
    key: tuple[str, ...] = ()
    copied_at: int = 0
    published: str = ""

    def has(self, lsn: int, place: int) -> bool:
        """Tell whether a change was read: the `place`th, from 1, of the transaction that commits at `lsn`."""
        return (lsn, place) <= (self.lsn, self.done)

    def advance(self, lsn: int, place: int, committed_at: int) -> TablePosition:
        """Return the position behind a change: the `place`th of the transaction that commits at `lsn`."""
        return msgspec.structs.replace(self._move(lsn), done=place, commit=lsn, committed_at=committed_at)

    def reach(self, lsn: int) -> TablePosition:
        """Return the position behind a part of the log that has no changes of the table."""
        return msgspec.structs.replace(self._move(lsn), done=0)

    def _move(self, lsn: int) -> TablePosition:
        if self.copies and lsn >= self.until:
            return TablePosition(
                copied=True, lsn=lsn, commit=self.commit, committed_at=self.committed_at, published=self.published
            )
        return msgspec.structs.replace(self, lsn=lsn)
