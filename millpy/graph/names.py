"""Names of steps, streams, tables and columns: plain SQL identifiers, minus the reserved ones."""

from __future__ import annotations

import re

from millpy.errors import GraphError

IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")
NAME_MAX = 63
NAME_MAX_OF = {"graph": 50, "table": 50, "column": 50}
"""These are names in PostgreSQL, which has at most 63 bytes for one, also for those that millpy derives from them."""
RESERVED_SCHEMAS = {"mill", "millpy", "public", "information_schema"}
RESERVED_COLUMNS = {
    "records": {"event_time", "ordinal", "interval_id", "bundle", "emitted_at"},
    "windowed": {"window_start", "window_end", "pane_index", "pane_timing", "late_count"}
    | {"pane_on_time_index", "pane_last"}
    | {"interval_id", "bundle", "emitted_at", "is_final"},
}


def checked_name(name: str, what: str) -> str:
    """Return `name` if it is a plain lower-case SQL identifier.

    Raises:
        GraphError: it is not.
    """
    longest = NAME_MAX_OF.get(what, NAME_MAX)
    if not isinstance(name, str) or not IDENTIFIER.fullmatch(name) or len(name) > longest:
        raise GraphError(
            f"{what} {name!r} is not a plain name",
            hint=f"use lower-case letters, digits and underscores, at most {longest}",
        )
    return name
