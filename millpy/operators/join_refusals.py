"""Records that a join does not buffer: late ones, those that cannot be stored, and those for which there is no room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, LateRows
from millpy.model.dead_letter import error_text, key_problem, payload_of, printable, unstorable_keys
from millpy.model.keys import key_text, key_texts
from millpy.model.record import RecordType, retractions_of
from millpy.model.stage import StageBinding, StepResult
from millpy.operators.join_rows import Integers
from millpy.operators.validation import Admission


class JoinRefusals:
    """Makes late records and dead letters of the records that a join does not buffer.

    Args:
        binding: the step in the deployed graph.
        types: the record types of the left and the right side.
    """

    def __init__(self, binding: StageBinding, types: tuple[RecordType, ...]) -> None:
        self._binding = binding
        self._admissions = [Admission(type_, "a join buffers") for type_ in types]

    def storable(self, result: StepResult, bundle: Bundle, rows: Integers, side: int) -> Integers:
        """Dead-letter the rows among these whose key or values cannot be stored. Return the other rows."""
        keys = bundle.keys
        bad_keys = unstorable_keys(key_texts(keys.keys))
        errors = self._admissions[side].refused(bundle.records.batch())
        if not bad_keys and not errors:
            return rows
        bad = np.isin(keys.codes, list(bad_keys))
        bad[list(errors)] = True
        for row in rows[bad[rows]].tolist():
            code = int(keys.codes[row])
            if code in bad_keys:
                letter = self._letter(bundle, row, "key", key_problem(key_text(keys.keys[code])))
                letter = replace(letter, key=None)
            else:
                letter = self._letter(bundle, row, "refused", error_text(errors[row]))
            self._dead_letter(result, bundle, letter)
        return rows[~bad[rows]]

    def refuse(self, result: StepResult, bundle: Bundle, row: int, reason: str, detail: str) -> None:
        """Dead-letter a row."""
        self._dead_letter(result, bundle, self._letter(bundle, row, reason, detail))

    def _letter(self, bundle: Bundle, row: int, reason: str, detail: str) -> DeadLetter:
        record = bundle.records.take(np.array([row], np.int64))
        return DeadLetter(
            reason,
            printable(detail)[:1_000],
            payload_of(record.objects()[0]),
            self._binding.inputs[bundle.input].stream,
            self._binding.computation,
            event_time=int(record.event_times[0]),
            key=key_text(bundle.keys.keys[int(bundle.keys.codes[row])]),
            input=bundle.input,
            retracts=bool(retractions_of(record)[0]),
        )

    def _dead_letter(self, result: StepResult, bundle: Bundle, letter: DeadLetter) -> None:
        result.dead_letters.append(letter)
        counts = result.dead_lettered_by_input
        counts[bundle.input] = counts.get(bundle.input, 0) + 1

    def set_late(self, result: StepResult, bundle: Bundle, rows: Integers, watermarks: Integers) -> None:
        """Store rows as late records."""
        late = bundle.records.take(rows)
        keys, codes = bundle.keys.keys, bundle.keys.codes
        result.late.append(
            LateRows(
                stream=self._binding.inputs[bundle.input].stream,
                computation=self._binding.computation,
                input=bundle.input,
                keys=[key_text(keys[code]) for code in codes[rows].tolist()],
                payloads=[payload_of(record) for record in late.objects()],
                event_times=late.event_times.tolist(),
                watermarks=watermarks[rows].tolist(),
                window_starts=[None] * len(late),
                window_ends=[None] * len(late),
                retracts=[] if late.retracts is None else late.retracts.tolist(),
            )
        )
        result.late_by_input[bundle.input] = result.late_by_input.get(bundle.input, 0) + len(rows)
