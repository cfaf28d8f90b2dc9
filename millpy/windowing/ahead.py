"""Keys of one interval whose sliding windows have left before those of the other keys.

All windows up to the interval's position have left. When a window has more keys than a turn may emit, some of them go
ahead; so does a key whose record is late for a window that waits. Each is stored under its key until the position has
reached it, kind POSITION, namespace "ahead".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.record import Instants
from millpy.model.time import INSTANT_MAX, Instant

NAMESPACE = "ahead"


class KeysAhead:
    """How far keys are whose windows have left before others'."""

    def __init__(self) -> None:
        self._reached: dict[Key, Instant] = {}
        self._moved: dict[Key, Instant] = {}
        self._stale: dict[Key, None] = {}
        self._hasher = KeyHasher()

    def recover(self, entries: Iterable[Entries], key_types: tuple[type, ...], position: Instant) -> None:
        """Take what is stored, given how far all keys are."""
        for part in entries:
            if part.kind is not Kind.POSITION or part.namespace != NAMESPACE:
                continue
            for text, value in zip(part.keys, part.values, strict=True):
                if value is not None:
                    self._reached[key_from_text(text, key_types)] = Instant(int(value))
        self.forget(position)

    def __bool__(self) -> bool:
        return bool(self._reached)

    def __contains__(self, key: Key) -> bool:
        return key in self._reached

    def of(self, key: Key, position: Instant) -> Instant:
        """How far a key is when all are at a position."""
        return max(position, self._reached.get(key, position))

    def of_all(self, keys: Sequence[Key], position: Instant) -> Instants:
        """The same of several."""
        if not self._reached:
            return np.full(len(keys), position, np.int64)
        return np.array([self.of(key, position) for key in keys], np.int64)

    def before(self, position: Instant) -> list[tuple[Key, Instant]]:
        """Those that are not as far as a position, and how far they are."""
        return [(key, reached) for key, reached in self._reached.items() if reached < position]

    def go(self, keys: Mapping[Key, Instant]) -> None:
        """Windows of these keys have left so far."""
        self._reached.update(keys)
        self._moved.update(keys)
        for key in keys:
            self._stale.pop(key, None)

    def forget(self, position: Instant) -> None:
        """All keys are at a position."""
        for key in [key for key, reached in self._reached.items() if reached <= position]:
            del self._reached[key]
            if self._moved.pop(key, None) is None:
                self._stale[key] = None

    @property
    def stale(self) -> bool:
        """Whether something is stored that says nothing any more."""
        return bool(self._stale)

    def take_entries(self, gone_max: int) -> Entries | None:
        """What has changed; of what says nothing any more about so many."""
        gone = list(self._stale)[:gone_max]
        for key in gone:
            del self._stale[key]
        moved, self._moved = self._moved, {}
        keys = [*moved, *gone]
        if not keys:
            return None
        entries = Entries(Kind.POSITION, NAMESPACE)
        entries.keys = key_texts(keys)
        entries.key_hashes = self._hasher.hashes(keys).tolist()
        entries.subkeys = [""] * len(keys)
        entries.values = [*(b"%d" % reached for reached in moved.values()), *([None] * len(gone))]
        entries.fire_ats = [INSTANT_MAX] * len(keys)
        return entries
