"""Taking back: restore a deployed graph to its state before an addition, and drop the addition's stored data.

Only additions can be taken back, because they do not change the meaning of anything that stays. Workers that still have
the newer file would deploy the addition again by themselves. So the description keeps what was taken back until an
operator deploys it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millpy.errors import GraphError, GraphVersionError
from millpy.model.graph_changes import (
    SOURCE_PART,
    Description,
    GraphChange,
    changes_between,
    changes_text,
    growing_by_site,
    named_parts,
    of_kind,
)
from millpy.model.identity import canonical_json
from millpy.model.versions import merged

TAKEN_BACK = "taken_back"
"""Key in a stored description: the additions that workers do not deploy."""


def changes_back(
    stored: Description, wanted: Description, changes: Sequence[GraphChange], upgrades: Collection[str] = ()
) -> list[GraphChange] | None:
    """Return the changes with kind "back" where they remove an addition; None if the file differs in other ways.

    Args:
        stored: description of the deployed graph.
        wanted: description of the earlier graph.
        changes: changes from the stored to the wanted graph.
        upgrades: computations whose state a function migrates.
    """
    if _lost_sources(changes) or any(growing_by_site(stored, wanted)):
        return None
    since = _changes_since(stored, wanted)
    if not all(c.kind in ("addition", "setting") or (c.kind == "state" and c.computation in upgrades) for c in since):
        return None
    lost = [c for c in changes if c.kind == "meaning" or (c.kind == "state" and c.computation not in upgrades)]
    return [replace(change, kind="back") if change in lost else change for change in changes]


def cannot_take_back(name: str, version: int, stored: Description, wanted: Description) -> GraphError:
    """Return the error for a file from which the deployed graph differs by more than additions."""
    found = [change for change in _changes_since(stored, wanted) if change.kind in ("meaning", "state")]
    found += [*growing_by_site(stored, wanted), *_lost_sources(changes_between(stored, wanted))]
    return GraphError(
        f"graph {name!r} (version {version}) differs from this file by more than additions: {changes_text(found)}",
        hint="--back needs a file that lacks only the last additions and is otherwise the same",
    )


def refuse_taken_back(name: str, version: int, stored: Description, changes: Sequence[GraphChange]) -> None:
    """Raise GraphVersionError if an operator has taken one of these additions back."""
    again = [change for change in of_kind("addition", changes) if list(change.addition) in stored.get(TAKEN_BACK, ())]
    if again:
        raise GraphVersionError(
            f"additions to graph {name!r} have been taken back (version {version}): {changes_text(again)}",
            hint="run `millpy deploy` with this file to add them again, or run the deployed file",
        )


def description_after(stored: Description, wanted: Description, changes: Sequence[GraphChange]) -> dict[str, Any]:
    """Return the description to store after the changes; it lists all additions that are taken back by then."""
    description = merged(stored, wanted)
    back = list(stored.get(TAKEN_BACK, ()))
    if of_kind("back", changes):
        back += [list(change.addition) for change in of_kind("addition", _changes_since(stored, wanted))]
    again = [list(change.addition) for change in changes]
    kept = {canonical_json(addition): addition for addition in back if addition not in again}
    return {**description, TAKEN_BACK: [kept[text] for text in sorted(kept)]} if kept else description


def lost_names(before: Mapping[str, Any] | Sequence[str], after: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Return the names in `before` that are not in `after`, in order."""
    return [name for name in before if name not in after]


def field_names(stream: Description) -> list[str]:
    """Return the fields of a described stream."""
    return [name for name, _ in stream["fields"]]


def column_names(table: Description) -> list[str]:
    """Return the columns of a described result table."""
    return [name for name, *_ in table["columns"]]


def cell_names(computation: Description) -> list[str]:
    """Return the cells of a described computation."""
    return list(named_parts(computation, "cells"))


def aggregate_names(computation: Description) -> list[str]:
    """Return the aggregates of a described computation."""
    return list(named_parts(computation, "aggregates"))


def _lost_sources(changes: Sequence[GraphChange]) -> list[GraphChange]:
    """Return the changes that remove what a source or step reads: positions there cannot be taken back."""
    return [change for change in changes if change.addition[:1] == (SOURCE_PART,)]


def _changes_since(stored: Description, wanted: Description) -> list[GraphChange]:
    """Return the changes that lead from `wanted` to `stored`. Source partitions stay, so they are no changes."""
    return changes_between(merged(stored, wanted), stored)
