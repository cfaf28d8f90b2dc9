"""Rows of finished windows that a new generation's result tables get from the current generation's, as they are.

A table is copied if the current generation has one of the same name, with the same key. Each column that both have must
have the same type; a column that only the new one has must allow NULL. The windows may differ: a row is known by its
key, start and end, and the new generation gives no pane to windows that end by the copied ones (`closed_end`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from millpy.errors import GraphError
from millpy.model.horizons import by_site
from millpy.model.time import INSTANT_MIN, Instant, describe

REFUSED_HINT = "give the new table another name, or deploy without --copy-results and create a view over both tables"
_WINDOWED = "windowed"


@dataclass(frozen=True, slots=True)
class ResultCopy:
    """What a result table gets from the table of the same name.

    Attributes:
        columns: the columns that both have.
        empty: the columns that only the new one has: NULL.
        left_out: the columns that only the current one has.
        closed_end: the windows that end by it are closed, and copied; INSTANT_MIN for none.
        retention_us: rows that are older than the copied ones by more are left out; None copies all.
    """

    table: str
    computation: str
    columns: tuple[str, ...]
    empty: tuple[str, ...]
    left_out: tuple[str, ...]
    closed_end: Instant = INSTANT_MIN
    retention_us: int | None = None

    def __str__(self) -> str:
        if self.closed_end == INSTANT_MIN:
            return f"{self.table} has no finished windows to copy"
        words = f"{self.table} gets the rows of windows that end by {describe(self.closed_end)}"
        if self.retention_us is not None:
            words += ", as far back as its retention"
        for names, what in ((self.empty, "NULL in"), (self.left_out, "without")):
            if names:
                words += f"; {what} {', '.join(names)}"
        return words


def copies_between(current: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[ResultCopy]:
    """Return what the windowed tables of a described graph get from those of the current generation.

    Raises:
        GraphError: they have no such table in common, or the columns of one do not fit.
    """
    copies, problems = [], []
    for name, table in wanted["tables"].items():
        before = current["tables"].get(name)
        if before is None or {before["kind"], table["kind"]} != {_WINDOWED}:
            continue
        computation = wanted["streams"][table["stream"]]["producer"]
        found = list(_problems(before, table))
        if by_site(computation, wanted):
            found.append("its sites have a watermark each, so that nothing tells which windows are closed")
        if found:
            problems.append(f"{name}: {', '.join(found)}")
        was, now = ([column for column, *_ in found["columns"]] for found in (before, table))
        copies.append(
            ResultCopy(
                name,
                computation,
                columns=tuple(column for column in now if column in was),
                empty=tuple(column for column in now if column not in was),
                left_out=tuple(column for column in was if column not in now),
                retention_us=table.get("retention"),
            )
        )
    if problems:
        raise GraphError(f"rows cannot be copied to {'; '.join(problems)}", hint=REFUSED_HINT)
    if not copies:
        raise GraphError("the generations have no windowed result table in common, so that no rows can be copied")
    return copies


def _problems(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    keys_before, keys_after = _key(before), _key(after)
    if keys_before != keys_after:
        was, now = (
            ", ".join(f"{name} {type_}" for name, type_, _ in keys) or "none" for keys in (keys_before, keys_after)
        )
        yield f"its key changed from {was} to {now}"
        return
    known = {name: (type_, nullable) for name, type_, nullable in before["columns"]}
    for name, type_, nullable in after["columns"]:
        if name not in known:
            if not nullable:
                yield f"column {name!r} is new and cannot be NULL"
        elif known[name][0] != type_:
            yield f"column {name!r} changed from {known[name][0]} to {type_}"
        elif known[name][1] and not nullable:
            yield f"column {name!r} could be NULL and cannot be any more"


def _key(table: Mapping[str, Any]) -> list[Any]:
    """Return the columns of the key, which come before the bounds of the window."""
    names = [name for name, *_ in table["columns"]]
    return list(table["columns"][: names.index("window_start")])
