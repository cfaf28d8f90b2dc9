"""RefusedMessages: the messages of one interval that the other side refuses, and those of their keys that wait behind.

It decides when each is sent again, and when it is given up; it neither sends nor stores. For each key there is a queue
in the order of positions. Only its first message has been refused; the key *waits* until that is delivered or settled:

    refused ──► due ──► sent again ──► delivered            the next message of the key is due at once
       ▲                    │
       └──── refused ◄──────┤
                            └──► given up ──► dead letter, by a commit, or parked until an operator releases the key

What changes is in `changes` until it is stored.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from millpy.limits import Limits
from millpy.model.checkpoint import RefusedMessage
from millpy.model.dead_letter import printable
from millpy.model.time import Instant
from millpy.sinks.messages import SinkMessages, decode, joined
from millpy.sinks.protocol import SendBound
from millpy.sinks.refusal_policy import RefusalPolicy

RETRY_S_MAX = 60.0
"""The longest delay between two attempts, unless the other side asks for more."""
RETRY_AFTER_S_MAX = 600.0
"""The longest delay that the other side may ask for."""
WHY_CHARACTERS_MAX = 500


@dataclass(slots=True)
class WaitingMessage:
    """One message that was refused, or that waits behind one.

    Attributes:
        message: the message.
        key: its key as JSON text.
        size: its bytes.
        attempts, since_us, why, parked: as in `RefusedMessage`.
        retry_at: when it is due, in seconds on the monotonic clock.
        given_up: whether it is to become a dead letter.
        settling: whether it does so in a turn that is not known to be committed.
    """

    message: SinkMessages
    key: bytes
    size: int
    since_us: Instant
    attempts: int = 0
    why: str = ""
    parked: bool = False
    retry_at: float = 0.0
    given_up: bool = False
    settling: bool = False

    @property
    def position(self) -> int:
        """Its number in its interval."""
        return self.message.position

    def as_stored(self) -> RefusedMessage:
        """Return it as the store keeps it."""
        rows = self.message.encode()
        record = self.message.record_of(0)
        return RefusedMessage(rows, self.key, record, self.attempts, self.since_us, self.why, self.parked)


class RefusedMessages:
    """The refused messages of one interval, by key; soft state.

    Args:
        policy: when they are given up.
        limits: how long between attempts, and how many may wait.
        rng: makes the delays differ.
        stored: what an earlier owner has stored.

    Attributes:
        final: whether a refusal is final, because the sink stores positions: set when it has connected.
        records, size: number and bytes of all of them.
        changes: position -> what is to be stored; None for a message that is delivered.
    """

    def __init__(
        self, policy: RefusalPolicy, limits: Limits, rng: random.Random, stored: Iterable[RefusedMessage] = ()
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._rng = rng
        self._queues: dict[bytes, deque[WaitingMessage]] = {}
        self._places: dict[int, WaitingMessage] = {}
        self.final = False
        self.records = self.size = 0
        self.changes: dict[int, RefusedMessage | None] = {}
        for found in sorted(stored, key=lambda one: one.position):
            message = decode(found.message)
            waiting = WaitingMessage(message, found.key, message.size, found.since_us, found.attempts, found.why)
            waiting.parked = found.parked
            self._append(waiting)

    def __len__(self) -> int:
        return self.records

    def __contains__(self, position: int) -> bool:
        return position in self._places

    def __iter__(self) -> Iterator[WaitingMessage]:
        return iter(self._places.values())

    def is_full(self, delivered: int | None = None) -> bool:
        """Tell whether as many wait as the limits allow, so that no others are sent.

        If a delivered position is given, those behind it do not count: others of their `send` must be sent for the
        position to pass them.
        """
        records, size = self.records, self.size
        if delivered is not None:
            sizes = [waiting.size for waiting in self._places.values() if waiting.position < delivered]
            records, size = len(sizes), sum(sizes)
        return records >= self._limits.refused_records_max or size >= self._limits.refused_bytes_max

    @property
    def parked_keys(self) -> int:
        """The number of parked keys."""
        return sum(1 for queue in self._queues.values() if queue[0].parked)

    # -- what happens to them -------------------------------------------------------------------------------------

    def wait(self, message: SinkMessages, key: bytes, now_us: Instant) -> WaitingMessage:
        """Add a message behind those of its key, and return it."""
        waiting = WaitingMessage(message, key, message.size, now_us)
        self._append(waiting)
        self._note(waiting)
        return waiting

    def refuse(
        self,
        position: int,
        why: str,
        now: float,
        now_us: Instant,
        *,
        final: bool,
        is_tried: bool = True,
        retry_after_s: float | None = None,
    ) -> None:
        """Note that the first message of a key was refused, or not sent: try it again later, or give it up."""
        waiting = self._places[position]
        before = (other for other in self._queues[waiting.message.keys[0]] if other.position < position)
        assert all(other.given_up for other in before), position
        if waiting.attempts == 0:
            waiting.since_us = now_us
        waiting.attempts += is_tried
        waiting.why = printable(why)[:WHY_CHARACTERS_MAX] or "no reason is given"
        delay = self._limits.retry_pause_s(waiting.attempts - 1, RETRY_S_MAX)
        delay *= self._rng.uniform(0.5, 1.0)
        waiting.retry_at = now + max(delay, min(retry_after_s or 0.0, RETRY_AFTER_S_MAX))
        if final or self.final or (is_tried and self._policy.is_exhausted(waiting.attempts, now_us - waiting.since_us)):
            waiting.parked = self._policy.then == "park"
            waiting.given_up = not waiting.parked
        self._note(waiting)

    def be_final(self) -> None:
        """Give messages up that were refused, and let no other be tried twice."""
        self.final = True
        for waiting in self._places.values():
            waiting.given_up = waiting.given_up or (waiting.attempts > 0 and not waiting.parked)

    def accept(self, positions: Iterable[int]) -> None:
        """Forget messages that are delivered now."""
        for position in positions:
            self._remove(position)
            self.changes[position] = None

    def _append(self, waiting: WaitingMessage) -> None:
        queue = self._queues.setdefault(waiting.message.keys[0], deque())
        place = len(queue)
        while place and waiting.position < queue[place - 1].position:  # of a `send` that was refused as a whole
            place -= 1
        queue.insert(place, waiting)
        self._places[waiting.position] = waiting
        self.records += 1
        self.size += waiting.size

    def _remove(self, position: int) -> None:
        waiting = self._places.pop(position)
        key = waiting.message.keys[0]
        self._queues[key].remove(waiting)
        if not self._queues[key]:
            del self._queues[key]
        self.records -= 1
        self.size -= waiting.size

    def _note(self, waiting: WaitingMessage) -> None:
        self.changes[waiting.position] = waiting.as_stored()

    def on_stored(self, refused: Iterable[RefusedMessage], accepted: Iterable[int]) -> None:
        """Forget changes that are stored now, unless they have changed again."""
        for stored in refused:
            if self.changes.get(stored.position) is stored:
                del self.changes[stored.position]
        for position in accepted:
            if position in self.changes and self.changes[position] is None:
                del self.changes[position]

    # -- when they are sent again ---------------------------------------------------------------------------------

    def due(self, now: float, bound: SendBound, before: int, *, firsts: bool = False) -> SinkMessages | None:
        """Return the messages before a position to send again now, as many as one `send` may have; None without any.

        Of a key whose first message was refused, only that; else its messages up to the bound. If `firsts`, only the
        first of each key, so that a refused one is the first.
        """
        found: list[WaitingMessage] = []
        records, size = 0, 0
        for queue in self._queues.values():
            if not self._is_due(queue[0], now):
                continue
            for waiting in islice(queue, 1 if firsts or queue[0].attempts else None):
                if found and (records >= bound.records or size + waiting.size > bound.bytes):
                    break
                if waiting.position >= before:
                    break  # it waits for the `send` of its neighbors, which comes first
                found.append(waiting)
                records, size = records + 1, size + waiting.size
            if records >= bound.records or size >= bound.bytes:
                break
        found.sort(key=lambda waiting: waiting.position)
        return joined([waiting.message for waiting in found]) if found else None

    def _is_due(self, first: WaitingMessage, now: float) -> bool:
        return first.retry_at <= now and not (first.parked or first.given_up)

    def next_due(self, before: int) -> float | None:
        """Return when the next message before a position is due, in monotonic seconds; None if none will be."""
        firsts = (queue[0] for queue in self._queues.values() if queue[0].position < before)
        return min((first.retry_at for first in firsts if not (first.parked or first.given_up)), default=None)

    # -- how they are settled -------------------------------------------------------------------------------------

    def take_given_up(self, before: int) -> list[WaitingMessage]:
        """Return messages before a position that are to become dead letters, as they are stored, each once."""
        found = [first for queue in self._queues.values() if self._can_settle(first := queue[0], before)]
        for first in found:
            first.settling = True
        return found

    def has_given_up(self, before: int) -> bool:
        """Tell whether `take_given_up` would return any."""
        return any(self._can_settle(queue[0], before) for queue in self._queues.values())

    def _can_settle(self, first: WaitingMessage, before: int) -> bool:
        # A change that is not stored yet would store the message again behind the commit.
        return first.given_up and not first.settling and first.position not in self.changes and first.position < before

    def parked(self, key: bytes, ticket: int) -> WaitingMessage | None:
        """Return the message at which a key (JSON text) is parked; None if the ticket is of another parking."""
        first = self._places.get(ticket)
        return first if first is not None and first.parked and first.key == key else None

    def can_release(self, parked: WaitingMessage, before: int) -> bool:
        """Tell whether a parked message can be released now: it is stored so, and before a position."""
        return not parked.settling and parked.position not in self.changes and parked.position < before

    def settle(self, letters: Collection[int], released: Collection[bytes]) -> None:
        """Learn that a commit has made dead letters of messages, and released keys."""
        for position in letters:
            if position in self._places:
                self._remove(position)
                self.changes.pop(position, None)
        for waiting in self._places.values() if released else ():
            if waiting.parked and waiting.key in released:
                waiting.parked, waiting.settling = False, False
                waiting.attempts, waiting.why, waiting.retry_at = 0, "", 0.0

    def agree(self, stored: Iterable[RefusedMessage]) -> bool:
        """Tell whether just these messages are stored, leaving those out whose last change is not known to be."""
        unsure = self.changes.keys() | {waiting.position for waiting in self._places.values() if waiting.settling}
        return self._places.keys() - unsure == {found.position for found in stored} - unsure

    def reconcile(self, stored: Iterable[RefusedMessage]) -> None:
        """Find out what a commit of unknown outcome has settled, by what is stored now."""
        kept = {found.position: found for found in stored}
        for waiting in [waiting for waiting in self._places.values() if waiting.settling]:
            waiting.settling = False
            found = kept.get(waiting.position)
            if found is None:
                self.settle([waiting.position], ())
            elif waiting.parked and not found.parked:
                self.settle((), [waiting.key])

    def separate(self, messages: SinkMessages) -> tuple[list[int], list[int]]:
        """Return the places of messages to send, and of those that must wait behind a message of their key.

        Messages that are refused already are in neither. One that is given up lets others pass where it can come no
        more: at a sink that stores positions, which then stores those of the others.
        """
        if not self._places:
            return list(range(len(messages))), []
        sent: list[int] = []
        behind: list[int] = []
        for place, (key, position) in enumerate(zip(messages.keys, messages.positions, strict=True)):
            if position not in self._places:
                waits = any(
                    other.position < position and not (other.given_up and self.final)
                    for other in self._queues.get(key, ())
                )
                (behind if waits else sent).append(place)
        return sent, behind
