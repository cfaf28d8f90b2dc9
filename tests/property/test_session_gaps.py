"""Sessions with a gap for each record are found by columns as they are found one record at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.time import INSTANT_MIN
from millpy.windowing.session_assign import SessionSpan, merge_sessions, replay

rows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 60), st.sampled_from([1, 2, 5, 20])), min_size=1, max_size=25
)


@dataclass(frozen=True)
class Span:
    start: int
    end: int


def spans_of(cuts: list[int]) -> list[SessionSpan]:
    """Return spans that do not intersect."""
    edges = sorted(set(cuts))
    return [Span(start, end) for start, end in zip(edges[::2], edges[1::2], strict=False)]  # type: ignore[misc]


@settings(max_examples=300, deadline=None)
@given(rows=rows, cuts=st.lists(st.lists(st.integers(0, 80), max_size=6), min_size=3, max_size=3))
def test_columns_agree_with_one_record_at_a_time(rows: list[tuple[int, int, int]], cuts: list[list[int]]) -> None:
    codes, times, gaps = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    stored = {code: spans_of(of_key) for code, of_key in enumerate(cuts)}
    before = np.full(len(rows), INSTANT_MIN, np.int64)

    found = merge_sessions(times, before, codes, np.full(3, 7), 0, stored, gaps)

    expected = set()
    for code in set(codes.tolist()):
        mine = np.flatnonzero(codes == code)
        columns = zip(mine.tolist(), times[mine].tolist(), before[mine].tolist(), gaps[mine].tolist(), strict=True)
        sessions, late = replay(columns, 0, stored[code])
        assert not late
        expected |= {
            (code, one.start, one.end, frozenset(one.rows), frozenset(span.start for span in one.open))
            for one in sessions
        }
    by_session: dict[int, set[int]] = {}
    for row, number in enumerate(found.of_row.tolist()):
        by_session.setdefault(number, set()).add(row)
    assert {
        (code, start, end, frozenset(by_session[n]), frozenset(span.start for span in found.joined.get(n, ())))
        for n, (code, start, end) in enumerate(
            zip(found.codes.tolist(), found.starts.tolist(), found.ends.tolist(), strict=True)
        )
    } == expected
