"""The view of a result table: rows by key and time, a chart of a value, and what is behind a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse

from millpy.admin.pages import PagedView, RowPage, decoded, page_of
from millpy.admin.queries import Admin, Row
from millpy.admin.results import DeployedTable, RowFilter, newest, panes
from millpy.admin.results import page as rows_page
from millpy.api.answers import databases_of, read_shared
from millpy.api.dead_letters import VIEWS as LEFT_OUT
from millpy.api.parameters import KEY_CHARACTERS_MAX, TEXT, Cursor, GraphName, Word
from millpy.api.problems import not_found
from millpy.api.windows import Where, pairs
from millpy.clock import Clock, SystemClock
from millpy.errors import RightsError, SlowQueryError, UsageError
from millpy.ui.downloads import MEDIA_TYPES, WRITERS
from millpy.ui.rendering import page, shared_page
from millpy.ui.routing import Visitor, page_router
from millpy.ui.tables import (
    STATES,
    element_id,
    key_parts,
    key_text,
    moment,
    numbers_of,
    respelled,
    respelled_time,
    state_of,
    tables_of,
)
from millpy.ui.views import ROWS_MAX

TOO_LATE = """
SELECT key, window_start, count(*) AS records FROM millpy.late_records
 WHERE graph = :graph AND computation = :computation
   AND window_start BETWEEN CAST(:first AS timestamptz) AND CAST(:last AS timestamptz)
   AND key = ANY(CAST(:keys AS text[]))
 GROUP BY key, window_start ORDER BY window_start DESC LIMIT 1000
"""
ROWS_S_MAX = 1.0
"""Of the statements that read rows, together."""
OPEN_S_MAX = 0.5
"""Of the statement that reads open windows, which reads all of the table."""
UNREAD_S = 60.0
"""How long a table whose open windows are too many is shown without them, before they are tried again."""
UNREAD_MAX = 10_000
KEY = "key."
"""Before the name of a column in an address: the field of a form for it."""
Time = Annotated[str, Query(max_length=40, pattern=TEXT)]
Start = Annotated[str, Query(alias="from", max_length=40, pattern=TEXT)]
End = Annotated[str, Query(alias="to", max_length=40, pattern=TEXT)]
router = page_router()


@dataclass(frozen=True, slots=True)
class Choice:
    """What an address chooses of a table.

    Attributes:
        table: the table.
        values: column -> value.
        start, end: the span of time; empty for no bound.
        final: "true", "false", or empty for both.
        show: the value that the chart shows; empty if there is no number.
    """

    table: DeployedTable
    values: Mapping[str, str]
    start: str
    end: str
    final: str
    show: str

    def filter(self, after: str, limit: int) -> RowFilter:
        """Return the filter for a page of rows."""
        final = {"true": True, "false": False}.get(self.final)
        return RowFilter(
            values=self.values, start=self.start, end=self.end, final=final, after=decoded(after), limit=limit
        )

    @property
    def address(self) -> dict[str, Any]:
        """Return the parameters of the address that shows the same again."""
        where = [f"{name}={value}" for name, value in self.values.items()]
        return {
            "table": self.table.name, "where": where, "from_": self.start, "to": self.end, "final": self.final,
            "show": self.show,
        }  # fmt: skip


class UnreadTables:
    """Tables whose open windows were too many to read, so that a page that is open all day does not try each second.

    A role of the database may have a policy that makes them slow, for itself alone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[tuple[str, str, str | None], float] = {}

    def has(self, table: DeployedTable, role: str | None) -> bool:
        """Tell whether a table is shown to a role without its open windows for now."""
        return self._clock.monotonic() < self._until.get((table.graph, table.name, role), -math.inf)

    def add(self, table: DeployedTable, role: str | None) -> None:
        """Add a table."""
        if len(self._until) >= UNREAD_MAX:
            self._until.clear()
        self._until[table.graph, table.name, role] = self._clock.monotonic() + UNREAD_S


UNREAD = UnreadTables(SystemClock())


