"""Events, each as a sentence, and the findings of the doctor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response

from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.admin.events import PLACES, describe
from millpy.admin.pages import PagedView, RowPage, decoded
from millpy.admin.queries import Admin, Row
from millpy.api.answers import ROWS, answer_shared, as_json, databases_of, described, find_page, shown
from millpy.api.authentication import Caller, Viewer
from millpy.api.database import STATEMENT_S_MAX
from millpy.api.parameters import LIMIT, Cursor, End, GraphName, Limit, Start, Word
from millpy.api.problems import ProblemError
from millpy.clock import SystemClock
from millpy.config.settings import Settings

EVENTS = PagedView(source="millpy.events", order={"event_id": "bigint"}, descending=True, equal=("kind",), time="at")
DOCTOR_S = 10.0
"""Seconds for which findings are shown again."""
NOT_EXAMINED = "pooler"
"""It takes further connections."""
router = APIRouter(tags=["events"])


def sentences(admin: Admin, rows: list[Row]) -> list[Row]:
    """Return events with a sentence each, in `happened`."""
    if not rows:
        return rows
    computations = {row["interval_id"]: row["computation"] for row in admin.ask(PLACES)}
    return [{**row, "happened": describe(row["kind"], row["detail"], computations)} for row in rows]


def find_events(
    admin: Admin,
    graph: str,
    cursor: Sequence[str],
    limit: int,
    *,
    kind: str | None = None,
    start: str | None = None,
    end: str | None = None,
) -> RowPage:
    """Return a page of the events of a graph, each with a sentence.

    Raises:
        ProblemError: the graph is not deployed.
    """
    page = find_page(admin, EVENTS, graph, cursor, limit, words={"kind": kind}, start=start, end=end)
    return dataclasses.replace(page, rows=sentences(admin, page.rows))


@router.get("/v1/graphs/{graph}/events", responses=described(ROWS, "Events"), response_class=Response)
async def list_events(
    request: Request,
    caller: Viewer,
    graph: GraphName,
    kind: Word = None,
    start: Start = None,
    end: End = None,
    after: Cursor = "",
    limit: Limit = LIMIT,
) -> Response:
    """List what happened, the newest first. `happened` is a sentence, `detail` what was recorded."""
    cursor = decoded(after)

    def read(admin: Admin) -> str:
        return shown(find_events(admin, graph, cursor, limit, kind=kind, start=start, end=end))

    return await answer_shared(request, caller, read)


class Doctor:
    """Examines the database, at most once in DOCTOR_S, whatever the number of users."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._found: list[dict[str, Any]] = []
        self._until = 0.0

    def findings(self, admin: Admin) -> list[dict[str, Any]]:
        """Return the findings. Calls come one after another, in a lane of their own."""
        if self._clock.monotonic() >= self._until:
            facts = read_facts(admin.url, self._clock, statement_s_max=STATEMENT_S_MAX, examine_pooler=False)
            found = examine(facts, Settings.load().limits)
            self._found = [
                dataclasses.asdict(finding) | {"severity": finding.severity.value}
                for finding in found
                if finding.check != NOT_EXAMINED
            ]
            self._until = self._clock.monotonic() + DOCTOR_S
        return self._found

    @property
    def last(self) -> list[dict[str, Any]]:
        """What was found last; empty before the first time."""
        return self._found


@router.get("/v1/doctor", responses=described(ROWS, "Findings"), response_class=Response)
async def list_findings(request: Request, caller: Viewer) -> Response:
    """List the findings of `millpy doctor` on the database, which are at most ten seconds old."""
    return as_json({"rows": await findings_of(request, caller), "next": None})


async def findings_of(request: Request, caller: Caller) -> list[dict[str, Any]]:
    """Return the findings of the doctor.

    Raises:
        ProblemError: the user sees only what a role of the database may see.
    """
    if caller.principal.database_role is not None:
        raise ProblemError(HTTPStatus.FORBIDDEN, "a user with a role of the database cannot see the database")
    doctor: Doctor = request.app.state.doctor
    return await databases_of(request).examining.share("findings", doctor.findings, None)
