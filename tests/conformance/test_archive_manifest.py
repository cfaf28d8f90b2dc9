"""The manifest of archives: files take the place of others under the fence, all or none; garbage is deleted twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from millpy.store.postgres.statements import statement
from tests.conformance.store_builders import Owner

HOUR = "plant/readings/hour=2026-11-01T08"
A, B, C, MERGED = (f"{HOUR}/{name}" for name in ("a", "b", "c", "merged"))
LISTED = {A: 1, B: 2, C: 3}


@pytest.fixture
def place(owner: Owner, database_url: str) -> dict[str, int]:
    """An interval with three listed files of as many records as their bundle says."""
    (interval, *_) = owner.deployment.intervals_of("sums")
    with psycopg.connect(database_url, autocommit=True) as connection:
        for path, bundle in LISTED.items():
            connection.execute(
                """INSERT INTO mill.archive_files (interval_id, bundle, path, records, bytes, event_time_lo,
                                                   event_time_hi, partitions, archived_at)
                   SELECT %s, n, %s, n, 100, n, n + 10, jsonb_build_object('a', jsonb_build_array(n, n)),
                          now() - interval '1 hour'
                     FROM CAST(%s AS bigint) AS n""",
                [interval.interval_id, path, bundle],
            )
    return {"interval": interval.interval_id, "sequencer": owner.grants[interval.interval_id].sequencer}


def run(url: str, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(statement(name), parameters)
        return found.fetchall() if found.description else []


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


def listed(url: str) -> dict[str, int]:
    return dict(rows(url, "SELECT path, records FROM mill.archive_files"))  # type: ignore[arg-type]


def garbage(url: str) -> list[str]:
    return [path for (path,) in rows(url, "SELECT path FROM mill.archive_garbage ORDER BY path")]


@pytest.mark.parametrize(("paths", "further"), [([A, B, f"{HOUR}/erased"], 0), ([A, B], 1)])
def test_files_are_merged_all_of_them_or_none(
    database_url: str, place: dict[str, int], paths: Sequence[str], further: int
) -> None:
    """A file that was replaced meanwhile may have records that were erased."""
    stale = place | {"sequencer": place["sequencer"] + further}
    assert run(database_url, "merge_files", **stale, paths=list(paths), new_path=MERGED, size=150) == []
    assert (listed(database_url), garbage(database_url)) == (LISTED, [])

    assert run(database_url, "merge_files", **place, paths=[A, B], new_path=MERGED, size=150) == [(3,)]

    assert (listed(database_url), garbage(database_url)) == ({MERGED: 3, C: 3}, [A, B])
    ((bundle, size, first, last, partitions),) = rows(
        database_url,
        "SELECT bundle, bytes, event_time_lo, event_time_hi, partitions FROM mill.archive_files"
        f" WHERE path = '{MERGED}'",
    )
    assert (bundle, size, first, last, partitions) == (1, 150, 1, 12, {"a": [1, 2]})


def test_a_file_is_replaced_under_the_fence_while_it_is_listed(database_url: str, place: dict[str, int]) -> None:
    new = {"new_path": MERGED, "records": 1, "bytes": 50}
    stale = place | {"sequencer": place["sequencer"] + 1}
    assert run(database_url, "replace_file", **stale, path=B, **new) == []
    assert run(database_url, "replace_file", **place, path=f"{HOUR}/gone", **new) == []
    assert (listed(database_url), garbage(database_url)) == (LISTED, [])

    assert run(database_url, "replace_file", **place, path=B, **new) == [(2,)]

    assert (listed(database_url), garbage(database_url)) == ({A: 1, MERGED: 1, C: 3}, [B])


def test_small_files_are_found_when_their_hour_rests_and_unless_they_do_not_go_together(
    database_url: str, place: dict[str, int]
) -> None:
    asked: dict[str, Any] = {"intervals": [place["interval"]], "after_s": 60.0, "records_max": 4, "bytes_max": 300}
    found = run(database_url, "find_small_files", **asked, paths=["x"], alone=[C])
    assert [path for _, path, *_ in found] == [A, B, C]
    assert run(database_url, "find_small_files", **asked, paths=[B], alone=["x"]) == [], (
        "B and C are too large together"
    )
    for damaged in (A, B):
        assert run(database_url, "find_small_files", **asked, paths=["x"], alone=[damaged]) == []
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE mill.archive_files SET archived_at = now() WHERE path = %s", [C])
    assert run(database_url, "find_small_files", **asked, paths=["x"], alone=["x"]) == [], "the hour still gets files"


def test_garbage_of_an_object_store_is_deleted_once_more_whichever_archiver_deletes_it_first(
    database_url: str, place: dict[str, int]
) -> None:
    run(database_url, "merge_files", **place, paths=[A, B], new_path=MERGED, size=150)
    asked = {"intervals": [place["interval"]], "settled_s": 60.0, "rows_max": 10}
    assert [path for _, path in run(database_url, "find_garbage", **asked)] == [A, B]
    for _ in ("this archiver", "another one, which had found it, too"):
        run(database_url, "forget_garbage", paths=[A], settled_s=60.0)

    assert [path for _, path in run(database_url, "find_garbage", **asked)] == [B]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE mill.archive_garbage SET deleted_at = now() - interval '61 s' WHERE path = %s", [A])
    assert [path for _, path in run(database_url, "find_garbage", **asked)] == [A, B]
    run(database_url, "forget_garbage", paths=[A], settled_s=60.0)
    run(database_url, "forget_garbage", paths=[B], settled_s=0.0)
    assert garbage(database_url) == []
