"""Open windows of one interval: what has to be remembered between bundles, and when each is due.

    a window opens     with its first record that is not too late
    its on-time pane   once the input watermark has reached its end; until then it holds the low watermark at end - 1 µs
    late panes         after that, for a bundle that has brought it late records
    it expires         once the watermark has reached end + allowed lateness; then it emits nothing any more (I7)

Stored as one entry a (key, window), kind WINDOW, subkey "<start>/<end>", fire time: when it expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import msgspec

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.aggregate import Fold


class OpenPane(msgspec.Struct, gc=False):
    """One key's window.

    Attributes:
        values: one accumulator per aggregate.
        pane_index: index of the next pane (I7).
        late_count: records that came when the watermark had reached the window's end.
        emitted: whether a pane has left.
        bundle: the bundle that last wrote it; 0 for none.
    """

    values: list[Any]
    pane_index: int = 0
    late_count: int = 0
    emitted: bool = False
    bundle: int = 0


PaneName = tuple[int, Key]
_encode_lines = msgspec.json.Encoder().encode_lines
_decode = msgspec.json.Decoder(OpenPane).decode


class OpenWindows:
    """Panes by window start, then key; starts ordered by when they are due."""

    def __init__(self, folds: Sequence[Fold], size_us: int, allowed_lateness_us: int) -> None:
        self._folds = folds
        self._size_us = size_us
        self._allowed_us = allowed_lateness_us
        self.panes: dict[int, dict[Key, OpenPane]] = {}
        self._unfired: list[int] = []
        self._unexpired: list[int] = []
        self._touched: dict[PaneName, OpenPane] = {}
        self._hasher = KeyHasher()

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Take stored windows."""
        for text, subkey, value in zip(entries.keys, entries.subkeys, entries.values, strict=True):
            if value is None:
                continue
            pane = _decode(value)
            pane.values = [fold.restored(v) for fold, v in zip(self._folds, pane.values, strict=True)]
            panes = self.panes.setdefault(int(subkey.partition("/")[0]), {})
            panes[key_from_text(text, key_types)] = pane
        self._unexpired = list(self.panes)
        self._unfired = [start for start, panes in self.panes.items() if not all(p.emitted for p in panes.values())]
        heapify(self._unexpired)
        heapify(self._unfired)

    def of(self, start: int) -> dict[Key, OpenPane]:
        """The panes of a window, opened if it was not."""
        panes = self.panes.get(start)
        if panes is None:
            panes = self.panes[start] = {}
            heappush(self._unfired, start)
            heappush(self._unexpired, start)
        return panes

    def touch(self, start: int, key: Key, pane: OpenPane) -> None:
        """Note that a pane has changed in this bundle."""
        self._touched[start, key] = pane

    def due(self, watermark: Instant) -> list[tuple[int, Key, OpenPane]]:
        """Panes to emit now: those of windows that the watermark has reached, and those changed since."""
        due = {name: pane for name, pane in self._touched.items() if name[0] + self._size_us <= watermark}
        while self._unfired and self._unfired[0] + self._size_us <= watermark:
            start = heappop(self._unfired)
            for key, pane in self.panes[start].items():
                due[start, key] = pane
        self._touched.update(due)
        return [(start, key, pane) for (start, key), pane in due.items()]

    def take_entries(self, watermark: Instant, bundle: int) -> Entries | None:
        """Expire what the watermark has passed; changes of this bundle as entries.

        A window that opened and expired within the bundle leaves no trace.
        """
        entries = Entries(Kind.WINDOW, "")
        gone: list[PaneName] = []
        while self._unexpired and self._unexpired[0] + self._size_us + self._allowed_us <= watermark:
            start = heappop(self._unexpired)
            for key, pane in self.panes.pop(start).items():
                self._touched.pop((start, key), None)
                if pane.bundle:
                    gone.append((start, key))
        touched, self._touched = self._touched, {}
        names = [*touched, *gone]
        if not names:
            return None
        for pane in touched.values():
            pane.bundle = bundle
        size, allowed = self._size_us, self._allowed_us
        entries.keys = key_texts([key for _, key in names])
        entries.key_hashes = self._hasher.hashes([key for _, key in names]).tolist()
        entries.subkeys = [f"{start}/{start + size}" for start, _ in names]
        entries.values = [*encode_panes(list(touched.values())), *([None] * len(gone))]
        entries.fire_ats = [start + size + allowed for start, _ in names]
        return entries

    def oldest_hold(self) -> Instant:
        """Output time of the oldest window without its on-time pane."""
        return Instant(self._unfired[0] + self._size_us - 1) if self._unfired else INSTANT_MAX

    def next_due(self) -> Instant:
        """When the next window fires or expires."""
        fires = self._unfired[0] + self._size_us if self._unfired else INSTANT_MAX
        expires = self._unexpired[0] + self._size_us + self._allowed_us if self._unexpired else INSTANT_MAX
        return Instant(min(fires, expires))


def encode_panes(panes: Sequence[OpenPane]) -> list[bytes]:
    """Panes as JSON, all in one call unless one of them has what JSON cannot say."""
    if not panes:
        return []
    try:
        lines: list[bytes] = _encode_lines(panes).splitlines()
    except OverflowError:
        return [_encode_exactly(pane) for pane in panes]
    return [_encode_exactly(pane) if b"null" in line else line for pane, line in zip(panes, lines, strict=True)]


def _encode_exactly(pane: OpenPane) -> bytes:
    """With infinities, NaN and whole numbers beyond 64 bits as text; `Fold.restored` reads them back."""
    return msgspec.json.encode(msgspec.structs.replace(pane, values=[sayable(value) for value in pane.values]))


def sayable(value: Any) -> Any:
    """An accumulator as JSON can hold it."""
    if isinstance(value, list):
        return [sayable(part) for part in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value
