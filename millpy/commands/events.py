"""`millpy events`: what happened to a graph: takeovers, refusals, pauses, records set aside."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.clock import SystemClock
from millpy.commands import tables
from millpy.commands.common import (
    READING_S_MAX,
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    graph_in,
    print_json,
    settings_of,
    worded,
)
from millpy.commands.moments import moment
from millpy.store.admin_events import happenings

SHOWN = ("at", "graph", "kind", "happened")


@worded
def events(
    graph: GraphArgument = None,
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="Since then: a moment, or 90s, 10m, 2h.")] = "",
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Only these, e.g. claimed, quarantined, paused.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="At most so many, the newest.")] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened: takeovers, refused commits, pauses, records set aside, keys that stopped.

    What was set aside is one event a minute, computation and reason; of the newest 10,000 records.
    """
    since = moment("--from", start, SystemClock())
    with connected_to(settings_of(database), graph, READING_S_MAX) as admin:
        found = happenings(admin, graph_in(admin, graph), start=since, kinds=kinds or (), limit=limit)
    if as_json:
        print_json(found)
    else:
        tables.echo([{name: row[name] for name in SHOWN} for row in found])
