"""`--archive` of `millpy late replay --into-window`: what an archive says of windows whose rows do not say enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millpy.admin.audits import described, may_record
from millpy.admin.dead_letters import request_into_window
from millpy.admin.past_windows import asked_windows
from millpy.admin.queries import Admin
from millpy.cli.graph_audit import GraphAudit
from millpy.errors import UsageError
from millpy.model.changed_meaning import changed_since
from millpy.model.time import INSTANT_MAX, INSTANT_MIN

if TYPE_CHECKING:
    from millpy.process.window_recomputation import Recomputation


IDS_AT_ONCE = 1_000


def replay_recomputed(
    admin: Admin, location: str, directory: str, ids: Sequence[int], why: str
) -> tuple[int, Mapping[str, Any]]:
    """Request that late records are added to their finished windows; those are recomputed whose rows say too little.

    Returns:
        The number of requests, and `recomputed`, their number with a recomputed window, and `refused`, late record ->
        reason.
    """
    requested, with_archive = 0, 0
    refused: dict[int, str] = {}
    for start in range(0, len(ids), IDS_AT_ONCE):
        found = recomputed(admin, location, directory, ids[start : start + IDS_AT_ONCE])
        requested += request_into_window(admin, [*found.merged, *found.recomputed], why, found.recomputed)
        with_archive += len(found.recomputed)
        refused |= found.refused
    return requested, {"recomputed": with_archive, "refused": refused}


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
        # Windows from before a change in place are refused one by one: the others can be recomputed.
        since = changed_since(described(admin, name), computation) if may_record(admin) else INSTANT_MIN
        first = min(row["window_start"] for row in asked if row["computation"] == computation)
        with GraphAudit(admin, spec, (max(first, since), INSTANT_MAX)).unchanged([table]):
            of_table = recompute_windows(admin, graph, name, directory, own, table, since=since)
        found.recomputed |= of_table.recomputed
        found.refused |= of_table.refused
        found.merged += of_table.merged
    return found
