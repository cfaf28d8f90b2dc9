"""`--archive` of `millpy late replay --into-window`: what an archive says of windows whose rows do not say enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millpy.admin.past_windows import asked_windows
from millpy.admin.queries import Admin
from millpy.cli.graph_audit import GraphAudit
from millpy.errors import UsageError
from millpy.model.time import INSTANT_MAX

if TYPE_CHECKING:
    from millpy.process.window_recomputation import Recomputation


def recomputed(admin: Admin, location: str, directory: str, ids: Sequence[int]) -> Recomputation:
    """Recompute the finished windows of late records, as far as their rows do not say enough.

    Args:
        admin: the database.
        location: the graph's file, with which the workers run.
        directory: the directory of all archives.
        ids: the late records.

    Raises:
        UsageError: the file is of another graph than the deployed one, or the archive lacks records.
    """
    from millpy.graph.loader import load_graph  # imported here: `late list` does not need the engine
    from millpy.process.window_recomputation import Recomputation, recompute_windows

    graph = load_graph(location)
    spec = graph.spec()
    name = admin.name_of(graph.name, graph.generation)
    if name is None:
        raise UsageError(f"{graph.name} is not deployed", hint="`millpy graphs` lists what is")
    found = Recomputation()
    asked = asked_windows(admin, name, ids)
    tables = {table.computation: table for table in spec.tables if table.kind == "windowed"}
    for computation in sorted({row["computation"] for row in asked}):
        own = [row["id"] for row in asked if row["computation"] == computation]
        table = tables.get(computation)
        if table is None:
            found.merged += own  # its worker says why it cannot be corrected
            continue
        first = min(row["window_start"] for row in asked if row["computation"] == computation)
        with GraphAudit(admin, spec, (first, INSTANT_MAX)).unchanged([table]):
            of_table = recompute_windows(admin, graph, name, directory, own, table)
        found.recomputed |= of_table.recomputed
        found.refused |= of_table.refused
        found.merged += of_table.merged
    return found
