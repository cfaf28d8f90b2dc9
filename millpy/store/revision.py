"""The newest revision of the schema, in a module of its own so that a worker does not import the migration code."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from millpy.errors import ConfigError, NotMigratedError

HEAD = "0004"
"""The newest revision in `migrations/`; a test compares the two."""
_COMMENTS = re.compile(r"--.*")


def migrations_folder() -> Path:
    """Return the folder of the migrations: in the wheel, else in the source tree.

    Raises:
        ConfigError: neither folder exists.
    """
    package = Path(str(files("millpy")))
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigError("the migrations are not installed", hint="reinstall millpy")


def digest_of(folder: Path, revision: str) -> str:
    """Return a digest of the statements of the migrations in a folder up to a revision, without comments."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "versions").glob("*.sql"))}
    words = [word for name, text in texts.items() if name[:4] <= revision for word in _COMMENTS.sub("", text).split()]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


@cache
def build_of(revision: str) -> str:
    """Return what distinguishes the tables of a revision from others: until a release, migrations change in place."""
    return digest_of(migrations_folder(), revision)


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


def check_build(revision: str, build: str | None) -> None:
    """Check that the migrations up to a revision were those of this millpy. Raises ConfigError."""
    if build != build_of(revision):
        raise ConfigError(
            f"the database's tables (revision {revision}) are those of another development version of millpy",
            hint="create a new database (remove .millpy, if it is embedded), or use the millpy that made this one:"
            " until the first release, `millpy migrate` cannot change such tables",
        )


def check_revision(revision: str, build: str | None) -> None:
    """Check that the tables of a database are those of this millpy.

    Raises:
        ConfigError: they are newer, or of another development version; it says what to do.
        NotMigratedError: they are older.
    """
    if revision > HEAD:
        raise newer_database_error(revision)
    if revision < HEAD:
        raise older_database_error(revision)
    check_build(revision, build)
