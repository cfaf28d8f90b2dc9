"""The command line: parses arguments, words errors for people, calls others."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec

import typer

from millpy.complaint import complain
from millpy.config import Settings, configure_logging
from millpy.errors import MillError, UsageError
from millpy.store.admin import Admin, Row, table

app = typer.Typer(
    name="millpy",
    help="Exactly-once stream processing on PostgreSQL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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


def _settings(database: str | None) -> Settings:
    settings = Settings.load(database_url=database)
    configure_logging(settings)
    return settings


@app.command()
@worded
def run(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines a Graph.")],
    only: Annotated[str, typer.Option("--only", metavar="A,B", help="Take only these computations.")] = "",
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Worker processes.")] = 1,
    database: DatabaseOption = None,
) -> int:
    """Run a graph until its sources have ended, or until SIGTERM or Ctrl-C drains it."""
    from millpy.launch import run as launch  # the engine is not loaded for `status`

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    return launch(graph, _settings(database), only=names, workers=workers)


@app.command()
@worded
def migrate(database: DatabaseOption = None) -> None:
    """Create or update the tables of millpy in the configured database."""
    from millpy.store.migrate import migrate as migrate_database

    settings = _settings(database)
    if settings.database_url is None:
        raise UsageError(
            "no database is configured",
            hint="set MILLPY_DATABASE_URL or give --database URL; `millpy run` migrates the embedded one itself",
        )
    migrate_database(settings.database_url)
    typer.echo("the database is up to date")


@app.command()
@worded
def status(graph: GraphArgument = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show workers and the accounting of records."""
    _show(graph, database, as_json, lambda admin: {"workers": admin.workers(), "accounting": admin.accounting()})


@app.command()
@worded
def watermarks(
    graph: GraphArgument = None,
    explain: Annotated[
        str, typer.Option("--explain", metavar="[GRAPH.]COMPUTATION", help="What holds this one back.")
    ] = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how far event time has come, and what holds it back."""

    def ask(admin: Admin) -> dict[str, list[Row]]:
        return {"explanation": admin.explain_watermark(explain)} if explain else {"watermarks": admin.watermarks()}

    _show(graph, database, as_json, ask)


def _show(
    graph: str | None, database: str | None, as_json: bool, ask: Callable[[Admin], Mapping[str, Sequence[Row]]]
) -> None:
    from millpy.launch import database as connected

    with connected(_settings(database), graph, create=False) as url:
        answers = ask(Admin(url))
    if as_json:
        typer.echo(json.dumps(answers, default=_plain, indent=2))
        return
    for title, rows in answers.items():
        if len(answers) > 1:
            typer.echo(f"{title}\n")
        typer.echo(table(rows) or "(none)")
        if len(answers) > 1:
            typer.echo("")


def _plain(value: object) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def main() -> None:
    """The `millpy` command."""
    app()


if __name__ == "__main__":
    main()
