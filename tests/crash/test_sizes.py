"""What is too large for a bound, or too slow for it, takes longer; it is never repeated unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from millpy.embedded import EmbeddedPostgres
from millpy.testing.crash_test.database import url_through_proxy
from millpy.testing.proxy import PostgresProxy
from tests.crash.sizes import Feed, result_rows, stored_windows, worker

SLOW = """
    CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(3); RETURN NULL; END $$;
    CREATE TRIGGER slow AFTER INSERT ON sizes.windows EXECUTE FUNCTION public.slow()
"""
"""A turn that writes windows takes three seconds, so that there is time to kill its worker before the last."""


@pytest.fixture
def link(postgres: EmbeddedPostgres) -> Iterator[PostgresProxy]:
    """A slow link to the database."""
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    with PostgresProxy(str(parts["host"]), int(str(parts["port"])), bytes_per_s=150_000) as proxy:
        yield proxy


# The windows become rows while the later passes over all keys are read in small bundles: before they close.
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("stored", "each", "settings"),
    [
        ("folded", 3, {"fold_every_s": 0.1, "bundle_records_max": 100}),
        ("unfolded", 2, {"fold_every_s": 60.0, "bundle_records_max": 2_000}),
    ],
    ids=["folded", "unfolded"],
)
def test_windows_are_taken_over_through_a_slow_link(
    tmp_path: Path,
    database_url: str,
    postgres: EmbeddedPostgres,
    link: PostgresProxy,
    stored: str,
    each: int,
    settings: dict[str, float],
) -> None:
    # Longer than the lease of a second, and than the silence that is too long.
    feed = Feed(tmp_path / "feed.ndjson", keys=5_000, each=each).write()
    with worker(feed, database_url, **settings) as first:
        first.await_while_running(lambda: stored_windows(database_url, stored) >= 4_500, "windows are stored", 60)
        first.kill()
    tcp = postgres.tcp_url(str(conninfo.conninfo_to_dict(database_url)["dbname"]))
    with worker(feed, url_through_proxy(tcp, link.port), bundle_records_max=10_000) as second:
        second.await_finished(within_s=200)

    assert feed.faults(database_url) == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("windows", ["fixed", "sliding", "session"])
def test_windows_that_close_at_once_are_emitted_in_several_turns(
    tmp_path: Path, database_url: str, windows: str
) -> None:
    # A worker is killed while panes are emitted: emitted ones stay, the others follow.
    feed = Feed(tmp_path / "feed.ndjson", keys=2_000).write()
    settings = {"turn_panes_max": 150, "bundle_records_max": 2_000, "fold_every_s": 0.1}
    environment = {"SIZES_WINDOWS": windows}
    with worker(feed, database_url, environment, failpoint="after_claim:1:stop", **settings) as first:
        first.await_frozen()
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(SLOW)
        first.thaw()
        first.await_while_running(lambda: result_rows(database_url) > 0, "the first windows are there", 60)
        first.kill()
    left_before = result_rows(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DROP TRIGGER slow ON sizes.windows")
    with worker(feed, database_url, environment, **settings) as second:
        second.await_finished(within_s=60)

    assert feed.faults(database_url, windows=2 if windows == "sliding" else 1) == []
    assert 0 < left_before < feed.keys
