"""The view of the doctor: what `millpy doctor` finds in the database, the worst first."""

from __future__ import annotations

from fastapi import Request, Response

from millpy.api.events import findings_of
from millpy.model.finding import Severity
from millpy.ui.parameters import Choice
from millpy.ui.rendering import page
from millpy.ui.routing import Visitor, check_deployed, page_router

WORST_FIRST = [severity.value for severity in reversed(Severity)]
router = page_router()


@router.get("/doctor")
async def show_findings(request: Request, caller: Visitor, graph: Choice = "") -> Response:
    """Show the findings; `graph` keeps the menu of a graph."""
    if graph:
        await check_deployed(request, graph)
    rows = sorted(await findings_of(request, caller), key=lambda row: WORST_FIRST.index(row["severity"]))
    counts = {severity: sum(row["severity"] == severity for row in rows) for severity in WORST_FIRST}
    return page(request, caller, "doctor.html", view="doctor", graph=graph, rows=rows, counts=counts)
