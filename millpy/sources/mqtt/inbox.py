"""The queue of messages that one MQTT connection has delivered and the worker has not taken. Pure: no I/O, no clock.

    messages --put--> runs, in the order received --take--> the records of a bundle, and the packet ids to acknowledge

A run is a sequence of messages with one record each, or a single message whose payload is an array. The readings of an
array are records (deduplicated, dated and rejected one by one) that are taken together, because the message is
acknowledged as a whole. Markers and unwanted retained messages yield no records, but are acknowledged in order.

Three bounds apply to a message before it is expanded: the length of its topic, the number of its readings, and the
bytes of the readings together with the fields that the topic adds to each. A message beyond a bound is one rejected
record with the unchanged payload. An array stays unparsed until it is taken, so the queue holds the bytes that were
sent, and only a bundle holds the expanded readings.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import msgspec
from xxhash import xxh3_128_digest

from millpy.formats import Message
from millpy.formats.byte_order_marks import UTF_8
from millpy.ingest.expansion import EXPANDED_RECORDS_MAX, Expander, Expansion
from millpy.ingest.protocol import RejectedRow
from millpy.sources.mqtt.packets import Messages

MARKER_PREFIX = "millpy/marker/"
_MARKERS = MARKER_PREFIX.encode()
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[[ \t\r\n]*[{\]]")
_KNOWN_TOPICS_MAX = 100_000
_KNOWN_BYTES_MAX = 8_000_000
TOPIC_BYTES_MAX = 1_024
_SHOWN_BYTES = 200
_MESSAGE_BYTES = 250  # Python's overhead for a message, its digest included
_READINGS = msgspec.json.Decoder(list[msgspec.Raw])


class PayloadCompleter(Protocol):
    """A function that adds the fields of the topic to each payload."""

    def __call__(self, topics: Sequence[bytes], payloads: Sequence[bytes]) -> list[bytes]:
        """Return the payloads as records."""
        ...

    def ending(self, topic: bytes) -> bytes:
        """Return the bytes that a payload gets from its topic."""
        ...


@dataclass(slots=True)
class Run:
    """Consecutive records: one message each, or all in one message (`is_array`), which may have none.

    Attributes:
        topics: one topic per message.
        payloads: one payload per record; for an unread array, the unchanged payload of the message.
        packet_ids: one packet id per message.
        is_array: whether the run is a single message.
        marker: the payload of the message, if it is a marker.
        unread: the number of readings of an array that is not parsed yet.
        size: the bytes of all records, with the fields that their topics add.
        refused: why the single message of this run is rejected; only the beginning of its topic may be kept.
        digests: one digest per message, if the queue computes them; empty for messages that never yield records.
        redelivered: whether the broker has sent the single message of this run to this session before.
        origins: of expanded messages, the message of each record, and its place there (`Expansion.origins`).
    """

    topics: list[bytes]
    payloads: list[bytes]
    packet_ids: list[int]
    is_array: bool = False
    marker: bytes | None = None
    unread: int = 0
    size: int = 0
    refused: str = ""
    digests: list[bytes] = field(default_factory=list)
    redelivered: bool = False
    origins: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.size or sum(map(len, self.payloads))

    def __len__(self) -> int:
        return self.unread or len(self.payloads)

    @property
    def waiting_bytes(self) -> int:
        """Approximate number of bytes that the run occupies in the queue."""
        return sum(map(len, self.payloads)) + sum(map(len, self.topics)) + _MESSAGE_BYTES * len(self.packet_ids)

    def cut(self, count: int) -> Run:
        """Split off the first records and return them."""
        first = Run(self.topics[:count], self.payloads[:count], self.packet_ids[:count], digests=self.digests[:count])
        del self.topics[:count], self.payloads[:count], self.packet_ids[:count], self.digests[:count]
        self.size -= first.size
        return first

    def parsed(self, complete: PayloadCompleter | None) -> Run:
        """Parse an unread array, so that the run has one payload per record."""
        if self.unread:
            readings = [bytes(reading) for reading in _READINGS.decode(self.payloads[0])]
            self.payloads = readings if complete is None else complete(self.topics * len(readings), readings)
            self.unread = 0
        return self


@dataclass(slots=True)
class MessageBatch:
    """Messages taken from the queue: payloads with their origin, packet ids to acknowledge, and markers.

    Attributes:
        runs: the runs that have records.
        packet_ids: the packet ids to acknowledge, in the order received.
        markers: (topic, payload) of each marker.
        refused: (row, why) of each message beyond a bound.
        records: the number of records in the batch.
        counted: the number of records that left the inbox with the batch, in terms of `MessageQueue.received`.
        digests: one digest per message, if the queue computes them; includes skipped messages.
        skipped: the number of committed messages that were redelivered and skipped.
        bad, messages: the parts of expanded messages that are no records, and the message of each (`Expansion`).
    """

    runs: list[Run] = field(default_factory=list)
    packet_ids: list[int] = field(default_factory=list)
    markers: list[tuple[bytes, bytes]] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    records: int = 0
    counted: int = 0
    digests: list[bytes] = field(default_factory=list)
    skipped: int = 0
    bad: list[RejectedRow] = field(default_factory=list)
    messages: dict[int, Message] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Append a run."""
        self.packet_ids += run.packet_ids
        self.digests += run.digests
        if run.marker is not None:
            self.markers.append((run.topics[0], run.marker))
        if run.refused:
            self.refused.append((self.records, run.refused))
        if len(run):
            self.runs.append(run)
            self.records += len(run)

    def skip_run(self, run: Run) -> None:
        """Append a message but skip its records."""
        self.packet_ids += run.packet_ids
        self.digests += run.digests
        self.skipped += 1

    def payloads(self) -> list[bytes]:
        """Return one payload per record."""
        if len(self.runs) == 1:
            return self.runs[0].payloads
        return [payload for run in self.runs for payload in run.payloads]

    def describe(self) -> Callable[[int], str]:
        """Return a function that names the origin of a record: `sensors/a (packet 5)`, with `[2]` for reading 3."""
        ends = list(accumulate(map(len, self.runs)))

        def place(row: int) -> str:
            index = bisect_right(ends, row)
            run, at = self.runs[index], row - (ends[index - 1] if index else 0)
            if run.origins:
                message, at = run.origins[at]
                text = f"{_shown(run.topics[message])} (packet {run.packet_ids[message]})"
                return text if at < 0 else f"{text}[{at}]"
            message = 0 if run.is_array else at
            text = f"{_shown(run.topics[message])} (packet {run.packet_ids[message]})"
            return f"{text}[{at}]" if run.is_array else text

        return place


