"""What commands share: options, how an error is worded, how answers are shown."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec

import typer

from millpy.complaint import complain
from millpy.config import Settings, configure_logging
from millpy.errors import MillError
from millpy.store.admin import Admin, Row, table

P = ParamSpec("P")
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="Database; default: MILLPY_DATABASE_URL, else the embedded one."),
]
GraphArgument = Annotated[
    str | None, typer.Argument(metavar="[GRAPH.py]", help="Graph whose embedded database is meant.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def worded(command: Callable[P, int | None]) -> Callable[P, None]:
    """An error that a person can cause ends in a clear line and a status, never in a traceback."""

    @functools.wraps(command)
    def inner(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = command(*args, **kwargs) or 0
        except MillError as error:
            status = complain(error)
        except BrokenPipeError:  # `millpy status | head`
            sys.stderr.close()
            status = 0
        raise typer.Exit(status)

    return inner


def settings_of(database: str | None) -> Settings:
    """The settings, with the log configured by them."""
    settings = Settings.load(database_url=database)
    configure_logging(settings)
    return settings


def show(
    graph: str | None, database: str | None, as_json: bool, ask: Callable[[Admin], Mapping[str, Sequence[Row]]]
) -> None:
    """Ask the database and print the answers as tables or as JSON."""
    from millpy.launch import database as connected  # not loaded for --help

    with connected(settings_of(database), graph, create=False) as url:
        answers = ask(Admin(url))
    if as_json:
        print_json(answers)
        return
    for title, rows in answers.items():
        if len(answers) > 1:
            typer.echo(f"{title}\n")
        typer.echo(table(rows) or "(none)")
        if len(answers) > 1:
            typer.echo("")


def print_json(value: object) -> None:
    """Print JSON; moments in ISO 8601, what JSON has no form for as its text."""
    typer.echo(json.dumps(value, default=_plain, indent=2))


def _plain(value: object) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
