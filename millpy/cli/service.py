"""`millpy service`: install and uninstall the workers of a graph as a service of systemd."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import JsonOption, handle_errors, print_json, settings_of
from millpy.cli.service_files import files
from millpy.config.secrets import FILE
from millpy.config.settings import DATABASE_URL
from millpy.errors import ConfigError, UsageError
from millpy.process.launcher import WORKERS_MAX
from millpy.process.systemd import MARK, Service, environment_text, verify, write_private

service = typer.Typer(help="Run the workers of a graph as a service of systemd.", no_args_is_help=True)
service.command("files")(files)
NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the service; default: the file's.")]
RunAsOption = Annotated[
    str,
    typer.Option(
        "--run-as",
        metavar="ACCOUNT",
        help="Account of the workers; default: the file's owner, or an account without rights if that is root.",
    ),
]
UserOption = Annotated[bool, typer.Option("--user", help="Use your own systemd, without root.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
NowOption = Annotated[bool, typer.Option("--now", help="Start the service, now and at every boot.")]


@service.command("install")
@handle_errors
def install(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines the graph.")],
    name: NameOption = "",
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=WORKERS_MAX, help="Number of worker processes.")
    ] = 2,
    http: Annotated[
        str, typer.Option("--http", metavar="HOST:PORT", help="Address of health and metrics; empty for none.")
    ] = "127.0.0.1:8080",
    user: UserOption = False,
    run_as: RunAsOption = "",
    now: NowOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a unit of systemd that runs a graph's workers, and a file for its settings.

    The file gets the MILLPY_ settings of your environment, if it does not exist. Only its owner can read it. Another
    run of this command replaces the unit, and keeps the settings.
    """
    settings = settings_of(None)
    file = Path(graph).expanduser().resolve()
    if not file.is_file():
        raise UsageError(f"there is no file {graph}", hint="give the Python file that defines the graph")
    made = Service(
        name=name or file.stem,
        graph=file,
        program=[sys.executable, "-m", "millpy"],
        workers=workers,
        http=http,
        user=user,
        run_as=_account(file, run_as, user=user),
        drain_s=settings.limits.drain_grace_s,
    )
    own = {name: value for name, value in os.environ.items() if name.startswith("MILLPY_")}
    unit, environment = made.unit_path(), made.environment_path()
    keeps = environment.exists()
    if not (user or keeps or own.keys() & {DATABASE_URL, DATABASE_URL + FILE}):
        raise ConfigError(
            "a system service needs a PostgreSQL of yours: no database is configured",
            hint=f"set {DATABASE_URL}, or write it to {environment}; or use --user with the embedded database",
        )
    _check_ours(unit)
    if other := made.same_address():
        raise UsageError(f"{other} has the address {http}, too", hint="give another one: --http 127.0.0.1:8081")
    if problem := verify(made):
        raise ConfigError(f"systemd does not accept the unit: {problem}", hint="look at it with --dry-run")
    verbs = (("daemon-reload",), ("enable", "--now", made.unit))
    if not dry_run:
        if not keeps:
            write_private(environment, environment_text(own), 0o600)
        write_private(unit, made.text(), 0o644)
        if now:
            _call(made.commands(*verbs))
    commands = [shlex.join(command) for command in made.commands(*verbs)]
    _report(made, own, commands, kept=keeps, now=now, dry_run=dry_run, as_json=as_json)


def _report(
    made: Service,
    own: Mapping[str, str],
    commands: Sequence[str],
    *,
    kept: bool,
    now: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Say what `install` has written, or would write, and what comes next."""
    unit, environment = made.unit_path(), made.environment_path()
    if as_json:
        where = {"unit": str(unit), "environment": str(environment), "written": not dry_run, "started": now}
        print_json({**where, "text": made.text(), "commands": commands})
        return
    if dry_run:
        tables.say(f"{unit}:\n\n{made.text()}")
        named = ", ".join(sorted(own)) or "nothing"
        tables.say(f"{environment}: {'stays as it is' if kept else f'gets {named}'}")
        return
    tables.say(f"wrote {unit}")
    tables.say(f"{'kept' if kept else 'wrote'} {environment}, which only its owner can read")
    for command in () if now else commands:
        tables.say(f"next: {command}")
    if made.user:
        tables.say(f"to run without a login: loginctl enable-linger {pwd.getpwuid(os.geteuid()).pw_name}")


@service.command("uninstall")
@handle_errors
def uninstall(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the service.")],
    user: UserOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop a service that `install` has written, and delete its unit. Its settings and the database stay."""
    made = Service(name, Path("/"), ["millpy"], 1, "", user, "", 0.0)
    unit = made.unit_path()
    if not unit.exists():
        raise UsageError(f"there is no {unit}", hint="`systemctl list-units 'millpy-*'` lists services; see --user")
    _check_ours(unit)
    if not dry_run:
        if shutil.which("systemctl"):
            _call(made.commands(("disable", "--now", made.unit)))
        unit.unlink()
        if shutil.which("systemctl"):
            _call(made.commands(("daemon-reload",)))
    if as_json:
        print_json({"unit": str(unit), "environment": str(made.environment_path()), "deleted": not dry_run})
    else:
        tables.say(f"{'would delete' if dry_run else 'deleted'} {unit}; {made.environment_path()} stays")


def _account(file: Path, asked: str, *, user: bool) -> str:
    """Return the account of a system service: the one asked for, or the owner of the graph's file unless that is root.

    Raises:
        UsageError: there is no such account, or the service is the user's own.
    """
    if user:
        if asked:
            raise UsageError("a service of your own runs as you", hint="leave out --run-as, or --user")
        return ""
    if asked:
        try:
            return pwd.getpwnam(asked).pw_name
        except KeyError:
            raise UsageError(f"there is no account {asked!r}", hint="name one of this machine") from None
    owner = file.stat().st_uid
    try:
        return pwd.getpwuid(owner).pw_name if owner else ""
    except KeyError:
        return str(owner)


def _check_ours(unit: Path) -> None:
    if unit.exists() and not unit.read_text(errors="replace").startswith(MARK):
        raise UsageError(f"{unit} was not written by millpy", hint="give another --name, or move it away")


def _call(commands: Sequence[Sequence[str]]) -> None:
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        except FileNotFoundError:
            raise ConfigError(
                "systemd is not installed: there is no systemctl", hint="the unit is written; leave out --now"
            ) from None
        if done.returncode != 0:
            raise ConfigError(
                f"{shlex.join(command)} failed: {' '.join(done.stderr.split())}", hint="read `journalctl -xe`"
            )
