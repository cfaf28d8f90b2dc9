"""The command line: the app and a short command; every other command has a module in `millpy.cli`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from millpy.admin.queries import Admin, Row
from millpy.cli import (
    analytics,
    api,
    archive,
    audit,
    backfill,
    corrections,
    crash_test,
    db,
    dead_letters,
    demo,
    deploy,
    doctor,
    events,
    explanation,
    generations,
    init,
    migrate,
    parked,
    repair,
    report,
    run,
    service,
    sources,
    spark,
    sql,
    state,
    status,
    transcripts,
    ui,
    windows,
    workers,
)
from millpy.cli.options import (
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    graph_in,
    handle_errors,
    settings_of,
    show,
)
from millpy.cli.text_table import say
from millpy.errors import MillError, UsageError
from millpy.process.exit import report_error

app = typer.Typer(
    name="millpy",
    help="Exactly-once stream processing on PostgreSQL.\n\n"
    "`millpy init` writes an example, `millpy run` runs it, `millpy windows` shows its results.",
    epilog="The database is --database, else MILLPY_DATABASE_URL, else an embedded one in .millpy/. Exit status: 0 "
    "success, 1 failure, 2 a mistake in the command, the graph or a setting, 3 a broken invariant (the worker stopped "
    "and kept everything), 4 another version of the graph was deployed meanwhile, 130 interrupted by Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"millpy {version('millpy')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options before a command."""


@handle_errors
def watermarks(
    graph: GraphArgument = None,
    explain: Annotated[
        str, typer.Option("--explain", metavar="[GRAPH.]COMPUTATION", help="Explain what holds back its watermark.")
    ] = "",
    disorder: Annotated[
        bool, typer.Option("--disorder", help="Show how far the records of each source lie behind the newest one.")
    ] = False,
    sites: Annotated[
        bool, typer.Option("--sites", help="Show the watermark of each site of sources with watermark_by.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the watermarks: how far event time has come, and what holds it back."""
    if sum((disorder, sites, bool(explain))) > 1:
        raise UsageError("--disorder and --sites show sources, --explain one computation", hint="give one of the three")

    def ask(admin: Admin, name: str | None) -> dict[str, list[Row]]:
        if disorder:
            return {"disorder": admin.disorder(name)}
        if sites:
            return {"site_watermarks": admin.site_watermarks(name)}
        if not explain:
            return {"watermarks": admin.watermarks(name)}
        return {"explanation": _explained(admin, name, explain)}

    if explain and not as_json:
        with connected_to(settings_of(database), graph) as admin:
            steps = _explained(admin, graph_in(admin, graph), explain)
        explanation.echo(steps)
        return
    show(graph, database, as_json, ask)


def _explained(admin: Admin, graph: str | None, computation: str) -> list[Row]:
    named = computation if graph is None or "." in computation else f"{graph}.{computation}"
    return admin.explain_watermark(named)


COMMANDS: dict[str, dict[str, Callable[..., object] | typer.Typer]] = {
    "Run a graph": {
        "init": init.init,
        "demo": demo.demo,
        "run": run.run,
        "archive": archive.archive,
        "deploy": deploy.deploy,
        "backfill": backfill.backfill,
        "switch": generations.switch,
        "drop": generations.drop,
        "migrate": migrate.migrate,
        "db": db.db,
        "service": service.service,
    },
    "See its results": {
        "windows": windows.windows,
        "sql": sql.sql,
        "report": report.report,
        "analytics": analytics.analytics,
        "spark": spark.spark,
        "state": state.state,
    },
    "Monitor it": {
        "status": status.status,
        "graphs": generations.graphs,
        "watermarks": watermarks,
        "events": events.events,
        "sources": sources.sources,
        "fleet": sources.fleet,
        "workers": workers.workers,
        "doctor": doctor.doctor,
        "api": api.api,
        "ui": ui.ui,
        "token": api.token,
    },
    "Replay or discard": {
        "repair": repair.repair,
        "dead-letters": dead_letters.dead_letters,
        "late": dead_letters.late,
        "parked": parked.parked,
        "correct": corrections.correct,
        "corrections": corrections.corrections,
    },
    "Test it": {
        "audit": audit.audit,
        "crash-test": handle_errors(crash_test.command),
        "test": transcripts.test,
    },
}
"""The commands and groups of commands, in the order and under the headings of `millpy --help`."""
for _heading, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_heading)
        else:
            app.command(_name, rich_help_panel=_heading)(_command)


def _open_closed_streams() -> None:
    """Open the standard streams that were closed (`>&-`) on the null device, or a connection would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)  # for workers that are started
            setattr(sys, name, os.fdopen(descriptor, mode))


def main() -> None:
    """Run the `millpy` command."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does: a terminal may lack characters
    try:
        status = app(prog_name="millpy", standalone_mode=False)
    except Abort:  # the answer to a question was no, or the input ended
        refused = MillError("not confirmed; nothing was done", hint="give --yes to skip the question")
        status = report_error(refused, as_json="--json" in sys.argv)
    except TyperException as error:
        status = error.exit_code
        if type(error).__name__ != "NoArgsIsHelpError":  # typer has printed the help
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "millpy"
            message = " ".join(error.format_message().splitlines())
            message = message.replace(": Input should", ": it should").replace(": Value error, ", ": ")
            hint = f"see `{command} --help`"
            report_error(UsageError(message[:1].lower() + message[1:], hint=hint), as_json="--json" in sys.argv)
    sys.exit(status)


if __name__ == "__main__":
    main()
