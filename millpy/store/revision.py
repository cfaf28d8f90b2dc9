"""The newest revision of the schema; apart, so that a worker need not import what migrates."""

from __future__ import annotations

from millpy.errors import ConfigError

HEAD = "0003"
"""Tests hold it equal to what is in `migrations/`."""


def newer_than_we_are(revision: str) -> ConfigError:
    """The database was migrated by a newer millpy; its revisions are numbers of four digits."""
    return ConfigError(
        f"the database's tables (revision {revision}) are newer than this millpy (revision {HEAD})",
        hint="install the millpy that migrated it, or a later one",
    )
