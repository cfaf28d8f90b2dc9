"""`millpy correct` and `millpy corrections`: change rows of finished windows by hand, and show who changed which."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import partial
from typing import Annotated, Any

import typer

from millpy.admin.corrections import correct as correct_row
from millpy.admin.corrections import corrections as list_corrections
from millpy.admin.json_output import json_text
from millpy.cli import text_table as tables
from millpy.cli.options import (
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    graph_in,
    handle_errors,
    print_json,
    settings_of,
)
from millpy.errors import UsageError

TECHNICAL = ("pane_index", "pane_timing", "late_count", "emitted_at", "interval_id", "bundle")
ENDS = ("window_start", "window_end")


@handle_errors
def correct(
    table: Annotated[str, typer.Argument(metavar="SCHEMA.TABLE", help="A result table of windows.")],
    window: Annotated[
        list[str],
        typer.Option(
            "--window", metavar="COLUMN=VALUE", help="What names the window: each key and window_start; repeatable."
        ),
    ],
    values: Annotated[
        list[str], typer.Option("--set", metavar="COLUMN=VALUE", help="The new value of a column; repeatable.")
    ],
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for millpy.corrections.")],
    only_table: Annotated[
        bool, typer.Option("--only-table", help="Results computed from the window stay as they are.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change values of the row of a finished window. `millpy corrections` shows who did it, and both rows."""
    with connected_to(settings_of(database), None) as admin:
        named, given = _pairs("--window", window), _pairs("--set", values)
        row = correct_row(admin, table, named, given, why, only_table=only_table)
    if as_json:
        print_json(row)
    else:
        tables.echo([_shown(row, named)])


@handle_errors
def corrections(
    graph: GraphArgument = None,
    table: Annotated[str, typer.Option("--table", metavar="TABLE", help="Only of this result table.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show only the newest N.")] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the rows of finished windows that operators have changed, the newest last."""
    with connected_to(settings_of(database), graph) as admin:
        found = list_corrections(admin, graph_in(admin, graph), table, limit)
    if as_json:
        print_json(found)
        return
    tables.echo(
        [
            {
                "table": f"{row['graph']}.{row['table_name']}",
                "key": row["key"],
                "window_start": row["window_start"],
                "changed": _changed(row["old_row"], row["new_row"]),
                "by": row["requested_by"],
                "at": row["corrected_at"],
                "why": row["why"],
            }
            for row in found
        ],
        none="(no corrections)",
    )


def _shown(row: dict[str, Any], window: Iterable[str]) -> dict[str, Any]:
    """Return the columns of a row that a user reads: what names its window, then its values; times end in Z."""
    names = dict.fromkeys((*window, *ENDS, *row))
    found = {name: row[name] for name in names if name not in TECHNICAL}
    return found | {name: str(found[name]).replace("T", " ").replace("+00:00", "Z") for name in ENDS}


def _changed(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """Say which values have changed: n 3 -> 5."""
    if old is None or new is None:
        return "new row" if old is None else "row deleted"
    names = [name for name in new if name not in TECHNICAL and new[name] != old.get(name)]
    return ", ".join(f"{name} {_text(old.get(name))} -> {_text(new[name])}" for name in names)


_text = partial(json_text, indent=0)


def _pairs(option: str, words: Sequence[str]) -> dict[str, Any]:
    """Read words of the form column=value; a value that is JSON is one, other values are text."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {word!r} is not COLUMN=VALUE", hint=f"for example {option} mean=21.5")
        if name in found:
            raise UsageError(f"{option} names {name} twice", hint="give each column once")
        try:
            found[name] = json.loads(text, parse_int=Decimal, parse_float=Decimal, parse_constant=str)
        except ValueError:
            found[name] = text
    return found
