"""Mutants of the switch between two generations, in both stores."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SQL, POSTGRES = "millpy/store/sql/generations.sql", "millpy/store/postgres/deployment/generations.py"
MEMORY = "millpy/store/memory/generations.py"
IN_POSTGRES = "tests/conformance/test_postgres_store.py::TestPostgresStore::"
IN_MEMORY = "tests/conformance/test_memory_store.py::TestMemoryStore::"
FENCES = "test_switch_moves_name_and_tables_and_fences_both_generations"
WAITS = "test_switch_waits_for_the_commit_in_flight_of_either"
GOES_ON = "test_worker_that_looks_its_graph_up_again_continues_under_its_new_name"

MUTANTS = [
    Mutant(SQL, "SET version = version + 1", "SET version = version", (IN_POSTGRES + FENCES,)),
    Mutant(SQL, "graph_version = r.version, worker_id = NULL", "graph_version = r.version", (IN_POSTGRES + FENCES,)),
    Mutant(
        POSTGRES,
        "for graph in sorted((before, after), key",
        "for graph in sorted((after,), key",
        (IN_POSTGRES + FENCES,),
    ),
    Mutant(
        POSTGRES,
        "await _move(connection, after, after.name, family, tables[after])",
        "await _move(connection, after, after.name, family, [])",
        (IN_POSTGRES + FENCES,),
    ),
    Mutant(
        MEMORY,
        "        for graph in (before, after):\n            fence",
        "        for graph in (after,):\n            fence",
        (IN_MEMORY + FENCES,),
    ),
    Mutant(MEMORY, "version=graph.deployment.version + 1", "version=graph.deployment.version", (IN_MEMORY + FENCES,)),
    Mutant(
        MEMORY,
        "database.headers[interval.interval_id].disown()",
        "database.headers[interval.interval_id]",
        (IN_MEMORY + FENCES,),
    ),
    Mutant(MEMORY, "database.tables[table_id].graph = name", "database.tables[table_id].graph", (IN_MEMORY + FENCES,)),
    Mutant(
        MEMORY, "for graph in sorted((before, after), key", "for graph in sorted((after,), key", (IN_MEMORY + WAITS,)
    ),
    Mutant(
        MEMORY,
        "holder.committing or database.is_live(",
        "holder.committing and database.is_live(",
        (IN_MEMORY + WAITS,),
    ),
    Mutant(MEMORY, "or database.is_live(", "or not database.is_live(", (IN_MEMORY + WAITS,)),
    Mutant(MEMORY, "replace(graph.deployment, name=name)", "replace(graph.deployment)", (IN_MEMORY + GOES_ON,)),
]
