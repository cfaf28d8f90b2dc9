"""Workers, what they own, and how far event time has come."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from millpy.admin.pages import PagedView
from millpy.admin.queries import Admin
from millpy.api.answers import ROWS, add_pages, answer_shared, check_graph, described
from millpy.api.authentication import Viewer
from millpy.api.parameters import ComputationName, GraphName

# Rows are in the order of their names; a view whose key has parts that are missing shows them as empty text.
VIEWS = {
    "workers": (
        PagedView(
            source="millpy.workers", order={"registered_at": "timestamptz", "worker_id": "uuid"}, descending=True
        ),
        "The workers, the newest first: their leases, and the number of intervals that each owns.",
    ),
    "watermarks": (
        PagedView(
            source="millpy.watermarks", order={"computation": "text", "interval_id": "bigint"},
            equal=("computation", "worker_id"),
        ),
        "The intervals: who owns each, and its watermarks.",
    ),
    "accounting": (
        PagedView(
            source="(SELECT *, concat_ws('/', CAST(key_fields AS text)) AS fields FROM millpy.accounting)",
            columns=(
                "graph", "stream", "source_partition", "consumer", "key_fields", "result_table", "injected", "accepted",
                "duplicate", "dead_lettered", "produced", "added", "filtered", "consumed", "late", "parked", "pending",
                "balanced", "fields",
            ),
            order=dict.fromkeys(("stream", "source_partition", "consumer", "result_table", "fields"), "text"),
            equal=("stream", "consumer", "result_table", "balanced"),
        ),
        "The accounting of records: each source partition, subscription and result table, and whether it is balanced.",
    ),
    "backlog": (
        PagedView(
            source="(SELECT *, CAST(key_fields AS text) AS fields FROM millpy.backlog)",
            order=dict.fromkeys(("stream", "consumer", "fields"), "text"),
            equal=("stream", "consumer"),
        ),
        "What is stored for each subscription and not consumed yet.",
    ),
    "sinks": (
        PagedView(source="millpy.sinks", order={"sink": "text", "interval_id": "bigint"}, equal=("sink", "state")),
        "The intervals of sinks: what waits, what is refused, and whether they are connected.",
    ),
    "joins": (
        PagedView(
            source="millpy.joins", order={"computation": "text", "interval_id": "bigint"}, equal=("computation",)
        ),
        "The intervals of joins: what they keep.",
    ),
    "lookups": (
        PagedView(
            source="(SELECT *, CAST(worker_id AS text) AS by FROM millpy.lookups)",
            order={"table_name": "text", "by": "text"},
            equal=("table_name",),
        ),
        "The lookup tables, as each live worker knows them.",
    ),
    "archives": (
        PagedView(source="millpy.archive", order={"archive": "text"}),
        "The archives: their files and records, and what is not archived yet.",
    ),
    "audits": (
        PagedView(
            source="millpy.audits", order={"hour": "timestamptz", "result_table": "text"}, descending=True,
            equal=("result_table",), time="hour",
        ),
        "The hours of result tables that were audited, the newest first.",
    ),
}  # fmt: skip
EXPLAINED = "SELECT * FROM millpy.explain_watermark(:graph, :computation)"
router = APIRouter(tags=["workers"])
for _path, (_view, _text) in VIEWS.items():
    add_pages(router, _path, _view, _text)


@router.get(
    "/v1/graphs/{graph}/watermarks/{computation}/explanation",
    responses=described(ROWS, "The steps, the cause last"), response_class=Response,
)  # fmt: skip
async def explain_watermark(
    request: Request, caller: Viewer, graph: GraphName, computation: ComputationName
) -> Response:
    """Explain what holds back the watermark of a computation: a row for each step upstream, the cause last."""

    def read(admin: Admin) -> Mapping[str, object]:
        check_graph(admin, graph)
        return {"rows": admin.ask(EXPLAINED, graph=graph, computation=computation), "next": None}

    return await answer_shared(request, caller, read)
