"""`millpy deploy`: list the changes that a graph's file makes to the deployed graph, then deploy or refuse them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import typer

from millpy.cli import text_table as tables
from millpy.cli.copied_results import check_generation, copy_all, described, show_plan
from millpy.cli.options import DatabaseOption, JsonOption, handle_errors, print_json, settings_of
from millpy.errors import GraphError, MillError, TransientError, UsageError
from millpy.graph import Graph
from millpy.model.deployment import GraphSpec, Upgrade
from millpy.model.graph_changes import GraphChange, of_kind
from millpy.model.versions import MIGRATE, NEW_GENERATION, cannot_deploy
from millpy.observability.status_line import working
from millpy.process.assembly import prepare_sinks
from millpy.store.postgres.store import PostgresStore

WAY_BACK = "the file lacks parts of the deployed graph: add them, or remove them with millpy deploy FILE --back"
MARKS = {"addition": "+", "setting": "~", "state": "^", "meaning": "!", "back": "-"}


@handle_errors
def deploy(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines a Graph.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Try it, show the changes, and roll it back.")] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Migrate state with the functions given to graph.upgrade().")
    ] = False,
    back: Annotated[
        bool, typer.Option("--back", help="Remove the parts that this file lacks, with their stored data.")
    ] = False,
    reset: Annotated[
        list[str] | None,
        typer.Option(
            "--reset",
            metavar="NAME",
            help="Delete all that is stored of this computation, which begins anew; repeatable.",
        ),
    ] = None,
    copy_results: Annotated[
        bool,
        typer.Option("--copy-results", help="A new generation gets the rows of finished windows of the current one."),
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy a graph, or its changes; refuse a change that does not fit the stored data.

    Exit status: 0 deployed, nothing to deploy, or (--dry-run) deployable; 1 failed, try again; 2 refused.
    """
    from millpy.graph.loader import load_graph  # imported here: --help does not need the engine
    from millpy.process.launcher import database as connected

    loaded = load_graph(graph)
    upgrades = loaded.upgrades if upgrade else {}
    if reset and (upgrade or back):
        raise UsageError("--reset takes neither --upgrade nor --back", hint="deploy the changes first")
    if copy_results:
        check_generation(loaded.spec())
        if reset or upgrade or back:
            raise UsageError("--copy-results takes no --reset, --upgrade or --back", hint="do it afterwards")
    with connected(settings_of(database), graph, create=not dry_run) as url, working(f"deploying graph {loaded.name}"):
        if reset:
            asyncio.run(_reset(url, loaded, list(dict.fromkeys(reset)), dry_run=dry_run, as_json=as_json))
        else:
            if not dry_run:
                asyncio.run(prepare_sinks(loaded))
            how = {"back": back, "copy_results": copy_results, "dry_run": dry_run, "as_json": as_json}
            asyncio.run(_deploy(url, loaded.spec(), upgrades, **how))


