"""Unread panes: panes with the state of a trigger that leave memory before their window fires, or while records wait.

What `unfired_windows.py` says of panes holds for those of a trigger that is asked pane by pane, if records and the
watermark alone make them due. Such a pane may be needed twice without a record, and each time it is read in the order
of places:

    end       when the watermark reaches the end of its window, its trigger is asked, whether records have come or not
    expiry    when the window is over, late records that wait in it make the last pane

Which panes are left is a fact of their rows: `FiringState.passed` and `FiringState.waits`. A pane that needs neither
waits for late records only, and counts as one of a closed window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from millpy.model.keys import Key
from millpy.model.stored_windows import FIRST_PLACE, PaneNeed, PanePlace
from millpy.windowing.firing import firing_of
from millpy.windowing.pane_codec import OpenPane
from millpy.windowing.unfired_windows import UnfiredWindows


class UnreadPanes(UnfiredWindows):
    """The windows of one key interval whose trigger has a state, and that are not, or not all, in memory.

    Args:
        of_unfired: the arguments of `UnfiredWindows`.

    Attributes:
        unasked: the starts of windows with panes in the store that may wait for the expiry -> the place up to which
            they have been read.
        awake: window start -> the keys of panes that wait after the end of their window.
        finished: window start -> the keys whose trigger is finished.
    """

    reads_before_expiry = True
    awake: Mapping[int, set[Key]]
    finished: Mapping[int, set[Key]]

    def __init__(self, *of_closed: Any, **of_unfired: Any) -> None:
        super().__init__(*of_closed, **of_unfired)
        self.unasked: dict[int, PanePlace] = {}
        self._unread_by_need = {PaneNeed.END: self.unread, PaneNeed.EXPIRY: self.unasked}

    def has_unread(self, start: int, need: PaneNeed) -> bool:
        """Tell whether panes of a window that need something may be only in the store."""
        return start in self._unread_by_need[need]

    def recover_window(self, start: int, *, closed: bool) -> None:
        """Take note of a window of which a new owner has read only what has changed since the last fold."""
        super().recover_window(start, closed=closed)
        self.unasked[start] = FIRST_PLACE

    def _leave_unfired(self, start: int, keys: list[Key]) -> None:
        """Let panes leave memory, and take note of what they need."""
        firings = [firing_of(self._panes[start][key]) for key in keys]
        self._leave(start, keys)
        if not all(firing.passed for firing in firings):
            self.unread.setdefault(start, FIRST_PLACE)
        if any(firing.waits for firing in firings):
            self.unasked.setdefault(start, FIRST_PLACE)

    def _forget(self, start: int, keys: Sequence[Key]) -> None:
        for of_window in (self.finished.get(start), self.awake.get(start)):
            if of_window:
                of_window.difference_update(keys)

    def _unfired_panes(self, first_open_end: int) -> Iterator[tuple[int, Mapping[Key, OpenPane]]]:
        yield from super()._unfired_panes(first_open_end)
        for start, keys in self._awake_in_closed(first_open_end):
            panes = self._panes[start]
            yield start, {key: panes[key] for key in keys}

    def _awake_in_closed(self, first_open_end: int) -> Iterator[tuple[int, Collection[Key]]]:
        """Yield the start of each closed window with panes in memory that wait, and their keys."""
        for start, keys in self.awake.items():
            if keys and self._end_of(start) < first_open_end:
                yield start, keys

    def _closed_panes(self, first_open_end: int) -> int:
        waiting = sum(len(keys) for _, keys in self._awake_in_closed(first_open_end))
        return super()._closed_panes(first_open_end) - waiting

    def _count(self, start: int) -> int:
        return len(self._panes[start]) - len(self.awake.get(start, ()))

    def _scope(self, first_open_end: int) -> tuple[int, ...]:
        return *super()._scope(first_open_end), sum(map(len, self.awake.values()))
