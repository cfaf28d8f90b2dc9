"""Mutants of `millpy/injectors`: intake, dedupe, decoding, sources."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/injectors/dedupe.py",
        "            tiers.append(added)",
        "            pass",
        killers=("tests/unit/injectors/test_intake.py::test_duplicate_is_dropped_by_the_next_owner_too",),
        line="A message delivered again is dropped and counted",
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
    Mutant(
        "millpy/injectors/dedupe.py",
        "        again = (before != _NEVER) & (seen - before <= self._within_us)",
        "        again = (before != _NEVER) & (seen - before < self._within_us)",
        killers=(
            "tests/unit/injectors/test_dedupe_horizon.py::test_an_id_seen_exactly_the_horizon_ago_is_a_duplicate",
        ),
    ),
    Mutant(
        "millpy/injectors/dedupe.py",
        "        tiers = [old for old in self._tiers if old.newest >= horizon]",
        "        tiers = [old for old in self._tiers if old.newest > horizon]",
        killers=(
            "tests/unit/injectors/test_dedupe_horizon.py::test_a_tier_at_the_edge_of_the_horizon_outlives_those_that_are_added",
        ),
    ),
    Mutant(
        "millpy/injectors/dedupe.py",
        "    live = tier.seen >= horizon",
        "    live = tier.seen > horizon",
        killers=(
            "tests/unit/injectors/test_dedupe_horizon.py::test_an_id_at_the_edge_of_the_horizon_outlives_the_older_ones_of_its_tier",
            "tests/unit/injectors/test_dedupe_horizon.py::test_the_next_owner_and_a_renewed_run_know_an_id_at_the_edge",
        ),
    ),
    Mutant(
        "millpy/injectors/dedupe.py",
        "        if not len(self) or quiet_us <= self._within_us:",
        "        if not len(self) or quiet_us < self._within_us:",
        killers=(
            "tests/unit/injectors/test_dedupe_horizon.py::test_a_source_that_is_quiet_for_exactly_the_horizon_forgets_nothing",
        ),
    ),
    Mutant(
        "millpy/injectors/dedupe.py",
        'ids_of(tier.hi, tier.lo), times.astype("<i8").tobytes(), Instant(tier.newest + self._within_us), self.clock',
        'ids_of(tier.hi, tier.lo), times.astype("<i8").tobytes(), Instant(tier.newest + self._within_us - 1), self.clock',
        killers=("tests/unit/injectors/test_dedupe_horizon.py::test_a_run_is_kept_for_as_long_as_its_newest_id",),
    ),
    Mutant(
        "millpy/injectors/mqtt_inbox.py",
        "        for index in [*sorted(apart), len(published)]:",
        "        for index in [*apart, len(published)]:",
        killers=(
            "tests/unit/injectors/test_mqtt_inbox.py::test_retained_messages_are_acknowledged_in_the_order_received",
        ),
    ),
]
