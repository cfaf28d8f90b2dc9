"""What one MQTT connection has delivered and nobody has taken yet. Pure: no I/O, no clock.

    messages --put--> runs, in the order received --take--> a bundle's records, and what to acknowledge for them

A run is a stretch of messages with one record each, or a single message whose payload is an array: its readings are
records (deduplicated, dated and refused one by one) that are taken together, because they are acknowledged together.
Markers and retained messages that nobody wants are no records, but are acknowledged in their turn.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from millpy.injectors.mqtt_packets import Published

MARKER_PREFIX = "millpy/marker/"
_MARKERS = MARKER_PREFIX.encode()
_ARRAY = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*[{\]]")
_KNOWN_TOPICS_MAX = 100_000
_READINGS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(slots=True)
class Run:
    """Records that follow each other: one message each, or all in one message (`is_array`), which may have none."""

    topics: list[bytes]
    payloads: list[bytes]
    packet_ids: list[int]
    is_array: bool = False
    marker: bytes | None = None

    def __len__(self) -> int:
        return len(self.payloads)

    def cut(self, count: int) -> Run:
        """Take the first records away."""
        first = Run(self.topics[:count], self.payloads[:count], self.packet_ids[:count])
        del self.topics[:count], self.payloads[:count], self.packet_ids[:count]
        return first


@dataclass(slots=True)
class Bundle:
    """What was taken: payloads with their place, packet ids to acknowledge, and the markers met on the way."""

    runs: list[Run] = field(default_factory=list)
    packet_ids: list[int] = field(default_factory=list)
    markers: list[tuple[bytes, bytes]] = field(default_factory=list)
    records: int = 0

    def add(self, run: Run) -> None:
        """Append a run."""
        self.packet_ids += run.packet_ids
        if run.marker is not None:
            self.markers.append((run.topics[0], run.marker))
        if len(run):
            self.runs.append(run)
            self.records += len(run)

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
            topic = run.topics[message].decode(errors="replace").replace("\0", "\ufffd")  # NUL is no text in SQL
            text = f"{topic} (packet {run.packet_ids[message]})"
            return f"{text}[{at}]" if run.is_array else text

        return place


class Inbox:
    """Queue of runs.

    Args:
        topics: those of our filter; a session may still have a subscription from before the filter was changed.
        retained: whether retained messages are records.
        arrays: whether an array is many records; not for record classes that are written as arrays themselves.
        readings_max: an array with more stays one record, which no decoder takes.
        complete: adds to payloads what their topics say; None when they say nothing.
    """

    def __init__(
        self,
        *,
        topics: re.Pattern[bytes],
        retained: bool,
        arrays: bool,
        readings_max: int,
        complete: Callable[[Sequence[bytes], Sequence[bytes]], list[bytes]] | None = None,
    ) -> None:
        self._topics = topics
        self._retained = retained
        self._arrays = arrays
        self._readings_max = readings_max
        self._complete = complete
        self._runs: deque[Run] = deque()
        self._known: set[bytes] = set()
        self.foreign: bytes | None = None
        """The first topic that nobody asked for."""
        self.records = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def put(self, published: Published) -> None:
        """Append messages."""
        apart = self._apart(published)
        if not apart:
            self._append(Run(published.topics, published.payloads, published.packet_ids))
            return
        done = 0
        for index in [*sorted(apart), len(published)]:
            if index > done:
                these = slice(done, index)
                self._append(Run(published.topics[these], published.payloads[these], published.packet_ids[these]))
            if index < len(published):
                self._append(apart[index])
            done = index + 1

    def _apart(self, published: Published) -> dict[int, Run]:
        """The messages that are not one record each, by index."""
        apart: dict[int, Run] = {}
        if self._arrays:
            for index, payload in enumerate(published.payloads):
                # Most payloads begin with a brace, and no further look is needed.
                if payload[:1] != b"{" and _ARRAY.match(payload):
                    readings = self._readings(payload)
                    if readings is not None:
                        apart[index] = Run(
                            [published.topics[index]], readings, [published.packet_ids[index]], is_array=True
                        )
        if not self._retained:
            for index in published.retained:
                apart[index] = _passed(published, index)
        strange = self._strange(published.topics)
        if strange:
            for index, topic in enumerate(published.topics):
                if topic in strange:
                    apart[index] = _passed(published, index)
                    apart[index].marker = published.payloads[index] if topic.startswith(_MARKERS) else None
        return apart

    def _strange(self, topics: Sequence[bytes]) -> set[bytes]:
        """Markers, and topics that we do not ask for."""
        unknown = set(topics) - self._known
        if not unknown:
            return unknown
        ours = {topic for topic in unknown if not topic.startswith(_MARKERS) and self._topics.fullmatch(topic)}
        if len(self._known) + len(ours) > _KNOWN_TOPICS_MAX:
            self._known.clear()
        self._known |= ours
        strange = unknown - ours
        self.foreign = self.foreign or next((topic for topic in strange if not topic.startswith(_MARKERS)), None)
        return strange

    def _readings(self, payload: bytes) -> list[bytes] | None:
        try:
            readings = _READINGS.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        return None if len(readings) > self._readings_max else [bytes(reading) for reading in readings]

    def _append(self, run: Run) -> None:
        if self._complete is not None and len(run):
            topics = run.topics * len(run) if run.is_array else run.topics
            run.payloads = self._complete(topics, run.payloads)
        self._runs.append(run)
        self.records += len(run)
        self.bytes += sum(map(len, run.payloads))

    def take(self, *, records_max: int, bytes_max: int) -> Bundle:
        """The next records, at most a bundle, but at least a message when one is there."""
        bundle, size = Bundle(), 0
        while self._runs and bundle.records < records_max:
            run = self._runs[0]
            run_bytes = sum(map(len, run.payloads))
            if bundle.records and size + run_bytes > bytes_max:
                break
            if bundle.records + len(run) > records_max:
                if not run.is_array:
                    run = run.cut(records_max - bundle.records)
                    run_bytes = sum(map(len, run.payloads))
                elif bundle.records:
                    break
            if run is self._runs[0]:
                self._runs.popleft()
            self.records -= len(run)
            self.bytes -= run_bytes
            size += run_bytes
            bundle.add(run)
        return bundle


def _passed(published: Published, index: int) -> Run:
    """A message without records."""
    return Run([published.topics[index]], [], [published.packet_ids[index]], is_array=True)
