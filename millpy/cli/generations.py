"""`millpy graphs`, `millpy switch` and `millpy drop`: list, switch and drop the generations of graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from millpy.admin.queries import Admin, Row
from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, JsonOption, handle_errors, print_json, settings_of, show
from millpy.observability.status_line import working

BEHIND_S_MAX = 60
"""Seconds of event time that a generation may be behind the current one at a switch, without --anyway."""
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Try it, show what it would do, and roll it back.")]


@handle_errors
def graphs(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show the deployed graphs, their generations and their versions."""

    def ask(admin: Admin, _: str | None) -> Mapping[str, list[Row]]:
        return {"graphs": admin.ask("SELECT * FROM millpy.graphs ORDER BY family, generation")}

    show(None, database, as_json, ask)


@handle_errors
def switch(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="The graph's name.")],
    generation: Annotated[int, typer.Argument(metavar="GENERATION", help="The generation to make current.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Switch even if it has not caught up.")] = False,
    rights: Annotated[
        Literal["current", "new"] | None,
        typer.Option(
            "--rights",
            help="Which rights to keep where they differ: those on the current tables, or those on the new ones.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make another generation of a graph current: it gets the graph's name and the schema of its result tables.

    Exit status: 0 switched, or current already; 1 failed, try again; 2 refused.
    """
    from millpy.process.launcher import database as connected  # imported here: --help does not need the engine
    from millpy.store.postgres.deployment.generations import SwitchResult
    from millpy.store.postgres.store import PostgresStore

    async def switched(url: str) -> SwitchResult | None:
        behind_us_max = None if anyway else BEHIND_S_MAX * 1_000_000
        async with PostgresStore(url) as store:
            return await store.switch(graph, generation, behind_us_max=behind_us_max, rights=rights, dry_run=dry_run)

    with connected(settings_of(database), None, create=False) as url, working(f"switching graph {graph}"):
        found = asyncio.run(switched(url))
    if as_json:
        answer: dict[str, Any] = {
            "graph": graph,
            "current": generation,
            "dry_run": dry_run,
            "switched": found is not None,
        }
        if found is not None:
            answer |= {"before": found.before.generation, "left": found.left}
        print_json(answer)
        return
    if found is None:
        tables.say(f"generation {generation} of graph {graph} is already the current one")
        return
    beside = f"{graph}_{found.before.generation}"
    done, are = ("would be", "would be") if dry_run else ("is", "are")
    tables.say(
        f"generation {generation} of graph {graph} {done} the current one; its result tables {are} in schema {graph}"
    )
    tables.say(f"generation {found.before.generation} {done} {beside}, with its result tables in schema {beside}:")
    for words in found.left or ("nothing of yours depends on them",):
        tables.say(f"  {words}")
    if not dry_run:
        tables.say(f"its workers keep running until you stop them; then: millpy drop {beside}")
        tables.say(f"to switch back: millpy switch {graph} {found.before.generation}")


@handle_errors
def drop(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="The name, as `millpy graphs` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop a graph, or one generation of it: state, positions, result tables, dead letters and late records.

    Exit status: 0 dropped; 1 not confirmed, or failed, try again; 2 refused.
    """
    from millpy.process.launcher import database as connected  # imported here: --help does not need the engine
    from millpy.store.postgres.deployment.generations import DropResult
    from millpy.store.postgres.store import PostgresStore

    async def dropped(url: str, *, dry_run: bool) -> DropResult:
        async with PostgresStore(url) as store:
            return await store.drop(graph, dry_run=dry_run)

    with connected(settings_of(database), None, create=False) as url:
        if not (yes or dry_run):
            result = asyncio.run(dropped(url, dry_run=True))
            typer.confirm(f"{_describe(result)}: drop it", abort=True, err=True)
        with working(f"dropping graph {graph}"):
            result = asyncio.run(dropped(url, dry_run=dry_run))
    if as_json:
        print_json({"graph": graph, "dry_run": dry_run, "tables": result.tables, "dead_letters": result.dead_letters,
                    "late_records": result.late_records, "undelivered": result.undelivered,
                    "mqtt_sessions": _sessions(result)})  # fmt: skip
        return
    tables.say(f"{_describe(result)}: {'would be dropped' if dry_run else 'dropped'}")
    if sessions := _sessions(result):
        tables.say(
            "the MQTT broker keeps queueing for the graph's sessions until they expire; to end them now, run this with"
        )
        tables.say("the broker's address and login (and your own names, where the graph's file sets client_id=):")
        for session in sessions:
            tables.say(f"  mosquitto_sub -i {session} -t none -E")


def _sessions(result: Any) -> list[str]:
    """Return the names of the sessions left at MQTT brokers, except those that the user has named."""
    from millpy.sources.mqtt.source import session_name

    return [session_name(result.permanent_name, stream, partition, result.secret)
            for stream, partition, source in result.sources if source == "mqtt"]  # fmt: skip


def _describe(result: Any) -> str:
    tables = ", ".join(result.tables) or "none"
    lost = f", and messages of its sinks that are not delivered ({result.undelivered})" if result.undelivered else ""
    return (
        f"graph {result.graph} with its result tables ({tables}), dead letters ({result.dead_letters}) and"
        f" late records ({result.late_records}){lost}"
    )
