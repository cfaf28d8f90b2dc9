"""Result tables as several views show them: choose one, name a key, tell the states of windows apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from millpy.admin.json_output import json_safe
from millpy.admin.queries import Admin, Row
from millpy.admin.results import DeployedTable
from millpy.api.answers import check_graph, databases_of
from millpy.api.authentication import Caller
from millpy.api.windows import readable_tables
from millpy.errors import UsageError

NUMBERS = ("double precision", "numeric", "decimal", "bigint")
STATES: Mapping[str, str] = {
    "open": "open",
    "changeable": "may change",
    "amended": "amended by late records",
    "final": "final",
}
"""The states of a row, in the order of its life."""


async def tables_of(request: Request, caller: Caller, graph: str) -> list[DeployedTable]:
    """Return the result tables of a graph that a user may read.

    Raises:
        ProblemError: the graph is not deployed.
    """
    role = caller.principal.database_role

    def find(admin: Admin) -> list[DeployedTable]:
        found = readable_tables(admin, graph, role)
        if not found:
            check_graph(admin, graph)
        return found

    return await databases_of(request).reading.share(("tables", graph, role), find, None)


def state_of(row: Row) -> str:
    """Return a state of STATES."""
    if row.get("pane_timing") in ("open", "early"):
        return "open"
    if row.get("late_count"):
        return "amended"
    return "final" if row["is_final"] else "changeable"


def numbers_of(table: DeployedTable) -> list[str]:
    """Return the columns that a chart can show, measured values before counts."""
    found = [(NUMBERS.index(kind), name) for name, kind in table.values.items() if kind in NUMBERS]
    return [name for _, name in sorted(found, key=lambda pair: pair[0])]


def key_parts(row: Row, table: DeployedTable) -> list[str]:
    """Return `COLUMN=VALUE` for each key of a row, as the address of a view has them."""
    return [f"{name}={_text(row[name])}" for name in table.keys]


def key_text(row: Row, table: DeployedTable) -> str:
    """Return the key of a row as the engine names it: text for one field, and a list for several."""
    parts = [json_safe(row[name]) for name in table.keys]
    return as_key(parts[0] if len(parts) == 1 else parts)


def element_id(*parts: object) -> str:
    """Return the id of an element for a row, whatever characters its key has."""
    return f"row-{hashlib.sha256(as_key([str(part) for part in parts]).encode(errors='replace')).hexdigest()[:16]}"


def as_key(value: Any) -> str:
    """Return a key as JSON without spaces, so that two spellings can be compared."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def respelled(key: str) -> str:
    """Return a key of the engine in the spelling of `as_key`."""
    return as_key(parsed(key))


def parsed(key: str) -> Any:
    """Return the value of a key; a text that is not JSON, or that PostgreSQL cannot have, is a text."""
    try:
        found = json.loads(key)
        json.dumps(found, ensure_ascii=False).encode()  # JSON can escape halves of surrogate pairs
        return found
    except (ValueError, RecursionError):
        return key


def values_of_key(key: str, table: DeployedTable) -> dict[str, str] | None:
    """Return column -> value of a key of the engine; None if the table has other keys."""
    value = parsed(key)
    parts: Sequence[Any] = value if isinstance(value, list) and len(table.keys) > 1 else [value]
    if not table.keys or len(parts) != len(table.keys):
        return None
    return {name: _text(part) for name, part in zip(table.keys, parts, strict=True)}


def moment(text: str, name: str) -> str:
    """Return a time of a form as RFC 3339 in UTC; a time without a zone is one in UTC. Empty text stays empty.

    Raises:
        UsageError: the text is no time.
    """
    if not text:
        return ""
    try:
        found = datetime.fromisoformat(text)
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{name}: {text[:100]!r} is no time", hint="for example 2026-11-20T08:00:00Z") from None
    return found.isoformat().removesuffix("+00:00") + "Z"


def respelled_time(value: object) -> str:
    """Return a time of the database in the spelling of `moment`; infinite ones as they are."""
    text = str(json_safe(value))
    try:
        return moment(text, "")
    except UsageError:
        return text


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"\\x{bytes(value).hex()}"
    if isinstance(value, dict | list):
        return json.dumps(value)
    return str(json_safe(value))
