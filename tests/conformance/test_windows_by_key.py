"""Open windows key by key: the pages have what the view has, each window once, whatever is folded."""

from __future__ import annotations

from typing import Any

import pytest

from millpy.admin import state
from millpy.admin.pages import RowPage
from millpy.admin.queries import Admin
from millpy.admin.state import stored_page
from millpy.errors import UsageError
from millpy.model.checkpoint import Entries, Kind
from tests.conformance.store_builders import MINUTE, Owner, entries

KEYS = [f"device {number}" for number in range(12)]


def windows(*rows: tuple[str, int, Any]) -> Entries:
    """Build windows from (key, minute, value); None for one that is over."""
    changes = [(key, value, f"{n * MINUTE}/{(n + 1) * MINUTE}", (n + 2) * MINUTE) for key, n, value in rows]
    return entries(Kind.WINDOW, "", *changes)


CHANGES = (
    windows(*((key, minute, [minute]) for key in KEYS for minute in range(2)), *(("many", n, [n]) for n in range(9))),
    windows(*((key, 0, None) for key in KEYS[:4]), *((f"new {number}", 5, [1]) for number in range(4))),
    windows(
        *((key, 1, [7]) for key in KEYS[3:7]), ("many", 3, None), *((f"new {number}", 5, None) for number in (0, 2))
    ),
)


def pages_of(admin: Admin, limit: int) -> list[RowPage]:
    pages = [stored_page(admin, "windows", "factory", "sums", None, (), limit)]
    while (after := pages[-1].next) is not None:
        pages.append(stored_page(admin, "windows", "factory", "sums", None, after, limit))
        assert len(pages) < 500
    return pages


def told(rows: Any) -> list[tuple[str, ...]]:
    return sorted(
        tuple(map(str, (r["key"], r["window_start"], r["window_end"], r["expires_at"], r["value"]))) for r in rows
    )


@pytest.mark.parametrize("folds_after", [0, 1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2, 5, 1_000])
async def test_pages_have_each_open_window_once(owner: Owner, database_url: str, folds_after: int, limit: int) -> None:
    first, second = owner.deployment.intervals_of("sums")
    for number, change in enumerate(CHANGES, start=1):
        for interval, places in ((first, range(0, len(change), 2)), (second, range(1, len(change), 2))):
            await owner.commit(owner.checkpoint(interval, delta=(change.take(list(places)),)))
            if number == folds_after:
                await owner.fold(interval)
    admin = Admin(database_url)

    pages = pages_of(admin, limit)
    found = [row for page in pages for row in page.rows]
    expected = admin.ask("SELECT * FROM millpy.windows WHERE graph = 'factory' AND computation = 'sums'")

    assert told(found) == told(expected) and len(found) > 20
    assert all(len(page.rows) <= limit for page in pages)


async def test_windows_of_a_key_are_together_in_each_interval(owner: Owner, database_url: str) -> None:
    (interval, _) = owner.deployment.intervals_of("sums")
    await owner.commit(owner.checkpoint(interval, delta=(CHANGES[0],)))
    await owner.fold(interval)
    keys = [row["key"] for page in pages_of(Admin(database_url), 4) for row in page.rows]

    assert [key for place, key in enumerate(keys) if place == 0 or keys[place - 1] != key] == list(dict.fromkeys(keys))


async def test_a_page_ends_at_its_bytes(owner: Owner, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "BYTES_MAX", 500)
    (interval, _) = owner.deployment.intervals_of("sums")
    await owner.commit(owner.checkpoint(interval, delta=(CHANGES[0],)))
    pages = pages_of(Admin(database_url), 1_000)

    assert len(pages) > 5 and sum(len(page.rows) for page in pages) == len(CHANGES[0])


@pytest.mark.parametrize("after", [["1"], ["1", "2", "x", "k"], ["1", "2", str(2**63), "k"], ["1", "", "2", "k"]])
async def test_a_cursor_of_another_list_is_refused(owner: Owner, database_url: str, after: list[str]) -> None:
    with pytest.raises(UsageError, match="belongs to another list"):
        stored_page(Admin(database_url), "windows", "factory", "sums", None, after, 10)
