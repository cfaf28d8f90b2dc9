"""The queue of what is due: order, outdated items, and what it keeps."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Container

from hypothesis import given
from hypothesis import strategies as st

from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX, Instant
from millpy.model.timer import Timer
from millpy.operators.timers import TimerBook

entries = st.lists(
    st.tuples(st.integers(-3, 3), st.sampled_from(["", "a", "b"]), st.sampled_from(["x", "y", "z"])), max_size=12
)


class Numbers(DueQueue[int]):
    def __init__(self, gone: Container[int]) -> None:
        super().__init__()
        self.gone = gone

    def is_current(self, key: Key | None, item: int) -> bool:
        return item not in self.gone


@given(added=entries, gone=st.sets(st.integers(0, 11)), until=st.integers(-4, 4))
def test_items_come_by_due_time_then_name_then_key(
    added: list[tuple[int, str, str]], gone: set[int], until: int
) -> None:
    queue = Numbers(gone)
    for item, (due, name, key) in enumerate(added):
        queue.add(due, key, item, name)
    wanted = sorted((due, name, key, item) for item, (due, name, key) in enumerate(added) if item not in gone)
    due_now = [item for due, _, _, item in wanted if due <= until]
    keys = [key for due, _, key, _ in wanted if due <= until]

    assert queue.due_keys(until) == keys
    assert [queue.due_keys(until, most) for most in (0, 1, 3)] == [[], keys[:1], keys[:3]]
    assert queue.due_keys(until) == keys, "asking removes nothing"
    assert queue.next_due() == min((due for due, *_ in wanted), default=INSTANT_MAX)
    assert queue.first(until) == (due_now[0] if due_now else None)
    assert list(queue.take(until)) == due_now
    found = []
    while (item := queue.first()) is not None:
        found.append(item)
        queue.pop()
    assert found == [item for *_, item in wanted][len(due_now) :]


def test_items_stay_in_order_when_outdated_ones_are_removed() -> None:
    """What is left of a heap without some of its entries is no heap yet."""
    rng = random.Random(7)
    for _ in range(200):
        gone: set[int] = set()
        queue, dues = Numbers(gone), [rng.randrange(100) for _ in range(40)]
        for item, due in enumerate(dues):
            queue.add(due, None, item)
        gone.update(item for item in range(len(dues)) if rng.random() < 0.5)
        queue.remove_outdated()
        found = [dues[item] for item in queue.take(50)]
        assert found == sorted(due for item, due in enumerate(dues) if item not in gone and due <= 50)


def test_outdated_items_are_removed_when_there_are_too_many() -> None:
    queue = Numbers(range(1, 50_000))
    for item in range(50_000):
        queue.add(item, None, item, live=1)

    assert len(queue) <= 1_002
    assert queue.first() == 0


def test_a_timer_of_a_late_record_holds_no_watermark_back_also_for_a_new_owner() -> None:
    late = Timer("again", "processing", Instant(90), Instant(5), holds=False)
    in_time = Timer("flush", "processing", Instant(90), Instant(30))
    book, successor = TimerBook(), TimerBook()
    book.replace("a", 0, {late.id: late})
    assert book.oldest_hold() == INSTANT_MAX
    book.replace("a", 0, {late.id: late, in_time.id: in_time})
    assert book.oldest_hold() == 30

    for entries_of in book.take_entries([b'"a"'], [1]):
        for name, at, value in zip(entries_of.subkeys, entries_of.fire_ats, entries_of.values, strict=True):
            assert value is not None
            successor.absorb("a", entries_of.namespace, name, at, value)
    assert successor.by_key == book.by_key
    assert (successor.oldest_hold(), successor.next_due()) == (30, (INSTANT_MAX, 90))


def test_a_book_of_timers_leaves_memory_without_the_collector() -> None:
    gc.disable()
    try:
        book = TimerBook()
        gone = weakref.ref(book)
        del book
        assert gone() is None
    finally:
        gc.enable()