@router.get("/graphs/{graph}/windows")
async def show_windows(
    request: Request, caller: Visitor, graph: GraphName, table: Word = None, where: Where = None, start: Start = "",
    end: End = "", final: Literal["true", "false", ""] = "", show: Word = None, after: Cursor = "",
) -> Response:  # fmt: skip
    """Show rows of a result table, the newest first, with the open windows as they stand."""
    tables = await tables_of(request, caller, graph)
    if not tables:
        return page(request, caller, "windows.html", view="windows", graph=graph, tables=[], choice=None)
    choice = _choice(request, tables, table, where, start, end, final, show)

    def find(admin: Admin) -> dict[str, Any]:
        ask = ""
        try:
            found, whole = _rows(admin.limit_to(ROWS_S_MAX), choice, after)
        except SlowQueryError as error:
            found, whole, ask = RowPage([], None), True, error.hint
        too_late = {} if ask else _too_late(admin, choice, found.rows)
        rows = [_shown(row, choice, too_late) for row in found.rows]
        counts = {label: sum(row["state"] == state for row in rows) for state, label in STATES.items()}
        return {
            "tables": tables, "choice": choice, "rows": rows, "next": found.next, "after": after, "whole": whole,
            "ask": ask, "numbers": numbers_of(choice.table), "counts": counts, "states": STATES,
        }  # fmt: skip

    return await shared_page(request, caller, find, "windows.html", view="windows", graph=graph, apart=repr(tables))


@router.get("/graphs/{graph}/windows/row")
async def show_window(
    request: Request, caller: Visitor, graph: GraphName, table: Word = None, where: Where = None, start: Start = "",
    end: End = "",
) -> Response:  # fmt: skip
    """Show what is behind a row: the panes of its window, its late records and its dead letters."""
    tables = await tables_of(request, caller, graph)
    choice = _choice(request, tables, table, where, start, end, "", None)
    if not choice.start:
        raise not_found("a window has a beginning", "the view of windows leads to each")
    start_only = (choice.start, _next_instant(choice.start))
    wanted = replace(choice.filter("", ROWS_MAX), start=start_only[0], end=start_only[1])
    bounds = (choice.start, choice.end)

    def find(admin: Admin) -> tuple[list[Row], list[Row], str, dict[str, list[Row]]]:
        own = [row for row in panes(admin, choice.table, wanted) if _bounds(row, choice.table) == bounds]
        unfinished = _open_rows(admin, choice, wanted) or ()
        now = [row for row in unfinished if _bounds(row, choice.table) == bounds and row.get("pane_timing") == "open"]
        if not own and not now:
            raise not_found("there is no such window", "it may have been merged, dropped or taken back")
        key = key_text((own or now)[0], choice.table)
        views = {"late-records": ("window_start", start_only), "dead-letters": ("event_time", bounds)}
        left_out = {
            name: _of_window(admin, replace(LEFT_OUT[name][0], time=time), graph, key, choice, span)
            for name, (time, span) in views.items()
        }
        return own, now, key, left_out

    own, now_open, key, records = await read_shared(request, caller, find)
    late = [row for row in records["late-records"] if respelled_time(row["window_end"]) == choice.end]
    return page(
        request, caller, "window.html", view="windows", graph=graph, choice=choice, key=key, panes=own,
        now_open=now_open, late=late, letters=records["dead-letters"], columns=_columns(choice.table),
    )  # fmt: skip


@router.get("/graphs/{graph}/windows.{form}")
async def download_windows(
    request: Request, caller: Visitor, graph: GraphName, form: Literal["csv", "parquet"], table: Word = None,
    where: Where = None, start: Start = "", end: End = "", final: Literal["true", "false", ""] = "",
) -> Response:  # fmt: skip
    """Send the rows that the view would show, page by page."""
    choice = _choice(request, await tables_of(request, caller, graph), table, where, start, end, final, None)
    lane, role = databases_of(request).reading, caller.principal.database_role

    async def read_rows(after: Sequence[str], limit: int) -> RowPage:
        wanted = replace(choice.filter("", limit), after=after)
        return await lane.run(rows_page, role, choice.table, wanted)

    name = f"{graph}.{choice.table.name}.{form}".encode("ascii", "replace").decode().replace('"', "?")
    chunks = WRITERS[form](choice.table, read_rows)
    first = await anext(chunks)  # here, so that an error is an answer

    async def sent() -> Any:
        yield first
        async for chunk in chunks:
            yield chunk

    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(sent(), media_type=MEDIA_TYPES[form], headers=headers)


def _choice(
    request: Request, tables: Sequence[DeployedTable], table: str | None, where: list[str] | None, start: str,
    end: str, final: str, show: str | None,
) -> Choice:  # fmt: skip
    windowed = sorted(tables, key=lambda one: one.kind != "windowed")
    found = [one for one in tables if one.name == table] if table else windowed[:1]
    if not found:
        raise not_found(f"there is no result table {table!r}", "choose one of the list")
    given = {
        name.removeprefix(KEY): value
        for name, value in request.query_params.multi_items()
        if name.startswith(KEY) and value and len(value) <= KEY_CHARACTERS_MAX and "\0" not in value
    }
    values = {**pairs(where or []), **given}
    for name in values:
        found[0].type_of(name)
    numbers = numbers_of(found[0])
    shown = show if show in numbers else next(iter(numbers), "")
    return Choice(found[0], values, moment(start, "from"), moment(end, "to"), final, shown)


