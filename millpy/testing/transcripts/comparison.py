"""Comparing what has come out with what a transcript expects: every difference is one `Mismatch`.

Panes are compared window by window: those of one key and window in order, different windows in any order. Everything
that came out must be expected; of what is expected, only what is written is compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from millpy.model.checkpoint import DeadLetter
from millpy.model.time import Instant, instant
from millpy.testing.kit.contents import LateRecord, Pane
from millpy.testing.kit.state import Rows
from millpy.testing.transcripts.format import (
    ExpectedDeadLetter,
    ExpectedLateRecord,
    ExpectedMismatch,
    ExpectedPane,
    MismatchKind,
    Subject,
)
from millpy.testing.transcripts.notation import time_text, time_us, watermark_us

TOLERANCE = 1e-9
"""Relative difference up to which two floats are equal."""
E = TypeVar("E")
F = TypeVar("F")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One difference.

    Attributes:
        step: number of the `expect` step that found it; one more than the last step for the end of the transcript.
        of: what differs.
        kind: "missing", "unexpected", "different" in a field, or "error".
        key, window: of the pane or record; the window in the transcript's notation.
        field: the field that differs.
        expected, found: the values; of what is missing or unexpected, the whole of it.
    """

    step: int
    of: Subject
    kind: MismatchKind
    key: str | None = None
    window: tuple[str, str] | None = None
    field: str | None = None
    expected: Any = None
    found: Any = None

    def fits(self, wanted: ExpectedMismatch, origin: Instant) -> bool:
        """Tell whether it is the mismatch that a transcript names."""
        if (self.step, self.of, self.kind) != (wanted.step, wanted.of, wanted.kind):
            return False
        if wanted.window is not None:
            window = tuple(time_text(time_us(at, origin, "window"), origin) for at in wanted.window)
            if window != self.window:
                return False
        for name in ("key", "field"):
            if getattr(wanted, name) not in (None, getattr(self, name)):
                return False
        expected, found = wanted.expected, wanted.found
        return (expected is msgspec.UNSET or equal(expected, self.expected)) and (
            found is msgspec.UNSET or equal(found, self.found)
        )

    def __str__(self) -> str:
        where = f"{self.of.replace('_', ' ')}"
        if self.key is not None:
            where += f" {self.key}"
        if self.window is not None:
            where += f" [{self.window[0]}, {self.window[1]})"
        if self.kind == "different":
            field = f"{self.field}: " if self.field else ""
            return f"{where}: {field}expected {_shown(self.expected)}, found {_shown(self.found)}"
        if self.kind == "missing":
            return f"{where}: missing: {_shown(self.expected)}"
        return f"{where}: {self.kind}: {_shown(self.found)}"


