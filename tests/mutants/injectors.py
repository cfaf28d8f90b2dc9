"""Mutants of `millpy/injectors`: intake, dedupe, decoding, sources."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/injectors/dedupe.py",
        "            tiers.append(added)",
        "            pass",
        killers=("tests/unit/injectors/test_intake.py::test_duplicate_is_dropped_by_the_next_owner_too",),
    ),
    Mutant(
        "millpy/injectors/dedupe.py",
        "        same_hi = self.hi[at] == hi",
        "        same_hi = self.hi[at] != hi",
        killers=("tests/unit/injectors/test_intake.py::test_duplicate_is_dropped_by_the_next_owner_too",),
    ),
    Mutant(
        "millpy/injectors/dedupe.py",
        "    return pa.array([canonical_bytes(UUID(v) if kind is UUID else v) for v in values], pa.binary())",
        "    return pa.array([canonical_bytes(UUID(v) if kind is not UUID else v) for v in values], pa.binary())",
        killers=("tests/property/test_dedupe.py::test_ids_of_columns_are_those_of_objects",),
    ),
]