def _shown(topic: bytes) -> str:
    return topic.decode(errors="replace").replace("\0", "\ufffd")  # SQL text cannot hold NUL


class MessageQueue:
    """A queue of received messages, grouped into runs.

    Args:
        topics: the topics of our filter; a session may still have a subscription from before the filter changed.
        retained: whether retained messages are records.
        arrays: whether each element of an array is a record; False for record classes that are encoded as arrays.
        readings_max: the largest number of readings in a message; a message with more is rejected.
        bytes_max: the largest number of bytes that the readings of a message may have; a larger message is rejected.
        complete: adds the fields of the topic to payloads; None when the filter names no levels.
        digests: whether to compute digests, by which redelivered messages are recognized.
        expander: makes records of a message when it is taken; None for JSON. Until then a message counts as a record.
    """

    def __init__(  # noqa: PLR0913 - the settings of a source and its bounds
        self,
        *,
        topics: re.Pattern[bytes],
        retained: bool,
        arrays: bool,
        readings_max: int,
        bytes_max: int,
        complete: PayloadCompleter | None = None,
        digests: bool = False,
        expander: Expander | None = None,
    ) -> None:
        self._topics = topics
        self._retained = retained
        self._arrays = arrays and expander is None
        self._expander = expander
        self._readings_max = readings_max
        self._bytes_max = bytes_max
        self._complete = complete
        self._digests = digests
        self._runs: deque[Run] = deque()
        self._known: set[bytes] = set()
        self._known_bytes = 0
        self.foreign: bytes | None = None
        """The first topic outside our filter."""
        self.records = 0
        self.bytes = 0
        self.received = 0
        """The number of records received: one per message, except in arrays and in messages without records (I8)."""

    def __len__(self) -> int:
        return len(self._runs)

    def put(self, published: Messages) -> None:
        """Append messages."""
        special = self._special_runs(published)
        self.received += len(published) + sum(len(run) - 1 for run in special.values())
        digests = digests_of(published) if self._digests else []
        if not special:
            self._append(Run(published.topics, published.payloads, published.packet_ids, digests=digests))
            return
        redelivered = set(published.redelivered)
        done = 0
        for index in [*sorted(special), len(published)]:
            if index > done:
                self._append(_run_of(published, slice(done, index), digests))
            if index < len(published):
                run = special[index]
                if len(run) and digests:
                    run.digests, run.redelivered = [digests[index]], index in redelivered
                self._append(run)
            done = index + 1

    def _special_runs(self, published: Messages) -> dict[int, Run]:
        """Return the runs of the messages that need special treatment, by index."""
        redelivered = published.redelivered if self._digests else ()
        special = {index: _run_of(published, slice(index, index + 1), ()) for index in redelivered}
        unusual = self._unusual_topics(published.topics)
        others = {topic for topic in unusual if topic.startswith(_MARKERS) or not self._topics.fullmatch(topic)}
        if self._arrays:
            for index, payload in enumerate(published.payloads):
                # Most payloads begin with a brace, which rules out an array.
                if payload[:1] != b"{" and published.topics[index] not in others and _ARRAY.match(payload):
                    text = payload.removeprefix(UTF_8)
                    array = self._array(published.topics[index], text, published.packet_ids[index])
                    if array is not None:
                        special[index] = array
        if not self._retained:
            for index in published.retained:
                special[index] = _run_without_records(published, index)
        if unusual:
            for index, topic in enumerate(published.topics):
                if topic not in unusual:
                    continue
                if topic in others:
                    special[index] = _run_without_records(published, index)
                    is_marker = topic.startswith(_MARKERS)
                    # Ours come at QoS 1. A marker at QoS 0 may have overtaken messages that it is meant to follow.
                    ordered = is_marker and published.packet_ids[index]
                    special[index].marker = published.payloads[index] if ordered else None
                elif index not in special or len(special[index]):
                    why = f"its topic has {len(topic)} bytes, more than {TOPIC_BYTES_MAX}"
                    special[index] = _rejected_run(topic, published.payloads[index], published.packet_ids[index], why)
        return special

    def _unusual_topics(self, topics: Sequence[bytes]) -> set[bytes]:
        """Return the topics that are markers, outside our filter, or too long."""
        unknown = set(topics) - self._known
        if not unknown:
            return unknown
        matching = {topic for topic in unknown if not topic.startswith(_MARKERS) and self._topics.fullmatch(topic)}
        ours = {topic for topic in matching if len(topic) <= TOPIC_BYTES_MAX}
        self._known_bytes += sum(map(len, ours))
        if len(self._known) + len(ours) > _KNOWN_TOPICS_MAX or self._known_bytes > _KNOWN_BYTES_MAX:
            self._known.clear()
            self._known_bytes = 0
        else:
            self._known |= ours
        unusual = unknown - ours
        foreign = unknown - matching
        self.foreign = self.foreign or next((topic for topic in foreign if not topic.startswith(_MARKERS)), None)
        return unusual

    def _array(self, topic: bytes, payload: bytes, packet_id: int) -> Run | None:
        """Return an unread run for a message that is an array of readings, None for any other message."""
        try:
            readings = len(_READINGS.decode(payload))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        run = Run([topic], [payload] if readings else [], [packet_id], is_array=True, unread=readings)
        if len(topic) <= TOPIC_BYTES_MAX and self._complete is not None:
            run.size += readings * len(self._complete.ending(topic))
        if readings > self._readings_max:
            why = f"the message has {readings} readings, more than {self._readings_max}"
        elif run.size > self._bytes_max:
            grown = f"its {readings} readings, with the fields of the topic, have {run.size} bytes"
            why = f"{grown}, more than {self._bytes_max}"
        else:
            return run
        return _rejected_run(topic, payload, packet_id, why)

    def _append(self, run: Run) -> None:
        if self._complete is not None and self._expander is None and not (run.is_array or run.refused):
            run.payloads = self._complete(run.topics, run.payloads)
            run.size = sum(map(len, run.payloads))
        self._runs.append(run)
        self.records += len(run)
        self.bytes += run.waiting_bytes

    def take(
        self,
        *,
        records_max: int,
        bytes_max: int,
        is_committed: Callable[[bytes], bool | None] = lambda _digest: False,
        arrived_at: int = 0,
    ) -> MessageBatch:
        """Remove and return the next records: at most a bundle, but at least one message if one is ready.

        Args:
            records_max: the largest number of records in the bundle; a single array may exceed it.
            bytes_max: the largest number of bytes in the bundle; a single run may exceed it.
            is_committed: called for each redelivered message. True skips the message without counting it (I8).
                None means that the outcome is not known yet: the message and everything behind it wait.
            arrived_at: the time of this take, in µs, for messages that are expanded.
        """
        bundle, size = MessageBatch(), 0
        deadline = 0.0 if self._expander is None else self._expander.deadline()
        while self._runs and bundle.records < records_max:
            run = self._runs[0]
            committed = run.redelivered and is_committed(run.digests[0])
            if committed is None:
                break
            if committed:
                self._runs.popleft()
                self._leave(run)
                self.received -= len(run)
                bundle.skip_run(run)
                continue
            if self._expander is not None and run.payloads and not run.refused:
                if bundle.packet_ids and self._expander.is_over(deadline):
                    break
                room = min(records_max, EXPANDED_RECORDS_MAX) - bundle.records, bytes_max - size
                expansion = self._expand(
                    self._expander, run, *room, arrived_at, at_least_one=not bundle.records, deadline=deadline
                )
                if not expansion.taken:
                    break
                self._take_expanded(bundle, run, expansion)
                size += expansion.bytes
                continue
            if bundle.records and size + run.size > bytes_max:
                break
            if bundle.records + len(run) > records_max:
                if not run.is_array:
                    run = run.cut(records_max - bundle.records)
                elif bundle.records:
                    break
            if run is self._runs[0]:
                self._runs.popleft()
            self._leave(run)
            size += run.size
            bundle.add(run.parsed(self._complete))
        return bundle

    def _expand(
        self,
        expander: Expander,
        run: Run,
        records_max: int,
        bytes_max: int,
        arrived_at: int,
        *,
        at_least_one: bool,
        deadline: float,
    ) -> Expansion:
        """Expand the first messages of a run, as many as fit."""
        ending = (lambda topic: b"") if self._complete is None else self._complete.ending
        messages = (
            Message(payload, topic.decode(errors="replace"), arrived_at=arrived_at, ending=ending(topic))
            for topic, payload in zip(run.topics, run.payloads, strict=True)
        )
        return expander.expand(
            messages, records_max=records_max, bytes_max=bytes_max, at_least_one=at_least_one, deadline=deadline
        )

    def _take_expanded(self, bundle: MessageBatch, run: Run, expansion: Expansion) -> None:
        """Move the expanded messages of the first run, and their records, to a bundle."""
        whole = expansion.taken == len(run.packet_ids)
        taken = self._runs.popleft() if whole else run.cut(expansion.taken)
        self._leave(taken)
        self.received += len(expansion.payloads) - len(taken)
        taken.payloads, taken.origins = expansion.payloads, expansion.origins
        bundle.bad += [replace(bad, row=bundle.records + bad.row) for bad in expansion.refused]
        bundle.messages |= {bundle.records + row: message for row, message in expansion.messages.items()}
        bundle.add(taken)

    def _leave(self, run: Run) -> None:
        self.records -= len(run)
        self.bytes -= run.waiting_bytes


