"""Mutants of what bounds a turn, and of deltas in parts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPEN_SLICES, AHEAD = "millpy/windowing/sliding_state.py", "millpy/windowing/ahead.py"
SLICED, FOLDING = "millpy/windowing/sliding.py", "millpy/store/sql/folding.sql"
PANES = ("tests/property/test_windowed.py::test_no_turn_exceeds_its_limit_of_panes",)
LARGE = ("tests/conformance/test_large_deltas.py::test_deltas_of_several_documents_are_folded_and_read_as_one",)

MUTANTS = [
    Mutant(OPEN_SLICES, "                keys = self._part_of(window, panes_max) if left == panes_max else []",
           "                keys = []", PANES),
    Mutant(AHEAD, "        self._reached.update(keys)\n", "", PANES),
    Mutant(AHEAD, "        self._moved.update(keys)\n", "", PANES),
    Mutant(AHEAD, "                self._to_delete[key] = None", "                pass",
           ("tests/property/test_windowed.py::test_panes_emitted_in_several_turns_are_the_same",)),
    Mutant(SLICED, "            self._fire_early_for_late_rows(rows, reached)", "            pass", PANES),
    Mutant(FOLDING, "coalesce(piece.complete, i.folded_bundle) AS complete", "coalesce(piece.upto, 0) AS complete", LARGE,
           line="What is too large for a turn, a statement or a link takes longer"),
    Mutant("millpy/store/sql/reading.sql", "           AND (d.bundle, d.part) > (%(after)s::bigint, %(after_part)s::integer)) AS p",
           "           AND d.bundle > %(after)s::bigint + 0 * %(after_part)s::integer) AS p", LARGE),
    Mutant("millpy/model/delta.py", "            hi = max(bisect_right(ends, before + room), lo if part else lo + 1)",
           "            hi = max(bisect_right(ends, before + room), lo + 1)",
           equivalent="a part has one entry too many, which hardly changes its bytes"),
    Mutant("millpy/windowing/operator.py", "                progress.count_unit(run)  # millions of windows take long\n", "",
           ("tests/unit/windowing/test_many_stored_windows.py::test_every_piece_of_stored_windows_is_released_and_reported",)),
    Mutant("millpy/runtime/worker.py", "isinstance(error, PoisonError) and not (error.too_large and self.context.budget.factor > FACTOR_MIN):",
           "isinstance(error, PoisonError):",
           ("tests/crash/test_refused_by_size.py::test_turns_get_smaller_until_they_pass",)),
]  # fmt: skip