def equal(expected: Any, found: Any) -> bool:
    """Tell whether two values are equal: numbers by value, floats within `TOLERANCE`, lists item by item."""
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, float) or isinstance(found, float):
        numbers = isinstance(expected, int | float) and isinstance(found, int | float)
        return numbers and math.isclose(expected, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(equal, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(equal(expected[key], found[key]) for key in expected)
    return bool(expected == found)


class Comparison:
    """The comparison of one `expect` step.

    Args:
        step: its number.
        origin: the time from which the transcript's times count.

    Attributes:
        mismatches: what differs, so far.
    """

    def __init__(self, step: int, origin: Instant) -> None:
        self._step = step
        self._origin = origin
        self.mismatches: list[Mismatch] = []

    def panes(self, expected: Sequence[ExpectedPane], found: Sequence[Pane]) -> None:
        """Compare panes."""
        for name, wanted, pane in _paired(
            expected,
            found,
            lambda e: (e.key, *self._times(e.window), e.retraction),
            lambda f: (f.key, *map(instant, f.window), f.retraction),
        ):
            key, start, end, _ = name
            window = self._window(start, end)
            if wanted is None or pane is None:
                self._add_one_sided("pane", key, window, wanted, None if pane is None else self._shown_pane(pane))
                continue
            fields = {name: getattr(pane, name) for name in _OF_PANE}
            self._compare_fields("pane", key, window, wanted, fields, pane.values)
            if wanted.timestamp is not None:
                at = end - 1 if wanted.timestamp == "end_of_window" else self._time(wanted.timestamp)
                self._differ("pane", key, window, "timestamp", self._text(at), self._text(instant(pane.event_time)))

    def table(self, expected: Sequence[ExpectedPane], found: Rows) -> None:
        """Compare all rows of the result table."""
        for name, wanted, row in _paired(
            expected,
            found,
            lambda e: (e.key, *self._times(e.window)),
            lambda f: (f["key"], instant(f["window_start"]), instant(f["window_end"])),
        ):
            key, start, end = name
            window = self._window(start, end)
            if wanted is None or row is None:
                shown = None if row is None else {k: v for k, v in row.items() if k not in _OF_NAME}
                self._add_one_sided("table", key, window, wanted, shown)
                continue
            fields = {name: row[column] for name, column in _COLUMNS.items()}
            self._compare_fields("table", key, window, wanted, fields | {"first": row["pane_index"] == 0}, row)

    def late(self, expected: Sequence[ExpectedLateRecord], found: Sequence[LateRecord]) -> None:
        """Compare late records, of which there is one for each window that a record missed."""
        exact = all(wanted.window is not None for wanted in expected)
        for name, wanted, late in _paired(
            expected,
            found,
            lambda e: (e.key, self._time(e.at), *(self._times(e.window) if exact and e.window else ())),
            lambda f: (f.key, instant(f.event_time), *(map(instant, f.window) if exact and f.window else ())),
        ):
            key, at, *window_us = name
            window = self._window(*window_us) if window_us else None
            if wanted is None or late is None:
                shown = None if late is None else self._shown_late(late, with_window=not window_us)
                self._add_one_sided("late", key, window, wanted, shown, at=self._text(at))
                continue
            if wanted.window is not None and not window_us and late.window is not None:
                found_window = self._window(*map(instant, late.window))
                self._differ("late", key, window, "window", self._window(*self._times(wanted.window)), found_window)
            if wanted.value is not msgspec.UNSET:
                self._differ("late", key, window, "value", wanted.value, late.record.value)
            if wanted.watermark is not None:
                judged = self._text(instant(late.watermark))
                self._differ("late", key, window, "watermark", self._text(self._time(wanted.watermark)), judged)

    def dead_letters(self, expected: Sequence[ExpectedDeadLetter], found: Sequence[DeadLetter]) -> None:
        """Compare dead letters, those of one reason in order."""
        for reason, wanted, letter in _paired(expected, found, lambda e: e.reason, lambda f: f.reason):
            if wanted is None or letter is None:
                shown = None if letter is None else {"detail": letter.detail, "payload": _payload_text(letter)}
                self._add_one_sided("dead_letter", reason, None, wanted, shown)
            elif wanted.payload is not None:
                self._differ("dead_letter", reason, None, "payload", wanted.payload, _payload_text(letter))

    def watermark(self, of: Subject, expected: str | None, found: Instant) -> None:
        """Compare one watermark."""
        if expected is not None:
            wanted = watermark_us(expected, self._origin, of)
            if wanted != found:
                self._add(of, "different", expected=self._text(wanted), found=self._text(found))

    def error(self, of: Subject, text: str) -> None:
        """Add an error of the run."""
        self._add(of, "error", found=text)

    def _compare_fields(
        self,
        of: Subject,
        key: str,
        window: tuple[str, str],
        wanted: ExpectedPane,
        fields: dict[str, Any],
        values: Any,
    ) -> None:
        for field, found in fields.items():
            if (value := getattr(wanted, field)) is not None:
                self._differ(of, key, window, field, value, found)
        for column, value in wanted.values.items():
            self._differ(of, key, window, f"values.{column}", value, values[column])

    def _differ(
        self, of: Subject, key: str, window: tuple[str, str] | None, field: str, expected: Any, found: Any
    ) -> None:
        if not equal(expected, found):
            self._add(of, "different", key=key, window=window, field=field, expected=expected, found=found)

    def _add_one_sided(
        self, of: Subject, key: str, window: tuple[str, str] | None, wanted: Any, found: Any, **more: Any
    ) -> None:
        if wanted is None:
            self._add(of, "unexpected", key=key, window=window, found=more | found)
        else:
            given = {name: value for name, value in msgspec.to_builtins(wanted).items() if name not in _OF_NAME}
            self._add(of, "missing", key=key, window=window, expected=more | given)

    def _add(self, of: Subject, kind: MismatchKind, **more: Any) -> None:
        self.mismatches.append(Mismatch(step=self._step, of=of, kind=kind, **more))

    def _shown_pane(self, pane: Pane) -> dict[str, Any]:
        return {"values": dict(pane.values), "index": pane.index, "timing": pane.timing, "late_count": pane.late_count}

    def _shown_late(self, late: LateRecord, *, with_window: bool) -> dict[str, Any]:
        shown = {"value": late.record.value, "watermark": self._text(instant(late.watermark))}
        if with_window and late.window is not None:
            shown["window"] = self._window(*map(instant, late.window))
        return shown

    def _time(self, text: str) -> Instant:
        return time_us(text, self._origin, "time")

    def _times(self, window: tuple[str, str]) -> tuple[Instant, Instant]:
        return self._time(window[0]), self._time(window[1])

    def _text(self, at: int) -> str:
        return time_text(at, self._origin)

    def _window(self, start: int, end: int) -> tuple[str, str]:
        return self._text(start), self._text(end)


_OF_PANE = ("timing", "index", "first", "late_count", "on_time_index", "last")
_COLUMNS = {
    "timing": "pane_timing",
    "index": "pane_index",
    "late_count": "late_count",
    "on_time_index": "pane_on_time_index",
    "last": "pane_last",
}
"""Key of a row of the table -> its column."""
_OF_NAME = ("key", "window", "window_start", "window_end", "at")


def _paired(
    expected: Sequence[E], found: Sequence[F], name_of_expected: Callable[[E], Any], name_of_found: Callable[[F], Any]
) -> Iterator[tuple[Any, E | None, F | None]]:
    """Pair what has the same name, in order; yield (name, expected, found), None where there is no partner."""
    wanted: dict[Any, list[E]] = defaultdict(list)
    present: dict[Any, list[F]] = defaultdict(list)
    for one in expected:
        wanted[name_of_expected(one)].append(one)
    for other in found:
        present[name_of_found(other)].append(other)
    for name in dict.fromkeys([*wanted, *present]):
        left, right = wanted.get(name, []), present.get(name, [])
        for place in range(max(len(left), len(right))):
            yield (
                name,
                left[place] if place < len(left) else None,
                right[place] if place < len(right) else None,
            )


def _payload_text(letter: DeadLetter) -> str:
    return letter.payload.decode(errors="replace")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, tuple):
        return f"[{value[0]}, {value[1]})"
    return str(value)
