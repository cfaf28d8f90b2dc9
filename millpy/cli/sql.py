"""`millpy sql`: run one read-only statement."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import (
    READING_S_MAX,
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    handle_errors,
    print_json,
    settings_of,
)


@handle_errors
def sql(
    statement: Annotated[str, typer.Argument(metavar="STATEMENT", help="For example: SELECT * FROM plant.alerts")],
    graph: GraphArgument = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one read-only SQL statement, for at most five seconds."""
    with connected_to(settings_of(database), graph, READING_S_MAX) as admin:
        found = admin.read(statement)
    if as_json:
        print_json(found)
    else:
        tables.echo(found, none="(no rows)")
