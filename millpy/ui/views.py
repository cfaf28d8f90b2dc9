"""The views of the page, and their addresses. An address has all of a view's state: a link shows the same again."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from millpy.admin.pages import encoded

VIEWS: Mapping[str, str] = {
    "graph": "Graph",
    "windows": "Windows",
    "fleet": "Fleet",
    "set-aside": "Dead letters",
    "workers": "Workers",
    "state": "State",
    "events": "Events",
    "accounting": "Accounting",
    "doctor": "Doctor",
}
ROWS_MAX = 200
"""Rows of a list on one screen."""


def link(view: str, graph: str = "", **query: object) -> str:
    """Return the address of a view; parameters that are None or empty are left out.

    Args:
        view: a name of VIEWS, with what follows it.
        graph: the graph; empty for the first page, and for the doctor.
        query: the parameters; `from_` stands for `from`.
    """
    if view == "doctor":
        path, query = "/doctor", {"graph": graph, **query}
    elif not graph:
        path = "/"
    else:
        path = f"/graphs/{quote(graph, safe='')}" + ("" if view == "graph" else f"/{quote(view)}")
    words = {name.rstrip("_"): value for name, value in query.items() if value is not None and value != ""}
    return path + (f"?{urlencode(words, doseq=True)}" if words else "")


def next_link(view: str, graph: str, cursor: list[str] | None, **query: object) -> str:
    """Return the address of the next page of a list; empty on the last page."""
    return "" if cursor is None else link(view, graph, **{**query, "after": encoded(cursor)})
