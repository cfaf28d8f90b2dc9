"""Read the stored state of keys: cells, timers and open windows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from millpy.admin.pages import BYTES_MAX, PagedView, RowPage, cut, is_text, page_of
from millpy.admin.queries import Admin, Row
from millpy.errors import UsageError

COMPUTATIONS = "SELECT graph, computation, interval_id FROM millpy.watermarks"
# The index finds the row by the hash of the key; comparing the key itself rules out collisions. A subquery would not
# reach the index below the views; ARRAY(...) is a value.
_OF_KEY = """
     WHERE interval_id = ANY (CAST(:intervals AS bigint[]))
       AND (CAST(:keys AS text[]) IS NULL
            OR (hashtextextended(key, 0)
                = ANY (ARRAY(SELECT hashtextextended(k, 0) FROM unnest(CAST(:keys AS text[])) AS k))
                AND key = ANY (CAST(:keys AS text[]))))
"""
_SELECTED = {
    "state": ("SELECT key, cell, subkey, value FROM millpy.state", "key, cell, subkey"),
    "timers": ("SELECT key, timer, time_domain, fires_at, value FROM millpy.timers", "fires_at, key, timer"),
    "windows": (
        "SELECT key, window_start, window_end, expires_at, value FROM millpy.windows",
        "window_start, window_end, key",
    ),
}
STATEMENTS = {
    what: " ".join([selected, _OF_KEY, "ORDER BY", order, "LIMIT :rows_max"])
    for what, (selected, order) in _SELECTED.items()
}
PAGES = {
    what: PagedView(source=" ".join(["(", _SELECTED[what][0], _OF_KEY, ")"]), order=order)
    for what, order in {
        "state": {"key": "text", "cell": "text", "subkey": "text"},
        "timers": {"fires_at": "timestamptz", "key": "text", "time_domain": "text", "timer": "text"},
        "windows": {"window_start": "timestamptz", "window_end": "timestamptz", "key": "text"},
    }.items()
}

_BY_KEY = """
SELECT * FROM (SELECT r.*, r.place AS page_cursor, count(*) OVER () AS page_found,
                      sum(octet_length(CAST(r AS text))) OVER (ORDER BY page_row) AS page_bytes
                 FROM millpy.windows_by_key(:graph, :computation, CAST(:after AS text[]), :rows_max) WITH ORDINALITY
                      AS r (key, window_start, window_end, expires_at, value, gone, place, page_row)) AS p
 WHERE page_row = 1 OR page_bytes <= :bytes_max ORDER BY page_row
"""
_PLACE_PARTS = 4
_INTEGERS = 3
_BIGINT = re.compile(r"-?[0-9]{1,19}")


def stored(admin: Admin, graph: str | None, computation: str, key: str | None, limit: int) -> Mapping[str, list[Row]]:
    """Return the stored `state` (cells), `timers` and open `windows` of one key of a computation, or of all keys.

    Args:
        admin: the database.
        graph: the graph of the computation; None for any.
        computation: its name, or `graph.name`.
        key: the key, as text or as JSON; None for all keys.
        limit: the maximum number of rows of each kind.

    Raises:
        UsageError: no graph has the computation, or several have.
    """
    intervals = _intervals(admin, graph, computation)
    keys = None if key is None else _spellings(key)
    return {
        what: admin.ask(statement, intervals=intervals, keys=keys, rows_max=limit)
        for what, statement in STATEMENTS.items()
    }


def stored_page(
    admin: Admin, what: str, graph: str, computation: str, key: str | None, after: Sequence[str], limit: int
) -> RowPage:
    """Return a page of what `stored` returns: of its `state`, `timers` or `windows`.

    The windows of all keys come key by key instead, in no order of keys: to sort many takes too long.

    Raises:
        UsageError: the graph has no such computation.
    """
    if what == "windows" and key is None:
        _intervals(admin, graph, computation)
        return _windows_by_key(admin, graph, computation, after, limit)
    keys = None if key is None else _spellings(key)
    intervals = _intervals(admin, graph, computation)
    return page_of(admin, PAGES[what], wanted={}, after=after, limit=limit, intervals=intervals, keys=keys)


def _windows_by_key(admin: Admin, graph: str, computation: str, after: Sequence[str], limit: int) -> RowPage:
    if after and (len(after) != _PLACE_PARTS or not all(map(_is_bigint, after[:_INTEGERS]))):
        raise UsageError("the cursor belongs to another list", hint="begin without a cursor")
    name = computation.removeprefix(f"{graph}.")
    found = admin.ask(
        _BY_KEY, graph=graph, computation=name, after=list(after) or None, rows_max=limit + 1, bytes_max=BYTES_MAX
    )
    page = cut(found, limit)
    left: list[Row] = [
        {name: row[name] for name in row if name not in ("gone", "place")} for row in page.rows if not row["gone"]
    ]
    return RowPage(left, page.next)


def _is_bigint(text: str) -> bool:
    return _BIGINT.fullmatch(text) is not None and -(2**63) <= int(text) < 2**63


def _intervals(admin: Admin, graph: str | None, computation: str) -> list[int]:
    places = [row for row in admin.ask(COMPUTATIONS) if graph is None or row["graph"] == graph]
    named = [row for row in places if computation in (row["computation"], f"{row['graph']}.{row['computation']}")]
    names = sorted({f"{row['graph']}.{row['computation']}" for row in named})
    if not names:
        there = ", ".join(sorted({row["computation"] for row in places})) or "none"
        raise UsageError(f"there is no computation {computation!r}", hint=f"there are: {there}")
    if len(names) > 1:
        raise UsageError(f"several graphs have a computation {computation!r}", hint=f"name one: {', '.join(names)}")
    return [row["interval_id"] for row in named]


def _spellings(key: str) -> Sequence[str]:
    """Return the JSON texts under which a key may be stored."""
    found = {json.dumps(key, ensure_ascii=False)}
    try:
        found.add(json.dumps(json.loads(key), ensure_ascii=False, separators=(",", ":")))
    except (ValueError, RecursionError):  # no JSON, too many digits of a number, or too deep
        pass
    return [text for text in sorted(found) if is_text(text)]
