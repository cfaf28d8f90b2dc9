"""`millpy state`: what is stored for a key."""

from __future__ import annotations

from typing import Annotated

import typer

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
from millpy.store.admin_state import stored


@worded
def state(
    computation: Annotated[str, typer.Argument(metavar="[GRAPH.]COMPUTATION", help="The step that stores it.")],
    graph: GraphArgument = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", help="As text, or as JSON: 7, '[\"hall 3\", 7]'.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="At most so many of each.")] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a computation has stored: cells, timers and open windows, of one key or of all."""
    with connected_to(settings_of(database), graph, READING_S_MAX) as admin:
        found = stored(admin, graph_in(admin, graph), computation, key, limit)
    if as_json:
        print_json(found)
        return
    whose = computation if key is None else f"key {key} of {computation}"
    if not any(found.values()):
        tables.say(f"nothing is stored for {whose}")
    for title, rows in found.items():
        if rows:
            tables.say(f"{title}\n")
            tables.echo(rows)
            tables.say("")
