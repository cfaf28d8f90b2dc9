"""Dedupe ids of one source partition: an exact sliding horizon, in memory as sorted arrays (I4).

A record is a duplicate if its id was last seen at most `within` ago on the dedupe clock. A duplicate refreshes its id.
The clock never runs back: the clock of a column is its running maximum. The result does not depend on how records are
split into bundles.

    id       16 bytes: xxh3_128 of the canonical bytes of the fields, as two uint64 (hi, lo)
    recent   a dict of the ids of small bundles
    tiers    sorted (hi, lo, last seen), oldest first (`model/ids.py`); a merge drops ids that have left the horizon.
             Because the clock never runs back, the newest tier that has an id knows when it was last seen
    run      the ids of one bundle, duplicates included, committed with it; a new owner rebuilds the index from the runs
             of the horizon
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from millpy.ingest.settings import Dedupe
from millpy.model.checkpoint import DedupeRun
from millpy.model.ids import (
    ID_BYTES,
    Halves,
    IdFilter,
    Mask,
    first_of_each,
    halves_of,
    ids_of,
    order_of,
    tiers_to_merge,
)
from millpy.model.keys import canonical_bytes
from millpy.model.record import Instants, RecordType, column_of, getter
from millpy.model.time import INSTANT_MIN, Instant, instant

RECENT_IDS_MAX = 4_096
RENEWED_IDS_MAX = 4_000_000
_SMALL_IDS_MAX = 64
_NEVER = INSTANT_MIN


@dataclass(slots=True)
class _IdTier:
    """Distinct ids in order, and the time at which each was last seen."""

    hi: Halves
    lo: Halves
    seen: Instants
    oldest: int = field(init=False)
    newest: int = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.seen), "a tier without ids"
        self.oldest, self.newest = int(self.seen.min()), int(self.seen.max())

    def __len__(self) -> int:
        return len(self.hi)

    def last_seen(self, hi: Halves, lo: Halves) -> Instants:
        """Return when each id was last seen; INSTANT_MIN for an id that is not in this tier."""
        at = np.searchsorted(self.hi, hi)
        np.minimum(at, len(self.hi) - 1, out=at)
        same_hi = self.hi[at] == hi
        found = np.where(same_hi & (self.lo[at] == lo), self.seen[at], _NEVER)
        # Several ids share an upper half: look at the neighbors, too. With random ids this never happens.
        for row in np.flatnonzero(same_hi & (self.lo[at] != lo)).tolist():
            place = int(at[row])
            while place < len(self.hi) and self.hi[place] == hi[row]:
                if self.lo[place] == lo[row]:
                    found[row] = self.seen[place]
                place += 1
        return found


class DedupeIndex:
    """The ids of one source partition within the horizon; soft state.

    Args:
        within_us: the horizon in µs.
        runs: the stored runs, oldest first.
        recent_ids_max: number of recent ids at which they are sorted into a tier.
        floor: ids that were last seen before it are forgotten, although they are within the horizon.

    Attributes:
        found: number of duplicates in the last check.
    """

    def __init__(
        self,
        within_us: int,
        runs: Sequence[DedupeRun] = (),
        *,
        recent_ids_max: int = RECENT_IDS_MAX,
        floor: Instant = INSTANT_MIN,
    ) -> None:
        self._within_us = within_us
        self._floor = max(floor, INSTANT_MIN + 1)  # INSTANT_MIN is never
        self._recent_ids_max = recent_ids_max
        self._recent: dict[tuple[int, int], int] = {}
        self._tiers: list[_IdTier] = []
        self.clock: Instant = max((run.clock for run in runs), default=INSTANT_MIN)
        self._filter = IdFilter()
        self.found = 0
        ids = b"".join(run.ids for run in runs)
        if ids:
            self._push(_newest(*halves_of(ids), np.concatenate([_times_of(run) for run in runs])))

    def __len__(self) -> int:
        """Return the number of ids in memory. An id in several tiers counts several times."""
        return len(self._recent) + sum(map(len, self._tiers))

    def check(self, ids: bytes, clocks: Instants) -> tuple[Mask, DedupeRun | None]:
        """Judge records in order, and remember their ids.

        Args:
            ids: 16 bytes per record.
            clocks: the dedupe clock at each record; its running maximum counts.

        Returns:
            Which records are duplicates; and the run to commit, None without records.
        """
        count = len(clocks)
        self.found = 0
        if not count:
            return np.zeros(0, bool), None
        hi, lo = halves_of(ids)
        times = np.maximum(np.maximum.accumulate(clocks), self.clock)
        order = order_of(hi, lo)
        hi, lo, seen = hi[order], lo[order], times[order]
        first = first_of_each(hi, lo)
        last = np.append(first[1:], True)
        small = int(np.count_nonzero(first)) <= _SMALL_IDS_MAX
        if self._recent and not small:
            # Flush before this bundle becomes a tier: a later tier knows when an id was last seen. Flush by the clock
            # before it: its first records may be duplicates of ids that leave the horizon by its last record.
            self._flush()
        self.clock = Instant(int(times[-1]))
        before = np.empty(count, np.int64)
        before[1:] = seen[:-1]
        before[first] = self._last_seen(hi[first], lo[first])
        duplicates = np.empty(count, bool)
        again = (before >= self._floor) & (seen - before <= self._within_us)
        self.found = int(np.count_nonzero(again))
        duplicates[order] = again
        tier = _IdTier(hi[last], lo[last], seen[last])
        if small:
            self._add_recent(tier)
        else:
            self._push(tier)
        return duplicates, self._run(tier)

    def expire(self, quiet_us: int) -> DedupeRun | None:
        """Forget every id if the source has been quiet for longer than the horizon. Return the run that records it.

        Otherwise the last runs of a quiet source, and their slots, would be kept forever.
        """
        if not len(self) or quiet_us <= self._within_us:
            return None
        self._recent.clear()
        self._tiers.clear()
        self.clock = Instant(self.clock + quiet_us)
        return DedupeRun(b"", b"", Instant(self.clock - 1), self.clock)

    def renew(self) -> DedupeRun | None:
        """Return all ids of the horizon as one run that replaces earlier runs; None without ids, or with too many.

        For a named clock that pauses: its ids stay valid meanwhile, and would keep their slots from being freed.
        """
        if self._recent:
            self._flush()
        if not self._tiers:
            return None
        whole = _live(_joined(self._tiers), self.clock - self._within_us)
        self._tiers = [] if whole is None else [whole]
        if whole is None or len(whole) > RENEWED_IDS_MAX:
            return None
        return replace(self._run(whole), whole=True)

    def _last_seen(self, hi: Halves, lo: Halves) -> Instants:
        """Return when each id was last seen. The ids are in order."""
        found = np.full(len(hi), _NEVER, np.int64)
        asked = np.flatnonzero(self._filter.may_hold(hi))
        for tier in reversed(self._tiers):
            if not len(asked):
                break
            seen = tier.last_seen(hi[asked], lo[asked])
            found[asked] = seen
            asked = asked[seen == _NEVER]
        if self._recent:
            recent = [self._recent.get(pair, _NEVER) for pair in zip(hi.tolist(), lo.tolist(), strict=True)]
            np.maximum(found, np.array(recent, np.int64), out=found)
        return found

    def _add_recent(self, tier: _IdTier) -> None:
        self._recent.update(zip(zip(tier.hi.tolist(), tier.lo.tolist(), strict=True), tier.seen.tolist(), strict=True))
        if len(self._recent) >= self._recent_ids_max:
            self._flush()

    def _flush(self) -> None:
        """Sort the ids of small bundles into a tier."""
        pairs = np.array(list(self._recent), np.uint64)
        seen = np.array(list(self._recent.values()), np.int64)
        self._recent.clear()
        self._push(_newest(pairs[:, 0], pairs[:, 1], seen))  # each id occurs once

    def _push(self, tier: _IdTier) -> None:
        """Add a tier, and merge tiers of similar size when there are enough of them."""
        horizon = self.clock - self._within_us
        tiers = [old for old in self._tiers if old.newest >= horizon]
        added = _live(tier, horizon)
        if added is not None:
            tiers.append(added)
            while count := tiers_to_merge([len(each) for each in tiers]):
                merged = _live(_joined(tiers[-count:]), horizon)
                assert merged is not None, "each tier has ids in the horizon"
                tiers[-count:] = [merged]
            self._filter.add(added.hi, (each.hi for each in tiers))
        self._tiers = tiers

    def _run(self, tier: _IdTier) -> DedupeRun:
        times = tier.seen if tier.oldest < tier.newest else tier.seen[:1]
        return DedupeRun(
            ids_of(tier.hi, tier.lo), times.astype("<i8").tobytes(), Instant(tier.newest + self._within_us), self.clock
        )


def _times_of(run: DedupeRun) -> Instants:
    times = np.frombuffer(run.times, "<i8").astype(np.int64)
    return np.repeat(times, len(run.ids) // ID_BYTES) if len(times) == 1 else times


def _newest(hi: Halves, lo: Halves, seen: Instants) -> _IdTier:
    """Sort the ids and keep the last time of each. The times of an id must not fall."""
    order = order_of(hi, lo)
    hi, lo = hi[order], lo[order]
    last = np.append(first_of_each(hi, lo)[1:], True)
    if last.all():
        return _IdTier(hi, lo, seen[order])
    return _IdTier(hi[last], lo[last], seen[order[last]])


def _joined(tiers: Sequence[_IdTier]) -> _IdTier:
    """Merge tiers, oldest first, into one."""
    return _newest(
        np.concatenate([tier.hi for tier in tiers]),
        np.concatenate([tier.lo for tier in tiers]),
        np.concatenate([tier.seen for tier in tiers]),
    )


def _live(tier: _IdTier, horizon: int) -> _IdTier | None:
    """Return the ids that have not left the horizon, or None if all have."""
    if tier.oldest >= horizon:
        return tier
    live = tier.seen >= horizon
    return _IdTier(tier.hi[live], tier.lo[live], tier.seen[live]) if live.any() else None


class DedupeIds:
    """Makes the 16-byte ids of a record type's dedupe fields."""

    def __init__(self, settings: Dedupe, record_type: RecordType) -> None:
        self._fields = settings.fields
        self._kinds = [record_type.field_type(name) for name in settings.fields]
        self._nullable = [name for name in settings.fields if record_type.is_nullable(name)]
        self._reads = [getter(name) for name in settings.fields]

    def identified_objects(self, objects: Sequence[object]) -> Mask:
        """Tell which objects have an id: none of its fields is None."""
        if not self._nullable:
            return np.ones(len(objects), bool)
        reads = [getter(name) for name in self._nullable]
        return np.array([all(read(o) is not None for read in reads) for o in objects], bool)

    def identified_batch(self, batch: pa.RecordBatch) -> Mask:
        """Tell which rows of a batch have an id."""
        known = np.ones(batch.num_rows, bool)
        for name in self._nullable:
            known &= column_of(batch, name).is_valid().to_numpy(zero_copy_only=False)
        return known

    def of_objects(self, objects: Sequence[object]) -> bytes:
        """Return the concatenated ids of objects that all have one."""
        if len(self._fields) == 1:
            (read,) = self._reads
            return b"".join(xxhash.xxh3_128_digest(canonical_bytes(_key_of(read(o)))) for o in objects)
        return b"".join(
            xxhash.xxh3_128_digest(canonical_bytes(tuple(_key_of(read(o)) for read in self._reads))) for o in objects
        )

    def of_batch(self, batch: pa.RecordBatch) -> bytes:
        """Return the concatenated ids of rows that all have one, without an object per field."""
        parts = [
            _canonical_column(column_of(batch, name), kind)
            for name, kind in zip(self._fields, self._kinds, strict=True)
        ]
        if len(parts) > 1:
            parts = [part for member in parts for part in (_length_prefix(member), member)]
            parts = [pa.scalar(b"t", pa.binary()), *parts]
            whole = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
        else:
            whole = parts[0]
        return b"".join(map(xxhash.xxh3_128_digest, whole.to_pylist()))


