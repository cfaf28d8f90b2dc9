"""Why a result table has no rows yet: the earliest window that is open, and the watermark that has to pass its end."""

from __future__ import annotations

from millpy.admin.loaders import utc_text
from millpy.admin.queries import Admin
from millpy.admin.results import DeployedTable
from millpy.errors import UsageError

OPEN = """
SELECT window_start, window_end FROM millpy.windows
 WHERE interval_id = ANY (CAST(:intervals AS bigint[])) ORDER BY window_end, window_start LIMIT 1
"""
PLACES = """
SELECT interval_id, min(input_watermark) OVER () AS input_watermark FROM millpy.watermarks
 WHERE graph = :graph AND computation = :computation
"""


def why_empty(admin: Admin, table: DeployedTable) -> str:
    """Return why a table without rows has none yet, as a clause."""
    name = f"{table.graph}.{table.computation}"
    places = admin.ask(PLACES, graph=table.graph, computation=table.computation)
    if not places:
        return "its computation has no intervals"
    watermark = str(places[0]["input_watermark"])
    if watermark == "infinity":
        return "all input has ended"
    try:
        found = admin.ask(OPEN, intervals=[row["interval_id"] for row in places]) if table.kind == "windowed" else []
    except UsageError:  # too many windows for the time that a query may take
        return f"see `millpy watermarks --explain {name}`"
    reached = "" if watermark == "-infinity" else f", now {utc_text(watermark)}"
    if found:
        start, end = (utc_text(str(found[0][column])) for column in ("window_start", "window_end"))
        if end == "infinity":
            return f"the window from {start} on is open, and only its trigger writes rows"
        return (
            f"the window from {start} to {end} is open until the watermark{reached and f'{reached},'} reaches its end;"
            f" `millpy watermarks --explain {name}` shows what it waits for"
        )
    if table.kind == "windowed":
        return f"no window is open; the watermark is{reached.removeprefix(', now') or ' at the beginning'}"
    return "its computation has written none; `millpy status` counts what reached it"
