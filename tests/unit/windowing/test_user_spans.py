"""Merging windows of a user's function at the instant at which they are over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millpy.windowing.user_spans import Span, merge_spans


def join_all(_row: int, _span: Span, near: Sequence[Span]) -> Sequence[Span]:
    return near


@pytest.mark.parametrize("allowed", [0, 7])
@pytest.mark.parametrize(("before_the_end", "windows"), [(1, [(0, 15, [0, 1])]), (0, [(0, 10, [0]), (5, 15, [1])])])
def test_a_window_merges_until_its_end_and_the_allowed_lateness(
    allowed: int, before_the_end: int, windows: list[tuple[int, int, list[int]]]
) -> None:
    rows = [(0, (0, 10), 0), (1, (5, 15), 10 + allowed - before_the_end)]

    found, _, errors = merge_spans(rows, allowed, 100, [], join_all)

    assert [(window.start, window.end, window.rows) for window in found] == windows
    assert not errors


@pytest.mark.parametrize("allowed", [0, 7])
def test_a_record_is_dropped_from_the_end_of_its_window_and_the_allowed_lateness_on(allowed: int) -> None:
    kept, late, _ = merge_spans([(0, (0, 10), 10 + allowed - 1)], allowed, 100, [], join_all)
    dropped, _, _ = merge_spans([(0, (0, 10), 10 + allowed)], allowed, 100, [], join_all)

    assert [window.rows for window in kept] == [[0]]
    assert late == ([0] if allowed else [])
    assert dropped == []
