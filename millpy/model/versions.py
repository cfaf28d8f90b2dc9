"""Versions: which differences between a graph and the deployed one may be deployed live. Others are refused.

`graph_changes.py` finds the differences and their kinds. An older version of the graph lacks the additions of the newer
one, and a missing part is a change of meaning. So the two versions never alternate on one state. Two settings could, so
a setting changes only when an operator deploys it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from millpy.errors import GraphError, GraphVersionError
from millpy.model.deployment import GraphSpec
from millpy.model.graph_changes import (
    Description,
    GraphChange,
    changes_between,
    changes_text,
    named_parts,
    new_partitions,
    of_kind,
)

NEW_GENERATION = "undo the change, or make it the next generation: Graph(…, generation=…) runs beside it until a switch"
MIGRATE = "pass a function to graph.upgrade(…) and run `millpy deploy --upgrade`, or make it a new generation"


def only_grows(stored: Description, wanted: Description, changes: Sequence[GraphChange]) -> bool:
    """Tell whether all changes are new source partitions, which a worker may add by itself."""
    return sum(map(len, new_partitions(stored, wanted).values())) == len(changes)


def merged(stored: Description, wanted: Description) -> dict[str, Any]:
    """Return the description of the graph after `wanted` is deployed; it keeps deployed source partitions.

    `grown` lists the aggregates that were added live; windows from before have no value for them.
    """
    added = new_partitions(stored, wanted)
    computations = {}
    for name, computation in wanted["computations"].items():
        before = stored["computations"].get(name, {})
        partitions = before.get("partitions", computation["partitions"])
        computations[name] = {**computation, "partitions": [*partitions, *added.get(name, ())]}
        own, known = named_parts(computation, "aggregates"), named_parts(before, "aggregates") if before else {}
        new = [name for name in own if before and name not in known]
        if grown := [*(name for name in before.get("grown", ()) if name in own), *new]:
            computations[name]["grown"] = grown
    return {**wanted, "computations": computations}


def refuse_changes(
    name: str,
    version: int,
    stored: Description,
    wanted: Description,
    *,
    on_purpose: bool,
    changes: Sequence[GraphChange],
    upgrades: Collection[str] = (),
) -> None:
    """Raise if the changes must not be deployed.

    Args:
        name: name of the graph.
        version: the deployed version.
        stored: description of the deployed graph.
        wanted: description of the graph to deploy.
        on_purpose: whether an operator deploys the changes, rather than a worker that starts.
        changes: changes from the stored to the wanted graph.
        upgrades: computations whose state a function migrates.

    Raises:
        GraphVersionError: the graph only lacks parts of the deployed one, or has other settings and nobody requested
            them: it is an older version, or a newer one that is not deployed yet.
        GraphError: a change of meaning or state.
    """
    meanings, settings = of_kind("meaning", changes), of_kind("setting", changes)
    states = [change for change in of_kind("state", changes) if change.computation not in upgrades]
    if version > 1 and not on_purpose and changes and not of_kind("addition", changes):
        since = changes_between(wanted, stored)
        added = of_kind("addition", since)
        if added and len([*added, *of_kind("setting", since)]) == len(since):
            raise GraphVersionError(
                f"deployed version {version} of graph {name!r} has more than this file: {changes_text(since)}",
                hint="update this file, or remove the additions: millpy deploy FILE --back",
            )
        if settings and len(of_kind("setting", since)) == len(since):
            meanings = []  # this file may be from before: some settings can be changed in one direction only
    if meanings:
        raise GraphError(f"{cannot_deploy(name, meanings)}: {changes_text(meanings)}", hint=NEW_GENERATION)
    if states:
        raise GraphError(f"{cannot_deploy(name, states)}: {changes_text(states)}", hint=MIGRATE)
    if settings and not on_purpose:
        # Another attempt succeeds once the file is updated or deployed.
        raise GraphVersionError(
            f"graph {name!r} has other settings than deployed version {version}: {changes_text(settings)}",
            hint="if this file is newer, run `millpy deploy`; if not, update it",
        )


def refuse_older(spec: GraphSpec, newest: int) -> None:
    """Raise GraphVersionError if a graph that is not deployed is an older generation: its state was dropped.

    Args:
        spec: a graph whose generation is not deployed.
        newest: the highest deployed generation; 0 if the graph has none.
    """
    if spec.generation < newest:
        raise GraphVersionError(
            f"generation {newest} of graph {spec.name!r} is deployed; generation {spec.generation} no longer is",
            hint=f"give a new generation a higher number: Graph({spec.name!r}, generation={newest + 1})",
        )


def cannot_deploy(name: str, refused: Sequence[GraphChange]) -> str:
    """Return the beginning of an error: the graph, and how many of its changes are refused."""
    many = "1 change does" if len(refused) == 1 else f"{len(refused)} changes do"
    return f"cannot deploy {name!r}: {many} not fit the stored data"
