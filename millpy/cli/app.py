"""The command line: the app, whose commands have a module each in `millpy.cli`, which is imported when it is named."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException
from typer.main import get_group

from millpy.cli.text_table import say
from millpy.errors import MillError, UsageError
from millpy.process.exit import report_error

COMMANDS: dict[str, dict[str, str]] = {
    "Run a graph": {
        "init": "init.init",
        "demo": "demo.demo",
        "run": "run.run",
        "archive": "archive.archive",
        "deploy": "deploy.deploy",
        "backfill": "backfill.backfill",
        "switch": "generations.switch",
        "drop": "generations.drop",
        "migrate": "migrate.migrate",
        "db": "db.db",
        "service": "service.service",
    },
    "See its results": {
        "windows": "windows.windows",
        "sql": "sql.sql",
        "report": "report.report",
        "analytics": "analytics.analytics",
        "spark": "spark.spark",
        "state": "state.state",
    },
    "Monitor it": {
        "status": "status.status",
        "graphs": "generations.graphs",
        "watermarks": "watermarks.watermarks",
        "events": "events.events",
        "sources": "sources.sources",
        "fleet": "sources.fleet",
        "workers": "workers.workers",
        "doctor": "doctor.doctor",
        "api": "api.api",
        "ui": "ui.ui",
        "token": "api.token",
    },
    "Replay or discard": {
        "repair": "repair.repair",
        "dead-letters": "dead_letters.dead_letters",
        "late": "dead_letters.late",
        "parked": "parked.parked",
        "correct": "corrections.correct",
        "corrections": "corrections.corrections",
    },
    "Test it": {
        "audit": "audit.audit",
        "crash-test": "crash_test.command",
        "test": "transcripts.test",
    },
}
"""The commands and groups of commands, as MODULE.NAME, in the order and under the headings of `millpy --help`."""
HEADINGS = {name: heading for heading, commands in COMMANDS.items() for name in commands}


class NamedCommands(Mapping[str, Any]):
    """The commands by name; one is imported when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            heading = HEADINGS[name]
            module, _, attribute = COMMANDS[heading][name].partition(".")
            command = getattr(import_module(f"millpy.cli.{module}"), attribute)
            alone = typer.Typer(pretty_exceptions_enable=False)
            if isinstance(command, typer.Typer):
                alone.add_typer(command, name=name, rich_help_panel=heading)
            else:
                alone.command(name, rich_help_panel=heading)(command)
            self._made[name] = get_group(alone).commands[name]
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(HEADINGS)

    def __len__(self) -> int:
        return len(HEADINGS)


class CommandLine(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = NamedCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in their order."""
        return list(self.commands)


app = typer.Typer(
    name="millpy",
    cls=CommandLine,
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
