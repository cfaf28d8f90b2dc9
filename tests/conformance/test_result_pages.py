"""Pages of a result table, which is looked through from its newest rows on: each row once, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from millpy.admin import results
from millpy.admin.pages import RowPage
from millpy.admin.queries import Admin
from millpy.admin.results import RowFilter, newest, page, result_tables
from tests.conformance.store_builders import Owner

FILL = """
INSERT INTO factory.sums_1m (device, window_start, window_end, total, label, pane_index, pane_timing, late_count,
                             interval_id, bundle)
SELECT 'd' || n % 3, at, at + interval '1 min', n, repeat('x', 100), 0, 'on_time', 0, 1, n
  FROM generate_series(1, 60) AS n CROSS JOIN LATERAL (SELECT now() - interval '1 s' * 1.4::float8 ^ n AS at) AS t
"""
TOTALS = "SELECT total FROM factory.sums_1m ORDER BY window_start DESC"


def pages(admin: Admin, limit: int, **wanted: str) -> Iterator[RowPage]:
    (table,) = [one for one in result_tables(admin) if one.name == "sums_1m"]
    after: list[str] | None = []
    while after is not None:
        found = page(admin, table, RowFilter(values=wanted, after=after, limit=limit))
        yield found
        after = found.next


@pytest.mark.parametrize("bytes_max", [1_000, 8_000_000])
@pytest.mark.parametrize("limit", [7, 60, 100])
async def test_pages_have_each_row_once_whatever_its_age(
    owner: Owner, database_url: str, monkeypatch: pytest.MonkeyPatch, limit: int, bytes_max: int
) -> None:
    """From seconds to years, so that a page is put together from several looks."""
    monkeypatch.setattr(results, "BYTES_MAX", bytes_max)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(FILL.encode())
        stored = [total for (total,) in connection.execute(TOTALS)]
    admin = Admin(database_url)
    found = list(pages(admin, limit))

    assert [row["total"] for one in found for row in one.rows] == stored and len(stored) == 60
    assert all(0 < len(one.rows) <= limit for one in found[:-1])
    assert [len(one.rows) for one in pages(admin, 100, label="nothing")] == [0]
    (table,) = [one for one in result_tables(admin) if one.name == "sums_1m"]
    listed = newest(admin, table, RowFilter(values={}, limit=limit))
    assert [row["total"] for row in listed] == stored[:limit][::-1]
