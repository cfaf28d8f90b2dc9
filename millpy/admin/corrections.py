"""Correct rows of finished windows by hand, and list all corrections."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

import msgspec

from millpy.admin.queries import Admin, Row

_ENCODE = msgspec.json.Encoder(decimal_format="number").encode
_LIST = """
    SELECT *, CAST(old_row AS text) AS old_text, CAST(new_row AS text) AS new_text FROM millpy.corrections
     WHERE (CAST(:graph AS text) IS NULL OR graph = :graph) AND (:table = '' OR table_name = :table)
     ORDER BY correction_id DESC LIMIT :rows"""
_CORRECT = """
    SELECT CAST(millpy.correct(:table, CAST(:window AS jsonb), CAST(:values AS jsonb), :why, :only_table) AS text)
        AS new_row"""

_WINDOWS = """
    SELECT key, (extract(epoch FROM window_start) * 1000000)::bigint AS window_start,
           (extract(epoch FROM window_end) * 1000000)::bigint AS window_end
      FROM millpy.corrected_windows WHERE graph = :graph AND table_name = :table"""
Window = tuple[str, ...]
"""The keys of a window as text, as SQL casts them, then its start and end in µs."""


def corrected_windows(admin: Admin, graph: str, table: str) -> set[Window]:
    """Return the windows of a table whose rows operators have corrected."""
    found = set()
    for row in admin.ask(_WINDOWS, graph=graph, table=table):
        key = json.loads(row["key"])
        keys = key if isinstance(key, list) else [key]
        texts = (part if isinstance(part, str) else json.dumps(part) for part in keys)
        found.add((*texts, str(row["window_start"]), str(row["window_end"])))
    return found


def without_corrected(
    rows: Sequence[tuple[str, Sequence[Any]]], corrected: Set[Window]
) -> list[tuple[str, Sequence[Any]]]:
    """Return the rows of a repair (kind, and columns as text) whose windows nobody has corrected."""
    widths = {len(window) for window in corrected}

    def is_corrected(values: Sequence[Any]) -> bool:
        texts = list(map(str, values))
        forms = (texts, list(map(_base64_of, texts)))
        return any(tuple(form[:width]) in corrected for width in widths for form in forms)

    return [(kind, values) for kind, values in rows if not is_corrected(values)]


def _base64_of(text: str) -> str:
    """Return bytes as a key has them, from the text that PostgreSQL reads; any other text as it is."""
    try:
        return b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode() if text.startswith("\\x") else text
    except ValueError:
        return text


def corrections(admin: Admin, graph: str | None, table: str, limit: int) -> list[Row]:
    """Return the newest `limit` corrections, oldest first; of every graph if `graph` is None, of every table if ""."""
    found = [dict(row) for row in reversed(admin.ask(_LIST, graph=graph, table=table, rows=limit))]
    for row in found:
        row |= {"old_row": _exact(row.pop("old_text")), "new_row": _exact(row.pop("new_text"))}
    return list(found)


def correct(
    admin: Admin, table: str, window: Mapping[str, Any], values: Mapping[str, Any], why: str, *, only_table: bool
) -> dict[str, Any]:
    """Change values of the row of a finished window; return the new row.

    Args:
        admin: the database; its role may write the table.
        table: the result table with its schema.
        window: the columns that name the window: keys, window_start, and window_end if several start together.
        values: the new values by column.
        why: the reason, which `millpy.corrections` shows.
        only_table: whether to change the table although other results are computed from it.
    """
    (done,) = admin.change(
        _CORRECT,
        table=table,
        window=_ENCODE(dict(window)).decode(),
        values=_ENCODE(dict(values)).decode(),
        why=why,
        only_table=only_table,
    )
    found: dict[str, Any] = _exact(done["new_row"])
    return found


def _exact(row: str | None) -> Any:
    """Read a row whose numbers keep all their digits."""
    return None if row is None else json.loads(row, parse_float=Decimal)
