"""`millpy deploy --copy-results`: what a new generation gets of the rows of the current one, and the copy itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.cli import text_table as tables
from millpy.errors import UsageError
from millpy.model.copied_results import ResultCopy
from millpy.model.deployment import GraphSpec
from millpy.model.time import describe
from millpy.store.postgres.store import PostgresStore


def check_generation(spec: GraphSpec) -> None:
    """Raise UsageError for a graph that is no later generation."""
    if spec.generation == 1:
        raise UsageError(
            "--copy-results is for a new generation, and this file defines the first one",
            hint=f"Graph({spec.name!r}, generation=2) begins the next",
        )


def show_plan(copies: Sequence[ResultCopy]) -> None:
    """Say what would be copied."""
    for copy in copies:
        tables.say(f"  {copy}")


async def copy_all(store: PostgresStore, spec: GraphSpec, graph_id: int, *, say: bool) -> dict[str, int]:
    """Copy what is left, piece by piece; return the number of rows by table. With `say`, tell of each piece."""
    copied: dict[str, int] = {}
    while (piece := await store.copy_results(spec, graph_id)) is not None:
        table, rows, end = piece
        copied[table] = copied.get(table, 0) + rows
        if say and rows:
            tables.say(f"  copied {copied[table]} rows of {table}, to windows that end by {describe(end)}")
    return copied


def described(copies: Sequence[ResultCopy]) -> list[dict[str, Any]]:
    """Return what would be copied, for programs."""
    return [
        {
            "table": copy.table,
            "columns": list(copy.columns),
            "empty": list(copy.empty),
            "left_out": list(copy.left_out),
            "windows_end_by": describe(copy.closed_end),
        }
        for copy in copies
    ]
