"""Which events are new to those who look again and again, whatever the order in which their transactions commit.

The id of an event is drawn before its transaction commits, so an event may appear below others that have been seen.
Each look therefore begins above the *settled* id: all transactions that drew an id up to it have ended, and what they
wrote has been seen. A snapshot says which have ended, for the whole server: one that stays open keeps the settled id,
at most SEEN_MAX events behind the newest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from millpy.admin.queries import Admin, Row

SEEN_MAX = 2_000
"""Events that are looked at again at most."""
_OLDEST_OPEN = "SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS xid"
_NEXT = "SELECT CAST(CAST(pg_current_xact_id() AS text) AS bigint) AS xid"
"""The xmax of a snapshot would not do: transactions with greater numbers may run already."""
_IDS = "SELECT event_id FROM millpy.events WHERE event_id > :settled ORDER BY event_id DESC LIMIT :seen_max"
_EVENTS = "SELECT * FROM millpy.events WHERE event_id = ANY (CAST(:ids AS bigint[])) ORDER BY event_id"


class NewEvents:
    """Reads each event once, except those from before the first look.

    Attributes:
        settled: no event with this id or a lower one will appear any more.
    """

    def __init__(self) -> None:
        self.settled = 0
        self._seen: frozenset[int] | None = None
        self._newest = 0
        self._passing: tuple[frozenset[int], int] = (frozenset(), 0)
        self._looks: deque[tuple[int, int]] = deque()
        """Ids that had been drawn, and the next transaction's number at a time after that."""

    def read(self, admin: Admin, rows_max: int) -> list[Row]:
        """Return the newest `rows_max` events that have appeared since the last `passed`, oldest first."""
        oldest_open = admin.ask(_OLDEST_OPEN)[0]["xid"]  # before the ids are read: what has ended is among them
        found = [row["event_id"] for row in admin.ask(_IDS, settled=self.settled, seen_max=SEEN_MAX)]
        if self._newest > (self._looks[-1][0] if self._looks else self.settled):
            self._looks.append((self._newest, admin.ask(_NEXT)[0]["xid"]))
        new = [] if self._seen is None else [number for number in found if number not in self._seen][:rows_max]
        events: list[Row] = list(admin.ask(_EVENTS, ids=new)) if new else []
        self._passing = frozenset(found), oldest_open
        return events

    def passed(self) -> None:
        """Take what was read last as seen: an error before that must not skip it."""
        seen, oldest_open = self._passing
        if len(seen) == SEEN_MAX:
            self.settled = max(self.settled, min(seen) - 1)
        while self._looks and (self._looks[0][1] <= oldest_open or self._looks[0][0] <= self.settled):
            self.settled = max(self.settled, self._looks.popleft()[0])
        self._newest = max(self._newest, max(seen, default=0))
        self._seen = frozenset(number for number in seen if number > self.settled)


def events_after(admin: Admin, number: int, rows_max: int) -> Sequence[Row]:
    """Return the newest `rows_max` events with a higher id, oldest first."""
    ids = [row["event_id"] for row in admin.ask(_IDS, settled=number, seen_max=rows_max)]
    return admin.ask(_EVENTS, ids=ids) if ids else []
