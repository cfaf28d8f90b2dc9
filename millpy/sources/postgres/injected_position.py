"""What was read of an injected stream: exact for transactions that commit in any order.

Numbers are given when records are injected, and transactions commit later, in another order. So a position is the
greatest number that was read, and the transactions that were open in the snapshot of that read. Unread is

    a record with a greater number, or
    a record of one of these transactions, which has committed since, or has not yet

A snapshot `xmin:xmax:xid,…` names the open transactions below its xmax, the id behind the last transaction that had
ended. Others with greater ids may have been running, and one of them may have the smaller number. So all ids from xmax
to one that is given after the snapshot count as open. `millpy.inject` gets its transaction's id before it takes a
number: a transaction that has no id at the snapshot takes a greater number than any that the snapshot shows, and needs
no entry.

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

XidRange = tuple[int, int]
"""Ids of transactions: the first, and the one behind the last."""


class InjectedPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read.

    Attributes:
        last: the greatest number that was read.
        open: transactions that were open at the last read.
        rest: transactions that have ended, of which records between `after` and `last` are unread.
        after: the number up to which records of `rest` were read.
    """

    last: int
    open: tuple[XidRange, ...] = ()
    rest: tuple[XidRange, ...] = ()
    after: int = 0

    def advance(self, end: int, open_xids: Sequence[XidRange], *, whole: bool) -> InjectedPosition:
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
        return InjectedPosition(self.last, tuple(open_xids), subtract(self.open, open_xids), end)

    def without_rest(self) -> InjectedPosition:
        """Return the position when nothing of `rest` is unread."""
        return InjectedPosition(self.last, self.open)

    def parameters(self) -> dict[str, int | str]:
        """Return the position as parameters of a statement."""
        return {
            "last": self.last,
            "open": multirange(self.open),
            "rest": multirange(self.rest),
            "after": self.after,
        }


def open_in(snapshot: str, until: int) -> tuple[XidRange, ...]:
    """Return the transactions that may have been open in a snapshot.

    Args:
        snapshot: `xmin:xmax:xid,…`.
        until: an id that was given after the snapshot was taken.
    """
    _, xmax, xids = snapshot.split(":")
    named = [(int(xid), int(xid) + 1) for xid in xids.split(",") if xid]
    return (*named, (int(xmax), until)) if int(xmax) < until else tuple(named)


def subtract(ranges: Sequence[XidRange], others: Sequence[XidRange]) -> tuple[XidRange, ...]:
    """Return the ids of ranges that others do not have; both are in order, and theirs do not overlap."""
    left: list[XidRange] = []
    for first, behind in ranges:
        begin = first
        for other_first, other_behind in others:
            if begin < other_first < behind:
                left.append((begin, other_first))
            if other_first < behind:
                begin = max(begin, other_behind)
        if begin < behind:
            left.append((begin, behind))
    return tuple(left)


def multirange(ranges: Sequence[XidRange]) -> str:
    """Return ranges as PostgreSQL writes an int8multirange."""
    return "{" + ",".join(f"[{first},{behind})" for first, behind in ranges) + "}"


def from_multirange(text: str) -> tuple[XidRange, ...]:
    """Return the ranges of an int8multirange."""
    pairs = text[2:-2].split("),[") if len(text) > 2 else []
    return tuple((int(first), int(behind)) for first, behind in (pair.split(",") for pair in pairs))
