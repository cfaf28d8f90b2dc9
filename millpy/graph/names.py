"""Names of steps, streams, tables and columns: plain SQL identifiers, and those that are taken."""

from __future__ import annotations

import re

from millpy.errors import GraphError

IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}")
RESERVED_SCHEMAS = {"mill", "millpy", "public", "information_schema"}
RESERVED_COLUMNS = {
    "records": {"event_time", "ordinal", "interval_id", "bundle", "emitted_at"},
    "windowed": {"window_start", "window_end", "pane_index", "pane_timing", "late_count"}
    | {"interval_id", "bundle", "emitted_at", "is_final"},
}


def checked_name(name: str, what: str) -> str:
    """A name that is a plain lower-case SQL identifier, or a GraphError that says so."""
    if not IDENTIFIER.fullmatch(name):
        raise GraphError(
            f"{what} {name!r} is not a plain name", hint="use lower-case letters, digits and underscores, at most 63"
        )
    return name