async def _deploy(
    url: str,
    spec: GraphSpec,
    upgrades: Mapping[str, Upgrade],
    *,
    back: bool,
    copy_results: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    async with PostgresStore(url) as store:
        found = await store.compare(spec, upgrades=upgrades, back=back)
        version, changes = found if found is not None else (None, ())
        refused = refusals(changes, upgrades)
        deployed = version
        notes: Sequence[str] = ()
        copies = await store.plan_copies(spec) if copy_results else ()
        deployment = failure = None
        if not refused and (version is None or changes or copy_results):
            how: dict[str, Any] = {"upgrades": upgrades, "back": back, "copy_results": copy_results}
            if dry_run:
                failure = await _tried(store, spec, how)
            else:
                deployment = await store.deploy(spec, on_purpose=True, **how)
                deployed = deployment.version
                notes = deployment.changes if version is None else ()
        lacks = bool(refused) and await _only_lacks(store, spec, upgrades)
        more: dict[str, Any] = {"copies": described(copies)} if copy_results else {}
        if deployment is not None and copy_results and as_json:
            more["copied"] = await copy_all(store, spec, deployment.graph_id, say=False)
        is_refused = bool(refused) or (failure is not None and not isinstance(failure, TransientError))
        how = {"refused": is_refused, "dry_run": dry_run, "as_json": as_json}
        _show(spec, version, deployed, changes, notes, more, **how)
        if failure is not None:
            raise failure
        if copy_results and not as_json and not refused:
            if deployment is None:
                show_plan(copies)
            else:
                copied = await copy_all(store, spec, deployment.graph_id, say=True)
                tables.say(f"copied {sum(copied.values())} rows; all rows of finished windows are there")
    if refused:
        raise GraphError(
            cannot_deploy(spec.name, refused),
            hint=WAY_BACK if lacks else _hint(refused),
        )


async def _tried(store: PostgresStore, spec: GraphSpec, how: Mapping[str, Any]) -> MillError | None:
    """Deploy a graph and roll it back; return why it could not be deployed."""
    try:
        await store.deploy(spec, on_purpose=True, dry_run=True, **how)
    except MillError as error:
        return error
    return None


async def _reset(url: str, graph: Graph, names: Sequence[str], *, dry_run: bool, as_json: bool) -> None:
    """Let computations begin anew, and say what is deleted; with `dry_run`, roll it back."""
    spec = graph.spec()
    async with PostgresStore(url) as store:
        deployment = await store.reset(spec, names, dry_run=dry_run)
    dropped = [table.name for table in spec.tables if table.computation in names]
    if as_json:
        answer = {"graph": spec.name, "generation": spec.generation, "reset": list(names), "tables": dropped}
        print_json({**answer, "deployed": None if dry_run else deployment.version, "dry_run": dry_run})
        return
    tables.say(f"graph {spec.name}: {'would reset' if dry_run else 'reset'} {', '.join(names)}")
    tables.say("  their state, positions, dead letters and late records are deleted")
    if sinks := [step.name for step, _ in graph.sinks() if step.name in names]:
        tables.say(f"  the messages of {', '.join(sinks)} that are not delivered are deleted")
    begin = {"a source as if it were new" if c.kind == "injector" else "a computation with new data"
             for c in spec.computations if c.name in names}  # fmt: skip
    tables.say(f"  they begin anew: {', '.join(sorted(begin))}")
    if dropped:
        tables.say(f"  the rows of {', '.join(dropped)} are deleted")
    tables.say("nothing was changed (--dry-run)" if dry_run else f"version {deployment.version} is deployed")


async def _only_lacks(store: PostgresStore, spec: GraphSpec, upgrades: Mapping[str, Upgrade]) -> bool:
    """Tell whether the file is the deployed graph without some of its additions."""
    try:
        return await store.compare(spec, upgrades=upgrades, back=True) is not None
    except GraphError:
        return False


def refusals(changes: Sequence[GraphChange], upgrades: Collection[str]) -> list[GraphChange]:
    """Return the changes that cannot be deployed."""
    states = [change for change in of_kind("state", changes) if change.computation not in upgrades]
    return [*of_kind("meaning", changes), *states]


def _hint(refused: Sequence[GraphChange]) -> str:
    if all(change.kind == "state" for change in refused):
        return MIGRATE
    return NEW_GENERATION


def _show(
    spec: GraphSpec,
    version: int | None,
    deployed: int | None,
    changes: Sequence[GraphChange],
    notes: Sequence[str],
    more: Mapping[str, Any],
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
            "changes": [{"kind": c.kind, "subject": c.subject, "difference": c.difference} for c in changes],
            "notes": list(notes),
            **more,
        }
        print_json(answer)
        return
    if version is None:
        steps = f"{_counted(len(spec.computations), 'computation')} and {_counted(len(spec.tables), 'result table')}"
        which = f"generation {spec.generation} of graph" if spec.generation > 1 else "graph"
        tables.say(f"{which} {spec.name} is new: {steps}")
    elif not changes:
        tables.say(f"graph {spec.name} is deployed already: version {version}")
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
            tables.say(f"workers of version {version} stop at their next commit: restart them with this file")
            tables.say("(a service and `millpy run --workers` with more than one do so by themselves)")
    elif dry_run and (version is None or changes):
        tables.say("nothing was changed (--dry-run)")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
