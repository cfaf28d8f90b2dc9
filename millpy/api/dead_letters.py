"""What did not reach its result: dead letters, late records, parked keys, refused messages, and corrections."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from millpy.admin.dead_letters import DEAD_LETTERS, LATE_RECORDS, RecordFilter, RecordTable
from millpy.admin.pages import PagedView
from millpy.admin.queries import Admin, Row
from millpy.api.answers import OBJECT, ROWS, add_pages, answer_shared, as_json, check_graph, databases_of, described
from millpy.api.authentication import Viewer
from millpy.api.parameters import GraphName, RecordId
from millpy.api.problems import not_found

TEXT_CHARACTERS = 1_000
"""Of a payload in a list; the path of one record has all of it."""
_CAUSE = ("computation", "stream", "reason", "state")
VIEWS = {
    "dead-letters": (
        PagedView(
            source="millpy.dead_letters",
            columns=(
                "dead_letter_id", "graph", "computation", "stream", "reason", "detail", "source_position", "key",
                "event_time", f"left(payload_text, {TEXT_CHARACTERS}) AS payload_text",
                "octet_length(payload) AS payload_bytes", "dead_lettered_at", "state", "state_at", "attempts",
                "replayable", "retracts", "into_window", "requested_by", "why",
            ),
            order={"dead_letter_id": "bigint"}, descending=True, equal=(*_CAUSE, "key"), time="dead_lettered_at",
        ),
        "Dead letters, the newest first, with the beginnings of their payloads.",
    ),
    "late-records": (
        PagedView(
            source="millpy.late_records",
            columns=(
                "late_record_id", "graph", "computation", "stream", "key", "event_time", "watermark", "window_start",
                "window_end", f"left(payload_text, {TEXT_CHARACTERS}) AS payload_text",
                "octet_length(payload) AS payload_bytes", "recorded_at", "state", "state_at", "attempts", "replayable",
                "retracts", "into_window", "requested_by", "why", "detail", "dead_letter_id",
            ),
            order={"late_record_id": "bigint"}, descending=True, equal=("computation", "stream", "state", "key"),
            time="recorded_at",
        ),
        "Late records, the newest first, with the watermark that judged each.",
    ),
    "parked": (
        PagedView(
            source="millpy.parked", order={"computation": "text", "key": "text", "interval_id": "bigint"},
            equal=("computation", "reason", "key"),
        ),
        "The keys that stopped at a failing record, and how many records wait behind it.",
    ),
    "refused-messages": (
        PagedView(
            source="millpy.refused_messages",
            columns=(
                "graph", "sink", "key", "number", "attempts", "since", "state", "refused_because",
                f"left(record, {TEXT_CHARACTERS}) AS record", "interval_id",
            ),
            order={"sink": "text", "interval_id": "bigint", "number": "bigint"}, equal=("sink", "key", "state"),
        ),
        "The messages that the other side of a sink refuses, and those that wait behind them.",
    ),
    "causes": (
        PagedView(
            source="millpy.retention", order=dict.fromkeys(("table_name", "stream", "computation", "reason"), "text"),
            equal=("table_name", "computation", "reason"),
        ),
        "Dead letters and late records by cause: how many were seen, kept and deleted by age.",
    ),
    "corrections": (
        PagedView(
            source="millpy.corrections", order={"correction_id": "bigint"}, descending=True, equal=("table_name",),
            time="corrected_at",
        ),
        "The rows of finished windows that operators changed, the newest first.",
    ),
}  # fmt: skip
GROUPED = """
SELECT computation, stream, reason, state, count(*) AS records, min(dead_lettered_at) AS first_at,
       max(dead_lettered_at) AS last_at, min(detail) AS detail
  FROM millpy.dead_letters WHERE graph = :graph
 GROUP BY computation, stream, reason, state ORDER BY count(*) DESC, computation, stream, reason, state LIMIT 1000
"""
router = APIRouter(tags=["dead letters"])


@router.get("/v1/graphs/{graph}/dead-letters/by-reason", responses=described(ROWS, "Groups"), response_class=Response)
async def group_dead_letters(request: Request, caller: Viewer, graph: GraphName) -> Response:
    """Count the dead letters by computation, stream, reason and state: the 1,000 largest groups."""

    def read(admin: Admin) -> Mapping[str, object]:
        check_graph(admin, graph)
        return {"rows": admin.ask(GROUPED, graph=graph), "next": None}

    return await answer_shared(request, caller, read)


for _path, (_view, _text) in VIEWS.items():
    add_pages(router, _path, _view, _text)


@router.get(
    "/v1/graphs/{graph}/dead-letters/{number}", responses=described(OBJECT, "A dead letter"), response_class=Response
)
async def show_dead_letter(request: Request, caller: Viewer, graph: GraphName, number: RecordId) -> Response:
    """Show a dead letter with its whole payload and the traceback."""
    return await _shown(request, caller.principal.database_role, DEAD_LETTERS, graph, number)


@router.get(
    "/v1/graphs/{graph}/late-records/{number}", responses=described(OBJECT, "A late record"), response_class=Response
)
async def show_late_record(request: Request, caller: Viewer, graph: GraphName, number: RecordId) -> Response:
    """Show a late record with its whole payload."""
    return await _shown(request, caller.principal.database_role, LATE_RECORDS, graph, number)


async def _shown(request: Request, role: str | None, records: RecordTable, graph: str, number: int) -> Response:
    def read(admin: Admin) -> list[Row]:
        return records.rows(admin, RecordFilter(graph=graph, ids=(number,)), 1)

    found = await databases_of(request).reading.run(read, role)
    if not found:
        raise not_found(f"graph {graph!r} has no {records.word} {number}")
    return as_json(found[0])
