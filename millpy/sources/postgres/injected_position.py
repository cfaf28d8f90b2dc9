"""What was read of an injected stream: exact for transactions that commit in any order.

Numbers are given when records are injected, and transactions commit later, in another order. So a position is the
greatest number that was read, and the transactions that were open in the snapshot of that read. Unread is

    a record with a greater number, or
    a record of one of these transactions, which has committed since, or has not yet

`millpy.inject` gets its transaction's id before it takes a number. A transaction that has no id at the snapshot
therefore takes a greater number than any that the snapshot shows, and needs no entry.

Records are read in the order of their numbers. If B waited for A to commit, because both change a row, and injects
after that, A's number is smaller, and every snapshot that shows B shows A: A comes before B. Nothing waits for an open
transaction.

A page that is cut may end at a smaller number than the greatest one read before: it then has records of transactions
that committed late, and `rest` keeps those of which only the records up to `after` were read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class InjectedPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read.

    Attributes:
        last: the greatest number that was read.
        open: transactions that were open at the last read.
        rest: transactions of which records beyond `after` are unread.
        after: the number up to which records of `rest` were read.
    """

    last: int
    open: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    after: int = 0

    def advance(self, numbers: Sequence[int], open_xids: Sequence[int], *, whole: bool) -> InjectedPosition:
        """Return the position behind a page.

        Args:
            numbers: its records, ascending; at least one.
            open_xids: the transactions that were open in its snapshot.
            whole: whether the page has all unread records that its snapshot shows.
        """
        end = numbers[-1]
        if whole or end >= self.last:
            return InjectedPosition(max(self.last, end), tuple(open_xids))
        return InjectedPosition(self.last, tuple(open_xids), tuple(sorted({*self.open, *self.rest})), end)

    def parameters(self) -> dict[str, int | str]:
        """Return the position as parameters of a statement."""
        return {
            "last": self.last,
            "open": ",".join(map(str, self.open)),
            "rest": ",".join(map(str, self.rest)),
            "after": self.after,
        }


def open_in(snapshot: str) -> tuple[int, ...]:
    """Return the transactions that a snapshot, `xmin:xmax:xid,…`, shows as open."""
    xids = snapshot.rpartition(":")[2]
    return tuple(map(int, xids.split(","))) if xids else ()
