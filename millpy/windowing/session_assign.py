"""Assignment of rows to sessions: assign, merge, then judge lateness by the merged session.

Processed one at a time, each row opens [t, t + gap), with a gap of its key or of its own, and merges with every live
session of its key that it intersects. A session is live while the watermark before the row is below its end + allowed
lateness; a row whose merged session is not live is too late. The order of rows matters only for a row that is so late
that a session which it intersects may have expired (t + allowed < watermark), or that the watermark has reached the
end of its own span:

    keys without such rows ("order-independent")   sorted by event time and cut at gaps, as columns
    keys with such rows ("order-dependent")        replayed row by row
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from millpy.model.record import Instants
from millpy.model.time import INSTANT_MIN, Instant
from millpy.windowing.group_by import Integers

_COMPOSITE_MAX = 2**62


class SessionSpan(Protocol):
    """The span [start, end) of an open session."""

    start: int
    end: int


@dataclass(slots=True)
class Sessions:
    """The sessions of a turn's rows.

    Attributes:
        codes, starts, ends: per session, its key code and span.
        joined: session -> the open sessions that it continues, by start; without them it is new.
        of_row: per row, its session; -1 for a row that is too late.
        late: per row, whether the watermark had reached the end of its session when it arrived.
    """

    codes: npt.NDArray[np.int64]
    starts: Instants
    ends: Instants
    joined: dict[int, list[SessionSpan]]
    of_row: npt.NDArray[np.int64]
    late: npt.NDArray[np.bool_]

    def drop(self, dropped: npt.NDArray[np.bool_]) -> Sessions:
        """Return the sessions without some of them, whose rows have none."""
        kept = np.flatnonzero(~dropped)
        place = np.full(len(dropped) + 1, -1, np.int64)  # the last one is that of rows without a session
        place[kept] = np.arange(len(kept))
        of_row = place[self.of_row]
        joined = {int(place[number]): olds for number, olds in self.joined.items() if not dropped[number]}
        codes, starts, ends = self.codes[kept], self.starts[kept], self.ends[kept]
        return Sessions(codes, starts, ends, joined, of_row, self.late & (of_row >= 0))


@dataclass(slots=True, eq=False)
class ReplayedSession:
    """A session during the replay of rows.

    Attributes:
        open: the open sessions that it continues.
        rows: its rows of this turn.
    """

    start: int
    end: int
    open: list[SessionSpan] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def take(self, other: ReplayedSession) -> None:
        """Make another session, behind it, a part of it."""
        self.end = max(self.end, other.end)
        self.open += other.open
        self.rows += other.rows


START, END = attrgetter("start"), attrgetter("end")
AnySession = TypeVar("AnySession", bound=ReplayedSession)


Replay: TypeAlias = Callable[
    [Iterable[tuple[int, int, int, int]], int, Sequence[SessionSpan], Instant], tuple[list[ReplayedSession], list[int]]
]


class RecordBound(Protocol):
    """A bound on the records of a session: see `session_size.py`."""

    def may_fill(
        self, codes: Integers, keys: int, open_sessions: Iterable[tuple[int, Sequence[SessionSpan]]]
    ) -> npt.NDArray[np.bool_]:
        """Return by key code whether a session of the key may become full, or is."""
        ...

    def replay(
        self,
        rows: Iterable[tuple[int, int, int, int]],
        allowed_us: int,
        open_sessions: Sequence[SessionSpan],
        floor: Instant = INSTANT_MIN,
    ) -> tuple[list[ReplayedSession], list[int]]:
        """Assign the rows of one key to sessions one by one, as `replay` does without a bound."""
        ...


def merge_sessions(  # noqa: PLR0913 - columns, and the rules by which their rows merge
    times: Instants,
    watermarks: Instants,
    codes: Integers,
    gaps: npt.NDArray[np.int64],
    allowed_us: int,
    open_sessions: Mapping[int, Sequence[SessionSpan]],
    row_gaps: Instants | None = None,
    bound: RecordBound | None = None,
    floor: Instant = INSTANT_MIN,
) -> Sessions:
    """Assign rows to sessions.

    Args:
        times: event time of each row, in order of arrival.
        watermarks: judging watermark of each row.
        codes: key code of each row.
        gaps: gap of each key code, in µs.
        allowed_us: the allowed lateness.
        open_sessions: key code -> its open sessions, by start; they do not intersect.
        row_gaps: gap of each row, in µs. Default: that of its key.
        bound: the bound on the records of a session. Keys with a session that may reach it are replayed.
        floor: the sessions that end by it are over, whatever the watermark.
    """
    gap_of = gaps[codes] if row_gaps is None else row_gaps
    order_dependent = (times < np.maximum(watermarks - allowed_us, floor)) | (times + gap_of <= watermarks)
    if bound is not None:
        order_dependent |= bound.may_fill(codes, len(gaps), open_sessions.items())[codes]
    if not order_dependent.any():
        independent = _merge_order_independent(times, codes, gaps, open_sessions, row_gaps)
        if independent is not None:
            return independent
    replayed_keys = np.zeros(len(gaps), np.bool_)
    replayed_keys[codes[order_dependent]] = True
    by_replay = replayed_keys[codes]
    independent_rows = np.flatnonzero(~by_replay)
    independent = None
    if len(independent_rows):
        independent_open = {code: found for code, found in open_sessions.items() if not replayed_keys[code]}
        some_gaps = None if row_gaps is None else row_gaps[independent_rows]
        independent = _merge_order_independent(
            times[independent_rows], codes[independent_rows], gaps, independent_open, some_gaps
        )
    rows = np.arange(len(times)) if independent is None else np.flatnonzero(by_replay)
    replaying = replay if bound is None else bound.replay
    replayed = _merge_by_replay(times, watermarks, codes, gap_of, allowed_us, open_sessions, rows, replaying, floor)
    return replayed if independent is None else _both(independent, independent_rows, replayed)


def _merge_order_independent(
    times: Instants,
    codes: Integers,
    gaps: npt.NDArray[np.int64],
    open_sessions: Mapping[int, Sequence[SessionSpan]],
    row_gaps: Instants | None,
) -> Sessions | None:
    """Assign rows whose order does not matter. Return None if key and time do not fit in one 64-bit number."""
    spans = [(code, span) for code, found in open_sessions.items() for span in found]
    first = int(times.min())
    last = times if row_gaps is None else times + row_gaps
    width = int(last.max()) - first + 1
    if (width + 1) * len(gaps) >= _COMPOSITE_MAX:
        return None
    place = codes.astype(np.int64) * width + (times - first)
    order = np.argsort(place, kind="stable")
    sorted_codes, sorted_times = codes[order].astype(np.int64), times[order]
    cut = np.ones(len(order), np.bool_)
    if row_gaps is None:
        cut[1:] = (np.diff(sorted_codes) != 0) | (np.diff(sorted_times) >= gaps[sorted_codes[1:]])
    else:
        # A row begins a session if it is at the end of all rows of its key before it, or behind it. The ends of one
        # key are before the rows of the next in `place`, so that one running maximum does for all keys.
        reached = np.maximum.accumulate(place[order] + row_gaps[order])
        cut[1:] = (np.diff(sorted_codes) != 0) | (place[order][1:] >= reached[:-1])
    begin = np.flatnonzero(cut)
    cluster_codes = sorted_codes[begin]
    starts = sorted_times[begin].copy()
    if row_gaps is None:
        ends = sorted_times[np.append(begin[1:], len(order)) - 1] + gaps[cluster_codes]
    else:
        ends = np.maximum.reduceat(last[order], begin)
    number = np.arange(len(begin))
    joined = _joined(spans, cluster_codes, starts, ends, gaps, number) if spans else {}
    if joined:
        number, kept, joined = _renumbered(number, joined)
        cluster_codes = cluster_codes[kept]
        starts, ends = _extended(starts, ends, number, joined)
    of_row = np.empty(len(order), np.int64)
    of_row[order] = number[np.cumsum(cut) - 1]
    return Sessions(cluster_codes, starts, ends, joined, of_row, np.zeros(len(order), np.bool_))


def _joined(
    spans: Sequence[tuple[int, SessionSpan]],
    codes: npt.NDArray[np.int64],
    starts: Instants,
    ends: Instants,
    gaps: npt.NDArray[np.int64],
    number: npt.NDArray[np.int64],
) -> dict[int, list[SessionSpan]]:
    """Return cluster -> the open sessions that it intersects.

    Clusters that intersect the same open session become one: in `number` they get the number of the first.
    """
    lo = np.searchsorted(codes, np.arange(len(gaps)), side="left").tolist()
    hi = np.searchsorted(codes, np.arange(len(gaps)), side="right").tolist()
    joined: dict[int, list[SessionSpan]] = {}
    for code, span in spans:
        begin, stop = lo[code], hi[code]
        if begin == stop:
            continue
        # The clusters of a key are ordered and disjoint, so those that meet the session are neighbors.
        if stop - begin == 1:
            one, other = begin, stop
            if ends[begin] <= span.start or starts[begin] >= span.end:
                continue
        else:
            one = begin + int(np.searchsorted(ends[begin:stop], span.start, side="right"))
            other = begin + int(np.searchsorted(starts[begin:stop], span.end, side="left"))
            if one >= other:
                continue
        head = int(number[one])
        number[one:other] = head
        joined.setdefault(head, []).append(span)
    return joined


def _renumbered(
    number: npt.NDArray[np.int64], joined: dict[int, list[SessionSpan]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[int, list[SessionSpan]]]:
    """Renumber clusters without gaps. Return (new number by cluster, old number by new number, `joined`)."""
    kept = np.unique(number)
    renumbered = np.searchsorted(kept, number)
    return renumbered, kept, {int(np.searchsorted(kept, head)): found for head, found in joined.items()}


def _extended(
    starts: Instants, ends: Instants, number: npt.NDArray[np.int64], joined: Mapping[int, Sequence[SessionSpan]]
) -> tuple[Instants, Instants]:
    """Return the starts and ends of sessions, each merged from clusters and the open sessions that it continues."""
    begin = np.flatnonzero(np.diff(number, prepend=-1))
    starts = np.minimum.reduceat(starts, begin)
    ends = np.maximum.reduceat(ends, begin)
    for session, found in joined.items():
        starts[session] = min(int(starts[session]), found[0].start)
        ends[session] = max(int(ends[session]), found[-1].end)
    return starts, ends


def _merge_by_replay(  # noqa: PLR0913 - as above
    times: Instants,
    watermarks: Instants,
    codes: Integers,
    row_gaps: Instants,
    allowed_us: int,
    open_sessions: Mapping[int, Sequence[SessionSpan]],
    rows: Integers,
    replaying: Replay,
    floor: Instant,
) -> Sessions:
    """Assign the given rows one by one."""
    of_key: dict[int, list[int]] = {}
    for row, code in zip(rows.tolist(), codes[rows].tolist(), strict=True):
        of_key.setdefault(code, []).append(row)
    late = np.zeros(len(times), np.bool_)
    of_row = np.full(len(times), -1, np.int64)
    found: list[tuple[int, ReplayedSession]] = []
    for code, key_rows in of_key.items():
        picked = (column[key_rows].tolist() for column in (times, watermarks, row_gaps))
        columns = zip(key_rows, *picked, strict=True)
        replayed, late_rows = replaying(columns, allowed_us, open_sessions.get(code, ()), floor)
        late[late_rows] = True
        found.extend((code, session) for session in replayed)
    joined = {}
    for number, (_, session) in enumerate(found):
        of_row[session.rows] = number
        if session.open:
            joined[number] = sorted(session.open, key=lambda span: span.start)
    return Sessions(
        np.array([code for code, _ in found], np.int64),
        np.array([session.start for _, session in found], np.int64),
        np.array([session.end for _, session in found], np.int64),
        joined,
        of_row,
        late,
    )


def replay(
    rows: Iterable[tuple[int, int, int, int]],
    allowed_us: int,
    open_sessions: Sequence[SessionSpan],
    floor: Instant = INSTANT_MIN,
) -> tuple[list[ReplayedSession], list[int]]:
    """Assign the rows of one key, (row, event time, judging watermark, gap), one by one. Watermarks do not regress.

    There is at least one row.

    Returns:
        (sessions that have rows, rows that arrived after the watermark had reached their session's end). A row that is
        in no session is too late.
    """
    rows = list(rows)
    begin = max(rows[0][2] - allowed_us, floor)
    # In order and disjoint: only one that is over may intersect another.
    live = [ReplayedSession(span.start, span.end, [span]) for span in open_sessions if span.end > begin]
    over: list[ReplayedSession] = []
    late: list[int] = []
    for row, at, watermark, gap_us in rows:
        over_by = max(watermark - allowed_us, floor)
        over += take_over(live, over_by)
        first, behind = bisect_right(live, at, key=END), bisect_left(live, at + gap_us, key=START)
        if first == behind:
            if at + gap_us <= over_by:
                continue
            session = ReplayedSession(at, at + gap_us)
            live.insert(first, session)
        else:
            session = join_neighbors(live, first, behind, at, at + gap_us)
        session.rows.append(row)
        if session.end <= watermark:
            late.append(row)
    return [session for session in over + live if session.rows], late


def take_over(live: list[AnySession], over_by: int) -> list[AnySession]:
    """Remove the sessions that are over from `live`; return them."""
    gone = bisect_right(live, over_by, key=END) if live and live[0].end <= over_by else 0
    over = live[:gone]
    del live[:gone]
    return over


def join_neighbors(live: list[AnySession], first: int, behind: int, start: int, end: int) -> AnySession:
    """Make one session of those from `first` up to `behind`, in `live`, and a span; return it."""
    session = live[first]
    for other in live[first + 1 : behind]:
        session.take(other)
    del live[first + 1 : behind]
    session.start, session.end = min(session.start, start), max(session.end, end)
    return session


def _both(independent: Sessions, independent_rows: Integers, replayed: Sessions) -> Sessions:
    """Return the sessions of order-independent keys, followed by those of the replayed ones."""
    of_row = np.where(replayed.of_row >= 0, replayed.of_row + len(independent.codes), -1)
    of_row[independent_rows] = independent.of_row
    return Sessions(
        np.concatenate([independent.codes, replayed.codes]),
        np.concatenate([independent.starts, replayed.starts]),
        np.concatenate([independent.ends, replayed.ends]),
        independent.joined | {session + len(independent.codes): found for session, found in replayed.joined.items()},
        of_row,
        replayed.late,
    )
