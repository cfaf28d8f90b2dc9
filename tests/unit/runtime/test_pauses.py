"""After a slow collection its objects are frozen; cycles that are made later are still collected."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from millpy.runtime import pauses
from millpy.runtime.pauses import short_pauses
from tests.collector import nothing_frozen


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    with nothing_frozen():
        yield


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_objects_of_a_slow_collection_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "PAUSE_S_MAX", 0.0)
    windows = [[number] for number in range(1_000)]

    with short_pauses():
        gc.collect()
        assert gc.get_freeze_count() >= len(windows)
        assert len(gc.get_objects()) < len(windows)
        later = weakref.ref(Cycle())
        gc.collect()
        assert later() is None, "a cycle that was made afterwards is collected"

    assert gc.get_freeze_count() == 0
    assert pauses.__name__ not in [watch.__module__ for watch in gc.callbacks]


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_quick_collections_and_those_of_young_objects_change_nothing(
    monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    monkeypatch.setattr(pauses, "PAUSE_S_MAX", 0.0 if generation < 2 else 60.0)
    gc.collect(generation)  # Python 3.12 itself freezes what never ends
    before = gc.get_freeze_count()

    with short_pauses():
        gc.collect(generation)
        assert gc.get_freeze_count() == before


def test_freezing_ends_when_the_worker_ends_with_an_error() -> None:
    before = list(gc.callbacks)
    with pytest.raises(ValueError, match="mistake"), short_pauses():
        raise ValueError("mistake")

    assert gc.callbacks == before
