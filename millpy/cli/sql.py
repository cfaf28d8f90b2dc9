"""`millpy sql`: run one read-only statement."""

from __future__ import annotations

from datetime import timedelta
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
from millpy.config.durations import format_duration


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
        tables.echo([{name: _exact(value) for name, value in row.items()} for row in found], none="(no rows)")


def _exact(value: object) -> object:
    return format_duration(value, exact=True) if isinstance(value, timedelta) else value
