"""The view of the devices: how late and how silent each is, when it reported, and what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response

from millpy.admin.device_reports import ROWS_MAX as WINDOWS_MAX
from millpy.admin.device_reports import reports
from millpy.admin.pages import PagedView, RowPage, decoded
from millpy.admin.queries import Admin, Row
from millpy.admin.results import DeployedTable
from millpy.api.answers import find_page
from millpy.api.parameters import Cursor, GraphName, Word
from millpy.api.sources import FLEET, SILENT_S_MAX
from millpy.clock import SystemClock
from millpy.config.durations import format_duration
from millpy.errors import UsageError
from millpy.model.time import to_datetime
from millpy.ui.rendering import shared_page
from millpy.ui.routing import Visitor, page_router
from millpy.ui.tables import element_id, numbers_of, tables_of, values_of_key

DEVICES_MAX = 100
SPANS = 48
HOURS: Mapping[str, float] = {"10 minutes": 1 / 6, "1 hour": 1, "6 hours": 6, "1 day": 24, "7 days": 168}
CELL, HEIGHT = 3, 22
"""Of the heat map: the width of a span, and the height of a device, in pixels."""
LEVELS = 4
SITES = """
SELECT DISTINCT site FROM millpy.site_watermarks WHERE graph = :graph AND site IS NOT NULL ORDER BY site LIMIT 200
"""
# A device of a site has it as one part of its key. JSON with a NUL is none for PostgreSQL.
_OF_SITE = """
 AS every WHERE CAST(:site AS text) IS NULL
             OR CASE WHEN key !~ '\\\\u0000' THEN jsonb_exists(CAST(key AS jsonb), CAST(:site AS text)) ELSE false END
"""
SILENT = """
SELECT computation, count(*) AS devices, min(last_event_time) AS since FROM millpy.silent_devices
 WHERE graph = :graph GROUP BY computation ORDER BY computation LIMIT 100
