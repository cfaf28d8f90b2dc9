"""Mutants of the sources that read PostgreSQL: injected records, and changes of tables."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/store/sql/injected.sql",
        "unnest(%(open)s::int8multirange)",
        "unnest('{}'::int8multirange)",
        killers=(
            "tests/conformance/test_injected.py::test_concurrent_transactions_are_read_once_and_in_the_order_of_their_locks",
        ),
        line="An injected record counts once if its transaction commits, and not at all otherwise",
    ),
    Mutant(
        "millpy/sources/postgres/injected_position.py",
        "return (*named, (int(xmax), until)) if int(xmax) < until else tuple(named)",
        "return tuple(named)",
        killers=("tests/property/test_injected_position.py",),
    ),
    Mutant(
        "millpy/sources/postgres/table_position.py",
        "        return (lsn, place) <= (self.lsn, self.done)\n",
        "        return (lsn, place) < (self.lsn, self.done)\n",
        killers=("tests/conformance/test_tables.py::test_copy_and_changes_are_exact_when_readers_die_at_any_position",),
        line="Each change of a table counts once",
    ),
    Mutant(
        "millpy/sources/postgres/injected_position.py",
        "        if self.rest:\n            return self.without_rest() if whole else msgspec.structs.replace(self, after=end)\n",
        "",
        killers=(
            "tests/property/test_injected_position.py::test_second_cut_page_below_the_greatest_number_repeats_nothing",
        ),
        line="An injected record counts once if its transaction commits, and not at all otherwise",
    ),
    Mutant(
        "millpy/sources/postgres/table_thread.py",
        "                    position = position.advance(begin.lsn, place, begin.committed_at)\n",
        "                    self._position = position = position.advance(begin.lsn, place, begin.committed_at)\n",
        killers=(
            "tests/conformance/test_tables.py::test_changes_are_read_once_when_the_replication_connection_breaks_among_them",
        ),
        line="Each change of a table counts once",
    ),
    Mutant(
        "millpy/sources/postgres/table_copy.py",
        'return sql.SQL("{} COLLATE {}").format(value, collation) if column.collation else value',
        "return value",
        killers=(
            "tests/conformance/test_table_keys.py::test_copy_that_is_interrupted_within_any_kind_of_key_has_each_change_once",
        ),
        line="Each change of a table counts once",
    ),
    Mutant(
        "millpy/sources/postgres/table_checks.py",
        "    if confirmed is not None and confirmed > position.lsn:\n",
        "    if confirmed is not None and confirmed > position.lsn + 1_000_000_000:\n",
        killers=(
            "tests/conformance/test_table_slots.py::test_reader_stops_when_the_slot_or_the_log_does_not_fit_what_is_committed",
        ),
        line="Each change of a table counts once",
    ),
    *(
        Mutant(
            "millpy/sources/postgres/table_thread.py",
            "            flushed = self._committed_lsn\n",
            f"            flushed = {advanced}\n",
            killers=("tests/unit/sources/test_tables.py::test_a_slot_forgets_nothing_but_what_is_committed",),
        )
        for advanced in ("stream.reached", "self._position.lsn")
    ),
    Mutant(
        "millpy/sources/postgres/table_thread.py",
        "            self._committed_lsn = max(self._committed_lsn, position.lsn)\n",
        "            self._committed_lsn = position.lsn\n",
        killers=("tests/unit/sources/test_tables.py::test_a_slot_forgets_nothing_but_what_is_committed",),
    ),
    Mutant(
        "millpy/sources/postgres/table_thread.py",
        "        if not position.copies or begin.lsn >= position.until:\n",
        "        if not position.copies or begin.lsn > position.until:\n",
        killers=(
            "tests/unit/sources/test_tables.py::test_a_change_is_one_of_the_copy_exactly_if_its_snapshot_shows_it",
        ),
    ),
    *(
        Mutant(
            "millpy/sources/postgres/table_checks.py",
            original,
            changed,
            killers=(f"tests/unit/sources/test_tables.py::{killer}",),
        )
        for original, changed, killer in (
            (
                "            if (begin.lsn, begin.committed_at) != (self._commit, self._committed_at):\n",
                "            if begin.lsn != self._commit:\n",
                "test_log_without_the_last_commit_that_was_read_is_refused",
            ),
            (
                "            if (begin.lsn, begin.committed_at) != (self._commit, self._committed_at):\n",
                "            if begin.committed_at != self._committed_at:\n",
                "test_log_without_the_last_commit_that_was_read_is_refused",
            ),
            (
                "        if begin.lsn > position.commit:\n",
                "        if begin.lsn > position.lsn:\n",
                "test_change_that_counts_as_read_comes_from_no_later_commit",
            ),
            (
                "        if self._commit and lsn > self._commit:\n",
                "        if self._commit and lsn >= self._commit:\n",
                "test_log_that_ends_before_the_last_commit_that_was_read_is_awaited",
            ),
            (
                "position.commit if position.commit >= begin else 0",
                "position.commit",
                "test_log_that_was_read_is_followed",
            ),
            (
                "position.commit if position.commit >= begin else 0",
                "position.commit if position.commit > begin else 0",
                "test_log_without_the_last_commit_that_was_read_is_refused",
            ),
        )
    ),
]
