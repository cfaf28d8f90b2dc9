"""Keys of one interval that are ahead: their sliding windows have fired before those of the other keys.

The position of an interval, or of a key, is the end up to which its windows have fired. If a window has more keys than
a turn may emit, some of its keys go ahead of the interval; so does a key whose record is late for a window that has not
fired yet. The store keeps each key that is ahead, under kind POSITION and namespace "ahead", until the interval's
position has reached it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest

import numpy as np

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.record import Instants
from millpy.model.time import INSTANT_MAX, Instant

NAMESPACE = "ahead"


class KeysAhead:
    """The positions of the keys that are ahead of their interval, and their changes since they were last stored."""

    def __init__(self) -> None:
        self._reached: dict[Key, Instant] = {}
        self._moved: dict[Key, Instant] = {}
        self._to_delete: dict[Key, None] = {}
        self._hasher = KeyHasher()

    def recover(self, entries: Iterable[Entries], key_types: tuple[type, ...], position: Instant) -> None:
        """Load the stored keys, given the interval's position."""
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

    def position_of(self, key: Key, position: Instant) -> Instant:
        """Return the position of a key, given the interval's position."""
        return max(position, self._reached.get(key, position))

    def positions_of(self, keys: Sequence[Key], position: Instant) -> Instants:
        """Return the positions of several keys, given the interval's position."""
        if not self._reached:
            return np.full(len(keys), position, np.int64)
        return np.array([self.position_of(key, position) for key in keys], np.int64)

    def positions_before(self, position: Instant) -> list[tuple[Key, Instant]]:
        """Return (key, position) of the keys that are ahead, but not as far as the given position."""
        return [(key, reached) for key, reached in self._reached.items() if reached < position]

    def advance(self, keys: Mapping[Key, Instant]) -> None:
        """Record that windows of these keys have fired up to the given positions."""
        self._reached.update(keys)
        self._moved.update(keys)
        for key in keys:
            self._to_delete.pop(key, None)

    def forget(self, position: Instant) -> None:
        """Forget the keys that the interval has caught up with at its new position."""
        for key in [key for key, reached in self._reached.items() if reached <= position]:
            del self._reached[key]
            if self._moved.pop(key, None) is None:
                self._to_delete[key] = None

    @property
    def has_deletions(self) -> bool:
        """Whether the store still has entries of keys that are no longer ahead."""
        return bool(self._to_delete)

    def take_entries(self, gone_max: int) -> Entries | None:
        """Return the changes since the last call as entries; None without any.

        At most `gone_max` of them are deletions, by key; further ones follow with the next call.
        """
        gone = list(self._to_delete)
        if len(gone) > gone_max:
            gone = nsmallest(gone_max, gone)
        for key in gone:
            del self._to_delete[key]
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
