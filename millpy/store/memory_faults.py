"""Faults of a `MemoryDatabase`, asked for by tests one by one; nothing happens by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from millpy.errors import CommitUnknownError, MillError, StoreUnavailableError

if TYPE_CHECKING:
    from millpy.store.memory import MemoryStore
    from millpy.store.memory_database import MemoryDatabase, Transaction

Landing = Literal["before", "later", "delayed", "never"]


class Faults:
    """What goes wrong next.

    A commit whose answer is lost raises CommitUnknownError in the client, and lands

        before    it has happened already; only the answer is lost
        later     its backend has passed the fence and holds its row locks until the test lands or drops it:
                  a takeover waits for it
        delayed   it is still on its way and holds no lock; when it lands it meets the fence like any other
        never     the backend noticed the lost connection and rolled back

    `store` restricts a fault to one worker's connection.
    """

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._losses: list[tuple[Landing, MemoryStore | None]] = []
        self._outages: list[MemoryStore | None] = []
        self._lost: list[tuple[Landing, Transaction]] = []

    def lose_answer_of_next_commit(self, lands: Landing, *, store: MemoryStore | None = None) -> None:
        """The next commit raises CommitUnknownError."""
        self._losses.append((lands, store))

    def lose_connections(self, times: int = 1, *, store: MemoryStore | None = None) -> None:
        """The next operations raise StoreUnavailableError and change nothing."""
        self._outages.extend([store] * times)

    @property
    def lost_commits(self) -> int:
        """Commits with a lost answer that have neither landed nor been dropped."""
        return len(self._lost)

    def land_lost_commits(self) -> int:
        """Let every lost commit reach its end now; how many changed something.

        Those that the fence refuses are gone. A delayed one that finds a row locked stays lost.
        """
        landed = 0
        lost, self._lost = self._lost, []
        for landing, transaction in lost:
            if not self._database.lock_now(transaction):
                self._lost.append((landing, transaction))
                continue
            try:
                transaction.land()
                landed += 1
            except MillError:
                # Nobody is connected to hear why; the transaction is rolled back.
                pass
            finally:
                self._database.unlock(transaction)
        return landed

    def drop_lost_commits(self) -> int:
        """Roll every lost commit back; how many there were."""
        lost, self._lost = self._lost, []
        for _, transaction in lost:
            self._database.unlock(transaction)
        return len(lost)

    def forget(self) -> None:
        """Nothing more of what was asked for goes wrong."""
        self._losses.clear()
        self._outages.clear()

    def meet_outage(self, store: MemoryStore) -> None:
        """Called by each operation: raise when its connection is lost now."""
        for place, only in enumerate(self._outages):
            if only is None or only is store:
                del self._outages[place]
                raise StoreUnavailableError("the connection to the database is lost")

    def take_loss(self, store: MemoryStore) -> Landing | None:
        """Called by each commit: how its answer is lost, None when it is not."""
        for place, (landing, only) in enumerate(self._losses):
            if only is None or only is store:
                del self._losses[place]
                return landing
        return None

    def lose(self, landing: Landing, transaction: Transaction) -> CommitUnknownError:
        """Keep a transaction whose answer is lost, with its locks; the error for the client."""
        if landing in ("later", "delayed"):
            transaction.committing = True
            self._lost.append((landing, transaction))
        return CommitUnknownError("the connection was lost around COMMIT")
