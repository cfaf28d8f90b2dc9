"""Migrates a database to the schema that this version of millpy needs.

The migrations are SQL files under `migrations/`, which the wheel contains as `millpy/_migrations`. They only go
forward. All missing migrations run in one transaction that locks their table, so several processes may migrate at once.
Other roles cannot hold it up, because a role without rights cannot lock the table.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import psycopg
import psycopg.conninfo
import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import IntegrityError, InternalError, OperationalError

from millpy.config.database_url import unreadable_url_error
from millpy.errors import ConfigError, StoreUnavailableError
from millpy.store.postgres.deployment.roles import Roles, act_as_owner, create_roles, grant, has_roles, read_roles
from millpy.store.postgres.engine import make_engine
from millpy.store.postgres.statements import statement
from millpy.store.postgres.unreachable import is_standby, standby_error, unreachable_error
from millpy.store.revision import HEAD, build_of, check_build, migrations_folder, newer_database_error

HOLD = (
    "CREATE SCHEMA IF NOT EXISTS mill",
    "CREATE TABLE IF NOT EXISTS mill.alembic_version"
    " (version_num varchar(32) CONSTRAINT alembic_version_pkc PRIMARY KEY, build text)",
    "LOCK TABLE mill.alembic_version IN SHARE ROW EXCLUSIVE MODE",
)
"""Every process but the first waits in one of these statements. It then fails in it, or locks the table."""
BUILT = sqlalchemy.text("UPDATE mill.alembic_version SET build = :build")
ROLE_EXISTS = (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateObject)
"""Roles are those of the whole server: a migration of another database may create or grant them at the same time."""
progress = logging.getLogger("millpy.observability.status_line")
ATTEMPTS = 10
"""An attempt fails when another process creates the table meanwhile."""


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """The result of `migrate`.

    Attributes:
        applied: the revisions that were missing, in order.
        roles: the roles of the database, if it has any.
    """

    applied: tuple[str, ...]
    roles: Roles | None


def migrate(url: str, role_prefix: str | None = None) -> MigrationResult:
    """Apply every missing migration, as the owner if the database has roles. Needs the right to create schemas.

    Args:
        url: URL of the database.
        role_prefix: prefix of the roles owner, worker and reader, to create them with their rights; None for no roles.

    Raises:
        ConfigError: the URL is not one of PostgreSQL, the database is not in UTF-8, the role lacks rights, or a newer
            millpy created the tables, or another development version.
        StoreUnavailableError: the database cannot be reached, or this process was suspended meanwhile.
    """
    for _ in range(ATTEMPTS):
        try:
            return _migrate(url, role_prefix)
        except (IntegrityError, *ROLE_EXISTS):
            progress.debug("another process migrates the database, or creates the same roles: trying again")
    raise ConfigError(
        "cannot create mill.alembic_version: the name is taken", hint="rename the object that has this name"
    )


def _migrate(url: str, role_prefix: str | None) -> MigrationResult:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.set_main_option("path_separator", "os")
    engine = _engine(url)
    progress.debug("connecting to the database")
    had_roles = False
    try:
        with engine.begin() as connection:
            driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
            _refuse_encoding(driver)
            had_roles = has_roles(driver)
            if role_prefix is not None and had_roles:  # a dump lacks rights on the database, and may lack owners
                create_roles(driver, Roles.named(role_prefix))
            act_as_owner(driver)
            progress.debug("waiting for other migrations to end")
            for step in HOLD:
                connection.execute(sqlalchemy.text(step))
            _refuse_others(driver)
            config.attributes["connection"] = connection
            progress.debug("migrating the database to revision %s", HEAD)
            command.upgrade(config, "head")
            if "applied" in config.attributes:
                connection.execute(BUILT, {"build": build_of(HEAD)})
            if role_prefix is not None:
                create_roles(driver, Roles.named(role_prefix))
            roles = read_roles(driver)
            if roles is not None:
                grant(driver, roles)
            return MigrationResult(tuple(config.attributes.get("applied", ())), roles)
    except OperationalError as error:
        raise unreachable_error(str(error.orig)) from error
    except (InternalError, psycopg.InternalError) as error:
        if isinstance(getattr(error, "orig", error), psycopg.errors.IdleInTransactionSessionTimeout):
            raise StoreUnavailableError(
                "the migration was suspended for too long, and was rolled back", hint="run `millpy migrate` again"
            ) from error
        raise
    except (sqlalchemy.exc.NotSupportedError, psycopg.errors.FeatureNotSupported) as error:
        refused = getattr(error, "orig", error)
        if isinstance(refused, psycopg.Error) and is_standby(refused):
            raise standby_error() from error
        raise
    except (sqlalchemy.exc.ProgrammingError, psycopg.errors.InsufficientPrivilege) as error:
        first, *_ = str(getattr(error, "orig", error)).splitlines()
        restored = "; after the restore of a dump, with --roles" if had_roles else ""
        raise ConfigError(
            f"cannot migrate the database: {first}", hint=f"run `millpy migrate` as the owner{restored}"
        ) from error
    finally:
        engine.dispose()


def _refuse_encoding(connection: psycopg.Connection[Any]) -> None:
    """Refuse a database in which not every text can be stored: payloads, keys and reasons are Unicode."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in (None, "UTF8"):
        raise ConfigError(
            f"the encoding of the database is {encoding}, which cannot store all texts",
            hint="create one for millpy: CREATE DATABASE millpy ENCODING 'UTF8' LOCALE 'C.UTF-8' TEMPLATE template0",
        )


def _refuse_others(connection: psycopg.Connection[Any]) -> None:
    for revision, build in connection.execute(statement("read_revision")):
        if revision > HEAD:
            raise newer_database_error(revision)
        check_build(revision, build)


def _engine(url: str) -> sqlalchemy.Engine:
    try:
        psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise unreadable_url_error() from None
    return make_engine(url)
