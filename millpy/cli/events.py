"""`millpy events`: list takeovers, refused commits, pauses, dead letters, late records and parked keys."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.admin.events import list_events
from millpy.cli import text_table as tables
from millpy.cli.options import (
    READING_S_MAX,
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    graph_in,
    handle_errors,
    print_json,
    settings_of,
)
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock

SHOWN = ("at", "graph", "kind", "happened")


@handle_errors
def events(
    graph: GraphArgument = None,
    start: Annotated[
        str,
        typer.Option("--from", metavar="TIME", help="Only events since TIME: a time with its zone, or 90s, 10m, 2h."),
    ] = "",
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only this kind, for example claimed, dead_lettered, paused."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show only the newest N.")] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened: takeovers, refused commits, pauses, dead letters, late records, parked keys.

    Dead letters and late records are one event per minute, computation and reason, of the newest 10,000 of each.
    """
    since = moment("--from", start, SystemClock())
    with connected_to(settings_of(database), graph, READING_S_MAX) as admin:
        found = list_events(admin, graph_in(admin, graph), start=since, kinds=kinds or (), limit=limit)
    if as_json:
        print_json(found)
    else:
        tables.echo([{name: row[name] for name in SHOWN} for row in found])
