"""Mutants of `millpy/store`: what a commit checks and changes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/store/memory/commit.py",
        "        if header is None or (running == graph_version and not expects(header, checkpoint)):",
        "        if header is None or (running == graph_version and expects(header, checkpoint)):",
        killers=("tests/conformance/test_memory_store.py::TestMemoryStore::test_request_contains_the_dead_letter",),
    ),
    Mutant(
        "millpy/store/memory/commit.py",
        '    if first or row["pane_index"] != stored["pane_index"] + 1:',
        '    if first or row["pane_index"] == stored["pane_index"] + 1:',
        killers=("tests/conformance/test_memory_store.py::TestMemoryStore::test_pane_replaces_the_pane_before_it",),
    ),
    Mutant(
        "millpy/store/memory/commit.py",
        '    if first or row["pane_index"] != stored["pane_index"] + 1:',
        '    if first and row["pane_index"] != stored["pane_index"] + 1:',
        killers=("tests/conformance/test_memory_store.py::TestMemoryStore::test_pane_that_skips_an_index_is_refused",),
    ),
    Mutant(
        "millpy/store/memory/database.py",
        "            total += 0 if row is None or row.value is None else int(row.value)",
        "            total += 0 if row is None or row.value is not None else int(row.value)",
        killers=("tests/conformance/test_memory_store.py::TestMemoryStore::test_accounting_adds_up",),
    ),
    Mutant(
        "millpy/store/memory/database.py",
        "        found = [t for t in self.tables.values() if t.spec.name == name and graph in (None, t.graph)]",
        "        found = [t for t in self.tables.values() if t.spec.name != name and graph in (None, t.graph)]",
        killers=("tests/conformance/test_memory_store.py::TestMemoryStore::test_pane_replaces_the_pane_before_it",),
    ),
    Mutant(
        "millpy/store/memory/database.py",
        "        return self.workers[worker_id].info.graph_version == deployed.version",
        "        return self.workers[worker_id].info.graph_version != deployed.version",
        killers=("tests/conformance/test_memory_store.py::TestMemoryStore::test_request_contains_the_dead_letter",),
    ),
    Mutant(
        "millpy/store/memory/database.py",
        "        self.clock: Clock = clock if clock is not None else SystemClock()",
        "        self.clock: Clock = clock if clock is None else SystemClock()",
        killers=("tests/unit/runtime/test_worker.py::test_a_worker_without_intervals_sleeps_even_after_a_hint",),
    ),
    Mutant(
        "millpy/store/memory/tables.py",
        "        return run.expires_at >= self.dedupe_clock and bundle >= self.dedupe_whole",
        "        return run.expires_at > self.dedupe_clock and bundle >= self.dedupe_whole",
        killers=(
            "tests/conformance/test_memory_store.py::TestMemoryStore::test_retention_keeps_a_dedupe_run_until_the_clock_is_past_it",
        ),
    ),
    Mutant(
        "millpy/store/sql/reading.sql",
        "AND r.expires_at >= %(clock)s",
        "AND r.expires_at > %(clock)s",
        killers=(
            "tests/conformance/test_postgres_store.py::TestPostgresStore::test_run_expires_once_the_dedupe_clock_is_past_it",
        ),
    ),
    Mutant(
        "migrations/versions/0002_functions.sql",
        "r.expires_at >= latest.clock",
        "r.expires_at > latest.clock",
        killers=(
            "tests/conformance/test_postgres_store.py::TestPostgresStore"
            "::test_retention_keeps_a_dedupe_run_until_the_clock_is_past_it",
        ),
    ),
    Mutant(
        "millpy/cli/dead_letters.py",
        '        print_json({"requested": requested, "of": len(ids), "states": ',
        '        print_json({"requested": requested, "of": requested, "states": ',
        killers=(
            "tests/crash/test_dead_letter_commands.py::test_dead_letters_are_listed_replayed_corrected_and_discarded",
        ),
    ),
]
