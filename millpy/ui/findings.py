"""The view of the doctor: what `millpy doctor` finds in the database, the worst first."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response

from millpy.api.events import Doctor, findings_of
from millpy.model.finding import Severity
from millpy.ui.parameters import Choice
from millpy.ui.rendering import page
from millpy.ui.routing import Visitor, check_deployed, page_router

WORST_FIRST = [severity.value for severity in reversed(Severity)]
WAIT_S = 1.0
"""How long a page waits for the doctor; then it shows what was found before."""
router = page_router()


@router.get("/doctor")
async def show_findings(request: Request, caller: Visitor, graph: Choice = "") -> Response:
    """Show the findings; `graph` keeps the menu of a graph."""
    if graph:
        await check_deployed(request, graph)
    finding = asyncio.ensure_future(findings_of(request, caller))
    finding.add_done_callback(_forget)
    done, _ = await asyncio.wait({finding}, timeout=WAIT_S)
    doctor: Doctor = request.app.state.doctor
    rows = sorted(finding.result() if done else doctor.last, key=lambda row: WORST_FIRST.index(row["severity"]))
    counts = {severity: sum(row["severity"] == severity for row in rows) for severity in WORST_FIRST}
    return page(request, caller, "doctor.html", view="doctor", graph=graph, rows=rows, counts=counts, whole=bool(done))


def _forget(ended: asyncio.Future[Any]) -> None:
    if not ended.cancelled():
        ended.exception()  # of a page that did not wait for it
