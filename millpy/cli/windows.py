"""`millpy windows`: show the rows of a result table by key and time, and follow new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from millpy.admin.empty_table import why_empty
from millpy.admin.json_output import json_text
from millpy.admin.queries import Admin, Row
from millpy.admin.results import DeployedTable, RowFilter, newest, progress, result_tables, written_since
from millpy.cli import text_table as tables
from millpy.cli.options import (
    READING_S_MAX,
    DatabaseOption,
    JsonOption,
    connected_to,
    graph_in,
    handle_errors,
    print_json,
    settings_of,
)
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.errors import MillError, TransientError, UsageError

FOLLOW_EVERY_S = 0.5
FOLLOW_SHARE_MAX = 0.1
"""Share of the time for queries of new rows: without an index on them, each query scans the table."""
HIDDEN = ("pane_index", "pane_timing", "ordinal", "emitted_at", "interval_id", "bundle")


@handle_errors
def windows(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE] [GRAPH.py]",
            help="Result table (optional if there is only one), and the graph's file.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", "-k", metavar="[NAME=]VALUE", help="Only rows with this key or value.")
    ] = None,
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="Only rows at or after this event time.")] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Only rows before this event time.")] = "",
    final: Annotated[
        bool | None, typer.Option("--final/--open", help="Only final windows, or only open ones, as they stand.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show only the newest N.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing rows as they are written.")] = False,
    everything: Annotated[bool, typer.Option("--all-columns", help="Show panes and the origin of rows, too.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the newest rows of a result table.

    TIME is a time with its zone (2026-11-20T08:00:00Z), or how long ago (90s, 10m, 2h, 7d).
    With --follow --json, every row is one line of JSON.
    """
    clock = SystemClock()
    span = (moment("--from", start, clock), moment("--to", end, clock))
    named = [word for word in words or () if not _is_graph(word)]
    locations = [word for word in words or () if _is_graph(word)]
    if len(named) > 1 or len(locations) > 1:
        raise UsageError(f"unexpected argument {(words or [])[-1]!r}", hint="give one table and one graph's file")
    location = locations[0] if locations else None
    doing = "" if follow else "querying the database"
    with connected_to(settings_of(database), location, READING_S_MAX, doing) as admin:
        result_table = _chosen(result_tables(admin), graph_in(admin, location), named[0] if named else "")
        values = dict(_value(result_table, text) for text in keys or ())
        wanted = RowFilter(values=values, start=span[0], end=span[1], final=final, limit=limit)
        shown = None if as_json or everything else tuple(name for name in result_table.columns if name not in HIDDEN)
        if follow:
            _follow(admin, result_table, wanted, shown, as_json=as_json)
            return
        rows = newest(admin, result_table, wanted)
        none = "" if rows or as_json else _none(admin, result_table, wanted)
    if as_json:
        print_json({"table": f"{result_table.graph}.{result_table.name}", "rows": rows})
    else:
        tables.echo(_short(rows, shown), none=none)


def _none(admin: Admin, result_table: DeployedTable, wanted: RowFilter) -> str:
    """Return what is printed instead of rows."""
    name = f"{result_table.graph}.{result_table.name}"
    if wanted.values or wanted.start or wanted.end or wanted.final is not None:
        return f"(no rows in {name} match these options)"
    return f"(no rows in {name} yet: {why_empty(admin, result_table)})"


def _is_graph(word: str) -> bool:
    return word.partition(":")[0].endswith(".py")


def _chosen(there: Sequence[DeployedTable], graph: str | None, name: str) -> DeployedTable:
    """Return the table that the arguments name.

    Raises:
        UsageError: no table matches, or several do.
    """
    there = [table for table in there if graph is None or table.graph == graph]
    found = [table for table in there if name in ("", table.name, f"{table.graph}.{table.name}")]

    def names(tables: Sequence[DeployedTable]) -> str:
        return ", ".join(f"{table.graph}.{table.name}" for table in tables)

    if not there:
        of = "" if graph is None else f" of graph {graph!r}"
        raise UsageError(f"there is no result table{of} yet", hint="run a graph that ends in .to_table(…) first")
    if not found:
        raise UsageError(f"there is no result table {name!r}", hint=f"there are: {names(there)}")
    found = [table for table in found if table.current] if len(found) > 1 else found
    if len(found) != 1:
        raise UsageError("several result tables match", hint=f"name one: {names(found)}")
    return found[0]


def _value(result_table: DeployedTable, text: str) -> tuple[str, str]:
    """Split `NAME=VALUE`. The name may be missing if the table has one key column."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if len(result_table.keys) == 1:
        return next(iter(result_table.keys)), text
    named = result_table.keys or result_table.values
    raise UsageError(f"--key {text!r} does not say which column", hint=f"write NAME=VALUE; names: {', '.join(named)}")


def _short(rows: Sequence[Row], shown: Sequence[str] | None) -> list[Row]:
    return [{name: row[name] for name in shown or row} for row in rows]


def _follow(
    admin: Admin, result_table: DeployedTable, wanted: RowFilter, shown: Sequence[str] | None, *, as_json: bool
) -> None:
    clock = SystemClock()
    writers = _writers(admin, result_table)
    bundles: Mapping[int, int] = progress(admin, result_table)
    rows = newest(admin, result_table, wanted)
    # Rows written between the two statements are among these already.
    before = {(tuple(row[name] for name in result_table.identity), row["bundle"]) for row in rows}
    widths: list[int] = []
    while True:
        _check_writers(admin, result_table, writers)
        if rows:
            widths = _print(_short(rows, shown), widths, as_json=as_json)
        began = clock.monotonic()
        try:
            found = written_since(admin, result_table, wanted, bundles)
        except MillError:  # perhaps a switch or a drop has removed the table
            _check_writers(admin, result_table, writers)
            raise
        took_s = clock.monotonic() - began
        bundles = {**bundles, **_newest_bundles(found, bundles)}
        rows = [
            row for row in found if (tuple(row[name] for name in result_table.identity), row["bundle"]) not in before
        ]
        before = set()
        if not rows:
            asyncio.run(clock.sleep(max(FOLLOW_EVERY_S, took_s / FOLLOW_SHARE_MAX)))


def _writers(admin: Admin, result_table: DeployedTable) -> list[Row]:
    """Return the generation that writes a table; an empty list if no graph has the name."""
    return admin.ask("SELECT family, generation FROM millpy.graphs WHERE graph = :graph", graph=result_table.graph)


def _check_writers(admin: Admin, result_table: DeployedTable, before: Sequence[Row]) -> None:
    if _writers(admin, result_table) != before:
        raise TransientError(
            f"{result_table.graph}.{result_table.name} now belongs to another generation, or was dropped",
            hint="`millpy graphs` lists the generations; then follow the table again",
        )


def _newest_bundles(rows: Sequence[Row], before: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for row in rows:
        interval = row["interval_id"]
        found[interval] = max(row["bundle"], found.get(interval, before.get(interval, 0)))
    return found


def _print(rows: Sequence[Row], widths: list[int], *, as_json: bool) -> list[int]:
    """Print rows below the rows before them. Return the column widths for the next rows."""
    if as_json:
        for row in rows:
            typer.echo(json_text(row, indent=0))
        return widths
    text, grown = tables.continued(rows, widths)
    tables.say(text)
    return grown
