"""OutboxLogic: the step of `to_kafka` and `to_sink`, which makes messages of records and stores them in an outbox.

The messages are in the commit of the turn; the worker delivers them afterwards (`runtime/outbox_drain.py`). The step
numbers them, without a gap in an interval. What cannot become a message is a dead letter; so is a message that is given
up because the other side refuses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from millpy.errors import CallTimeoutError, RefusedValueError
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter
from millpy.model.dead_letter import dead_letter_of, payload_of, printable
from millpy.model.identity import Identity
from millpy.model.keys import Key, key_text
from millpy.model.record import RecordType, getter
from millpy.model.stage import ResidentInterval, StageBinding, StepResult, StoredInterval, Work
from millpy.model.step_progress import UNRETURNED_MAX, Call
from millpy.sinks.messages import SinkMessages, field_bytes, joined
from millpy.sinks.protocol import Sink

MESSAGE_OVERHEAD, HEADER_OVERHEAD = 100, 10
"""Bytes that count for a message, and for each of its headers, beside its content: a batch of Kafka begins with 61."""
_FAILURES = (TypeError, ValueError, OverflowError, RecursionError, RefusedValueError)
Made = TypeVar("Made")
Encode = Callable[[Any], bytes | None]
_JSON = msgspec.json.Encoder()


def key_bytes(key: Key) -> bytes:
    """Return the key of a message: text as UTF-8, bytes as they are, everything else as JSON."""
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes):
        return key
    return str(key).encode() if isinstance(key, UUID) else key_text(key)


def key_text_of(key: bytes, key_types: Sequence[type]) -> bytes:
    """Return the key of a message as `key_text` has it."""
    if len(key_types) > 1:
        return key
    (kind,) = key_types
    if issubclass(kind, bytes):
        return key_text(key)
    if issubclass(kind, str | UUID):
        return key_text(key.decode())
    return key


def encoder_of(sink: Sink, record_type: RecordType) -> Encode:
    """Return a function from a record to the value of its message."""
    if (own := sink.encoder(record_type)) is not None:
        return own
    if not sink.value:
        return _JSON.encode
    read = getter(sink.value)
    return lambda record: field_bytes(read(record))


class OutboxLogic:
    """A step whose messages a sink delivers."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def bind(self, binding: StageBinding) -> OutboxStage:
        """Return the stage, which can open intervals."""
        return OutboxStage(self.sink, binding)

    def identity(self) -> Identity:
        """Describe the sink, to which the delivered positions belong."""
        return {"kind": "outbox", "sink": self.sink.identity()}


class OutboxStage:
    """A step with an outbox in a deployed graph.

    Attributes:
        record_types: the record types of its inputs.
    """

    def __init__(self, sink: Sink, binding: StageBinding) -> None:
        self._sink = sink
        self._binding = binding
        self.record_types = [taken.record_type for taken in binding.inputs]

    def open(self, recovered: StoredInterval) -> OutboxInterval:
        """Return an interval that continues its outbox."""
        return OutboxInterval(self._sink, self._binding, recovered.outbox.head)

    def key_text(self, messages: SinkMessages, place: int) -> bytes:
        """Return the key of a message, as JSON text."""
        return key_text_of(messages.keys[place], self._binding.inputs[0].key_types)

    def letter_of(self, message: SinkMessages, why: str) -> DeadLetter:
        """Make the dead letter of a message that is given up because the other side refuses it.

        Its payload is the record, so that a replay makes a new message.
        """
        place = message.inputs[0] if message.inputs else 0
        return DeadLetter(
            reason="refused",
            detail=printable(f"the other side refuses message {message.positions[0]}: {why}")[:1000],
            payload=message.record_of(0),
            stream=self._binding.inputs[place].stream,
            computation=self._binding.computation,
            event_time=message.event_times[0],
            key=self.key_text(message, 0),
            input=place,
        )


