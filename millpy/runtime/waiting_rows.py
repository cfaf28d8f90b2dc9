"""WaitingRows: the committed rows of one outbox that are not delivered, and their bytes.

What a commit has just stored is handed over in memory, if there is room; everything else is read from the store in its
turn. `size` counts all of it. Of rows that an earlier owner has stored only the sum is known until they are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from millpy.errors import SinkUnavailableError
from millpy.model.checkpoint import Grant, OutboxRows, OutboxState
from millpy.sinks.messages import SinkMessages, decode, joined
from millpy.sinks.protocol import SendBound
from millpy.store.protocol import Store

HANDED_OVER_BYTES_MAX = 4_000_000
"""Bytes of committed rows that wait in memory, for each interval; others are read from the store in their turn."""


class WaitingRows:
    """The rows of one interval.

    Attributes:
        head: the position behind the last committed message.
        delivered: all messages before it are delivered, or wait because they are refused.
        size: bytes of the rows from there.
    """

    def __init__(self, store: Store, state: OutboxState) -> None:
        self._store = store
        self.head, self.delivered, self.size = state.head, state.delivered, state.size
        self._sizes: deque[tuple[int, int]] = deque()
        self._unread_to, self._unread_size, self._sized_to = state.head, state.size, state.delivered
        self._rows: deque[OutboxRows] = deque()
        self._rows_size = 0
        self._taken: SinkMessages | None = None
        self._read_to = state.delivered

    @property
    def is_empty(self) -> bool:
        """Whether there is no message to take."""
        return self._taken is None and not self._rows and self._read_to >= self.head

    def commit(self, rows: OutboxRows) -> None:
        """Take rows that a commit has stored behind the others."""
        if rows.end <= self.head:
            return  # known by a read after the commit
        if rows.position == self._read_to and self._rows_size + len(rows.payload) <= HANDED_OVER_BYTES_MAX:
            self._rows.append(rows)
            self._rows_size += len(rows.payload)
            self._read_to = rows.end
        self.add(rows.end, len(rows.payload))

    def add(self, head: int, size: int) -> None:
        """Note rows that are only in the store."""
        self.head = head
        self.size += size
        self._sizes.append((head, size))

    def rewind(self) -> None:
        """Take what is not delivered once more."""
        self._rows.clear()
        self._rows_size, self._taken, self._read_to = 0, None, self.delivered

    def deliver(self, position: int) -> None:
        """Note that all messages before a position are delivered, or wait because they are refused."""
        self.delivered = max(self.delivered, position)
        while self._sizes and self._sizes[0][0] <= self.delivered:
            self.size -= self._sizes.popleft()[1]
        if self._unread_size and self._unread_to <= self.delivered:
            self.size -= self._unread_size
            self._unread_size = 0

    async def take(self, grant: Grant, bound: SendBound, *, stable: bool = False) -> SinkMessages | None:
        """Return as many of the oldest messages as one `send` may have; None if there are none.

        With `stable` they are of one commit, because what follows may not have been there when they were sent first.

        Raises:
            SinkUnavailableError: they are gone, to another owner.
        """
        parts: list[SinkMessages] = []
        room, room_bytes = bound.records, bound.bytes
        while room > 0 and room_bytes > 0:
            taken = self._taken if self._taken is not None else await self._next_row(grant)
            if taken is None:
                break
            part = _fitting(taken, room, room_bytes)
            if not len(part):
                part = taken.part(0, 0 if parts else 1)  # a single message may be larger than the bound
            self._taken = taken.part(len(part), len(taken)) if len(part) < len(taken) else None
            if not len(part):
                break
            parts.append(part)
            if stable:
                break
            room, room_bytes = room - len(part), room_bytes - part.size
        return joined(parts) if parts else None

    async def _next_row(self, grant: Grant) -> SinkMessages | None:
        """Return the messages of the next row that are not delivered; None if there are none."""
        if not self._rows:
            if self._read_to >= self.head:
                return None
            await self._read(grant)
        rows = self._rows.popleft()
        self._rows_size -= len(rows.payload)
        messages = decode(rows)
        skipped = max(0, self.delivered - rows.position)
        return messages.part(skipped, len(messages)) if skipped else messages

    async def _read(self, grant: Grant) -> None:
        found = await self._store.read_outbox(grant, self._read_to, HANDED_OVER_BYTES_MAX)
        if not found or found[0].position > self._read_to:
            raise SinkUnavailableError(f"the messages from position {self._read_to} have left the outbox")
        self._rows.extend(found)
        self._rows_size += sum(len(rows.payload) for rows in found)
        self._read_to = found[-1].end
        self._measure(found)

    def _measure(self, found: Sequence[OutboxRows]) -> None:
        """Note the bytes of rows of an earlier owner, so that they count no longer once they are delivered."""
        measured = []
        for rows in found:
            if self._sized_to < rows.end <= self._unread_to:
                self._sized_to = rows.end
                size = min(len(rows.payload), self._unread_size)
                self._unread_size -= size
                measured.append((rows.end, size))
        at = next((place for place, (end, _) in enumerate(self._sizes) if end > self._sized_to), len(self._sizes))
        self._sizes.rotate(-at)
        self._sizes.extendleft(reversed(measured))
        self._sizes.rotate(at)


def _fitting(messages: SinkMessages, records: int, size: int) -> SinkMessages:
    """Return the first messages that fit into a number and bytes."""
    first = messages if len(messages) <= records else messages.part(0, records)
    if first.size <= size:
        return first
    return first.part(0, bisect_right(list(accumulate(first.sizes())), size))
