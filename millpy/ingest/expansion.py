"""Expansion: messages become JSON records by a source's payload format, within the bounds of a bundle.

A source expands messages when it takes them, and stops before the bundle would exceed its bound; the messages behind
wait for the next take. The records of one message are taken together, because the message is acknowledged, or its
position committed, as a whole. `Limits.message_records_max` and `Limits.message_bytes_max` bound what one message can
become: a message beyond them is one dead letter.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from millpy.errors import SourceUnavailableError
from millpy.formats import BadPart, Format, Message, Part, SchemaPendingError
from millpy.ingest.json_append import completed
from millpy.ingest.protocol import RejectedRow, SourceSetup
from millpy.limits import Limits
from millpy.model.dead_letter import error_text
from millpy.model.record import RecordType
from millpy.model.step_progress import is_user_error

PENDING_S_MAX = 5.0
"""How long a replay waits for a schema registry."""
SCHEMAS_OF_A_MESSAGE = 3
EMPTY = "the payload is empty"
EXPANDED_RECORDS_MAX = 8_192
"""The most records of a bundle that a source expands in the event loop, which must not stop for long."""


@dataclass(slots=True)
class Expansion:
    """The records of some messages.

    Attributes:
        payloads: one JSON object per record, or the bytes of a part that is none.
        refused: the rows that are no records.
        messages: row -> the message of which that row is a bad part; its payload is that of the row.
        origins: the message of each row, and its number among the rows of that message; -1 if it is the only one.
        taken: the number of messages that were expanded; the others did not fit.
        bytes: the bytes of all payloads.
    """

    payloads: list[bytes] = field(default_factory=list)
    refused: list[RejectedRow] = field(default_factory=list)
    messages: dict[int, Message] = field(default_factory=dict)
    origins: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0
    bytes: int = 0

    def describe(self, place: Callable[[int], str]) -> Callable[[int], str]:
        """Return a function that names the origin of a row, given one that names that of a message."""
        origins = self.origins

        def described(row: int) -> str:
            message, part = origins[row]
            return place(message) if part < 0 else f"{place(message)}[{part}]"

        return described

    def add(self, message: Message, parts: Sequence[Part], reason: str = "undecodable") -> None:
        """Append the parts of the next message."""
        alone = len(parts) == 1
        for number, part in enumerate(parts):
            self.origins.append((self.taken, -1 if alone else number))
            if isinstance(part, BadPart):
                row = len(self.payloads)
                self.refused.append(RejectedRow(row, reason, part.detail))
                self.messages[row] = _message_of(part, message)
                part = part.payload
            self.payloads.append(part)
            self.bytes += len(part)
        self.taken += 1


def _message_of(part: BadPart, message: Message) -> Message:
    """Return a bad part as the message that a replay reads."""
    if part.payload is message.payload:  # bad as a whole
        return message
    return msgspec.structs.replace(message, payload=part.payload, decoded=part.decoded)


class Expander:
    """Expands the messages of one source.

    A message whose schema the registry has not answered yet waits, and so does everything behind it. With a setup, the
    source then takes what is before it, shows as not connected if the registry does not answer, and wakes its worker
    when it does. Without one, the call itself waits, at most PENDING_S_MAX.

    Args:
        format: the source's format.
        record_type: the record type of the stream.
        limits: bounds on what one message can become.
        setup: of a source that can wait, and that expands in the event loop: a slow function of the user must not hold
            up the worker until it loses its lease, so a take is bounded in seconds. None for no bound.
    """

    def __init__(
        self, format: Format, record_type: RecordType, limits: Limits, setup: SourceSetup | None = None
    ) -> None:
        self._read = format.reader(record_type)
        self._setup = setup
        self._awaited: Future[None] | None = None
        self._take_s_max = limits.step_s_max
        self._monotonic = None if setup is None else setup.clock.monotonic
        self._records_max = limits.message_records_max
        self._bytes_max = limits.message_bytes_max

    def deadline(self) -> float:
        """Return when a take that begins now is to end; its messages are expanded until then, one at least."""
        return math.inf if self._monotonic is None else self._monotonic() + self._take_s_max

    def is_over(self, deadline: float) -> bool:
        """Tell whether a take has lasted until its deadline."""
        return self._monotonic is not None and self._monotonic() >= deadline

    def expand(
        self,
        messages: Iterable[Message],
        *,
        records_max: int,
        bytes_max: int,
        at_least_one: bool = True,
        skip_blank: bool = False,
        deadline: float = math.inf,
    ) -> Expansion:
        """Expand messages from the front until the next would exceed a bound.

        Args:
            messages: the waiting messages, in order.
            records_max: the largest number of records.
            bytes_max: the largest number of bytes of all records.
            at_least_one: whether the first message is taken even if it alone exceeds a bound.
            skip_blank: whether a message without a visible character has no records.
            deadline: when to stop.
        """
        found, waits = Expansion(), False
        for message in messages:
            if found.taken and (len(found.payloads) >= records_max or found.bytes >= bytes_max):
                break
            if (found.taken or not at_least_one) and self.is_over(deadline):
                break
            if skip_blank and not message.payload.strip():
                found.taken += 1
                continue
            try:
                parts, reason = self._parts(message)
            except SchemaPendingError as pending:
                if self._setup is not None:
                    self._wait(self._setup, pending)
                    waits = True
                    break
                parts, reason = self._parts_at_last(message, pending)
            fits = len(found.payloads) + len(parts) <= records_max
            fits = fits and found.bytes + sum(map(_size, parts)) <= bytes_max
            if not fits and (found.payloads or not at_least_one):
                break
            found.add(message, parts, reason)
        if self._setup is not None and not waits:
            self._setup.connection.release()
        return found

    def _wait(self, setup: SourceSetup, pending: SchemaPendingError) -> None:
        """Wake the worker when the registry has answered."""
        if pending.why:
            setup.connection.hold(pending.why)
        if pending.done is not self._awaited:
            self._awaited = pending.done
            loop = asyncio.get_running_loop()
            pending.done.add_done_callback(lambda _: loop.call_soon_threadsafe(setup.ready.set))

    def _parts_at_last(self, message: Message, pending: SchemaPendingError) -> tuple[list[Part], str]:
        """Wait for the registry. Raises SourceUnavailableError if it does not answer."""
        for _ in range(SCHEMAS_OF_A_MESSAGE):
            try:
                pending.done.result(PENDING_S_MAX)
                return self._parts(message)
            except TimeoutError:
                raise SourceUnavailableError(pending.why or "the schema registry does not answer") from None
            except SchemaPendingError as another:
                pending = another
        raise SourceUnavailableError("the schema registry does not answer")

    def _parts(self, message: Message) -> tuple[list[Part], str]:
        """Return the parts of a message, completed by its source; one bad part if it is bad as a whole."""
        if len(message.payload) > self._bytes_max:
            return [BadPart(message.payload, f"the message has more than {self._bytes_max} bytes")], "oversize"
        parts: list[Part] = []
        size = 0
        try:
            for part in self._read(message):
                if isinstance(part, bytes) and message.ending:
                    part = completed(part, message.ending)
                parts.append(part)
                size += _size(part)
                if len(parts) > self._records_max:
                    detail = f"the message has more than {self._records_max} records"
                    return [BadPart(message.payload, detail)], "oversize"
                if size > self._bytes_max:
                    detail = f"the records of the message have more than {self._bytes_max} bytes"
                    return [BadPart(message.payload, detail)], "oversize"
        except SchemaPendingError:
            raise
        except BaseException as error:  # a user's function, and libraries, may raise anything
            if not is_user_error(error):
                raise
            is_empty = isinstance(error, msgspec.DecodeError) and not message.payload.strip()
            detail = EMPTY if is_empty else error_text(error)
            return [BadPart(message.payload, detail)], "undecodable"
        return parts, "undecodable"


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else len(part.payload)
