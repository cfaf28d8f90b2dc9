"""What one MQTT connection has delivered and nobody has taken yet. Pure: no I/O, no clock.

    messages --put--> runs, in the order received --take--> a bundle's records, and what to acknowledge for them

A run is a stretch of messages with one record each, or a single message whose payload is an array: its readings are
records (deduplicated, dated and refused one by one) that are taken together, because they are acknowledged together.
Markers and retained messages that nobody wants are no records, but are acknowledged in their turn.

What one message may become is bounded before it becomes it: its topic, how many readings it holds, and how many bytes
these are together with what the topic adds to each. A message beyond a bound is one refused record, as it came. An
array is kept as it came until it is taken, so the queue holds what was sent and only a bundle holds what it became.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import msgspec
from xxhash import xxh3_128_digest

from millpy.injectors.mqtt_packets import Published

MARKER_PREFIX = "millpy/marker/"
_MARKERS = MARKER_PREFIX.encode()
_ARRAY = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*[{\]]")
_KNOWN_TOPICS_MAX = 100_000
_KNOWN_BYTES_MAX = 8_000_000
TOPIC_BYTES_MAX = 1_024
_SHOWN_BYTES = 200
_MESSAGE_BYTES = 250  # what Python needs for a message beside its bytes, its digest included
_READINGS = msgspec.json.Decoder(list[msgspec.Raw])


class Completes(Protocol):
    """Adds to payloads what their topics say."""

    def __call__(self, topics: Sequence[bytes], payloads: Sequence[bytes]) -> list[bytes]:
        """Return the payloads as records."""
        ...

    def ending(self, topic: bytes) -> bytes:
        """Return what a payload gets from its topic."""
        ...


@dataclass(slots=True)
class Run:
    """Records that follow each other: one message each, or all in one message (`is_array`), which may have none.

    Attributes:
        payloads: one a record; of an array that is not open yet, the message as it came.
        unread: how many readings an array has that is not open yet.
        size: bytes of all records, with what their topics add.
        refused: why the one message of this run is no record; of its topic only the beginning is kept.
        digests: of the messages, where they are asked for; none of messages that never are records.
        redelivered: the one message of this run was sent to this session before.
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

    def __post_init__(self) -> None:
        self.size = self.size or sum(map(len, self.payloads))

    def __len__(self) -> int:
        return self.unread or len(self.payloads)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that it takes in the queue, about."""
        return sum(map(len, self.payloads)) + sum(map(len, self.topics)) + _MESSAGE_BYTES * len(self.packet_ids)

    def cut(self, count: int) -> Run:
        """Take the first records away."""
        first = Run(self.topics[:count], self.payloads[:count], self.packet_ids[:count], digests=self.digests[:count])
        del self.topics[:count], self.payloads[:count], self.packet_ids[:count], self.digests[:count]
        self.size -= first.size
        return first

    def opened(self, complete: Completes | None) -> Run:
        """Return the run with a payload for each record."""
        if self.unread:
            readings = [bytes(reading) for reading in _READINGS.decode(self.payloads[0])]
            self.payloads = readings if complete is None else complete(self.topics * len(readings), readings)
            self.unread = 0
        return self


@dataclass(slots=True)
class Bundle:
    """What was taken: payloads with their place, packet ids to acknowledge, and the markers met on the way.

    Attributes:
        refused: (row, why) of payloads that are messages beyond a bound.
        records: how many there are in it.
        counted: how many have left the inbox with it, by the count of what was received.
        digests: of its messages, where they are asked for; also of those passed over.
        passed_over: how many messages were redelivered though they are committed.
    """

    runs: list[Run] = field(default_factory=list)
    packet_ids: list[int] = field(default_factory=list)
    markers: list[tuple[bytes, bytes]] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    records: int = 0
    counted: int = 0
    digests: list[bytes] = field(default_factory=list)
    passed_over: int = 0

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

    def pass_over(self, run: Run) -> None:
        """Append a message without its records."""
        self.packet_ids += run.packet_ids
        self.digests += run.digests
        self.passed_over += 1

    def payloads(self) -> list[bytes]:
        """One a record."""
        if len(self.runs) == 1:
            return self.runs[0].payloads
        return [payload for run in self.runs for payload in run.payloads]

    def describe(self) -> Callable[[int], str]:
        """Where record i came from: `sensors/a (packet 5)`, with `[2]` for the third reading of an array."""
        ends = list(accumulate(map(len, self.runs)))

        def place(row: int) -> str:
            index = bisect_right(ends, row)
            run, at = self.runs[index], row - (ends[index - 1] if index else 0)
            message = 0 if run.is_array else at
            text = f"{_shown(run.topics[message])} (packet {run.packet_ids[message]})"
            return f"{text}[{at}]" if run.is_array else text

        return place


def _shown(topic: bytes) -> str:
    return topic.decode(errors="replace").replace("\0", "\ufffd")  # NUL is no text in SQL


class Inbox:
    """Queue of runs.

    Args:
        topics: those of our filter; a session may still have a subscription from before the filter was changed.
        retained: whether retained messages are records.
        arrays: whether an array is many records; not for record classes that are written as arrays themselves.
        readings_max: a message with more readings is refused.
        bytes_max: a message whose readings would have more bytes is refused.
        complete: adds to payloads what their topics say; None when they say nothing.
        digests: whether messages are to be known again.
    """

    def __init__(
        self,
        *,
        topics: re.Pattern[bytes],
        retained: bool,
        arrays: bool,
        readings_max: int,
        bytes_max: int,
        complete: Completes | None = None,
        digests: bool = False,
    ) -> None:
        self._topics = topics
        self._retained = retained
        self._arrays = arrays
        self._readings_max = readings_max
        self._bytes_max = bytes_max
        self._complete = complete
        self._digests = digests
        self._runs: deque[Run] = deque()
        self._known: set[bytes] = set()
        self._known_bytes = 0
        self.foreign: bytes | None = None
        """The first topic that nobody asked for."""
        self.records = 0
        self.bytes = 0
        self.received = 0
        """How many records came, by messages: one each, but for those that were told apart (I8)."""

    def __len__(self) -> int:
        return len(self._runs)

    def put(self, published: Published) -> None:
        """Append messages."""
        apart = self._apart(published)
        self.received += len(published) + sum(len(run) - 1 for run in apart.values())
        digests = digests_of(published) if self._digests else []
        if not apart:
            self._append(Run(published.topics, published.payloads, published.packet_ids, digests=digests))
            return
        redelivered = set(published.redelivered)
        done = 0
        for index in [*sorted(apart), len(published)]:
            if index > done:
                self._append(_stretch(published, slice(done, index), digests))
            if index < len(published):
                run = apart[index]
                if len(run) and digests:
                    run.digests, run.redelivered = [digests[index]], index in redelivered
                self._append(run)
            done = index + 1

    def _apart(self, published: Published) -> dict[int, Run]:
        """The messages that are not one record each, by index."""
        redelivered = published.redelivered if self._digests else ()
        apart = {index: _stretch(published, slice(index, index + 1), ()) for index in redelivered}
        strange = self._strange(published.topics)
        others = {topic for topic in strange if topic.startswith(_MARKERS) or not self._topics.fullmatch(topic)}
        if self._arrays:
            for index, payload in enumerate(published.payloads):
                # Most payloads begin with a brace, and no further look is needed.
                if payload[:1] != b"{" and published.topics[index] not in others and _ARRAY.match(payload):
                    array = self._array(published.topics[index], payload, published.packet_ids[index])
                    if array is not None:
                        apart[index] = array
        if not self._retained:
            for index in published.retained:
                apart[index] = _passed(published, index)
        if strange:
            for index, topic in enumerate(published.topics):
                if topic not in strange:
                    continue
                if topic in others:
                    apart[index] = _passed(published, index)
                    is_marker = topic.startswith(_MARKERS)
                    # At QoS 0 it may have overtaken what it is to prove read: ours come at QoS 1.
                    ordered = is_marker and published.packet_ids[index]
                    apart[index].marker = published.payloads[index] if ordered else None
                elif index not in apart or len(apart[index]):
                    why = f"its topic has {len(topic)} bytes; at most {TOPIC_BYTES_MAX} are taken"
                    apart[index] = _refused(topic, published.payloads[index], published.packet_ids[index], why)
        return apart

    def _strange(self, topics: Sequence[bytes]) -> set[bytes]:
        """Markers, topics that we do not ask for, and those that are too long."""
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
        strange = unknown - ours
        foreign = unknown - matching
        self.foreign = self.foreign or next((topic for topic in foreign if not topic.startswith(_MARKERS)), None)
        return strange

    def _array(self, topic: bytes, payload: bytes, packet_id: int) -> Run | None:
        """Return the run of a message that is an array of readings, None for any other; it is opened when taken."""
        try:
            readings = len(_READINGS.decode(payload))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        run = Run([topic], [payload] if readings else [], [packet_id], is_array=True, unread=readings)
        if len(topic) <= TOPIC_BYTES_MAX and self._complete is not None:
            run.size += readings * len(self._complete.ending(topic))
        if readings > self._readings_max:
            why = f"an array of {readings} readings; at most {self._readings_max} are taken in one message"
        elif run.size > self._bytes_max:
            grown = f"{readings} readings with what their topic adds are {run.size} bytes"
            why = f"{grown}; at most {self._bytes_max} are taken"
        else:
            return run
        return _refused(topic, payload, packet_id, why)

    def _append(self, run: Run) -> None:
        if self._complete is not None and not (run.is_array or run.refused):
            run.payloads = self._complete(run.topics, run.payloads)
            run.size = sum(map(len, run.payloads))
        self._runs.append(run)
        self.records += len(run)
        self.bytes += run.waiting_bytes

    def take(
        self, *, records_max: int, bytes_max: int, is_committed: Callable[[bytes], bool | None] = lambda _digest: False
    ) -> Bundle:
        """The next records, at most a bundle, but at least a message when one is there and does not wait.

        Args:
            records_max: of the bundle.
            bytes_max: of the bundle.
            is_committed: asked for each redelivered message; one that is, is passed over and not counted (I8).
                None: that is not known yet, and it waits, and what is behind it.
        """
        bundle, size = Bundle(), 0
        while self._runs and bundle.records < records_max:
            run = self._runs[0]
            committed = run.redelivered and is_committed(run.digests[0])
            if committed is None:
                break
            if committed:
                self._runs.popleft()
                self._leave(run)
                self.received -= len(run)
                bundle.pass_over(run)
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
            bundle.add(run.opened(self._complete))
        return bundle

    def _leave(self, run: Run) -> None:
        self.records -= len(run)
        self.bytes -= run.waiting_bytes


def digests_of(published: Published) -> list[bytes]:
    """16 bytes a message, by which it is known when it is delivered again: with the same packet id, also on the next
    connection (MQTT 4.4). A topic holds no NUL.
    """
    whole = zip(published.topics, published.payloads, published.packet_ids, strict=True)
    return [xxh3_128_digest(b"%b\0%b" % (topic, payload), packet_id) for topic, payload, packet_id in whole]


def _stretch(published: Published, these: slice, digests: Sequence[bytes]) -> Run:
    """Messages of one record each."""
    return Run(
        published.topics[these],
        published.payloads[these],
        published.packet_ids[these],
        digests=list(digests[these]),
    )


def _passed(published: Published, index: int) -> Run:
    """A message without records; its topic matters only if it is a marker."""
    topic = published.topics[index]
    return Run([topic if topic.startswith(_MARKERS) else b""], [], [published.packet_ids[index]], is_array=True)


def _refused(topic: bytes, payload: bytes, packet_id: int, why: str) -> Run:
    """A message that is one refused record."""
    shown = topic if len(topic) <= TOPIC_BYTES_MAX else topic[:_SHOWN_BYTES] + "…".encode()
    return Run([shown], [payload], [packet_id], refused=why)
