"""Lookups in SQL tables, as steps of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.computation import Computation
from millpy.errors import GraphError
from millpy.graph.nodes import Input, StageNode
from millpy.model.lookup import LookupTable
from millpy.operators.join_output import JoinedType
from millpy.operators.lookup import POLICIES, LookupLogic, Missing


def lookup_node(
    name: str, inputs: Sequence[Input], table: LookupTable, *, missing: Missing, suffix: str, intervals: int
) -> tuple[StageNode, JoinedType]:
    """Return the step of a lookup, and the type of its output.

    Raises:
        GraphError: the keys have different types, a parameter is not one of its values, or records may be retracted.
    """
    if missing not in POLICIES:
        names = " or ".join(f'"{value}"' for value in POLICIES)
        raise GraphError(f"unknown missing={missing!r} of a lookup", hint=f"use {names}")
    if not isinstance(suffix, str) or not f"a{suffix}".isidentifier():
        raise GraphError(f"suffix={suffix!r} makes no field name", hint='for example suffix="_table"')
    taken = inputs[0]
    if taken.key_types != table.key_types:
        mine, its = _types(taken.key_types), _types(table.key_types)
        raise GraphError(
            f"cannot look up ({', '.join(taken.fields)}), of type {mine}, in {table.name} by"
            f" ({', '.join(table.key)}), of type {its}",
            hint="map the records to the type of the table's key, or let the class of the rows have theirs",
        )
    if retracting := [each.stream.name for each in inputs if each.retracts]:
        raise GraphError(
            f"records of {retracting[0]!r} may be retracted, and a retraction could find another row than its record",
            hint="look up before you aggregate; or in a dashboard, join the result table with the SQL table",
        )
    how: Any = "left" if missing == "null" else "inner"
    joined = JoinedType(taken.record_type, taken.fields, table.record_type, table.key, how, suffix)
    return StageNode(name, tuple(inputs), LookupLogic(table, joined, missing), intervals), joined


def check_tables(node: StageNode, others: Sequence[Any]) -> None:
    """Check that all steps of a graph read a table in one way, so that a turn has one version of it.

    Raises:
        GraphError: two steps read different columns of a table, or by different keys or at different times.
    """
    for other in others:
        for known in other.tables if isinstance(other, StageNode) else ():
            for table in node.tables:
                if table.name == known.name and table != known:
                    raise GraphError(
                        f"two steps read table {table.name} in different ways: {known!r} and {table!r}",
                        hint="use one LookupTable for both; or make a view for one of them",
                    )


def check_rows(computation: Computation) -> None:
    """Check that a Computation cannot change the rows that all its calls share.

    Raises:
        GraphError: the class of the rows of one of its tables is not frozen.
    """
    for name, table in computation.tables().items():
        if not table.row.__struct_config__.frozen:
            raise GraphError(
                f"the rows of {type(computation).__name__}.{name} could be changed by a call, and all calls share them",
                hint=f"class {table.row.__name__}(msgspec.Struct, frozen=True): …",
            )


def _types(kinds: Sequence[type]) -> str:
    return f"({', '.join(kind.__name__ for kind in kinds)})"
