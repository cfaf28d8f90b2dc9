"""Taking back: a deployed graph becomes again what it was before an addition, and what the addition has stored goes.

Only what came as an addition can be taken back: then nothing that stays has changed its meaning meanwhile. Workers that
still have the file would bring it in again by themselves, so what was taken back is kept in mind, by its words, until a
person deploys it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millpy.errors import GraphError, GraphVersionError
from millpy.model.versions import Change, Description, changes_between, merged, only, said

TAKEN_BACK = "taken_back"
"""In a stored description: additions, in words, that workers do not bring in."""


def ways_back(
    stored: Description, wanted: Description, changes: Sequence[Change], upgrades: Collection[str] = ()
) -> list[Change] | None:
    """The changes with those that take an addition back marked as such; None when there are others.

    Args:
        stored: description of the deployed graph.
        wanted: description of the graph as it was.
        changes: from the one to the other.
        upgrades: computations whose state will be migrated by a function.
    """
    since = _since(stored, wanted)
    if not all(c.kind in ("addition", "setting") or (c.kind == "state" and c.computation in upgrades) for c in since):
        return None
    lost = [c for c in changes if c.kind == "meaning" or (c.kind == "state" and c.computation not in upgrades)]
    return [replace(change, kind="back") if change in lost else change for change in changes]


def refuse_back(name: str, version: int, stored: Description, wanted: Description) -> GraphError:
    """Why the changes cannot be taken back."""
    found = [change for change in _since(stored, wanted) if change.kind in ("meaning", "state")]
    return GraphError(
        f"graph {name!r} (version {version}) was not made of this one by additions: {said(found)}",
        hint="--back takes a file that lacks what was added and is the same in the rest: the last addition goes first",
    )


def refuse_taken_back(name: str, version: int, stored: Description, changes: Sequence[Change]) -> None:
    """Raise GraphVersionError when a person has taken one of these additions back."""
    again = [change for change in only("addition", changes) if str(change) in stored.get(TAKEN_BACK, ())]
    if again:
        raise GraphVersionError(
            f"this has been taken back from graph {name!r} (version {version}): {said(again)}",
            hint="`millpy deploy` this file to bring it in again, or run the file that is deployed",
        )


def description_after(stored: Description, wanted: Description, changes: Sequence[Change]) -> dict[str, Any]:
    """The description of the deployed graph after its changes, with what has been taken back up to now."""
    description = merged(stored, wanted)
    back = set(stored.get(TAKEN_BACK, ()))
    if only("back", changes):
        back |= {str(change) for change in only("addition", _since(stored, wanted))}
    back -= {str(change) for change in changes}
    return {**description, TAKEN_BACK: sorted(back)} if back else description


def lost_names(before: Mapping[str, Any] | Sequence[str], after: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """What is in the one and not in the other, in its order."""
    return [name for name in before if name not in after]


def field_names(stream: Description) -> list[str]:
    """The fields of a described stream."""
    return [field.split(": ", 1)[0] for field in stream["schema"]]


def column_names(table: Description) -> list[str]:
    """The columns of a described result table."""
    return [column.split(" ", 1)[0] for column in table["columns"]]


def cell_names(computation: Description) -> list[str]:
    """The cells of a described computation."""
    return [name for name, _ in computation["meaning"].get("cells", ())]


def aggregate_names(computation: Description) -> list[str]:
    """The aggregates of a described computation."""
    return [name for name, _ in computation["meaning"].get("aggregates", ())]


def _since(stored: Description, wanted: Description) -> list[Change]:
    """What has come since the graph was like `wanted`, source partitions apart: those stay."""
    return changes_between(merged(stored, wanted), stored)
