"""Mutants of the views that judge: what adds up, who is alive, what state a source is in."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VIEWS = "migrations/versions/0003_views.sql"
ACCOUNT = ("tests/conformance/test_accounting.py::test_one_too_many_or_too_few_of_any_term_is_reported_in_its_place",)
EXPLAINED = ("tests/conformance/test_views.py",)
JUDGED = "tests/conformance/test_view_verdicts.py::"
OF_LIFE = (f"{JUDGED}test_interval_is_live_while_its_owners_lease_is_valid",)
OF_SOURCES = (f"{JUDGED}test_source_runs_while_its_worker_lives_and_until_its_input_ends",)
OF_SUBSCRIPTION = (
    "produced + coalesce(added, 0)",
    "coalesce(filtered, 0) + consumed + late + dead_lettered + coalesce(parked, 0) + pending",
)
ALIVE = "mill.alive(w.lease_deadline, w.lease_s)"
LIVE = f"{ALIVE} AS live"
OF_CLOCK = (f"{JUDGED}test_a_lease_from_before_the_clock_was_set_back_counts_nowhere",)

MUTANTS = [
    *(Mutant(VIEWS, "injected = accepted + duplicate + dead_lettered AS balanced", f"{other} AS balanced", ACCOUNT)
      for other in ("injected >= accepted + duplicate + dead_lettered", "injected <= accepted + duplicate + dead_lettered",
                    "true", "injected = accepted + duplicate")),
    *(Mutant(VIEWS, " = ".join(OF_SUBSCRIPTION), other, ACCOUNT)
      for other in (" >= ".join(OF_SUBSCRIPTION), " <= ".join(OF_SUBSCRIPTION), "true")),
    *(Mutant(VIEWS, "NULL, produced = consumed\n", f"NULL, {other}\n", ACCOUNT)
      for other in ("produced >= consumed", "produced <= consumed", "true")),
    Mutant(VIEWS, "k.count) FILTER (WHERE k.namespace = 'late'), 0)", "k.count) FILTER (WHERE k.namespace = 'dead_lettered'), 0)",
           ACCOUNT),
    Mutant(VIEWS, f"{LIVE}, p.bundle,", "true AS live, p.bundle,", OF_LIFE),
    Mutant(VIEWS, f"{LIVE}, p.bundle,", "w.lease_deadline IS NOT NULL AS live, p.bundle,", OF_LIFE),
    *(Mutant(VIEWS, f"{LIVE}, w.registered_at,", f"{other} AS live, w.registered_at,", of)
      for other, of in (("true", OF_LIFE), ("w.lease_deadline < clock_timestamp()", OF_LIFE),
                        ("w.lease_deadline > clock_timestamp()", OF_CLOCK))),
    Mutant(VIEWS, f"{LIVE} INTO here", "true AS live INTO here", EXPLAINED),
    Mutant(VIEWS, f"WHEN {ALIVE}\n            THEN CASE", "WHEN true\n            THEN CASE", OF_SOURCES),
    Mutant(VIEWS, "WHEN p.low_watermark >= 4611686018427387904 THEN 'ended'",
           "WHEN p.low_watermark > 4611686018427387904 THEN 'ended'", OF_SOURCES),
    Mutant(VIEWS, "name = family AS current", "true AS current", (f"{JUDGED}test_only_the_generation_with_the_graphs_name_is_current",)),
]  # fmt: skip
