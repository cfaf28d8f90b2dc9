"""Deduplicate: a keyed step that lets the first record of each id through; the id is its key.

For feeds that share ids across source partitions, where no partition sees all. See `model.first_seen` for what a
duplicate is. A record more than `within` behind the watermark cannot be judged and goes to `late_records`; any other
is judged exactly, once, whatever the bundles, crashes and takeovers. Ids are kept as runs in the ring of the sources'
dedupe ids, so nothing is written for a duplicate, and no row for an id.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from millpy.injectors.dedupe import DedupeIds
from millpy.injectors.settings import Dedupe, duration_text
from millpy.model.arrivals import judging_watermarks
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Entries, LateRows
from millpy.model.deployment import Meaning
from millpy.model.first_seen import FirstSeen
from millpy.model.keys import key_text
from millpy.model.quarantine import payload_of
from millpy.model.record import Instants, Records, concat
from millpy.model.stage import Arrived, Binding, Recovered, StepResult, Work
from millpy.model.time import INSTANT_MAX, Instant, microseconds
from millpy.runtime.outlets import outlets_of


class DeduplicateLogic:
    """What a graph holds of a deduplicate step."""

    def __init__(self, by: Sequence[str], within: timedelta) -> None:
        self.by = tuple(by)
        self.within = within

    def bind(self, binding: Binding) -> DeduplicateStage:
        """The stage, ready to open intervals."""
        return DeduplicateStage(self, binding)

    def meaning(self) -> Meaning:
        """The horizon; the id is in the subscription."""
        return {"within": duration_text(self.within)}


class DeduplicateStage:
    """A deduplicate step in a deployed graph."""

    def __init__(self, logic: DeduplicateLogic, binding: Binding) -> None:
        self.logic = logic
        self.binding = binding

    def open(self, recovered: Recovered) -> DeduplicateInterval:
        """Build the soft state of one interval from the runs that are stored."""
        return DeduplicateInterval(self.logic, self.binding, recovered)


class DeduplicateInterval:
    """Soft state of one interval: the ids that were accepted."""

    immediate = True

    def __init__(self, logic: DeduplicateLogic, binding: Binding, recovered: Recovered) -> None:
        self._binding = binding
        self._within_us = microseconds(logic.within)
        self._ids = DedupeIds(Dedupe(*logic.by, within=logic.within), binding.inputs[0].record_type)
        self._seen = FirstSeen(self._within_us, recovered.dedupe_runs)
        self._outlet = outlets_of(binding)[None]

    def missing(self, bundles: Sequence[Bundle]) -> Sequence[bytes]:
        """Nothing: all ids of the horizon are in memory."""
        return ()

    def absorb(self, keys: Sequence[bytes], entries: Sequence[Entries]) -> None:
        """Nothing is ever missing."""

    def oldest_work(self) -> Instant:
        """Nothing is held back."""
        return INSTANT_MAX

    def next_due(self) -> tuple[Instant, Instant]:
        """Nothing goes by time."""
        return INSTANT_MAX, INSTANT_MAX

    def folded(self, bundle: int) -> None:
        """Ids are not folded."""

    def step(self, work: Work) -> StepResult:
        """Let the first record of each id through, in order of arrival."""
        result = StepResult()
        judged = [self._without_late(result, arrival, work) for arrival in work.arrived if len(arrival.bundle)]
        records = concat(judged) if judged else Records.none(self._binding.inputs[0].record_type)
        ids = self._ids.of_objects(records.objects()) if records.small else self._ids.of_batch(records.batch())
        accepted, result.dedupe_run = self._seen.check(ids, records.event_times, work.watermark)
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

    def _without_late(self, result: StepResult, arrival: Arrived, work: Work) -> Records:
        """The records that can be judged; the others are late."""
        records = arrival.bundle.records
        watermarks = judging_watermarks(arrival, work)
        late = records.event_times < watermarks - self._within_us
        if not late.any():
            return records
        rows = np.flatnonzero(late)
        place = arrival.bundle.input
        result.late.append(self._late_rows(arrival, records.take(rows), rows, watermarks[rows]))
        result.late_by_input[place] = result.late_by_input.get(place, 0) + len(rows)
        return records.take(np.flatnonzero(~late))

    def _late_rows(self, arrival: Arrived, late: Records, rows: Instants, watermarks: Instants) -> LateRows:
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
        )

    def _emit(self, result: StepResult, accepted: Records) -> None:
        outlet = self._outlet
        if outlet.subscribed:
            result.productions[outlet.stream] = accepted.without_watermarks()
        if outlet.table_id is not None:
            _, rows = outlet.gather(accepted.objects(), accepted.event_times.tolist())
            assert rows is not None, outlet.table_id
            result.results.append(rows)
