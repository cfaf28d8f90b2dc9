"""Sources, and the devices behind them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from millpy.admin.pages import PagedView
from millpy.admin.queries import DEVICES
from millpy.api.answers import ROWS, add_pages, described, page_response
from millpy.api.authentication import Viewer
from millpy.api.parameters import LIMIT, Cursor, GraphName, Limit, Word

_FLEET = f"({DEVICES})"
_PLACE = {"stream": "text", "source_partition": "text"}
VIEWS = {
    "sources": (
        PagedView(source="millpy.sources", order=_PLACE, equal=("stream", "state")),
        "The source partitions: whether they run, are connected or paused, and their counts.",
    ),
    "silent-devices": (
        PagedView(source="millpy.silent_devices", order={"computation": "text", "key": "text"}, equal=("computation",)),
        "The devices that a `silent_after` step has found silent.",
    ),
    "disorder": (
        PagedView(source="millpy.disorder", order=_PLACE, equal=("stream",)),
        "How far the records of each source partition lie behind the newest one.",
    ),
    "site-watermarks": (
        PagedView(source="millpy.site_watermarks", order={**_PLACE, "site": "text"}, equal=("stream", "site")),
        "The watermark of each site, of sources that keep one for each.",
    ),
    "injections": (
        PagedView(source="millpy.injections", order={"source": "text"}),
        "The sources of injected records: what waits, and which transactions are open.",
    ),
}
_ALL_GRAPHS = {"graph": None}
FLEET = {
    "key": PagedView(
        source=_FLEET, order={"stream": "text", "key": "text"}, equal=("stream", "device"), given=_ALL_GRAPHS
    ),
    "silence": PagedView(
        source=_FLEET, order={"silent_for": "interval", "stream": "text", "key": "text"}, descending=True,
        equal=("stream", "device"), given=_ALL_GRAPHS,
    ),
    "lag": PagedView(
        source=" ".join(["(SELECT d.*, coalesce(d.lag, interval '0') AS behind FROM", _FLEET, "AS d)"]),
        columns=(
            "device", "last_event_time", "lag", "silent_since", "silent_for", "rate", "records", "duplicates", "late",
            "dead_letters", "graph", "stream", "source_partitions", "key", "behind",
        ),
        order={"behind": "interval", "stream": "text", "key": "text"}, descending=True, equal=("stream", "device"),
        given=_ALL_GRAPHS,
    ),
}  # fmt: skip
SILENT_S_MAX = 10.0**9
router = APIRouter(tags=["sources"])
for _path, (_view, _text) in VIEWS.items():
    add_pages(router, _path, _view, _text)


@router.get("/v1/graphs/{graph}/fleet", responses=described(ROWS, "Devices"), response_class=Response)
async def list_fleet(
    request: Request,
    caller: Viewer,
    graph: GraphName,
    sort: Literal["key", "silence", "lag"] = "key",
    stream: Word = None,
    device: Word = None,
    silent_s: Annotated[
        float, Query(ge=0, le=SILENT_S_MAX, description="Only devices silent for as many seconds.")
    ] = 0,
    after: Cursor = "",
    limit: Limit = LIMIT,
) -> Response:
    """List the devices behind the sources: how late and how silent each is, its rate and its counts.

    The order by silence or by lag moves while it is read: a device can be on two pages, or on none.
    """
    words = {"stream": stream, "device": device}
    return await page_response(request, caller, FLEET[sort], graph, after, limit, words=words, silent_s=silent_s)