def _key_of(value: Any) -> Any:
    """Return a value as one that has canonical bytes: a time as its µs, a float as its bits, 0.0 and -0.0 alike."""
    if isinstance(value, datetime):
        return instant(value)
    return struct.unpack(">q", struct.pack(">d", value + 0.0))[0] if isinstance(value, float) else value


def _canonical_column(column: pa.Array, kind: type) -> pa.Array:
    """Return the canonical bytes of every value as a binary column."""
    if kind is datetime:
        column, kind = column.cast(pa.int64()), int
    elif kind is float:
        column, kind = pa.array((column.to_numpy(zero_copy_only=False) + 0.0).view(np.int64)), int
    if kind is int:
        raw = np.empty((len(column), 9), np.uint8)
        raw[:, 0] = ord("i")
        raw[:, 1:] = column.to_numpy(zero_copy_only=False).astype(">i8").view(np.uint8).reshape(-1, 8)
        return _fixed_width(raw)
    if kind in (str, bytes):
        tag = pa.scalar(b"s" if kind is str else b"y", pa.binary())
        return pc.binary_join_element_wise(tag, column.cast(pa.binary()), pa.scalar(b"", pa.binary()))
    values = column.to_pylist()
    return pa.array([canonical_bytes(UUID(v) if kind is UUID else v) for v in values], pa.binary())


def _length_prefix(column: pa.Array) -> pa.Array:
    lengths = pc.binary_length(column).to_numpy(zero_copy_only=False).astype(">u4")
    return _fixed_width(lengths.view(np.uint8).reshape(-1, 4))


def _fixed_width(raw: npt.NDArray[np.uint8]) -> pa.Array:
    count, width = raw.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(raw))]
    )
