"""Feeder: writes prepared lines to the tapes of a run, in time with the faults.

The input has to last as long as the faults do, and nobody knows how long that is. So the rate is set anew all the time:
what is left, over the time that the faults to come are likely to take. After the last fault the rest is let go.
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
from millpy.testing.crash_test.inputs import Prepared
from millpy.testing.crash_test.tape import END_FILE, PARTS_FILE

TICK_S = 0.05
REST_S = 1.0
"""What is left after the last fault is let go over so long: the last recovery must have something to do."""


def lay_out(prepared: Sequence[Prepared], feed: Path) -> None:
    """Give a run the whole input at once."""
    for source in prepared:
        directory = feed / source.stream
        directory.mkdir(parents=True)
        shutil.copy(source.directory / PARTS_FILE, directory)
        for part in range(len(source.records)):
            (directory / str(part)).hardlink_to(source.directory / str(part))
        (directory / END_FILE).touch()


class Outlet(Protocol):
    """Where the lines of one source go.

    Attributes:
        written: lines so far.
    """

    source: Prepared
    written: int

    def write(self, count: int) -> None:
        """The next so many lines. Raises MillError."""
        ...

    def close(self, *, ended: bool) -> None:
        """No more will come; `ended`: because that was all."""
        ...


class Feeder(threading.Thread):
    """Feeds a run until everything is out.

    Args:
        remaining_s: from the seconds since the beginning, how long the feed still has to last; 0 or less: let go.
        rate_max: records a second; what the graph can take without falling behind.
        outlets: what takes a stream's lines; a tape for those that are not named.

    Attributes:
        failure: why it could not go on.
    """

    def __init__(
        self,
        prepared: Sequence[Prepared],
        feed: Path,
        clock: Clock,
        *,
        remaining_s: Callable[[float], float],
        rate_max: float,
        outlets: Mapping[str, Outlet] | None = None,
    ) -> None:
        super().__init__(name="feeder", daemon=True)
        outlets = outlets or {}
        self._outlets = [
            outlets[source.stream] if source.stream in outlets else _Tape(source, feed / source.stream)
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
        """Records written so far."""
        return sum(outlet.written for outlet in self._outlets)

    def run(self) -> None:
        """Feed, and note why that was not possible."""
        try:
            self._feed_all()
            for outlet in self._outlets:
                outlet.close(ended=self.fed == self.total)
        except MillError as error:
            self.failure = error

    def _feed_all(self) -> None:
        """A little every tick."""
        began = before = self._clock.monotonic()
        due = rate = 0.0
        while not self._stopped.wait(TICK_S) and self.fed < self.total:
            now = self._clock.monotonic()
            left = self.total - self.fed
            remaining_s = self._remaining_s(now - began)
            wanted = left / max(remaining_s, REST_S)
            rate = min(wanted if remaining_s > REST_S else max(wanted, rate), self._rate_max)  # never ebbs away
            due = min(due + rate * (now - before), float(left))
            before = now
            count = int(due)
            due -= count
            self._feed((self.fed + count) / self.total)

    def _feed(self, share: float) -> None:
        """Bring every source to the same share of its whole."""
        for outlet in self._outlets:
            outlet.write(round(outlet.source.total * share) - outlet.written)

    def stop(self) -> None:
        """End early; the tape stays open-ended."""
        self._stopped.set()
        self.join()


class _Tape:
    """One tape as it is written."""

    def __init__(self, source: Prepared, directory: Path) -> None:
        directory.mkdir(parents=True)
        shutil.copy(source.directory / PARTS_FILE, directory)
        self.source = source
        self.written = 0
        self._directory = directory
        self._parts: Iterator[int] = iter(range(len(source.records)))
        self._lines: IO[bytes] | None = None
        self._out: IO[bytes] | None = None

    def write(self, count: int) -> None:
        """The next so many lines, over the borders of parts."""
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
