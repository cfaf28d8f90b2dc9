"""`millpy parked`: keys that stopped at a failing record, and letting them go on."""

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
from millpy.store.admin import Row

SHOWN = ("graph", "computation", "key", "records", "holds_watermark_at", "parked_at", "detail", "requested")
ComputationArgument = Annotated[str, typer.Argument(metavar="COMPUTATION", help="The step whose keys are meant.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help="One key, as text or as JSON; without it all of them.")
]

parked = typer.Typer(help='Keys that stopped at a failing record (on_failure="park").', no_args_is_help=True)


@parked.command("list")
@worded
def list_parked(graph: GraphArgument = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List parked keys, why they stopped, and how many records wait; --json shows record and traceback too."""
    show(
        graph,
        database,
        as_json,
        lambda admin, name: {"parked": [row if as_json else {c: row[c] for c in SHOWN} for row in admin.parked(name)]},
    )


@parked.command("release")
@worded
def release(
    computation: ComputationArgument,
    graph: GraphArgument = None,
    key: KeyOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let parked keys go on from the record that failed, once its cause is mended; what fails again is parked again."""
    asked = _ask(graph, database, computation, key, discard=False)
    if as_json:
        print_json(asked)
    else:
        tables.say(f"{asked['keys']} keys of {computation} go on")


@parked.command("discard")
@worded
def discard(
    computation: ComputationArgument,
    graph: GraphArgument = None,
    key: KeyOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let parked keys go on without the record that failed; it becomes a dead letter."""
    asked = _ask(graph, database, computation, key, discard=True)
    if as_json:
        print_json(asked)
    else:
        tables.say(f"{asked['keys']} keys of {computation} go on without what they stopped at")


def _ask(graph: str | None, database: str | None, computation: str, key: str | None, *, discard: bool) -> Row:
    asked, name = 0, None
    with connected_to(settings_of(database), graph) as admin:
        name = graph_in(admin, graph)
        graphs = {row["graph"] for row in admin.parked(name) if row["computation"] == computation}
        if len(graphs) > 1:
            raise UsageError(f"{computation!r} has parked keys in several graphs", hint="name the graph's file as well")
        for name in graphs:
            asked = admin.release_parked(name, computation, key, discard=discard)
    if not asked:
        what = f"{computation!r} has no parked key" + (f" {key}" if key is not None else "")
        raise UsageError(what, hint="`millpy parked list` shows them; those that are asked for already go on soon")
    return {"graph": name, "computation": computation, "key": key, "discarded": discard, "keys": asked}
