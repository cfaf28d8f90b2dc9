"""OutboxLogic: the step of `to_kafka` and `to_sink`, which makes messages of records and stores them in an outbox.

The messages are in the commit of the turn; the worker delivers them afterwards (`runtime/sinks.py`). The step numbers
them, without a gap in an interval. What cannot become a message is a dead letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpy.errors import RefusedValueError
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter
from millpy.model.dead_letter import dead_letter_of, payload_of
from millpy.model.identity import Identity
from millpy.model.keys import Key, key_text
from millpy.model.record import RecordType, getter
from millpy.model.stage import ResidentInterval, StageBinding, StepResult, StoredInterval, Work
from millpy.sinks.messages import SinkMessages, joined
from millpy.sinks.protocol import Sink

MESSAGE_OVERHEAD, HEADER_OVERHEAD = 100, 10
"""Bytes that count for a message, and for each of its headers, beside its content: a batch of Kafka begins with 61."""
Encode = Callable[[Any], bytes | None]
_JSON = msgspec.json.Encoder()


def key_bytes(key: Key) -> bytes:
    """Return the key of a message: text as UTF-8, bytes as they are, everything else as JSON."""
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes):
        return key
    return str(key).encode() if isinstance(key, UUID) else key_text(key)


def field_bytes(value: Any) -> bytes | None:
    """Return the value of one field for a message: text as UTF-8, bytes as they are, everything else as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else _JSON.encode(value)


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
    """A step with an outbox in a deployed graph."""

    def __init__(self, sink: Sink, binding: StageBinding) -> None:
        self._sink = sink
        self._binding = binding

    def open(self, recovered: StoredInterval) -> OutboxInterval:
        """Return an interval that continues its outbox."""
        return OutboxInterval(self._sink, self._binding, recovered.outbox.head)


class OutboxInterval(ResidentInterval):
    """One interval of a step with an outbox. Its only soft state is the position of the next message."""

    immediate = True

    def __init__(self, sink: Sink, binding: StageBinding, position: int) -> None:
        self._sink = sink
        self._binding = binding
        self._position = position
        self._encode = [encoder_of(sink, taken.record_type) for taken in binding.inputs]
        self._headers = [(name, getter(name)) for name in sink.headers]
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
        texts: list[bytes | None] = [key_bytes(key) for key in bundle.keys.keys]
        values, failed = self._values(bundle.input, objects)
        headers = [self._headers_of(record) for record in objects] if self._headers else []
        times = bundle.records.event_times.tolist()
        made = SinkMessages(self._position, [texts[code] for code in codes], values, times, headers)
        sizes, bytes_max = made.sizes(), self._bytes_max
        if not failed and max(sizes) <= bytes_max:
            return made
        for place, size in enumerate(sizes):
            if place not in failed and size > bytes_max:
                failed[place] = RefusedValueError(f"a message of {size:,} bytes; the limit is {bytes_max:,}")
        letters += [self._letter(bundle, objects[place], place, error) for place, error in sorted(failed.items())]
        return made.take([place for place in range(len(objects)) if place not in failed])

    def _values(self, place: int, objects: Sequence[Any]) -> tuple[list[bytes | None], dict[int, BaseException]]:
        encode = self._encode[place]
        failed: dict[int, BaseException] = {}
        try:
            return [encode(record) for record in objects], failed
        except (TypeError, ValueError, OverflowError, RecursionError):
            values: list[bytes | None] = []
        for number, record in enumerate(objects):
            try:
                values.append(encode(record))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                failed[number] = RefusedValueError(f"no message can be made of the record: {error}")
                values.append(None)
        return values, failed

    def _headers_of(self, record: Any) -> list[tuple[str, bytes]]:
        found = [(name, field_bytes(read(record))) for name, read in self._headers]
        return [(name, value) for name, value in found if value is not None]

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
