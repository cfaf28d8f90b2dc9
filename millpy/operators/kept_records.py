"""Kept records: the first record of each id within a horizon, where records may be retracted again.

The counterpart of `first_seen.py`, with the same rule for duplicates, for a stream with retractions. A retraction takes
the way of its record: it passes if that record was kept, which frees the id, and else it is a duplicate. A kept record
is known by its id, its event time and a mark, the hash of its content. Equal records are interchangeable, so they are
counted: the retraction that passes is the last.

    entry   (id, event time) -> mark, number of equal records; no two of an id are within the horizon of each other
    run     the entries that one bundle has changed, as they are after it; a number of 0 has been retracted. `times` has
            three numbers for each id
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millpy.model.checkpoint import DedupeRun
from millpy.model.ids import ID_BYTES
from millpy.model.record import Instants, Mask
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant

Marks = npt.NDArray[np.uint64]
_Name = tuple[bytes, int]
_ROW = np.dtype([("at", "<i8"), ("mark", "<u8"), ("number", "<i8")])


class KeptRecords:
    """The kept records of one interval.

    Args:
        within_us: the horizon.
        runs: the stored runs, oldest first.
        floor: records with an earlier event time are forgotten, although they are within the horizon.

    Attributes:
        let_in: number of records that the last `check` let pass.
    """

    def __init__(self, within_us: int, runs: Sequence[DedupeRun] = (), *, floor: Instant = INSTANT_MIN) -> None:
        self._within_us = within_us
        self._entries: dict[_Name, tuple[int, int]] = {}
        self._times_of: dict[bytes, list[int]] = {}
        self._ids_at: dict[int, set[bytes]] = {}
        self._times: list[int] = []
        self._changed: dict[_Name, None] = {}
        self._clock = max((run.clock for run in runs), default=INSTANT_MIN)
        self._stored_until = max((run.expires_at for run in runs if run.ids), default=INSTANT_MIN)
        self.let_in = 0
        for run in runs:
            self._load(run, floor)
        self._changed.clear()
        self._forget()

    def __len__(self) -> int:
        """Return the number of kept records."""
        return len(self._entries)

    def check(
        self, ids: bytes, times: Instants, marks: Marks, retracts: Mask, clock: Instant
    ) -> tuple[Mask, DedupeRun | None]:
        """Judge records in order of arrival, and remember those that are kept.

        Args:
            ids: 16 bytes per record.
            times: event times.
            marks: hashes of the records' content.
            retracts: which of them are retractions.
            clock: the watermark after all of them.

        Returns:
            A mask of the records that pass; the run to commit, None when nothing has changed.
        """
        self._clock = Instant(max(self._clock, clock))
        names = (ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES))
        columns = (times.tolist(), marks.tolist(), retracts.tolist())
        passes = np.zeros(len(times), np.bool_)
        for row, (id_, at, mark, is_retraction) in enumerate(zip(names, *columns, strict=True)):
            passes[row] = self._retract(id_, at, mark) if is_retraction else self._keep(id_, at, mark)
        self.let_in = int(np.count_nonzero(passes))
        run = self._take_run()
        self._forget()
        return passes, run or self._take_last_run()

    def _keep(self, id_: bytes, at: int, mark: int) -> bool:
        """Keep a record, unless it is a duplicate."""
        found = self._entries.get((id_, at))
        if found is not None:
            if found[0] == mark:
                self._set(id_, at, mark, found[1] + 1)
            return False
        times = self._times_of.get(id_, [])
        place = bisect_left(times, at)
        if any(abs(at - other) <= self._within_us for other in times[max(0, place - 1) : place + 1]):
            return False
        self._set(id_, at, mark, 1)
        return True

    def _retract(self, id_: bytes, at: int, mark: int) -> bool:
        """Remove a record, and tell whether it was kept and has no equal one left."""
        found = self._entries.get((id_, at))
        if found is None or found[0] != mark:
            return False
        self._set(id_, at, mark, found[1] - 1)
        return found[1] == 1

    def _set(self, id_: bytes, at: int, mark: int, number: int) -> None:
        name = (id_, at)
        self._changed[name] = None
        if number:
            if name not in self._entries:
                insort(self._times_of.setdefault(id_, []), at)
                self._expire_later(id_, at)
            self._entries[name] = (mark, number)
        elif self._entries.pop(name, None) is not None:
            self._drop_time(id_, at)

    def _expire_later(self, id_: bytes, at: int) -> None:
        ids = self._ids_at.get(at)
        if ids is None:
            self._ids_at[at] = ids = set()
            heapq.heappush(self._times, at)
        ids.add(id_)

    def _drop_time(self, id_: bytes, at: int) -> None:
        times = self._times_of[id_]
        del times[bisect_left(times, at)]
        if not times:
            del self._times_of[id_]

    def _expires_at(self, at: int) -> Instant:
        return Instant(min(at + 2 * self._within_us, INSTANT_MAX - 1))

    def _forget(self) -> None:
        """Forget the records that no other record can meet any more."""
        while self._times and self._expires_at(self._times[0]) < self._clock:
            at = heapq.heappop(self._times)
            for id_ in self._ids_at.pop(at):
                if self._entries.pop((id_, at), None) is not None:
                    self._drop_time(id_, at)

    def _take_run(self) -> DedupeRun | None:
        """Return the entries that have changed since the last call as a run; None without any."""
        if not self._changed:
            return None
        changed, self._changed = sorted(self._changed), {}
        rows = np.zeros(len(changed), _ROW)
        rows["at"] = [at for _, at in changed]
        found = [self._entries.get(name, (0, 0)) for name in changed]
        rows["mark"], rows["number"] = zip(*found, strict=True)
        ids = b"".join(id_ for id_, _ in changed)
        expires_at = self._expires_at(max(at for _, at in changed))
        self._stored_until = max(self._stored_until, expires_at)
        return DedupeRun(ids, rows.tobytes(), expires_at, self._clock)

    def _take_last_run(self) -> DedupeRun | None:
        """Return, once all stored runs have expired, the run that lets the store free their slots; else None."""
        if not INSTANT_MIN < self._stored_until < self._clock:
            return None
        self._stored_until = INSTANT_MIN
        return DedupeRun(b"", b"", Instant(self._clock - 1), self._clock)

    def _load(self, run: DedupeRun, floor: Instant) -> None:
        """Apply the changes of a stored run. A merged one has several bundles' changes, in their order."""
        for row, (at, mark, number) in enumerate(np.frombuffer(run.times, _ROW).tolist()):
            if at >= floor:
                self._set(run.ids[ID_BYTES * row : ID_BYTES * (row + 1)], at, mark, number)
