"""Which session each row belongs to: assign, merge, then judge lateness on the merged session.

One record at a time, each row opens [t, t + gap) and merges with every live session of its key that it intersects. A
session is live while the watermark before the row is below its end + allowed lateness; a row whose merged session is
not live is too late. So a row belongs to sessions that depend on the order of rows only where it comes so late that a
session which it intersects may be over (t + allowed < watermark), or that its own end has been reached. All other rows
of a key form sessions by their event times alone, whatever their order:

    calm keys       (none of their rows is like that)   sorted by event time, cut where the gap is, as columns
    other keys                                           replayed row by row
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from millpy.model.record import Instants
from millpy.windowing.grouping import Integers

_COMPOSITE_MAX = 2**62


class Extent(Protocol):
    """A session that is open already."""

    start: int
    end: int


@dataclass(slots=True)
class Sessions:
    """The sessions that the rows of a turn are in.

    Attributes:
        codes, starts, ends: key code and extent per session.
        joined: session -> the open sessions that it goes on from, by start; the others are new.
        of_row: session per row; -1 for a row that is too late.
        late: rows that came when the watermark had reached the end of their session.
    """

    codes: npt.NDArray[np.int64]
    starts: Instants
    ends: Instants
    joined: dict[int, list[Extent]]
    of_row: npt.NDArray[np.int64]
    late: npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Replayed:
    """A session while its rows are replayed."""

    start: int
    end: int
    open: list[Extent] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def merge_sessions(
    times: Instants,
    watermarks: Instants,
    codes: Integers,
    gaps: npt.NDArray[np.int64],
    allowed_us: int,
    open_sessions: Mapping[int, Sequence[Extent]],
) -> Sessions:
    """Bring rows into sessions.

    Event times, judging watermarks and key codes are by row, in order of arrival; gaps by key code. The open sessions
    of a key code are in order of start, and do not intersect.
    """
    gap_of = gaps[codes]
    restless = (times + allowed_us < watermarks) | (times + gap_of <= watermarks)
    if not restless.any():
        calm = _merge_calm(times, codes, gaps, open_sessions)
        if calm is not None:
            return calm
    replayed_keys = np.zeros(len(gaps), np.bool_)
    replayed_keys[codes[restless]] = True
    by_replay = replayed_keys[codes]
    calm_rows = np.flatnonzero(~by_replay)
    calm = None
    if len(calm_rows):
        calm_open = {code: found for code, found in open_sessions.items() if not replayed_keys[code]}
        calm = _merge_calm(times[calm_rows], codes[calm_rows], gaps, calm_open)
    rows = np.arange(len(times)) if calm is None else np.flatnonzero(by_replay)
    replayed = _merge_by_replay(times, watermarks, codes, gaps, allowed_us, open_sessions, rows)
    return replayed if calm is None else _both(calm, calm_rows, replayed)


def _merge_calm(
    times: Instants, codes: Integers, gaps: npt.NDArray[np.int64], open_sessions: Mapping[int, Sequence[Extent]]
) -> Sessions | None:
    """Rows that form sessions by their times alone; None when time and key do not fit in one sortable number."""
    extents = [(code, extent) for code, found in open_sessions.items() for extent in found]
    first = int(times.min())
    width = int(times.max()) - first + 1
    if (width + 1) * len(gaps) >= _COMPOSITE_MAX:
        return None
    place = codes.astype(np.int64) * width + (times - first)
    order = np.argsort(place, kind="stable")
    sorted_codes, sorted_times = codes[order].astype(np.int64), times[order]
    cut = np.ones(len(order), np.bool_)
    cut[1:] = (np.diff(sorted_codes) != 0) | (np.diff(sorted_times) >= gaps[sorted_codes[1:]])
    begin = np.flatnonzero(cut)
    cluster_codes = sorted_codes[begin]
    starts = sorted_times[begin].copy()
    ends = sorted_times[np.append(begin[1:], len(order)) - 1] + gaps[cluster_codes]
    number = np.arange(len(begin))
    joined = _joined(extents, cluster_codes, starts, ends, gaps, number) if extents else {}
    if joined:
        number, kept, joined = _renumbered(number, joined)
        cluster_codes = cluster_codes[kept]
        starts, ends = _extended(starts, ends, number, joined)
    of_row = np.empty(len(order), np.int64)
    of_row[order] = number[np.cumsum(cut) - 1]
    return Sessions(cluster_codes, starts, ends, joined, of_row, np.zeros(len(order), np.bool_))


def _joined(
    extents: Sequence[tuple[int, Extent]],
    codes: npt.NDArray[np.int64],
    starts: Instants,
    ends: Instants,
    gaps: npt.NDArray[np.int64],
    number: npt.NDArray[np.int64],
) -> dict[int, list[Extent]]:
    """Cluster -> open sessions that it meets; clusters that meet the same one get the number of the first of them."""
    lo = np.searchsorted(codes, np.arange(len(gaps)), side="left").tolist()
    hi = np.searchsorted(codes, np.arange(len(gaps)), side="right").tolist()
    joined: dict[int, list[Extent]] = {}
    for code, extent in extents:
        begin, stop = lo[code], hi[code]
        if begin == stop:
            continue
        # Of one key clusters are in order and apart: those that meet the session are neighbours.
        if stop - begin == 1:
            one, other = begin, stop
            if ends[begin] <= extent.start or starts[begin] >= extent.end:
                continue
        else:
            one = begin + int(np.searchsorted(ends[begin:stop], extent.start, side="right"))
            other = begin + int(np.searchsorted(starts[begin:stop], extent.end, side="left"))
            if one >= other:
                continue
        head = int(number[one])
        number[one:other] = head
        joined.setdefault(head, []).append(extent)
    return joined


def _renumbered(
    number: npt.NDArray[np.int64], joined: dict[int, list[Extent]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[int, list[Extent]]]:
    """(new number per cluster, the clusters that lend theirs, `joined` by new numbers), without holes."""
    kept = np.unique(number)
    renumbered = np.searchsorted(kept, number)
    return renumbered, kept, {int(np.searchsorted(kept, head)): found for head, found in joined.items()}


def _extended(
    starts: Instants, ends: Instants, number: npt.NDArray[np.int64], joined: Mapping[int, Sequence[Extent]]
) -> tuple[Instants, Instants]:
    """Extents of merged sessions: of their clusters, then of the open sessions that they go on from."""
    begin = np.flatnonzero(np.diff(number, prepend=-1))
    starts = np.minimum.reduceat(starts, begin)
    ends = np.maximum.reduceat(ends, begin)
    for session, found in joined.items():
        starts[session] = min(int(starts[session]), found[0].start)
        ends[session] = max(int(ends[session]), found[-1].end)
    return starts, ends


def _merge_by_replay(
    times: Instants,
    watermarks: Instants,
    codes: Integers,
    gaps: npt.NDArray[np.int64],
    allowed_us: int,
    open_sessions: Mapping[int, Sequence[Extent]],
    rows: Integers,
) -> Sessions:
    """Some rows, one after the other."""
    of_key: dict[int, list[int]] = {}
    for row, code in zip(rows.tolist(), codes[rows].tolist(), strict=True):
        of_key.setdefault(code, []).append(row)
    late = np.zeros(len(times), np.bool_)
    of_row = np.full(len(times), -1, np.int64)
    found: list[tuple[int, Replayed]] = []
    for code, key_rows in of_key.items():
        columns = zip(key_rows, times[key_rows].tolist(), watermarks[key_rows].tolist(), strict=True)
        replayed, late_rows = replay(columns, int(gaps[code]), allowed_us, open_sessions.get(code, ()))
        late[late_rows] = True
        found.extend((code, session) for session in replayed)
    joined = {}
    for number, (_, session) in enumerate(found):
        of_row[session.rows] = number
        if session.open:
            joined[number] = sorted(session.open, key=lambda extent: extent.start)
    return Sessions(
        np.array([code for code, _ in found], np.int64),
        np.array([session.start for _, session in found], np.int64),
        np.array([session.end for _, session in found], np.int64),
        joined,
        of_row,
        late,
    )


def replay(
    rows: Iterable[tuple[int, int, int]], gap_us: int, allowed_us: int, open_sessions: Sequence[Extent]
) -> tuple[list[Replayed], list[int]]:
    """One key's rows (row, event time, judging watermark), one after the other; watermarks do not go back.

    Returns:
        (sessions that have rows, rows that came when their session's end had been reached). A row in no session is
        too late.
    """
    live = [Replayed(extent.start, extent.end, [extent]) for extent in open_sessions]
    over: list[Replayed] = []
    late: list[int] = []
    for row, at, watermark in rows:
        if any(session.end + allowed_us <= watermark for session in live):
            over.extend(session for session in live if session.end + allowed_us <= watermark)
            live = [session for session in live if session.end + allowed_us > watermark]
        met = [session for session in live if at < session.end and session.start < at + gap_us]
        if not met:
            if at + gap_us + allowed_us <= watermark:
                continue
            session = Replayed(at, at + gap_us)
            live.append(session)
        else:
            session = met[0]
            for other in met[1:]:
                session.start, session.end = min(session.start, other.start), max(session.end, other.end)
                session.open += other.open
                session.rows += other.rows
                live.remove(other)
            session.start, session.end = min(session.start, at), max(session.end, at + gap_us)
        session.rows.append(row)
        if session.end <= watermark:
            late.append(row)
    return [session for session in over + live if session.rows], late


def _both(calm: Sessions, calm_rows: Integers, replayed: Sessions) -> Sessions:
    """Sessions of calm keys, then those of the others."""
    of_row = np.where(replayed.of_row >= 0, replayed.of_row + len(calm.codes), -1)
    of_row[calm_rows] = calm.of_row
    return Sessions(
        np.concatenate([calm.codes, replayed.codes]),
        np.concatenate([calm.starts, replayed.starts]),
        np.concatenate([calm.ends, replayed.ends]),
        calm.joined | {session + len(calm.codes): found for session, found in replayed.joined.items()},
        of_row,
        replayed.late,
    )