def _rows(admin: Admin, choice: Choice, after: str) -> tuple[RowPage, bool]:
    """Return a page of rows, and whether the first one has all windows that are open: half of it is for them."""
    if after or choice.final == "true" or choice.table.kind != "windowed":
        return rows_page(admin, choice.table, choice.filter(after, ROWS_MAX)), True
    wanted = choice.filter(after, ROWS_MAX // 2)
    found = rows_page(admin, choice.table, wanted)
    live = _open_rows(admin, choice, wanted)
    if live is None:
        return found, False
    rows = {_identity(row, choice.table): row for row in found.rows}
    for row in live:
        identity = _identity(row, choice.table)
        if row["pane_timing"] == "open" or (row["pane_timing"] == "early" and identity in rows):
            rows[identity] = row  # an early pane that is stored belongs to the page of its row
    newest_first = sorted(rows.values(), key=lambda row: str(row[choice.table.time]), reverse=True)
    return RowPage(newest_first, found.next), len(live) < wanted.limit


def _open_rows(admin: Admin, choice: Choice, wanted: RowFilter) -> list[Row] | None:
    """Return the newest windows that are not final, as they stand; None if these cannot be read."""
    if UNREAD.has(choice.table, admin.role):
        return None
    try:
        return newest(admin.limit_to(OPEN_S_MAX), choice.table, replace(wanted, final=False))
    except RightsError:
        return None  # they are not for this user
    except SlowQueryError:
        UNREAD.add(choice.table, admin.role)
        return None
    except UsageError:
        return None


def _too_late(admin: Admin, choice: Choice, rows: Sequence[Row]) -> dict[tuple[str, str], int] | None:
    """Return how many records were too late for which window of these rows; None if the user may not know."""
    if not rows or choice.table.kind != "windowed":
        return {}
    times = sorted(str(row["window_start"]) for row in rows)
    keys = sorted({key_text(row, choice.table) for row in rows})
    table = choice.table
    try:
        found = admin.ask(
            TOO_LATE, graph=table.graph, computation=table.computation, first=times[0], last=times[-1], keys=keys
        )
    except RightsError:
        return None
    return {(respelled(row["key"]), str(row["window_start"])): row["records"] for row in found}


def _shown(row: Row, choice: Choice, too_late: Mapping[tuple[str, str], int] | None) -> dict[str, Any]:
    table = choice.table
    windowed = table.kind == "windowed"
    start, end = _bounds(row, table)
    key = key_text(row, table) if windowed else ""
    value = row.get(choice.show)
    return {
        "row": row, "id": element_id(*_identity(row, table)), "state": state_of(row), "key": key, "at_s": _epoch(start),
        "value": None if value is None else float(value), "from": start, "to": end, "where": key_parts(row, table),
        "too_late": None if too_late is None else too_late.get((key, str(row.get("window_start"))), 0),
        "windowed": windowed,
    }  # fmt: skip


def _of_window(admin: Admin, view: PagedView, graph: str, key: str, choice: Choice, span: tuple[str, str]) -> list[Row]:
    """Return the records of a key in a span of time; none for a user who may not read them."""
    wanted = {"graph": graph, "computation": choice.table.computation, "key": key}
    try:
        return page_of(admin, view, wanted=wanted, limit=ROWS_MAX, start=span[0], end=span[1]).rows
    except RightsError:
        return []


def _columns(table: DeployedTable) -> list[tuple[str, str]]:
    return [(name, name.replace("_", " ")) for name in ("pane_index", "pane_timing", *table.values, "late_count")]


def _identity(row: Row, table: DeployedTable) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in table.identity)


def _bounds(row: Row, table: DeployedTable) -> tuple[str, str]:
    names = ("window_start", "window_end") if table.kind == "windowed" else ("event_time", "event_time")
    return respelled_time(row[names[0]]), respelled_time(row[names[1]])


def _next_instant(text: str) -> str:
    try:
        return moment((datetime.fromisoformat(text) + timedelta(microseconds=1)).isoformat(), "from")
    except OverflowError:
        return "infinity"  # it is the last one that a datetime has


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None  # infinity, or a year after 9999
