"""Recognition of committed messages that the broker delivers again. Pure: no I/O, no clock.

Until the broker has processed the PUBACKs of a commit, a killed worker or a lost connection brings committed messages
back, marked DUP. `Dedupe` recognizes their records within its horizon, but the horizon may have passed meanwhile: the
worker was down for longer, or a replayed history makes one bundle span more. So each commit of a source with `Dedupe`
also stores the digests of its messages, as a note beside the position. A message that is marked DUP and has a stored
digest is acknowledged and skipped. The digest covers the packet id, which the broker keeps until the message is
acknowledged, so a later message with the same bytes that was in flight when the worker died counts as another message.

    taken      the digests of a bundle go into its commit, as a separate note
    committed  a redelivery is skipped; before the commit, it waits
    proven     the broker has answered a ping that was sent behind the PUBACKs: the next commit deletes the note

Notes left by another connection or another worker are deleted once the backlog of this connection is drained and
acknowledged. Without `Dedupe`, two equal messages may be two records, so a redelivery cannot be told from the second.

Bound: the messages that the broker sends ahead of acknowledgements, plus one bundle; the oldest are forgotten first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
_PREFIX = "sent:"


@dataclass(slots=True, eq=False)
class SentBundle:
    """The messages of one bundle.

    Attributes:
        name: the name of the bundle's note.
        digests: the digests of its messages, concatenated.
        by: an opaque token for the connection that delivered the bundle; None for another worker's connection.
        ping: the ping sent behind its acknowledgements; None before the commit.
        committed: whether the commit of the bundle is known to have succeeded.
    """

    name: str
    digests: bytes
    by: object | None
    ping: int | None = None
    committed: bool = False


class Redeliveries:
    """The messages of one source partition that the broker may deliver again.

    Args:
        notes: the notes that the last commit left; the next commit deletes the unreadable ones.
        messages_max: the largest number of messages to remember.
    """

    def __init__(self, notes: Mapping[str, bytes], messages_max: int) -> None:
        self._bytes_max = messages_max * DIGEST_BYTES
        self._sent: deque[SentBundle] = deque()
        self._next = 0
        self._stale: list[str] = []
        self._known: dict[bytes, bool] | None = None
        for name, note in sorted(notes.items(), key=lambda each: (len(each[0]), each[0])):
            try:
                number, digests = int(name.removeprefix(_PREFIX)), msgspec.json.decode(note, type=bytes)
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("cannot read note %r of an mqtt source (%s): the dedupe ids decide", name[:100], error)
                self._stale.append(name)
                continue
            self._sent.append(SentBundle(name, digests, None, committed=True))
            self._next = max(self._next, number + 1)

    def recognize(self, digest: bytes) -> bool | None:
        """Tell whether a redelivered message is committed; return None while the commit of its bundle is pending."""
        if self._known is None:
            self._known = {}
            for sent in self._sent:
                for at in range(0, len(sent.digests), DIGEST_BYTES):
                    one = sent.digests[at : at + DIGEST_BYTES]
                    self._known[one] = sent.committed or self._known.get(one, False)
        committed = self._known.get(digest)
        return False if committed is None else committed or None

    def __len__(self) -> int:
        """Return the number of remembered messages."""
        return self._bytes() // DIGEST_BYTES

    def take(self, digests: Sequence[bytes], by: object) -> tuple[SentBundle, dict[str, bytes | None]]:
        """Remember the messages of a bundle that was just taken.

        Returns:
            The entry to mark committed later, and the notes to write in the bundle's commit.
        """
        sent = SentBundle(f"{_PREFIX}{self._next}", b"".join(digests), by)
        self._next += 1
        while self._sent and self._sent[0].committed and self._bytes() > self._bytes_max:
            self._forget(self._sent.popleft())
        self._sent.append(sent)
        self._known = None
        notes: dict[str, bytes | None] = dict.fromkeys(self._stale)
        self._stale = []
        notes[sent.name] = msgspec.json.encode(sent.digests)
        return sent, notes

    def commit(self, sent: SentBundle) -> None:
        """Mark the messages of a bundle as committed."""
        sent.committed = True
        self._known = None

    def prove(self, by: object, answered: Callable[[int], bool], *, drained: bool) -> None:
        """Forget the messages that the broker can no longer deliver again.

        Args:
            by: the token of the current connection.
            answered: tells whether the broker has answered a ping of this connection.
            drained: whether this connection has delivered every redelivery from before it, and the broker has
                processed our acknowledgements of them.
        """
        kept: deque[SentBundle] = deque()
        for sent in self._sent:
            here = sent.by is by
            over = answered(sent.ping) if here and sent.ping is not None else drained and not here
            if sent.committed and over:
                self._forget(sent)
            else:
                kept.append(sent)
        self._sent = kept

    def _forget(self, sent: SentBundle) -> None:
        self._stale.append(sent.name)
        self._known = None

    def _bytes(self) -> int:
        return sum(len(sent.digests) for sent in self._sent)
