"""`millpy deploy`: what a graph's file would change in the deployed graph, in words; then changes it, or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import typer

from millpy.commands import tables
from millpy.commands.common import DatabaseOption, JsonOption, print_json, settings_of, worded
from millpy.errors import GraphError
from millpy.model.deployment import GraphSpec, Upgrade
from millpy.model.versions import NEW_GENERATION, Change, only
from millpy.progress import working
from millpy.store.postgres.store import PostgresStore

WAY_BACK = "it lacks what was added since: bring the file up to date; or take that away: millpy deploy FILE --back"
MARKS = {"addition": "+", "setting": "~", "state": "^", "meaning": "!", "back": "-"}


@worded
def deploy(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines a Graph.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Migrate state by what the graph's upgrade() says.")
    ] = False,
    back: Annotated[
        bool, typer.Option("--back", help="Take away what was added since this file, with what that has stored.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy a graph, or what has changed in it; a change of meaning is refused.

    Exit status: 0 deployed, or nothing to do, or (--dry-run) it could be deployed; 1 try again; 2 refused.
    """
    from millpy.graph_file import load_graph  # the engine is not loaded for --help
    from millpy.launch import database as connected

    loaded = load_graph(graph)
    upgrades = loaded.upgrades if upgrade else {}
    with connected(settings_of(database), graph, create=not dry_run) as url, working(f"deploying graph {loaded.name}"):
        asyncio.run(_deploy(url, loaded.spec(), upgrades, back=back, dry_run=dry_run, as_json=as_json))


async def _deploy(
    url: str, spec: GraphSpec, upgrades: Mapping[str, Upgrade], *, back: bool, dry_run: bool, as_json: bool
) -> None:
    async with PostgresStore(url) as store:
        found = await store.compare(spec, upgrades=upgrades, back=back)
        version, changes = found if found is not None else (None, ())
        refused = refusals(changes, upgrades)
        deployed = version
        notes: Sequence[str] = ()
        if not (dry_run or refused) and (version is None or changes):
            deployment = await store.deploy(spec, on_purpose=True, upgrades=upgrades, back=back)
            deployed = deployment.version
            notes = deployment.changes if version is None else ()
        lacks = bool(refused) and await _only_lacks(store, spec, upgrades)
    _show(spec, version, deployed, changes, notes, refused=bool(refused), dry_run=dry_run, as_json=as_json)
    if refused:
        raise GraphError(
            f"graph {spec.name!r} would not mean the same: refused changes: {len(refused)}",
            hint=WAY_BACK if lacks else _hint(refused),
        )


async def _only_lacks(store: PostgresStore, spec: GraphSpec, upgrades: Mapping[str, Upgrade]) -> bool:
    """Whether the file is the deployed graph without something that was added."""
    try:
        return await store.compare(spec, upgrades=upgrades, back=True) is not None
    except GraphError:
        return False


def refusals(changes: Sequence[Change], upgrades: Collection[str]) -> list[Change]:
    """Those that do not go in."""
    states = [change for change in only("state", changes) if change.computation not in upgrades]
    return [*only("meaning", changes), *states]


def _hint(refused: Sequence[Change]) -> str:
    if all(change.kind == "state" for change in refused):
        return "give a function for the state to graph.upgrade(…), and deploy with --upgrade"
    return NEW_GENERATION


def _show(
    spec: GraphSpec,
    version: int | None,
    deployed: int | None,
    changes: Sequence[Change],
    notes: Sequence[str],
    *,
    refused: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    if as_json:
        answer: dict[str, Any] = {
            "graph": spec.name,
            "generation": spec.generation,
            "version": version,
            "deployed": deployed,
            "dry_run": dry_run,
            "refused": refused,
            "changes": [{"kind": c.kind, "subject": c.subject, "words": c.words} for c in changes],
            "notes": list(notes),
        }
        print_json(answer)
        return
    if version is None:
        steps = f"{len(spec.computations)} computations and {len(spec.tables)} result tables"
        which = f"generation {spec.generation} of graph" if spec.generation > 1 else "graph"
        tables.say(f"{which} {spec.name} is new: {steps}")
    elif not changes:
        tables.say(f"graph {spec.name} is deployed like this: version {version}")
    else:
        tables.say(
            f"graph {spec.name}, version {version}, would change" if deployed == version else f"graph {spec.name}:"
        )
        for change in changes:
            tables.say(f"  {MARKS[change.kind]} {change}")
    if deployed != version:
        tables.say(f"version {deployed} is deployed")
        for note in notes:
            tables.say(f"  {note}")
        if notes:
            tables.say(f"when it has caught up: millpy switch {spec.name} {spec.generation}")
        if version is not None:
            tables.say(f"workers of version {version} stop at their next commit: start them with the new file")
    elif dry_run and (version is None or changes):
        tables.say("nothing was changed (--dry-run)")
