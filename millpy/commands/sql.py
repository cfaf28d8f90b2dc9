"""`millpy sql`: one statement that reads."""

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
    print_json,
    settings_of,
    worded,
)


@worded
def sql(
    statement: Annotated[str, typer.Argument(metavar="STATEMENT", help="For example: SELECT * FROM plant.alerts")],
    graph: GraphArgument = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the configured or embedded database one question in SQL; changes nothing, and takes five seconds at most."""
    with connected_to(settings_of(database), graph, READING_S_MAX) as admin:
        found = admin.read(statement)
    if as_json:
        print_json(found)
    else:
        tables.echo(found, none="(no rows)")
