"""Deduplicate: a keyed step that keeps the first record of each id; the id is its key.

The step is for feeds that share ids across source partitions. `operators/first_seen.py` defines a duplicate. A record
more than `within` behind the watermark, or behind the ids that an earlier `within` has forgotten, cannot be judged and
goes to `late_records`; any other record is judged exactly
once, regardless of bundles, crashes and takeovers. Ids are stored as runs in the ring of the sources' dedupe ids: a
duplicate writes nothing, and an id does not take a row.

Over a stream with retractions, `operators/kept_records.py` lets a retraction pass if its record has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import xxhash

from millpy.ingest.dedupe import DedupeIds
from millpy.ingest.settings import Dedupe
from millpy.model.arrivals import judging_watermarks
from millpy.model.checkpoint import DedupeRun, LateRows
from millpy.model.dead_letter import payload_of
from millpy.model.horizons import KEPT
from millpy.model.identity import Identity
from millpy.model.keys import key_text
from millpy.model.record import Instants, Mask, Records, concat, retractions_of
from millpy.model.stage import InputBundle, ResidentInterval, StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import Instant, microseconds
from millpy.operators.first_seen import FirstSeen
from millpy.operators.kept_records import KeptRecords
from millpy.operators.outputs import outlets_of


class DeduplicateLogic:
    """A deduplicate step in a graph; `takes_retractions` says whether some of the records may be retractions."""

    def __init__(self, by: Sequence[str], within: timedelta, *, takes_retractions: bool = False) -> None:
        self.by = tuple(by)
        self.within = within
        self.takes_retractions = takes_retractions

    def bind(self, binding: StageBinding) -> DeduplicateStage:
        """Return the stage, which can open intervals."""
        return DeduplicateStage(self, binding)

    def identity(self) -> Identity:
        """Describe the step; the id is part of the subscription."""
        described: dict[str, Any] = {"kind": "deduplicate"}
        return described | ({"takes_retractions": True} if self.takes_retractions else {})

    def settings(self) -> Identity:
        """Describe the horizon, which may change: `horizons.py` says what becomes of the stored ids."""
        return {KEPT: microseconds(self.within)}


class DeduplicateStage:
    """A deduplicate step in a deployed graph."""

    def __init__(self, logic: DeduplicateLogic, binding: StageBinding) -> None:
        self.logic = logic
        self.binding = binding

    def open(self, recovered: StoredInterval) -> DeduplicateInterval:
        """Build the soft state of one interval from its stored runs."""
        return DeduplicateInterval(self.logic, self.binding, recovered)


class DeduplicateInterval(ResidentInterval):
    """The soft state of one interval: the accepted ids."""

    immediate = True

    def __init__(self, logic: DeduplicateLogic, binding: StageBinding, recovered: StoredInterval) -> None:
        self._binding = binding
        self._within_us = microseconds(logic.within)
        self._floor = recovered.horizon_floor
        self._ids = DedupeIds(Dedupe(*logic.by, within=logic.within), binding.inputs[0].record_type)
        self._seen: FirstSeen | KeptRecords
        if logic.takes_retractions:
            self._seen = KeptRecords(self._within_us, recovered.dedupe_runs, floor=self._floor)
        else:
            self._seen = FirstSeen(self._within_us, recovered.dedupe_runs, floor=self._floor)
        self._outlet = outlets_of(binding)[None]

    def step(self, work: Work) -> StepResult:
        """Keep the first record of each id, in order of arrival."""
        result = StepResult()
        judged = [self._without_late(result, arrival, work) for arrival in work.arrived if len(arrival.bundle)]
        records = concat(judged) if judged else Records.empty(self._binding.inputs[0].record_type)
        accepted, result.dedupe_run = self._check(records, work.watermark)
        start = 0
        for arrival, part in zip((a for a in work.arrived if len(a.bundle)), judged, strict=True):
            place, mine = arrival.bundle.input, accepted[start : start + len(part)]
            duplicates, consumed = result.duplicates_by_input, result.consumed_by_input
            duplicates[place] = duplicates.get(place, 0) + int(np.count_nonzero(~mine))
            consumed[place] = consumed.get(place, 0) + len(mine)
            start += len(part)
        result.emitted_by_stream[self._outlet.stream] = self._seen.let_in
        if self._outlet.table_id is not None:
            result.emitted_by_table[self._outlet.table_id] = self._seen.let_in
        if accepted.any():
            self._emit(result, records if accepted.all() else records.take(np.flatnonzero(accepted)))
        return result

    def _check(self, records: Records, clock: Instant) -> tuple[Mask, DedupeRun | None]:
        """Judge records in order of arrival; return which of them pass, and the run to commit."""
        ids = self._ids.of_objects(records.objects()) if records.small else self._ids.of_batch(records.batch())
        if isinstance(self._seen, FirstSeen):
            return self._seen.check(ids, records.event_times, clock)
        marks = np.array([xxhash.xxh3_64_intdigest(payload_of(record)) for record in records.objects()], np.uint64)
        return self._seen.check(ids, records.event_times, marks, retractions_of(records), clock)

    def _without_late(self, result: StepResult, arrival: InputBundle, work: Work) -> Records:
        """Return the records that can be judged; count the others as late."""
        records = arrival.bundle.records
        watermarks = judging_watermarks(arrival, work)
        late = records.event_times < np.maximum(watermarks - self._within_us, self._floor)
        if not late.any():
            return records
        rows = np.flatnonzero(late)
        place = arrival.bundle.input
        result.late.append(self._late_rows(arrival, records.take(rows), rows, watermarks[rows]))
        result.late_by_input[place] = result.late_by_input.get(place, 0) + len(rows)
        return records.take(np.flatnonzero(~late))

    def _late_rows(self, arrival: InputBundle, late: Records, rows: Instants, watermarks: Instants) -> LateRows:
        keys, codes = arrival.bundle.keys.keys, arrival.bundle.keys.codes
        return LateRows(
            stream=self._binding.inputs[arrival.bundle.input].stream,
            computation=self._binding.computation,
            input=arrival.bundle.input,
            keys=[key_text(keys[code]) for code in codes[rows].tolist()],
            payloads=[payload_of(record) for record in late.objects()],
            event_times=late.event_times.tolist(),
            watermarks=watermarks.tolist(),
            window_starts=[None] * len(late),
            window_ends=[None] * len(late),
            retracts=[] if late.retracts is None else late.retracts.tolist(),
        )

    def _emit(self, result: StepResult, accepted: Records) -> None:
        outlet = self._outlet
        if outlet.subscribed:
            result.productions[outlet.stream] = accepted.without_watermarks()
        if outlet.table_id is not None:
            _, rows = outlet.gather(accepted.objects(), accepted.event_times.tolist())
            assert rows is not None, outlet.table_id
            result.results.append(rows)
