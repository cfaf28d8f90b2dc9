"""`millpy windows`: the rows of a result table, by key and time, and new ones as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from millpy.clock import SystemClock
from millpy.commands import tables
from millpy.commands.common import (
    READING_S_MAX,
    DatabaseOption,
    JsonOption,
    connected_to,
    graph_in,
    plain,
    print_json,
    settings_of,
    worded,
)
from millpy.commands.moments import moment
from millpy.errors import MillError, TransientError, UsageError
from millpy.store.admin import Admin, Row
from millpy.store.admin_results import ResultTable, Wanted, newest, progress, result_tables, written_since

FOLLOW_EVERY_S = 0.5
FOLLOW_SHARE_MAX = 0.1
"""A table without an index on what is new is looked through: no more often than this share of the time."""
HIDDEN = ("pane_index", "pane_timing", "ordinal", "emitted_at", "interval_id", "bundle")


@worded
def windows(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE] [GRAPH.py]",
            help="The table (may be left out when there is one), and whose embedded database.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", "-k", metavar="[NAME=]VALUE", help="Only rows with this value.")
    ] = None,
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="From this event time on.")] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Before this event time.")] = "",
    final: Annotated[
        bool | None, typer.Option("--final/--open", help="Only windows that can change no more, or that can.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="At most so many, the newest.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with rows as they are written.")] = False,
    everything: Annotated[bool, typer.Option("--all-columns", help="Panes and where a row comes from, too.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the newest rows of a result table.

    TIME is a moment with its zone (2026-11-20T08:00:00Z), or how long ago (90s, 10m, 2h, 7d).
    With --follow --json every row is a line of JSON.
    """
    clock = SystemClock()
    span = (moment("--from", start, clock), moment("--to", end, clock))
    named = [word for word in words or () if not _is_graph(word)]
    locations = [word for word in words or () if _is_graph(word)]
    if len(named) > 1 or len(locations) > 1:
        raise UsageError(f"{(words or [])[-1]!r} is one word too many", hint="name one table, and one graph's file")
    location = locations[0] if locations else None
    doing = "" if follow else "asking the database"
    with connected_to(settings_of(database), location, READING_S_MAX, doing) as admin:
        asked = _chosen(result_tables(admin), graph_in(admin, location), named[0] if named else "")
        values = dict(_value(asked, text) for text in keys or ())
        wanted = Wanted(values=values, start=span[0], end=span[1], final=final, limit=limit)
        shown = None if as_json or everything else tuple(name for name in asked.columns if name not in HIDDEN)
        if follow:
            _follow(admin, asked, wanted, shown, as_json=as_json)
            return
        rows = newest(admin, asked, wanted)
    if as_json:
        print_json({"table": f"{asked.graph}.{asked.name}", "rows": rows})
    else:
        tables.echo(_short(rows, shown), none=f"(no rows in {asked.graph}.{asked.name})")


def _is_graph(word: str) -> bool:
    return word.partition(":")[0].endswith(".py")


def _chosen(there: Sequence[ResultTable], graph: str | None, name: str) -> ResultTable:
    """The table that is meant.

    Raises:
        UsageError: none or several could be.
    """
    there = [table for table in there if graph is None or table.graph == graph]
    found = [table for table in there if name in ("", table.name, f"{table.graph}.{table.name}")]
    names = ", ".join(f"{table.graph}.{table.name}" for table in there)
    if not there:
        raise UsageError("there is no result table yet", hint="run a graph that ends in .to_table(…) first")
    if not found:
        raise UsageError(f"there is no result table {name!r}", hint=f"there are: {names}")
    found = [table for table in found if table.current] if len(found) > 1 else found
    if len(found) != 1:
        raise UsageError("several result tables could be meant", hint=f"name one: {names}")
    return found[0]


def _value(asked: ResultTable, text: str) -> tuple[str, str]:
    """`NAME=VALUE`, or the value of the only key column."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if len(asked.keys) == 1:
        return next(iter(asked.keys)), text
    named = asked.keys or asked.values
    raise UsageError(f"--key {text!r} does not say which column", hint=f"write NAME=VALUE; NAME: {', '.join(named)}")


def _short(rows: Sequence[Row], shown: Sequence[str] | None) -> list[Row]:
    return [{name: row[name] for name in shown or row} for row in rows]


def _follow(admin: Admin, asked: ResultTable, wanted: Wanted, shown: Sequence[str] | None, *, as_json: bool) -> None:
    clock = SystemClock()
    writers = _writers(admin, asked)
    bundles: Mapping[int, int] = progress(admin, asked)
    rows = newest(admin, asked, wanted)
    # What was written between the two statements is in the rows already.
    before = {(tuple(row[name] for name in asked.identity), row["bundle"]) for row in rows}
    widths: list[int] = []
    while True:
        _check_writers(admin, asked, writers)
        if rows:
            widths = _print(_short(rows, shown), widths, as_json=as_json)
        began = clock.monotonic()
        try:
            found = written_since(admin, asked, wanted, bundles)
        except MillError:  # it waited for a switch, and the table has other columns now, or none
            _check_writers(admin, asked, writers)
            raise
        took_s = clock.monotonic() - began
        bundles = {**bundles, **_newest_bundles(found, bundles)}
        rows = [row for row in found if (tuple(row[name] for name in asked.identity), row["bundle"]) not in before]
        before = set()
        if not rows:
            asyncio.run(clock.sleep(max(FOLLOW_EVERY_S, took_s / FOLLOW_SHARE_MAX)))


def _writers(admin: Admin, asked: ResultTable) -> list[Row]:
    """The generation that writes a table; none when there is none of this name."""
    return admin.ask("SELECT family, generation FROM millpy.graphs WHERE graph = :graph", graph=asked.graph)


def _check_writers(admin: Admin, asked: ResultTable, before: Sequence[Row]) -> None:
    if _writers(admin, asked) != before:
        raise TransientError(
            f"{asked.graph}.{asked.name} is another generation's now, or was dropped",
            hint="follow it again: `millpy graphs` shows what there is",
        )


def _newest_bundles(rows: Sequence[Row], before: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for row in rows:
        interval = row["interval_id"]
        found[interval] = max(row["bundle"], found.get(interval, before.get(interval, 0)))
    return found


def _print(rows: Sequence[Row], widths: list[int], *, as_json: bool) -> list[int]:
    """Print rows below those before them; the widths of the columns from now on."""
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row, default=plain))
        return widths
    text, grown = tables.continued(rows, widths)
    tables.say(text)
    return grown
