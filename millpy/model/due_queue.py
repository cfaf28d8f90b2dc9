"""What is due next: the timers, holds and open windows of an interval by due time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX, Instant

Item = TypeVar("Item")

_OUTDATED_MIN = 1_000


class DueQueue(Generic[Item]):
    """Items, most of them of a key, in order of due time, then name, then key; subclasses tell which are current.

    Keys break ties, and not the order of addition: a new owner adds stored items in any order, and must do what the
    owner before it would have done. A heap: an item is never searched for. One that is outdated stays until it is the
    first, or until `add` finds that most are.
    """

    __slots__ = ("_added", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, str, Any, int, Item]] = []
        self._added = 0  # breaks the last ties, so that the heap never compares items

    def __len__(self) -> int:
        """Return the number of items, outdated ones included."""
        return len(self._heap)

    def is_current(self, key: Key | None, item: Item) -> bool:
        """Tell whether an item still counts."""
        raise NotImplementedError

    def add(self, due: int, key: Key | None, item: Item, name: str = "", live: int = INSTANT_MAX) -> None:
        """Add an item. If there are many more than the `live` ones, remove those that are outdated. O(log n)."""
        self._added += 1
        heappush(self._heap, (due, name, key, self._added, item))
        if len(self._heap) > 2 * live + _OUTDATED_MIN:
            self.remove_outdated()

    def remove_outdated(self) -> None:
        """Remove the items that no longer count. O(n)."""
        self._heap[:] = [entry for entry in self._heap if self.is_current(entry[2], entry[4])]
        heapify(self._heap)

    def trim(self, live: int) -> bool:
        """Remove the items that no longer count, if they are many beside `live` ones. Return whether they were."""
        if many := len(self._heap) > live * 5 // 4 + _OUTDATED_MIN:
            self.remove_outdated()
        return many

    def first(self, until: int = INSTANT_MAX) -> Item | None:
        """Return the first item if it is due by `until`, else None."""
        heap = self._heap
        while heap:
            due, _, key, _, item = heap[0]
            if self.is_current(key, item):
                return item if due <= until else None
            heappop(heap)
        return None

    def next_due(self) -> Instant:
        """Return when the first item is due; INSTANT_MAX without one."""
        return INSTANT_MAX if self.first() is None else Instant(self._heap[0][0])

    def pop(self) -> None:
        """Remove the item that `first` has returned."""
        heappop(self._heap)

    def take(self, until: int) -> Iterator[Item]:
        """Remove and yield one item after the other that is due by `until`."""
        heap, is_current = self._heap, self.is_current
        while heap and heap[0][0] <= until:
            _, _, key, _, item = heappop(heap)
            if is_current(key, item):
                yield item

    def due_keys(self, until: int, items_max: int = INSTANT_MAX) -> list[Key]:
        """Return the keys of the first items that are due by `until`, in order, without removing the items."""
        heap, is_current = self._heap, self.is_current
        found: list[tuple[int, str, Any, int, Item]] = []
        while heap and heap[0][0] <= until and len(found) < items_max:
            entry = heappop(heap)
            if is_current(entry[2], entry[4]):
                found.append(entry)
        if heap:
            for entry in found:
                heappush(heap, entry)
        else:
            heap.extend(found)  # in order, as a heap is
        return [entry[2] for entry in found if entry[2] is not None]
