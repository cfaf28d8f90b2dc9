"""What a transcript is run on: the windowed step alone, or a hosted graph over a store.

StageSubject    the step alone, without source or store (`stage_subject.py`)
GraphSubject    source and step, hosted over a store in memory or PostgreSQL
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from millpy.model.checkpoint import DeadLetter
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, instant, to_datetime
from millpy.testing.kit.contents import BEGINNING_OF_TIME, END_OF_TIME, LateRecord, Pane
from millpy.testing.kit.driver import GraphDriver
from millpy.testing.kit.state import ReadableMemory, ReadableState, Rows
from millpy.testing.transcripts.definition import SOURCE, STEP, Definition


class Subject(Protocol):
    """The engine, or a part of it, as the steps of a transcript drive and read it. Partition None means all."""

    def feed(self, records: Sequence[Any], partition: str | None) -> None:
        """Give records to a source partition as one bundle."""
        ...

    def advance_watermark(self, at: Instant, partition: str | None) -> None:
        """Let source partitions state that nothing before `at` comes any more."""
        ...

    def advance_clock(self, by_us: int) -> None:
        """Let processing time pass."""
        ...

    def end(self, partition: str | None) -> None:
        """End the input."""
        ...

    def crash(self) -> None:
        """Drop all soft state, and read what is committed."""
        ...

    def lose_turns(self, loses: bool) -> None:
        """Set whether each turn is stepped, lost in a crash, and made again."""
        ...

    def panes(self) -> Sequence[Pane]:
        """Return all panes so far."""
        ...

    def late_records(self) -> Sequence[LateRecord]:
        """Return all late records so far."""
        ...

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return all dead letters so far."""
        ...

    def table(self) -> Rows:
        """Return the rows of the result table."""
        ...

    def watermarks(self) -> tuple[Instant, Instant, Instant]:
        """Return (watermark of the source, input watermark, low watermark)."""
        ...

    def unbalanced(self) -> Sequence[str]:
        """Describe the accounts that do not add up (I8)."""
        ...

    def close(self) -> None:
        """Forget the run."""
        ...


class GraphSubject:
    """A graph with a source and the windowed step, hosted over a store; by default in memory."""

    def __init__(self, definition: Definition, name: str, state: ReadableState | None = None) -> None:
        self._state = state or ReadableMemory()
        now = to_datetime(definition.clock)
        self._driver = GraphDriver(definition.graph(name), now=now, state=self._state)

    def feed(self, records: Sequence[Any], partition: str | None) -> None:
        """Give records to a source partition as one bundle."""
        self._driver.feed(SOURCE, records, partition=partition)

    def advance_watermark(self, at: Instant, partition: str | None) -> None:
        """Let source partitions state that nothing before `at` comes any more."""
        self._driver.advance_watermark(SOURCE, at, partition=partition)

    def advance_clock(self, by_us: int) -> None:
        """Let processing time pass."""
        self._driver.advance_clock(timedelta(microseconds=by_us))

    def end(self, partition: str | None) -> None:
        """End the input."""
        self._driver.end(SOURCE, partition=partition)

    def crash(self) -> None:
        """Drop all soft state, and read what is committed."""
        self._driver.crash()

    def lose_turns(self, loses: bool) -> None:
        """Set whether each turn is stepped, lost in a crash, and made again."""
        self._driver.loses_turns = loses

    def panes(self) -> Sequence[Pane]:
        """Return all panes so far."""
        return self._driver.panes(STEP)

    def late_records(self) -> Sequence[LateRecord]:
        """Return all late records so far."""
        return self._driver.late_records()

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return all dead letters so far."""
        return self._driver.dead_letters()

    def table(self) -> Rows:
        """Return the rows of the result table."""
        return self._driver.rows(STEP)

    def watermarks(self) -> tuple[Instant, Instant, Instant]:
        """Return (watermark of the source, input watermark, low watermark)."""
        step = self._driver.watermarks(STEP)
        return _instant(self._driver.watermark(SOURCE)), _instant(step.input), _instant(step.low)

    def unbalanced(self) -> Sequence[str]:
        """Describe the accounts that do not add up (I8)."""
        return self._state.unbalanced()

    def close(self) -> None:
        """Forget the run."""


def _instant(at: Any) -> Instant:
    return {BEGINNING_OF_TIME: INSTANT_MIN, END_OF_TIME: INSTANT_MAX}.get(at) or instant(at)
