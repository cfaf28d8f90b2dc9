"""`millpy api` and `millpy token`: serve the API, and manage who may use it."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

import typer

from millpy.admin import tokens as stored
from millpy.admin.tokens import Role
from millpy.cli import text_table as tables
from millpy.cli.options import (
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    duration_option,
    handle_errors,
    print_json,
    settings_of,
)
from millpy.config.extras import to_install
from millpy.errors import ConfigError

token = typer.Typer(help="Manage who may use the API.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Who uses it, as in events.")]


@handle_errors
def api(
    graph: GraphArgument = None,
    http: Annotated[
        str, typer.Option("--http", metavar="ADDRESS", help="Address; default: MILLPY_API, else 127.0.0.1:8090.")
    ] = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the API and the page until a signal ends it. Its log says the address; more settings: the environment."""
    try:
        from millpy.api.configuration import configuration
        from millpy.api.server import serve_api  # needs an optional dependency
        from millpy.ui.site import add_site
    except ImportError as error:
        raise ConfigError("the API is not installed", hint=to_install("api")) from error
    from millpy.process.launcher import database as connected

    settings = settings_of(database, api=http)
    with connected(settings, graph, create=False) as url:
        serve_api(configuration(settings, url), add_site)


@token.command("create")
@handle_errors
def create(
    name: NameArgument,
    role: Annotated[
        Literal["viewer", "operator", "admin"],
        typer.Option(
            "--role",
            help="viewer reads; operator also replays, discards, releases, resumes and drains; admin also switches.",
        ),
    ] = "viewer",
    kept_s: Annotated[
        float | None, duration_option("--for", None, "How long it is valid: 12h, 30d. Default: no end.")
    ] = None,
    database_role: Annotated[
        str | None,
        typer.Option("--database-role", metavar="ROLE", help="Role of the database under which its queries run."),
    ] = None,
    identity: Annotated[
        bool, typer.Option("--identity", help="A user that a reverse proxy names, instead of a token.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print it, once: the database has only its hash."""
    kept = None if kept_s is None else timedelta(seconds=kept_s)
    with connected_to(settings_of(database), None) as admin:
        row, made = stored.create(
            admin, name, Role[role.upper()], kept=kept, database_role=database_role, identity=identity
        )
    if as_json:
        print_json({**row, **({} if identity else {"token": made})})
    elif identity:
        tables.say(f"{name} may use the API as {role}, when the reverse proxy names that user")
    else:
        tables.say(made)


@token.command("list")
@handle_errors
def list_tokens(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the tokens and identities, without their secrets."""
    with connected_to(settings_of(database), None) as admin:
        found = stored.tokens(admin)
    if as_json:
        print_json({"tokens": found})
    else:
        tables.echo(found, none="(no tokens)")


@token.command("revoke")
@handle_errors
def revoke(name: NameArgument, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Revoke a token or an identity, and end its sessions. The API may accept it for two more seconds."""
    with connected_to(settings_of(database), None) as admin:
        gone = stored.revoke(admin, name)
    if as_json:
        print_json(gone)
    else:
        tables.say(f"revoked {gone['name']}")