def digests_of(published: Messages) -> list[bytes]:
    """Return a digest of 16 bytes per message, which recognizes a redelivery.

    The packet id is part of it: a redelivery has the same one, also on the next connection (MQTT 4.4). The separator
    NUL cannot occur in a topic.
    """
    whole = zip(published.topics, published.payloads, published.packet_ids, strict=True)
    return [xxh3_128_digest(b"%b\0%b" % (topic, payload), packet_id) for topic, payload, packet_id in whole]


def _run_of(published: Messages, these: slice, digests: Sequence[bytes]) -> Run:
    """Return a run of messages with one record each."""
    return Run(
        published.topics[these],
        published.payloads[these],
        published.packet_ids[these],
        digests=list(digests[these]),
    )


def _run_without_records(published: Messages, index: int) -> Run:
    """Return the run of a message without records; keep the topic only of a marker."""
    topic = published.topics[index]
    return Run([topic if topic.startswith(_MARKERS) else b""], [], [published.packet_ids[index]], is_array=True)


def _rejected_run(topic: bytes, payload: bytes, packet_id: int, why: str) -> Run:
    """Return the run of a message that is one rejected record."""
    shown = topic if len(topic) <= TOPIC_BYTES_MAX else topic[:_SHOWN_BYTES] + "…".encode()
    return Run([shown], [payload], [packet_id], refused=why)
