"""Archive: a keyed step that hands its input on to be archived as it is, and keeps no state.

The step only says which bundles a commit archives. The store of an archiver writes them as files and commits the
manifest with the cursors (store/postgres/archiving.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pyarrow as pa

from millpy.model.identity import Identity
from millpy.model.stage import ResidentInterval, StageBinding, StepResult, StoredInterval, Work

ADDED_COLUMNS = ("_partition", "_seq", "_ordinal", "_event_time_us", "_watermark_us", "_retracts")
"""The columns of an archive beside the fields of the records."""


def has_empty_struct(of: pa.DataType) -> bool:
    """Tell whether a type is a struct without fields, or has one inside."""
    inside = [of.field(place).type for place in range(of.num_fields)]
    return (pa.types.is_struct(of) and not inside) or any(map(has_empty_struct, inside))


class ArchiveLogic:
    """An archive in a graph.

    Args:
        buckets: number of parts of the key space, a power of two.
        skips: whether records that wait too long are left out, so that sources need not wait. May change at any time.
        takes_retractions: whether some of the records may be retractions, so that files have a column for it.
    """

    def __init__(self, buckets: int, *, skips: bool = False, takes_retractions: bool = False) -> None:
        self.buckets = buckets
        self.skips = skips
        self.takes_retractions = takes_retractions

    def bind(self, binding: StageBinding) -> ArchiveStage:
        """Return the stage, which can open intervals."""
        return ArchiveStage(self.takes_retractions)

    def identity(self) -> Identity:
        """Describe how the files are cut. The identities of other computations do not depend on it."""
        return {"kind": "archive", "buckets": self.buckets}


class ArchiveStage:
    """An archive in a deployed graph."""

    def __init__(self, takes_retractions: bool) -> None:
        self._takes_retractions = takes_retractions

    def open(self, recovered: StoredInterval) -> ArchiveInterval:
        """Return an interval, which has no soft state."""
        return ArchiveInterval(self._takes_retractions)


class ArchiveInterval(ResidentInterval):
    """One interval of an archive."""

    immediate = True

    def __init__(self, takes_retractions: bool) -> None:
        self._takes_retractions = takes_retractions

    def step(self, work: Work) -> StepResult:
        """Consume all bundles as they are; none of their records is late."""
        consumed: Counter[int] = Counter()
        bundles = [arrival.bundle for arrival in work.arrived]
        for bundle in bundles:
            consumed[bundle.input] += len(bundle)
        if self._takes_retractions:  # files say of every record whether it is one
            bundles = [replace(bundle, records=bundle.records.with_retracts()) for bundle in bundles]
        return StepResult(archived=bundles, consumed_by_input=dict(consumed))
