"""`millpy graphs`, `millpy switch`, `millpy drop`: what is deployed, which generation is current, the end of one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from millpy.commands import tables
from millpy.commands.common import DatabaseOption, JsonOption, print_json, settings_of, show, worded
from millpy.progress import working
from millpy.store.admin import Admin, Row

BEHIND_S_MAX = 60
"""How far in event time a generation may be behind the one whose place it takes."""
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Try it, say what it would do, and roll it back.")]


@worded
def graphs(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show what is deployed: graphs, their generations and versions."""

    def ask(admin: Admin, _: str | None) -> Mapping[str, list[Row]]:
        return {"graphs": admin.ask("SELECT * FROM millpy.graphs ORDER BY family, generation")}

    show(None, database, as_json, ask)


@worded
def switch(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="The graph's name.")],
    generation: Annotated[int, typer.Argument(metavar="GENERATION", help="Which one is to be current.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Also when it has not caught up.")] = False,
    rights: Annotated[
        Literal["current", "new"] | None,
        typer.Option(
            "--rights",
            help="Whose rights count where they differ: those of the tables that are current, or the new ones'.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make another generation of a graph the current one: it gets the graph's name, and the place of its result tables.

    Exit status: 0 switched, or it is current already; 1 try again; 2 refused.
    """
    from millpy.launch import database as connected  # the engine is not loaded for --help
    from millpy.store.postgres.generations import Switched
    from millpy.store.postgres.store import PostgresStore

    async def switched(url: str) -> Switched | None:
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
        tables.say(f"generation {generation} of graph {graph} is the current one already")
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
        tables.say(f"its workers go on until you stop them; then: millpy drop {beside}")
        tables.say(f"the way back: millpy switch {graph} {found.before.generation}")


@worded
def drop(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="The name, as `millpy graphs` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget a graph, or one generation of it: state, positions, result tables, and records that were set aside.

    Exit status: 0 dropped; 1 try again, or it was not confirmed; 2 refused.
    """
    from millpy.launch import database as connected  # the engine is not loaded for --help
    from millpy.store.postgres.generations import Remains
    from millpy.store.postgres.store import PostgresStore

    async def dropped(url: str, *, dry_run: bool) -> Remains:
        async with PostgresStore(url) as store:
            return await store.drop(graph, dry_run=dry_run)

    with connected(settings_of(database), None, create=False) as url:
        if not (yes or dry_run):
            remains = asyncio.run(dropped(url, dry_run=True))
            typer.confirm(f"{_words(remains)}: drop it", abort=True, err=True)
        with working(f"dropping graph {graph}"):
            remains = asyncio.run(dropped(url, dry_run=dry_run))
    if as_json:
        print_json({"graph": graph, "dry_run": dry_run, "tables": remains.tables, "dead_letters": remains.dead_letters,
                    "late_records": remains.late_records, "mqtt_sessions": _sessions(remains)})  # fmt: skip
        return
    tables.say(f"{_words(remains)}: {'would be dropped' if dry_run else 'dropped'}")
    if sessions := _sessions(remains):
        tables.say(
            "the MQTT broker goes on queueing for its sessions until they expire; to end them now, with the broker's"
        )
        tables.say("address and login (and with its own names, where the graph's file has a client_id=):")
        for session in sessions:
            tables.say(f"  mosquitto_sub -i {session} -t none -E")


def _sessions(remains: Any) -> list[str]:
    """What is left at MQTT brokers: the names of sessions, where the user has given none."""
    from millpy.injectors.mqtt import session_name

    return [session_name(remains.own_name, stream, partition, remains.secret)
            for stream, partition, source in remains.sources if source.startswith("Mqtt(")]  # fmt: skip


def _words(remains: Any) -> str:
    tables = ", ".join(remains.tables) or "none"
    return (
        f"graph {remains.graph} with its result tables ({tables}), dead letters ({remains.dead_letters}) and"
        f" late records ({remains.late_records})"
    )
