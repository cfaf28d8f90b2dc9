"""`millpy migrate`: create or update millpy's tables, and create the roles that use them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, JsonOption, handle_errors, print_json, settings_of
from millpy.errors import UsageError
from millpy.observability.status_line import working
from millpy.store.revision import HEAD

ROLE_PREFIX = "millpy"
RolesOption = Annotated[bool, typer.Option("--roles", help="Also create the roles owner, worker and reader.")]
PrefixOption = Annotated[
    str,
    typer.Option(
        "--role-prefix", metavar="NAME", help="With --roles: name them NAME_owner, NAME_worker and NAME_reader."
    ),
]


@handle_errors
def migrate(
    database: DatabaseOption = None,
    roles: RolesOption = False,
    role_prefix: PrefixOption = "",
    as_json: JsonOption = False,
) -> None:
    """Create or update millpy's tables; with --roles, also create the roles that use them."""
    from millpy.store.postgres.deployment.migrate import migrate as migrate_database  # --help does not need it

    settings = settings_of(database)
    if settings.database_url is None:
        raise UsageError(
            "no database is configured",
            hint="set MILLPY_DATABASE_URL or give --database URL; `millpy run` migrates the embedded one itself",
        )
    if role_prefix and not roles:
        raise UsageError("--role-prefix needs --roles", hint="give --roles too, or leave out --role-prefix")
    with working("migrating the database"):
        done = migrate_database(settings.database_url, (role_prefix or ROLE_PREFIX) if roles else None)
    made = done.roles
    if as_json:
        named = None if made is None else dataclasses.asdict(made)
        print_json({"revision": HEAD, "applied": done.applied, "roles": named})
        return
    tables.say("the database is up to date")
    if roles and made is not None:
        tables.say(f"owner {made.owner} migrates and deploys, {made.worker} runs workers, {made.reader} reads")
        tables.say("they have no passwords: set them (\\password in psql), or make your logins members of the roles")
