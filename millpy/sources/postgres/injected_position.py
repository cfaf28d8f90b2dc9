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
that committed late. `rest` keeps those of them that the page's snapshot shows as ended, and until their records up to
the greatest number are read, nothing else is. What they have beyond it comes later, in the order of all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class InjectedPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read.

    Attributes:
        last: the greatest number that was read.
        open: transactions that were open at the last read.
        rest: transactions that have ended, of which records between `after` and `last` are unread.
        after: the number up to which records of `rest` were read.
    """

    last: int
    open: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    after: int = 0

    def advance(self, end: int, open_xids: Sequence[int], *, whole: bool) -> InjectedPosition:
        """Return the position behind a page, or behind a part of it.

        Args:
            end: the number of its last record.
            open_xids: the transactions that were open in its snapshot.
            whole: whether it has all unread records that its snapshot shows.
        """
        if self.rest:
            return self.without_rest() if whole else msgspec.structs.replace(self, after=end)
        if whole or end >= self.last:
            return InjectedPosition(max(self.last, end), tuple(open_xids))
        ended = tuple(sorted({*self.open} - {*open_xids}))
        return InjectedPosition(self.last, tuple(open_xids), ended, end)

    def without_rest(self) -> InjectedPosition:
        """Return the position when nothing of `rest` is unread."""
        return InjectedPosition(self.last, self.open)

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
