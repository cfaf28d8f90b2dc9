"""`millpy state`: show the stored state of one key or of all."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.admin.state import stored
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


@handle_errors
def state(
    computation: Annotated[str, typer.Argument(metavar="[GRAPH.]COMPUTATION", help="Computation whose state to show.")],
    graph: GraphArgument = None,
    key: Annotated[
        str | None,
        typer.Option("--key", "-k", metavar="KEY", help="Only this key, as text or as JSON: 7, '[\"hall 3\", 7]'."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show at most N rows of each kind.")
    ] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the stored state of a computation, for one key or all: cells, timers and open windows."""
    with connected_to(settings_of(database), graph, READING_S_MAX) as admin:
        found = stored(admin, graph_in(admin, graph), computation, key, limit)
    if as_json:
        print_json(found)
        return
    where = computation if key is None else f"key {key} of {computation}"
    if not any(found.values()):
        tables.say(f"nothing is stored for {where}")
    for title, rows in found.items():
        if rows:
            tables.say(f"{title}\n")
            tables.echo(rows)
            tables.say("")
