"""The command line: the app, and the commands that are a few lines; the others are in `millpy.commands`."""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from millpy.commands import (
    crash_test,
    demo,
    deploy,
    doctor,
    events,
    generations,
    init,
    migrate,
    parked,
    report,
    run,
    set_aside,
    sources,
    sql,
    state,
    windows,
)
from millpy.commands.common import DatabaseOption, GraphArgument, JsonOption, show, worded
from millpy.complaint import complain
from millpy.errors import MillError, UsageError
from millpy.store.admin import Admin, Row

app = typer.Typer(
    name="millpy",
    help="Exactly-once stream processing on PostgreSQL.\n\n"
    "`millpy init` writes an example, `millpy run` runs it, `millpy windows` shows what it made.",
    epilog="The database is --database, else MILLPY_DATABASE_URL, else an embedded one in .millpy/. Exit status: 0 "
    "done, 1 it could not be done, 2 a mistake in the command, the graph or a setting, 3 an invariant is broken (the "
    "worker has stopped and kept everything), 130 ended by Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"millpy {version('millpy')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and leave.")
    ] = False,
) -> None:
    """What comes before a command."""


@app.command("status")
@worded
def status(graph: GraphArgument = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show workers, sources and the accounting of records."""

    def ask(admin: Admin, name: str | None) -> dict[str, list[Row]]:
        return {"workers": admin.workers(name), "sources": admin.sources(name), "accounting": admin.accounting(name)}

    show(graph, database, as_json, ask)


@app.command("watermarks")
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

    def ask(admin: Admin, name: str | None) -> dict[str, list[Row]]:
        if not explain:
            return {"watermarks": admin.watermarks(name)}
        one = explain if name is None or "." in explain else f"{name}.{explain}"
        return {"explanation": admin.explain_watermark(one)}

    show(graph, database, as_json, ask)


app.command("init")(init.init)
app.command("run")(run.run)
app.command("demo")(demo.demo)
app.command("windows")(windows.windows)
app.command("sql")(sql.sql)
app.command("state")(state.state)
app.command("events")(events.events)
app.command("crash-test")(worded(crash_test.command))
app.command("migrate")(migrate.migrate)
app.command("deploy")(deploy.deploy)
app.command("graphs")(generations.graphs)
app.command("switch")(generations.switch)
app.command("drop")(generations.drop)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)
app.add_typer(set_aside.dead_letters, name="dead-letters")
app.add_typer(set_aside.late, name="late")
app.add_typer(sources.sources, name="sources")
app.command("fleet")(sources.fleet)
app.add_typer(parked.parked, name="parked")


PANELS = {
    "Begin": ("init", "demo", "run", "deploy", "switch", "drop", "migrate"),
    "See what it makes": ("windows", "sql", "report", "state"),
    "See how it is": ("status", "graphs", "watermarks", "events", "sources", "fleet", "doctor"),
    "Take again, or give up": ("dead-letters", "late", "parked"),
    "Prove it": ("crash-test",),
}
"""The commands as `millpy --help` shows them."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
_PLACE_OF = {name: place for place, name in enumerate(_PANEL_OF)}
for _command in app.registered_commands:
    _command.rich_help_panel = _PANEL_OF.get(_command.name or "", "Others")
for _group in app.registered_groups:
    _group.rich_help_panel = _PANEL_OF.get(str(_group.name), "Others")
app.registered_commands.sort(key=lambda command: _PLACE_OF.get(command.name or "", len(_PLACE_OF)))


def main() -> None:
    """The `millpy` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a terminal may know few characters
    try:
        status = app(prog_name="millpy", standalone_mode=False)
    except Abort:  # a question was answered with no, or with the end of the input
        refused = MillError("nothing was done: it was not confirmed", hint="--yes does not ask")
        status = complain(refused, as_json="--json" in sys.argv)
    except TyperException as error:
        status = error.exit_code
        if type(error).__name__ != "NoArgsIsHelpError":  # the help has been printed
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "millpy"
            message = " ".join(error.format_message().splitlines())
            message = message.replace(": Input should", ": it should").replace(": Value error, ", ": ")
            hint = f"`{command} --help` says what there is"
            complain(UsageError(message[:1].lower() + message[1:], hint=hint), as_json="--json" in sys.argv)
    sys.exit(status)


if __name__ == "__main__":
    main()
