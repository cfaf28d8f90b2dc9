"""`millpy sources` and `millpy fleet`: list the source partitions, resume paused ones, list the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from millpy.admin.queries import Admin, Row
from millpy.cli import text_table as tables
from millpy.cli.options import (
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    duration_option,
    graph_in,
    handle_errors,
    print_json,
    settings_of,
    show,
)
from millpy.cli.sections import Section
from millpy.cli.status import named_once, source_section
from millpy.cli.watch import EveryOption, Look, WatchOption, interval_of, watch_answers
from millpy.errors import UsageError

sources = typer.Typer(help="List the source partitions, and resume paused ones.", no_args_is_help=True)


@sources.command("list")
@handle_errors
def list_sources(
    graph: GraphArgument = None,
    watch: WatchOption = False,
    every_s: EveryOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the partitions of all sources, and why some are paused or disconnected."""
    every = interval_of(watch, every_s)
    if every is None:
        show(graph, database, as_json, _listed)
    else:
        watch_answers(graph, database, every, _listed, _picture, as_json=as_json)


def _listed(admin: Admin, name: str | None) -> dict[str, list[Row]]:
    return {"sources": admin.sources(name)}


def _picture(now: Look, before: Look | None) -> list[Section]:
    return named_once([source_section(now, before)])


@sources.command("resume")
@handle_errors
def resume(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="Stream of the source.")],
    graph: GraphArgument = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resume a source that was paused because too many of its records became dead letters."""
    with connected_to(settings_of(database), graph) as admin:
        name = graph_in(admin, graph)
        paused = {row["graph"] for row in admin.sources(name) if row["stream"] == stream and row["paused_at"]}
        if not paused:
            raise UsageError(f"no source {stream!r} is paused", hint="`millpy sources list` lists those that are")
        if len(paused) > 1:
            raise UsageError(f"{stream!r} is paused in several graphs", hint="give the graph's file as well")
        (paused_graph,) = paused
        resumed = admin.resume_source(paused_graph, stream)
    if as_json:
        print_json({"graph": paused_graph, "stream": stream, "resumed": resumed})
        return
    tables.say(f"resumed {resumed} source partitions of {stream}")


SHOWN = {
    "device": "device", "lag": "lag", "silent_for": "silent", "rate": "rate", "records": "records",
    "duplicates": "dups", "late": "late", "dead_letters": "dead", "graph": "graph", "stream": "stream",
}  # fmt: skip
"""Columns of the view, and their titles where a device has to fit in a line of 80 characters."""


@handle_errors
def fleet(
    graph: GraphArgument = None,
    silent_s: Annotated[
        float, duration_option("--silent", None, "Only devices silent for this long: 90s, 30m, 2h, 7d.")
    ] = 0.0,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show only the N that are silent the longest.")
    ] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the devices behind the sources, one in a line: how late and how silent each is, its rate and its counts.

    "lag" is how far the newest event time was behind its arrival, "dups" are duplicates, "dead" are dead letters.
    """

    def ask(admin: Admin, name: str | None) -> dict[str, list[Row]]:
        rows = admin.fleet(name, silent_s, limit)
        return {"fleet": rows if as_json else _short(rows)}

    show(graph, database, as_json, ask)


def _short(rows: Sequence[Row]) -> list[Row]:
    """Return a line for each device, without its graph and stream where all devices have the same."""
    agreed = {name for name in ("graph", "stream") if len({row[name] for row in rows}) == 1}
    shown = {name: title for name, title in SHOWN.items() if name not in agreed}
    return [
        {title: f"{row[name]:.2f}/s" if name == "rate" else row[name] for name, title in shown.items()} for row in rows
    ]
