"""The migrations make what the code needs, once, and schema.py says the same."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import NullPool, create_engine, make_url

from millpy.errors import ConfigError, StoreUnavailableError
from millpy.store.migrate import HEAD, is_migrated, migrate, migrations_folder
from millpy.store.postgres.store import PostgresStore
from millpy.store.schema import metadata


def test_migrated_database_equals_the_described_tables(database_url: str) -> None:
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg"), poolclass=NullPool)

    with engine.connect() as connection:
        options = {
            "include_schemas": True,
            "include_name": only_ours,
            "compare_type": True,
            "compare_server_default": True,
        }
        found = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    assert found == []


def only_ours(name: str | None, kind: str, parents: dict[str, str | None]) -> bool:
    """Our schema, without alembic's own table and the partitions."""
    if kind == "schema":
        return name == "mill"
    if kind == "table":
        assert name is not None
        return name != "alembic_version" and not name.rstrip("0123456789").endswith("_")
    return True


def test_migrating_twice_changes_nothing(empty_database_url: str) -> None:
    assert not is_migrated(empty_database_url)

    migrate(empty_database_url)
    migrate(empty_database_url)

    assert is_migrated(empty_database_url)


def test_newest_revision_is_the_one_the_code_names() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.set_main_option("path_separator", "os")

    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


async def test_store_refuses_a_database_that_is_not_migrated(empty_database_url: str) -> None:
    store = PostgresStore(empty_database_url)

    with pytest.raises(ConfigError, match="not migrated"):
        await store.open()

    await store.close()


async def test_unreachable_database_is_said_to_be_unavailable() -> None:
    url = "postgresql://nobody@127.0.0.1:1/nothing"
    store = PostgresStore(url)

    with pytest.raises(StoreUnavailableError):
        await store.open()
    with pytest.raises(StoreUnavailableError):
        is_migrated(url)

    await store.close()


def test_wrong_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="URL"):
        migrate("not a url")