class OutboxInterval(ResidentInterval):
    """One interval of a step with an outbox. Its only soft state is the position of the next message."""

    def __init__(self, sink: Sink, binding: StageBinding, position: int) -> None:
        self.immediate = not sink.calls_code
        self._sink = sink
        self._binding = binding
        self._position = position
        self._encode = [encoder_of(sink, taken.record_type) for taken in binding.inputs]
        self._has_records = [encode != _JSON.encode for encode in self._encode]
        self._headers = [sink.header_reader(taken.record_type) for taken in binding.inputs]
        of_headers = sum(HEADER_OVERHEAD + len(name.encode()) - len(name) for name in sink.headers)
        self._bytes_max = sink.message_bytes_max - MESSAGE_OVERHEAD - of_headers

    def step(self, work: Work) -> StepResult:
        """Make a message of each record, in order of arrival; none of them is late.

        The records of a generation beside the current one are consumed without effect.
        """
        consumed: Counter[int] = Counter()
        result = StepResult()
        parts: list[SinkMessages] = []
        for arrival in work.arrived:
            bundle = arrival.bundle
            consumed[bundle.input] += len(bundle)
            if not len(bundle) or not self._binding.is_current:
                continue
            made = self._messages(bundle, result.dead_letters)
            dead = len(bundle) - len(made)
            if dead:
                consumed[bundle.input] -= dead
                place = bundle.input
                result.dead_lettered_by_input[place] = result.dead_lettered_by_input.get(place, 0) + dead
            if len(made):
                parts.append(made)
                self._position = made.end
        result.consumed_by_input = dict(consumed)
        result.outbox = joined(parts).encode() if parts else None
        return result

    def _messages(self, bundle: Bundle, letters: list[DeadLetter]) -> SinkMessages:
        """Make messages of a bundle; add dead letters for the records of which there can be none."""
        objects, codes = bundle.records.objects(), bundle.keys.codes.tolist()
        texts = [key_bytes(key) for key in bundle.keys.keys]
        failed: dict[int, BaseException] = {}
        values = _made(self._encode[bundle.input], objects, failed)
        times = bundle.records.event_times.tolist()
        headers = self._headers_of(bundle.input, objects, times, failed)
        made = SinkMessages(self._position, [texts[code] for code in codes], values, times, headers)
        made.records = [payload_of(record) for record in objects] if self._has_records[bundle.input] else []
        made.inputs = [bundle.input] * len(objects) if bundle.input else []
        sizes, bytes_max = made.sizes(), self._bytes_max
        if not failed and max(sizes) <= bytes_max:
            return made
        for place, size in enumerate(sizes):
            if place not in failed and size > bytes_max:
                failed[place] = RefusedValueError(f"a message of {size:,} bytes; the limit is {bytes_max:,}")
        letters += [self._letter(bundle, objects[place], place, error) for place, error in sorted(failed.items())]
        return made.take([place for place in range(len(objects)) if place not in failed])

    def _headers_of(
        self, place: int, records: Sequence[Any], times: Sequence[int], failed: dict[int, BaseException]
    ) -> list[list[tuple[str, bytes]]]:
        """Return the headers of each record; nothing if no message has any."""
        reader = self._headers[place]
        if reader is None:
            return []
        if not self._sink.calls_code:
            return [found or [] for found in _made(reader, records, failed)]
        progress, step, row = self._binding.progress, self._binding.computation, 0
        run = progress.run
        headers: list[list[tuple[str, bytes]]] = []

        def call() -> Call:
            return step, (times[row], payload_of(records[row]))

        progress.current_call = call
        for row, record in enumerate(records):
            if progress.unreturned and progress.is_hopeless(call()):
                failed[row] = CallTimeoutError(f"a function of the sink did not return, {UNRETURNED_MAX} times")
                headers.append([])
                continue
            headers.append(_attempt(reader, record, row, failed) or [])
            progress.count_unit(run)
        progress.current_call = None
        return headers

    def _letter(self, bundle: Bundle, record: Any, row: int, error: BaseException) -> DeadLetter:
        return dead_letter_of(
            error,
            payload_of(record),
            stream=self._binding.inputs[bundle.input].stream,
            computation=self._binding.computation,
            event_time=int(bundle.records.event_times[row]),
            key=key_text(bundle.keys.keys[int(bundle.keys.codes[row])]),
            input=bundle.input,
        )


def _made(make: Callable[[Any], Made], records: Sequence[Any], failed: dict[int, BaseException]) -> list[Made | None]:
    """Call a function for each record; None where it fails, of which `failed` gets the error."""
    try:
        return list(map(make, records))
    except _FAILURES:
        return [_attempt(make, record, place, failed) for place, record in enumerate(records)]


def _attempt(make: Callable[[Any], Made], record: Any, place: int, failed: dict[int, BaseException]) -> Made | None:
    try:
        return make(record)
    except RefusedValueError as error:
        failed[place] = error
    except _FAILURES as error:
        failed[place] = RefusedValueError(f"no message can be made of the record: {error}")
    return None
