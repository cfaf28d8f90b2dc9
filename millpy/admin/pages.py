"""Read views in pages, each by one statement: the rows behind a cursor, bounded in number and bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpy.admin.queries import Admin, Row
from millpy.errors import UsageError

_UNFIT = re.compile("[\0\ud800-\udfff]")
BYTES_MAX = 8_000_000
"""Bytes of the rows of a page, as text. A page has at least one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedView:
    """A view whose rows are read in the order of some columns, which identify a row.

    Attributes:
        source: the view's name, or a query in parentheses.
        columns: what is selected.
        order: column -> SQL type. Missing texts come first, as empty ones do.
        descending: whether the greatest come first.
        equal: the columns, all of type text, by which rows can be chosen.
        time: the column whose time can be bounded.
        given: parameter -> default of those that the query in `source` has.
    """

    source: str
    columns: Sequence[str] = ("*",)
    order: Mapping[str, str]
    descending: bool = False
    equal: Sequence[str] = ()
    time: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    def statement(self, *, behind: bool, wanted: Sequence[str], start: bool, end: bool) -> str:
        """Return the statement of a page.

        Args:
            behind: whether there is a cursor.
            wanted: the columns of `equal` by which rows are chosen.
            start: whether the time has a lower bound.
            end: whether it has an upper bound.
        """
        direction = "DESC" if self.descending else "ASC"
        keys = [_key(name, kind) for name, kind in self.order.items()]
        ordered = ", ".join(f"{key} {direction}" for key in keys)
        conditions = [f"CAST({name} AS text) = :is_{name}" for name in wanted]
        if behind:
            casts = ", ".join(f"CAST(:after_{place} AS {kind})" for place, kind in enumerate(self.order.values()))
            conditions.append(f"ROW({', '.join(keys)}) {'<' if self.descending else '>'} ROW({casts})")
        conditions += [f"{self.time} >= CAST(:start AS timestamptz)"] if start else []
        conditions += [f"{self.time} < CAST(:end AS timestamptz)"] if end else []
        cursor = ", ".join(f"CAST({key} AS text)" for key in keys)
        parts = (
            "SELECT * FROM (SELECT r.*, row_number() OVER w AS page_row, count(*) OVER () AS page_found,",
            "sum(octet_length(CAST(r AS text))) OVER w AS page_bytes FROM (",
            "SELECT", ", ".join(self.columns), f", jsonb_build_array({cursor}) AS page_cursor FROM", self.source,
            "AS v WHERE", " AND ".join(conditions) or "true", "ORDER BY", ordered, "LIMIT :rows_max) AS r",
            "WINDOW w AS (ORDER BY", ordered, ")) AS p",
            "WHERE page_row = 1 OR page_bytes <= :bytes_max ORDER BY page_row",
        )  # fmt: skip
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class RowPage:
    """Rows, and the cursor behind the last of them; None when there are no more."""

    rows: list[Row]
    next: list[str] | None


def page_of(
    admin: Admin,
    view: PagedView,
    *,
    wanted: Mapping[str, str],
    after: Sequence[str] = (),
    limit: int,
    start: str = "",
    end: str = "",
    **given: Any,
) -> RowPage:
    """Return a page of a view.

    Args:
        admin: the database.
        view: the view.
        wanted: column of `view.equal` -> value.
        after: the cursor of the page before; empty for the first page.
        limit: the maximum number of rows.
        start: only rows from this time on, as text; empty for all.
        end: only rows before this time, as text; empty for all.
        given: the parameters of the query in `view.source`.

    Raises:
        UsageError: the cursor belongs to another view.
    """
    if after and len(after) != len(view.order):
        raise UsageError("the cursor belongs to another list", hint="begin without a cursor")
    text = view.statement(behind=bool(after), wanted=list(wanted), start=bool(start), end=bool(end))
    parameters: dict[str, Any] = {**view.given, **given, "rows_max": limit + 1, "bytes_max": BYTES_MAX}
    parameters |= {f"is_{name}": value for name, value in wanted.items()}
    parameters |= {f"after_{place}": value for place, value in enumerate(after)}
    parameters |= {name: value for name, value in (("start", start), ("end", end)) if value}
    found = admin.ask(text, **parameters)
    return cut(found, limit)


def cut(found: Sequence[Row], limit: int) -> RowPage:
    """Return a page from the rows of a statement, which had one more row as its limit.

    Each row has `page_cursor`, and `page_found` with the number of rows before those beyond the bytes were cut off.
    """
    shown = found[:limit]
    more = bool(shown) and shown[0]["page_found"] > len(shown)
    cursor = shown[-1]["page_cursor"] if shown else None
    rows: list[Row] = [{name: value for name, value in row.items() if not name.startswith("page_")} for row in shown]
    return RowPage(rows, list(cursor) if more and cursor is not None else None)


def encoded(cursor: Sequence[str] | None) -> str | None:
    """Return a cursor as text for a URL."""
    return None if cursor is None else json.dumps(list(cursor), ensure_ascii=False, separators=(",", ":"))


def is_text(text: str) -> bool:
    """Tell whether PostgreSQL can have a text: one without NUL and halves of surrogate pairs, which JSON can escape."""
    return _UNFIT.search(text) is None


def decoded(text: str) -> list[str]:
    """Read a cursor.

    Raises:
        UsageError: the text is no cursor.
    """
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(part, str) and is_text(part) for part in found):
        raise UsageError("the cursor cannot be read", hint="use `next` of the page before, or begin without a cursor")
    return found


def _key(name: str, kind: str) -> str:
    return f"coalesce({name}, '') COLLATE \"C\"" if kind == "text" else name
