"""Mutants of the sources that read PostgreSQL: injected records, and changes of tables."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/store/sql/injected.sql",
        "i.xid = ANY (string_to_array(%(open)s, ',')::xid8[])",
        "i.xid = ANY (string_to_array(%(open)s, ',')::xid8[]) AND false",
        killers=(
            "tests/conformance/test_injected.py::test_concurrent_transactions_are_read_once_and_in_the_order_of_their_locks",
        ),
        line="An injected record counts once if its transaction commits, and not at all otherwise",
    ),
    Mutant(
        "millpy/sources/postgres/table_position.py",
        "        return (lsn, place) <= (self.lsn, self.done)\n",
        "        return (lsn, place) < (self.lsn, self.done)\n",
        killers=("tests/conformance/test_tables.py::test_copy_and_changes_are_exact_when_readers_die_at_any_position",),
        line="Each change of a table counts once",
    ),
]
