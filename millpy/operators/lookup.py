"""Lookup: a keyed step that adds the columns of a SQL table's row to each record.

The table's version is that of the turn (`model/lookup.py`), so all records of a bundle see one. The step keeps nothing:
each distinct key of a bundle is looked up once, and the rows are taken as columns.

A record without a row passes with None in the new fields, is dropped, or becomes a dead letter; all of these are
counted. A row that does not fit the class of the table's rows is not there.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa

from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter
from millpy.model.dead_letter import key_problem, payload_of
from millpy.model.identity import Identity
from millpy.model.keys import key_text
from millpy.model.lookup import LookupTable, TableVersion
from millpy.model.record import Mask, Records, concat, retractions_of
from millpy.model.stage import ResidentInterval, StageBinding, StepResult, StoredInterval, Work
from millpy.operators.join_output import JoinedType
from millpy.operators.join_reach import LEFT, RIGHT
from millpy.operators.outputs import outlets_of

Missing = Literal["null", "drop", "dead_letter"]
"""What becomes of a record without a row."""
POLICIES = ("null", "drop", "dead_letter")
REASON = "no_row"
"""The reason of dead letters of records without a row."""


class LookupLogic:
    """A lookup step in a graph.

    Args:
        table: the table.
        joined: the type of the output.
        missing: what becomes of a record without a row.
    """

    def __init__(self, table: LookupTable, joined: JoinedType, missing: Missing) -> None:
        self.table = table
        self.joined = joined
        self.missing = missing

    def bind(self, binding: StageBinding) -> LookupStage:
        """Return the stage, which can open intervals."""
        return LookupStage(self, binding)

    def identity(self) -> Identity:
        """Describe the step. It keeps nothing, so the table and what becomes of records may change."""
        return {"kind": "lookup"}


class LookupStage:
    """A lookup step in a deployed graph."""

    def __init__(self, logic: LookupLogic, binding: StageBinding) -> None:
        self.logic = logic
        self.binding = binding

    def open(self, recovered: StoredInterval) -> LookupInterval:
        """Build an interval, which keeps nothing."""
        return LookupInterval(self.logic, self.binding)


class LookupInterval(ResidentInterval):
    """One key interval of a lookup step; it has no state."""

    immediate = True

    def __init__(self, logic: LookupLogic, binding: StageBinding) -> None:
        self._logic, self._binding = logic, binding
        self._outlet = outlets_of(binding)[None]

    def step(self, work: Work) -> StepResult:
        """Look up the records of one turn, in order of arrival."""
        result = StepResult()
        version = work.tables[self._logic.table]
        made = [self._joined(result, arrival.bundle, version) for arrival in work.arrived if len(arrival.bundle)]
        records = concat(made) if made else Records.empty(self._logic.joined.record_type)
        result.emitted_by_stream[self._outlet.stream] = len(records)
        if self._outlet.table_id is not None:
            result.emitted_by_table[self._outlet.table_id] = len(records)
        if len(records):
            self._outlet.emit(records, result)
        return result

    def _joined(self, result: StepResult, bundle: Bundle, version: TableVersion) -> Records:
        """Return the records of a bundle with their rows; count those without one, and dead-letter them if asked to."""
        records, place, index = bundle.records, bundle.input, version.index
        of_key = np.array([index.get(key, -1) for key in bundle.keys.keys], np.int64)
        rows = of_key[bundle.keys.codes]
        alone = rows < 0
        unmatched = int(np.count_nonzero(alone))
        consumed = len(records)
        if unmatched:
            result.unmatched_by_input[place] = result.unmatched_by_input.get(place, 0) + unmatched
            if self._logic.missing == "dead_letter":
                self._dead_letter(result, bundle, np.flatnonzero(alone), version)
                consumed -= unmatched
            if self._logic.missing != "null":
                kept = np.flatnonzero(~alone)
                records, rows, alone = records.take(kept), rows[kept], alone[kept]
        result.consumed_by_input[place] = result.consumed_by_input.get(place, 0) + consumed
        return self._records(records, rows, alone, version)

    def _records(self, records: Records, rows: Any, alone: Mask, version: TableVersion) -> Records:
        joined = self._logic.joined
        found = version.batch.take(pa.array(rows, mask=alone))
        batch = joined.batch({LEFT: records.batch(), RIGHT: found})
        return Records(joined.record_type, records.event_times, batch=batch)

    def _dead_letter(self, result: StepResult, bundle: Bundle, rows: Any, version: TableVersion) -> None:
        """Dead-letter the records at these places of a bundle."""
        alone = bundle.records.take(rows)
        keys, codes = bundle.keys.keys, bundle.keys.codes[rows]
        retracts = retractions_of(alone).tolist()
        for number, (record, at) in enumerate(zip(alone.objects(), alone.event_times.tolist(), strict=True)):
            text = key_text(keys[int(codes[number])])
            result.dead_letters.append(
                DeadLetter(
                    REASON,
                    f"table {version.table.name} has no row with this key (version {version.version})",
                    payload_of(record),
                    self._binding.inputs[bundle.input].stream,
                    self._binding.computation,
                    event_time=at,
                    key=text if not key_problem(text) else None,
                    input=bundle.input,
                    retracts=retracts[number],
                )
            )
        place = bundle.input
        result.dead_lettered_by_input[place] = result.dead_lettered_by_input.get(place, 0) + len(rows)
