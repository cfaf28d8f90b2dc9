"""Faults of a `MemoryDatabase`. Tests inject them one by one; none happens by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from millpy.errors import CommitUnknownError, MillError, StoreUnavailableError

if TYPE_CHECKING:
    from millpy.store.memory.database import MemoryDatabase, Transaction
    from millpy.store.memory.store import MemoryStore

Landing = Literal["before", "later", "delayed", "never"]


class Faults:
    """The faults that the next operations meet.

    A commit that loses its answer raises CommitUnknownError in the client. It lands

        before    it has already committed, and only the answer is lost
        later     its backend has passed the fence, and holds its row locks until the test lands or drops it; a takeover
                  waits for it
        delayed   it is in transit and holds no lock; when it lands, the fence checks it like any other commit
        never     the backend noticed the lost connection and rolled back

    `store` restricts a fault to one worker's connection.
    """

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._losses: list[tuple[Landing, MemoryStore | None]] = []
        self._outages: list[MemoryStore | None] = []
        self._lost: list[tuple[Landing, Transaction]] = []

    def lose_answer_of_next_commit(self, lands: Landing, *, store: MemoryStore | None = None) -> None:
        """Make the next commit raise CommitUnknownError, and land as `lands` says."""
        self._losses.append((lands, store))

    def lose_connections(self, times: int = 1, *, store: MemoryStore | None = None) -> None:
        """Make the next `times` operations raise StoreUnavailableError and change nothing."""
        self._outages.extend([store] * times)

    def land_lost_commits(self) -> int:
        """Let every lost commit end now. Return the number of those that were committed.

        A commit that the fence refuses is gone. A delayed commit that finds a row locked stays lost.
        """
        landed = 0
        lost, self._lost = self._lost, []
        for landing, transaction in lost:
            if not self._database.try_lock(transaction):
                self._lost.append((landing, transaction))
                continue
            try:
                transaction.land()
                landed += 1
            except MillError:
                # The client is gone, so it cannot receive the error; the transaction is rolled back.
                pass
            finally:
                self._database.unlock(transaction)
        return landed

    def drop_lost_commits(self) -> int:
        """Roll back every lost commit. Return their number."""
        lost, self._lost = self._lost, []
        for _, transaction in lost:
            self._database.unlock(transaction)
        return len(lost)

    def forget(self) -> None:
        """Cancel all faults that have not happened yet."""
        self._losses.clear()
        self._outages.clear()

    def meet_outage(self, store: MemoryStore) -> None:
        """Raise StoreUnavailableError if this operation is to lose its connection. Every operation calls this."""
        for place, only in enumerate(self._outages):
            if only is None or only is store:
                del self._outages[place]
                raise StoreUnavailableError("the connection to the database is lost")

    def take_loss(self, store: MemoryStore) -> Landing | None:
        """Return how a commit loses its answer; None when it does not. Every commit calls this."""
        for place, (landing, only) in enumerate(self._losses):
            if only is None or only is store:
                del self._losses[place]
                return landing
        return None

    def lose(self, landing: Landing, transaction: Transaction) -> CommitUnknownError:
        """Keep a transaction that may still land, with its locks. Return the error for the client."""
        if landing in ("later", "delayed"):
            transaction.committing = True
            self._lost.append((landing, transaction))
        return CommitUnknownError("the connection was lost around COMMIT")
