"""Messages that are committed and that the broker may deliver again. Pure: no I/O, no clock.

Between a commit and the moment the broker has processed its PUBACKs, a killed worker or a lost connection brings
committed messages back, marked DUP. `Dedupe` knows their records as long as they are within its horizon, and the
horizon may have passed meanwhile: the worker was down for longer, or a history is replayed and one bundle spans more.
So each commit of a source with `Dedupe` also says which messages it took, as a note beside the position; a message that
is marked DUP and is one of them is acknowledged and passed over. One is known by its packet id too, which the broker
keeps until it is acknowledged: the next message with the same bytes, if on its way when we died, is another.

    taken      a bundle's digests go into its commit, as a note of their own
    committed  from now on a redelivery is none of our business; before that, it waits
    proven     the broker has answered a ping that was sent behind the PUBACKs: the next commit forgets the note

What another connection, or another worker, has left behind is forgotten once the backlog of this one is drained and
acknowledged. Without `Dedupe`, two equal messages may be two records, and a redelivery cannot be told from the second.

Bound: as many messages as the broker sends ahead of acknowledgements, and a bundle; the oldest are forgotten first.
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
class Sent:
    """The messages of one bundle.

    Attributes:
        name: of its note.
        digests: concatenated.
        by: stands for the connection that delivered it, and keeps nothing of it; None when that was another worker's.
        ping: the ping behind its acknowledgements; None before the commit.
    """

    name: str
    digests: bytes
    by: object | None
    ping: int | None = None
    committed: bool = False


class Redeliveries:
    """The messages of one source partition that may come again.

    Args:
        notes: as the last commit left them; the next one forgets those that cannot be read.
        messages_max: how many are remembered.
    """

    def __init__(self, notes: Mapping[str, bytes], messages_max: int) -> None:
        self._bytes_max = messages_max * DIGEST_BYTES
        self._sent: deque[Sent] = deque()
        self._next = 0
        self._stale: list[str] = []
        self._known: dict[bytes, bool] | None = None
        for name, note in sorted(notes.items(), key=lambda each: (len(each[0]), each[0])):
            try:
                number, digests = int(name.removeprefix(_PREFIX)), msgspec.json.decode(note, type=bytes)
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("note %r of an mqtt source cannot be read (%s): the ids decide", name[:100], error)
                self._stale.append(name)
                continue
            self._sent.append(Sent(name, digests, None, committed=True))
            self._next = max(self._next, number + 1)

    def recognize(self, digest: bytes) -> bool | None:
        """Whether a message that comes again is committed; None while its bundle is on the way there."""
        if self._known is None:
            self._known = {}
            for sent in self._sent:
                for at in range(0, len(sent.digests), DIGEST_BYTES):
                    one = sent.digests[at : at + DIGEST_BYTES]
                    self._known[one] = sent.committed or self._known.get(one, False)
        committed = self._known.get(digest)
        return False if committed is None else committed or None

    def __len__(self) -> int:
        """How many messages are remembered."""
        return self._bytes() // DIGEST_BYTES

    def take(self, digests: Sequence[bytes], by: object) -> tuple[Sent, dict[str, bytes | None]]:
        """Remember the messages of a bundle that was just taken.

        Returns:
            What to mark committed, and the notes that belong into its commit.
        """
        sent = Sent(f"{_PREFIX}{self._next}", b"".join(digests), by)
        self._next += 1
        while self._sent and self._sent[0].committed and self._bytes() > self._bytes_max:
            self._forget(self._sent.popleft())
        self._sent.append(sent)
        self._known = None
        notes: dict[str, bytes | None] = dict.fromkeys(self._stale)
        self._stale = []
        notes[sent.name] = msgspec.json.encode(sent.digests)
        return sent, notes

    def commit(self, sent: Sent) -> None:
        """Note that it is committed."""
        sent.committed = True
        self._known = None

    def prove(self, by: object, answered: Callable[[int], bool], *, drained: bool) -> None:
        """Forget what cannot come again.

        Args:
            by: the connection that stands.
            answered: whether the broker has answered a ping of this connection.
            drained: whether it has brought all that could come again from before it, and has processed our answer.
        """
        kept: deque[Sent] = deque()
        for sent in self._sent:
            here = sent.by is by
            over = answered(sent.ping) if here and sent.ping is not None else drained and not here
            if sent.committed and over:
                self._forget(sent)
            else:
                kept.append(sent)
        self._sent = kept

    def _forget(self, sent: Sent) -> None:
        self._stale.append(sent.name)
        self._known = None

    def _bytes(self) -> int:
        return sum(len(sent.digests) for sent in self._sent)
