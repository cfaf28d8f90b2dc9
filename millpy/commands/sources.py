"""`millpy sources` and `millpy fleet`: the feeds, which of them stand still, and their devices."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.commands import tables
from millpy.commands.common import (
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    graph_in,
    print_json,
    settings_of,
    show,
    worded,
)
from millpy.errors import UsageError
from millpy.store.admin import Admin, Row

sources = typer.Typer(help="Feeds: what they have brought, and which stand still.", no_args_is_help=True)


@sources.command("list")
@worded
def list_sources(graph: GraphArgument = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the partitions of all sources, and why some of them are paused."""
    show(graph, database, as_json, lambda admin, name: {"sources": admin.sources(name)})


@sources.command("resume")
@worded
def resume(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The source's stream.")],
    graph: GraphArgument = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a source go on that was paused because too much of it was set aside."""
    with connected_to(settings_of(database), graph) as admin:
        name = graph_in(admin, graph)
        paused = {row["graph"] for row in admin.sources(name) if row["stream"] == stream and row["paused_at"]}
        if not paused:
            raise UsageError(f"no source {stream!r} is paused", hint="`millpy sources list` shows them")
        if len(paused) > 1:
            raise UsageError(f"{stream!r} is paused in several graphs", hint="name the graph's file as well")
        (whose,) = paused
        resumed = admin.resume_source(whose, stream)
    if as_json:
        print_json({"graph": whose, "stream": stream, "resumed": resumed})
        return
    tables.say(f"{resumed} source partitions of {stream} go on")


COLUMNS = (
    "graph", "stream", "source_partition", "device", "last_event_time", "lag", "silent_for", "rate", "records",
    "duplicates", "late",
)  # fmt: skip


@worded
def fleet(
    graph: GraphArgument = None,
    silent_s: Annotated[
        float, typer.Option("--silent", metavar="S", min=0, help="Only those silent for so long.")
    ] = 0.0,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="At most so many, the longest silent.")
    ] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the devices behind the sources: when each was heard last, how often, what of it was set aside."""

    def ask(admin: Admin, name: str | None) -> dict[str, list[Row]]:
        rows = admin.fleet(name, silent_s, limit)
        return {"fleet": rows if as_json else [_short(row) for row in rows]}

    show(graph, database, as_json, ask)


def _short(row: Row) -> Row:
    short = {name: row[name] for name in (*COLUMNS, "dead_letters")}
    seconds = {name: row[name].total_seconds() for name in ("lag", "silent_for") if row[name] is not None}
    return short | {name: f"{value:.1f} s" for name, value in seconds.items()} | {"rate": f"{row['rate']:.2f}/s"}
