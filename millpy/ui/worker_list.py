"""The view of the workers: their leases, who owns what, and a time line of takeovers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from fastapi import Request, Response

from millpy.admin.json_output import json_safe
from millpy.admin.pages import RowPage, decoded
from millpy.admin.queries import Admin, Row
from millpy.api.actions import act, drain
from millpy.api.answers import find_page
from millpy.api.events import find_events
from millpy.api.parameters import Cursor, GraphName
from millpy.api.workers import VIEWS
from millpy.ui.parameters import Choice
from millpy.ui.rendering import shared_page
from millpy.ui.routing import OperatorForm, Visitor, done, page_router
from millpy.ui.views import ROWS_MAX, link

KINDS: Mapping[str, str] = {"claimed": "●", "lease_expired": "✗", "fence_refused": "▲", "drain_requested": "◆"}
"""The kinds of events on the time line, with their marks."""
EVENTS_MAX = 50
WIDTH, LEFT, LANE, ID_SHOWN = 960, 110, 26, 8
router = page_router()


@dataclass(frozen=True, slots=True)
class WorkerMark:
    """An event on the time line."""

    x: int
    y: int
    sign: str
    event: Row


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events of workers over time, a lane for each worker.

    Attributes:
        lanes: the workers, the one of the newest event first.
        marks: the events.
        start, end: the times of the first and the last event.
    """

    lanes: Sequence[str]
    marks: Sequence[WorkerMark]
    start: Any
    end: Any
    width: int = WIDTH
    left: int = LEFT
    lane: int = LANE

    @property
    def height(self) -> int:
        """The height of the drawing."""
        return (len(self.lanes) + 1) * self.lane


@router.get("/graphs/{graph}/workers")
async def show_workers(
    request: Request,
    caller: Visitor,
    graph: GraphName,
    computation: Choice = "",
    worker: Choice = "",
    after: Cursor = "",
) -> Response:
    """Show the workers of a graph, and the intervals: of a computation, of a worker, or all."""
    chosen = {"computation": computation or None, "worker_id": worker or None}
    cursor = decoded(after)

    def find(admin: Admin) -> dict[str, Any]:
        workers, intervals, events = _find(admin, graph, chosen, cursor)
        return {
            "workers": workers.rows, "more": workers.next, "rows": intervals.rows, "next": intervals.next,
            "events": events, "timeline": timeline_of(events), "computation": computation, "worker": worker,
            "after": after,
        }  # fmt: skip

    return await shared_page(request, caller, find, "workers.html", view="workers", graph=graph)


@router.post("/graphs/{graph}/workers/{worker}/drain")
async def drain_worker(request: Request, form: OperatorForm, graph: GraphName, worker: UUID) -> Response:
    """Request that a worker drains."""
    count = await act(request, form.caller, graph, partial(drain, worker=worker, why=""))
    name = str(worker)[:ID_SHOWN]
    text = f"Worker {name} drains: its intervals go to other workers." if count else f"Worker {name} drains already."
    return done(request, form.caller, text, link("workers", graph))


def _find(
    admin: Admin, graph: str, chosen: Mapping[str, str | None], cursor: Sequence[str]
) -> tuple[RowPage, RowPage, list[Row]]:
    workers = find_page(admin, VIEWS["workers"][0], graph, (), ROWS_MAX)
    intervals = find_page(admin, VIEWS["watermarks"][0], graph, cursor, ROWS_MAX, words=chosen)
    events = [row for kind in KINDS for row in find_events(admin, graph, (), EVENTS_MAX, kind=kind).rows]
    return workers, intervals, sorted(events, key=lambda row: -row["event_id"])[:EVENTS_MAX]


def timeline_of(events: Sequence[Row]) -> Timeline | None:
    """Place events, the newest first, on a time line; None if there are none."""
    if not events:
        return None
    seconds = [_seconds(row["at"]) for row in events]
    first, last = min(seconds), max(seconds)
    lanes = list(dict.fromkeys(_worker(row) for row in events))
    marks = [
        WorkerMark(
            x=LEFT + round((at - first) / ((last - first) or 1) * (WIDTH - LEFT - LANE)) + LANE // 2,
            y=lanes.index(_worker(row)) * LANE + LANE // 2,
            sign=KINDS[row["kind"]],
            event=row,
        )
        for row, at in zip(events, seconds, strict=True)
    ]
    return Timeline(lanes, marks, events[seconds.index(first)]["at"], events[seconds.index(last)]["at"])


def _worker(event: Row) -> str:
    return str(event["detail"].get("worker", ""))[:ID_SHOWN] or "unknown"


def _seconds(at: object) -> float:
    return datetime.fromisoformat(str(json_safe(at))).timestamp()
