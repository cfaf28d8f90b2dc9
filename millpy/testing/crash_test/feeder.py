"""Writes prepared lines to the feeds of a run, at a rate that makes them last as long as the faults.

How long the faults take is unknown in advance. At every tick the feeder therefore divides the rest of the input by the
estimated time of the coming faults. After the last fault it feeds the rest.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Protocol

from millpy.clock import Clock
from millpy.errors import MillError
from millpy.testing.crash_test.feed_source import END_FILE, PARTS_FILE
from millpy.testing.crash_test.inputs import PreparedInput

TICK_S = 0.05
REST_S = 1.0
"""The time over which the rest is fed after the last fault: the last recovery must have work to do."""


def write_whole_feed(prepared: Sequence[PreparedInput], feed: Path) -> None:
    """Write the whole input of a run, with its end."""
    for source in prepared:
        directory = feed / source.stream
        directory.mkdir(parents=True)
        shutil.copy(source.directory / PARTS_FILE, directory)
        for part in range(len(source.records)):
            (directory / str(part)).hardlink_to(source.directory / str(part))
        (directory / END_FILE).touch()


class FeedTarget(Protocol):
    """The destination of the lines of one source.

    Attributes:
        written: the number of lines so far.
    """

    source: PreparedInput
    written: int

    def write(self, count: int) -> None:
        """Write the next lines. Raises MillError."""
        ...

    def close(self, *, ended: bool) -> None:
        """End the feed; `ended` tells whether all lines were written."""
        ...


class Feeder(threading.Thread):
    """Feeds a run until all input is written.

    Args:
        remaining_s: from the seconds since the start, returns how long the feed still has to last; 0 or less: no limit.
        rate_max: records a second; as many as the graph can process without falling behind.
        outlets: the destinations of streams that do not go to a feed of files.

    Attributes:
        failure: why feeding failed.
    """

    def __init__(
        self,
        prepared: Sequence[PreparedInput],
        feed: Path,
        clock: Clock,
        *,
        remaining_s: Callable[[float], float],
        rate_max: float,
        outlets: Mapping[str, FeedTarget] | None = None,
    ) -> None:
        super().__init__(name="feeder", daemon=True)
        outlets = outlets or {}
        self._outlets = [
            outlets[source.stream] if source.stream in outlets else _FeedPart(source, feed / source.stream)
            for source in prepared
        ]
        self._clock = clock
        self._remaining_s = remaining_s
        self._rate_max = rate_max
        self._stopped = threading.Event()
        self.total = sum(source.total for source in prepared)
        self.failure: MillError | None = None

    @property
    def fed(self) -> int:
        """The number of records written so far."""
        return sum(outlet.written for outlet in self._outlets)

    def run(self) -> None:
        """Feed, and keep the error if feeding fails."""
        try:
            self._feed_all()
            for outlet in self._outlets:
                outlet.close(ended=self.fed == self.total)
        except MillError as error:
            self.failure = error

    def _feed_all(self) -> None:
        """Feed a little every tick."""
        began = before = self._clock.monotonic()
        due = rate = 0.0
        while not self._stopped.wait(TICK_S) and self.fed < self.total:
            now = self._clock.monotonic()
            left = self.total - self.fed
            remaining_s = self._remaining_s(now - began)
            wanted = left / max(remaining_s, REST_S)
            rate = min(
                wanted if remaining_s > REST_S else max(wanted, rate), self._rate_max
            )  # a rate that keeps falling never reaches the end
            due = min(due + rate * (now - before), float(left))
            before = now
            count = int(due)
            due -= count
            self._feed((self.fed + count) / self.total)

    def _feed(self, share: float) -> None:
        """Write every source up to the same share of its lines."""
        for outlet in self._outlets:
            outlet.write(round(outlet.source.total * share) - outlet.written)

    def stop(self) -> None:
        """End early, without marking the end of the feeds."""
        self._stopped.set()
        if self.ident is not None:  # else it was never started
            self.join()


class _FeedPart:
    """Writes the feed of one source, from its prepared lines."""

    def __init__(self, source: PreparedInput, directory: Path) -> None:
        directory.mkdir(parents=True)
        shutil.copy(source.directory / PARTS_FILE, directory)
        self.source = source
        self.written = 0
        self._directory = directory
        self._parts: Iterator[int] = iter(range(len(source.records)))
        self._lines: IO[bytes] | None = None
        self._out: IO[bytes] | None = None

    def write(self, count: int) -> None:
        """Write the next lines, across parts."""
        while count > 0:
            if self._lines is None or self._out is None:
                part = next(self._parts)
                self._lines = (self.source.directory / str(part)).open("rb")
                self._out = (self._directory / str(part)).open("ab", buffering=0)
            lines = list(islice(self._lines, count))
            self._out.write(b"".join(lines))
            self.written += len(lines)
            count -= len(lines)
            if count > 0:
                self._shut()

    def close(self, *, ended: bool) -> None:
        """Close the files, and mark the end."""
        self._shut()
        if ended:
            for part in self._parts:  # parts without lines
                (self._directory / str(part)).touch()
            (self._directory / END_FILE).touch()

    def _shut(self) -> None:
        for file in (self._lines, self._out):
            if file is not None:
                file.close()
        self._lines = self._out = None
