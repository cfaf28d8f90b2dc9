"""What views choose of the rows that they are given."""

from __future__ import annotations

from typing import Any, cast

import pytest

from millpy.admin.pages import RowPage
from millpy.admin.queries import Admin
from millpy.admin.results import DeployedTable
from millpy.errors import SlowQueryError, UsageError
from millpy.testing.clock import ManualClock
from millpy.ui import graph_view, key_state, windows

TABLE = DeployedTable("g", "t", "windowed", "c", {"device": "text"}, {"n": "bigint"})
CHOICE = windows.Choice(TABLE, {}, "", "", "", "n")


class Nobody:
    def __init__(self, role: str | None = None) -> None:
        self.role = role

    def limit_to(self, _: float) -> Nobody:
        return self


NOBODY = cast(Admin, Nobody())


def row(device: str, minute: int, timing: str = "on_time", n: int = 1) -> dict[str, Any]:
    time = f"2026-11-20T08:{minute:02}:00Z"
    return {"device": device, "window_start": time, "window_end": time, "pane_timing": timing, "n": n}


def shown(monkeypatch: pytest.MonkeyPatch, stored: list[Any], live: list[Any]) -> tuple[list[Any], bool]:
    monkeypatch.setattr(windows, "rows_page", lambda *_: RowPage(stored, ["more"]))
    monkeypatch.setattr(windows, "newest", lambda *_: live)
    found, whole = windows._rows(NOBODY, CHOICE, "")
    return [(one["device"], one["pane_timing"], one["n"]) for one in found.rows], whole


def test_an_open_window_that_is_older_than_the_page_is_on_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found, whole = shown(monkeypatch, [row("a", 9), row("b", 8)], [row("old", 1, "open")])

    assert found == [("a", "on_time", 1), ("b", "on_time", 1), ("old", "open", 1)]
    assert whole


def test_an_early_pane_is_only_on_the_page_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    live = [row("a", 9, "early", 2), row("z", 8, "early", 2)]

    found, _ = shown(monkeypatch, [row("a", 9, "early"), row("b", 8)], live)

    assert found == [("a", "early", 2), ("b", "on_time", 1)]


def test_more_open_windows_than_there_is_room_for_are_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "ROWS_MAX", 4)

    assert not shown(monkeypatch, [row("a", 9)], [row("b", 9, "open"), row("c", 9, "open")])[1]


@pytest.mark.parametrize(
    ("rows", "slowest"),
    [
        ([("a", "2026-11-20T08:00:00Z", 3), ("b", "-infinity", None)], "b"),
        ([("a", "2026-11-20T08:00:00Z", 3), ("b", "2026-11-20T07:00:00Z", 3_603)], "b"),
        ([("a", "infinity", None)], ""),
    ],
)
def test_a_step_that_has_had_no_record_is_the_slowest(rows: list[tuple[str, str, int | None]], slowest: str) -> None:
    progress = [{"computation": name, "low_watermark": mark, "lag_s": lag} for name, mark, lag in rows]

    assert graph_view._slowest(progress) == slowest


def test_a_table_with_too_many_open_windows_is_not_tried_again_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = ManualClock(), list[int]()

    def newest(*_: object) -> list[Any]:
        asked.append(1)
        raise SlowQueryError("the query takes too long")

    monkeypatch.setattr(windows, "rows_page", lambda *_: RowPage([row("a", 9)], None))
    monkeypatch.setattr(windows, "newest", newest)
    monkeypatch.setattr(windows, "UNREAD", windows.UnreadTables(clock))

    assert [windows._rows(NOBODY, CHOICE, "")[1] for _ in range(3)] == [False] * 3
    assert len(asked) == 1
    windows._rows(cast(Admin, Nobody("tenant")), CHOICE, "")
    assert len(asked) == 2, "a policy may be slow for one role only"
    clock.advance(windows.UNREAD_S)
    windows._rows(NOBODY, CHOICE, "")
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [(SlowQueryError("the query takes too long"), None), (UsageError("the cursor belongs to another table"), "raised")],
    ids=["slow", "another"],
)
def test_a_list_that_takes_too_long_is_left_out_and_another_error_is_one(
    monkeypatch: pytest.MonkeyPatch, error: UsageError, expected: str | None
) -> None:
    def stored_page(*_: object) -> RowPage:
        raise error

    monkeypatch.setattr(key_state, "stored_page", stored_page)
    found: object = None
    try:
        found = key_state._stored(NOBODY, "windows", "g", "c", None, ())
    except UsageError:
        found = "raised"

    assert found == expected
