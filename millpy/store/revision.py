"""The newest revision of the schema, in a module of its own so that a worker does not import the migration code."""

from __future__ import annotations

from millpy.errors import ConfigError, NotMigratedError

HEAD = "0004"
"""The newest revision in `migrations/`; a test compares the two."""


def newer_database_error(revision: str) -> ConfigError:
    """Return the error for a database that a newer millpy has migrated. Revisions are numbers of four digits."""
    return ConfigError(
        f"the database's tables (revision {revision}) are newer than this millpy (revision {HEAD})",
        hint="install the millpy that migrated it, or a later one",
    )


def older_database_error(revision: str) -> NotMigratedError:
    """Return the error for a database that an older millpy has migrated."""
    return NotMigratedError(
        f"the database's tables (revision {revision}) are older than this millpy (revision {HEAD})",
        hint="run `millpy migrate` as the owner",
    )


def check_revision(revision: str) -> None:
    """Check that the tables of a database are those of this millpy.

    Raises:
        ConfigError: they are newer; it says what to do.
        NotMigratedError: they are older.
    """
    if revision > HEAD:
        raise newer_database_error(revision)
    if revision < HEAD:
        raise older_database_error(revision)