"""
router = page_router()


@dataclass(frozen=True, slots=True)
class Strip:
    """What is drawn of a device: cells of the heat map, and the points of a line.

    Attributes:
        cells: the x of each span with windows, its level from 1 to LEVELS, and what it says.
        line: the points of the mean values, for SVG.
        text: the same, as text.
    """

    cells: Sequence[tuple[int, int]]
    line: str
    text: str


@dataclass(frozen=True, slots=True)
class _FleetQuery:
    """What an address asks for."""

    graph: str
    sort: str
    words: Mapping[str, str | None]
    site: str | None
    silent_s: float
    table: str
    show: str
    span: str
    cursor: Sequence[str]


@dataclass(frozen=True, slots=True)
class _FleetScreen:
    """What a screen shows: the devices, the tables that have their windows, and what is drawn of one."""

    devices: RowPage
    tables: Sequence[DeployedTable]
    table: DeployedTable | None
    value: str
    strips: Mapping[int, Strip]
    sites: Sequence[str]
    silent: Sequence[Row]


@router.get("/graphs/{graph}/fleet")
async def show_fleet(
    request: Request,
    caller: Visitor,
    graph: GraphName,
    sort: Literal["key", "silence", "lag"] = "silence",
    stream: Word = None,
    device: Word = None,
    site: Word = None,
    silent_s: Annotated[float, Query(ge=0, le=SILENT_S_MAX)] = 0,
    table: Word = None,
    show: Word = None,
    span: Literal["10 minutes", "1 hour", "6 hours", "1 day", "7 days"] = "10 minutes",
    after: Cursor = "",
) -> Response:
    """Show devices, with a heat map of when they reported, and a line of a value."""
    words = {"stream": stream or None, "device": device or None}
    wanted = _FleetQuery(graph, sort, words, site or None, silent_s, table or "", show or "", span, decoded(after))
    readable = [one for one in await tables_of(request, caller, graph) if one.kind == "windowed" and numbers_of(one)]

    def find(admin: Admin) -> dict[str, Any]:
        found = _read(admin, wanted, readable)
        address = {
            "sort": sort, "stream": stream, "device": device, "site": site, "silent_s": silent_s or "",
            "table": found.table.name if found.table else "", "show": found.value, "span": span,
        }  # fmt: skip
        return {
            "found": found, "after": after, "address": address,
            "numbers": numbers_of(found.table) if found.table else [], "spans": list(HOURS), "width": SPANS * CELL,
            "cell": CELL, "height": HEIGHT, "windows_max": WINDOWS_MAX, "where_of": partial(_where, found.table),
            "element_id": element_id,
        }  # fmt: skip

    return await shared_page(request, caller, find, "fleet.html", view="fleet", graph=graph, apart=repr(readable))


def _read(admin: Admin, wanted: _FleetQuery, tables: Sequence[DeployedTable]) -> _FleetScreen:
    devices = find_page(
        admin, _of_site(FLEET[wanted.sort]), wanted.graph, wanted.cursor, DEVICES_MAX, words=wanted.words,
        silent_s=wanted.silent_s, site=wanted.site,
    )  # fmt: skip
    fitting = [one for one in tables if any(values_of_key(row["key"], one) is not None for row in devices.rows)]
    table = next((one for one in fitting if one.name == wanted.table), fitting[0] if fitting else None)
    numbers = numbers_of(table) if table else []
    value = wanted.show if wanted.show in numbers else next(iter(numbers), "")
    strips = _strips(admin, table, devices.rows, value, wanted.span) if table else {}
    sites = [row["site"] for row in admin.ask(SITES, graph=wanted.graph)]
    return _FleetScreen(devices, fitting, table, value, strips, sites, admin.ask(SILENT, graph=wanted.graph))


def _of_site(view: PagedView) -> PagedView:
    """Return a view of the fleet with the parameter `site`, for the devices whose key has it."""
    source = " ".join(["(SELECT every.* FROM", view.source, _OF_SITE, ")"])
    return replace(view, source=source, given={**view.given, "site": None})


def _where(table: DeployedTable | None, row: Row) -> list[str] | None:
    values = None if table is None else values_of_key(row["key"], table)
    return None if values is None else [f"{name}={value}" for name, value in values.items()]


def _strips(admin: Admin, table: DeployedTable, rows: Sequence[Row], value: str, span: str) -> dict[int, Strip]:
    """Return what is drawn of the devices, by their place on the screen."""
    keys = {place: values_of_key(row["key"], table) for place, row in enumerate(rows)}
    drawn = [(place, list(key.values())) for place, key in keys.items() if key is not None]
    span_s = HOURS[span] * 3600 / SPANS
    start = to_datetime(SystemClock().now_us()).astimezone(UTC) - timedelta(hours=HOURS[span])
    try:
        found = reports(admin, table, [key for _, key in drawn], value, start.isoformat(), span_s)
    except UsageError:
        return {}  # a key is none of the table's type, or there are too many windows: the list is still right
    of_place: dict[int, list[Row]] = {place: [] for place, _ in drawn}
    for row in found:
        of_place[drawn[row["place"] - 1][0]].append(row)
    most = max((row["windows"] for row in found), default=1)
    return {place: _strip(own, most, span_s) for place, own in of_place.items()}


def _strip(rows: Sequence[Row], most: int, span_s: float) -> Strip:
    inside = [row for row in rows if 0 <= row["span"] < SPANS]
    cells = [(row["span"] * CELL, 1 + (row["windows"] * LEVELS - 1) // most) for row in inside]
    means = [(row["span"], row["mean"]) for row in inside if row["mean"] is not None]
    silent = SPANS - len({row["span"] for row in inside})
    text = f"reported in {SPANS - silent} of {SPANS} spans of {format_duration(span_s)}"
    if not means:
        return Strip(cells, "", text)
    low, high = min(mean for _, mean in means), max(mean for _, mean in means)
    scale = (HEIGHT - 4) / ((high - low) or 1.0)
    line = " ".join(f"{span * CELL + CELL / 2:g},{HEIGHT - 2 - (mean - low) * scale:.1f}" for span, mean in means)
    return Strip(cells, line, f"{text}; mean from {low:.6g} to {high:.6g}, last {means[-1][1]:.6g}")
