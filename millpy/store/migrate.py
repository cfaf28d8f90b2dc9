"""Brings a database to the schema that this version of millpy needs.

The migrations are reviewed SQL under `migrations/`; the wheel ships the same folder as `millpy/_migrations`.
They only go forward, and all that are missing run in one transaction that has their table locked, so that several
processes may start at once. Nobody else can hold that up: whom no right was given cannot lock the table.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import psycopg.conninfo
import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import IntegrityError, OperationalError

from millpy.database_url import unreadable
from millpy.errors import ConfigError
from millpy.store.engine import make_engine
from millpy.store.postgres.roles import Roles, act_as_owner, establish, grant, recorded
from millpy.store.revision import HEAD, newer_than_we_are
from millpy.store.unreachable import unreachable

HOLD = (
    "CREATE SCHEMA IF NOT EXISTS mill",
    "CREATE TABLE IF NOT EXISTS mill.alembic_version"
    " (version_num varchar(32) CONSTRAINT alembic_version_pkc PRIMARY KEY)",
    "LOCK TABLE mill.alembic_version IN SHARE ROW EXCLUSIVE MODE",
)
"""Who is not the first waits in one of these, and fails in it, or holds the table then."""
progress = logging.getLogger("millpy.progress")
ATTEMPTS = 10
"""Each after somebody else has made the table meanwhile."""


def migrations_folder() -> Path:
    """Where the migrations are: in the wheel, else in the source tree.

    Raises:
        ConfigError: when neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigError("the migrations are not installed", hint="reinstall millpy")


@dataclass(frozen=True, slots=True)
class Migrated:
    """What `migrate` has done.

    Attributes:
        applied: the revisions that were missing, in their order.
        roles: of the database, if it has any.
    """

    applied: tuple[str, ...]
    roles: Roles | None


def migrate(url: str, role_prefix: str | None = None) -> Migrated:
    """Apply every migration that is missing, as the owner where there are roles. Needs the right to create schemas.

    Args:
        url: of the database.
        role_prefix: also make the roles owner, worker and reader, named by it, and give them their rights.

    Raises:
        ConfigError: for a URL that is not one of PostgreSQL, a role without the rights, or tables of a newer millpy.
        StoreUnavailableError: when the database cannot be reached.
    """
    for _ in range(ATTEMPTS):
        try:
            return _migrate(url, role_prefix)
        except IntegrityError:
            progress.debug("somebody else was the first to migrate")
    raise ConfigError("something else keeps schema mill from being made", hint="is there a type mill.alembic_version?")


def _migrate(url: str, role_prefix: str | None) -> Migrated:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.set_main_option("path_separator", "os")
    engine = _engine(url)
    progress.debug("connecting to the database")
    try:
        with engine.begin() as connection:
            driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
            act_as_owner(driver)
            progress.debug("waiting until nobody else migrates")
            for statement in HOLD:
                connection.execute(sqlalchemy.text(statement))
            _refuse_newer(connection)
            config.attributes["connection"] = connection
            progress.debug("migrating the database to revision %s", HEAD)
            command.upgrade(config, "head")
            if role_prefix is not None:
                establish(driver, Roles.named(role_prefix))
            roles = recorded(driver)
            if roles is not None:
                grant(driver, roles)
            return Migrated(tuple(config.attributes.get("applied", ())), roles)
    except OperationalError as error:
        raise unreachable(str(error.orig)) from error
    except (sqlalchemy.exc.ProgrammingError, psycopg.errors.InsufficientPrivilege) as error:
        first, *_ = str(getattr(error, "orig", error)).splitlines()
        raise ConfigError(f"cannot migrate the database: {first}", hint="migrate as the owner role") from error
    finally:
        engine.dispose()


def is_migrated(url: str) -> bool:
    """Whether the database has the schema that this version needs.

    Raises:
        StoreUnavailableError: when the database cannot be reached.
    """
    engine = _engine(url)
    try:
        with engine.connect() as connection:
            if connection.scalar(sqlalchemy.text("SELECT to_regclass('mill.alembic_version')")) is None:
                return False
            return bool(connection.scalar(sqlalchemy.text("SELECT version_num FROM mill.alembic_version")) == HEAD)
    except OperationalError as error:
        raise unreachable(str(error.orig)) from error
    finally:
        engine.dispose()


def _refuse_newer(connection: sqlalchemy.Connection) -> None:
    if connection.scalar(sqlalchemy.text("SELECT to_regclass('mill.alembic_version')")) is None:
        return
    revision = connection.scalar(sqlalchemy.text("SELECT version_num FROM mill.alembic_version"))
    if revision is not None and revision > HEAD:
        raise newer_than_we_are(revision)


def _engine(url: str) -> sqlalchemy.Engine:
    try:
        psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise unreadable() from None
    return make_engine(url)
