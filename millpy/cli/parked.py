"""`millpy parked`: list, release or discard keys that stopped at a failing record."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.admin.queries import Row
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

SHOWN = ("graph", "computation", "key", "records", "holds_watermark_at", "parked_at", "detail", "requested")
ComputationArgument = Annotated[str, typer.Argument(metavar="COMPUTATION", help="Computation of the keys.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", metavar="KEY", help="Only this key, as text or as JSON; default: all parked keys."),
]

parked = typer.Typer(
    help='List, release or discard keys that stopped at a failing record (on_failure="park").', no_args_is_help=True
)


@parked.command("list")
@handle_errors
def list_parked(
    graph: GraphArgument = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show only the newest N.")] = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List parked keys, why they stopped, and how many records wait; --json adds the record and the traceback."""
    with connected_to(settings_of(database), graph) as admin:
        # One more than is shown, to tell whether there are more.
        found = admin.parked(graph_in(admin, graph), limit if as_json else limit + 1)
    if as_json:
        print_json({"parked": found})
        return
    tables.echo([{name: row[name] for name in SHOWN} for row in found[-limit:]])
    if len(found) > limit:
        tables.say(f"these are the newest {limit:,}; -n shows more")


@parked.command("release")
@handle_errors
def release(
    computation: ComputationArgument,
    graph: GraphArgument = None,
    key: KeyOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Release parked keys after a fix: each continues at the record that failed, and parks again if it fails again."""
    released = _request(graph, database, computation, key, discard=False)
    if as_json:
        print_json(released)
    else:
        tables.say(f"releasing {released['keys']} keys of {computation}")


@parked.command("discard")
@handle_errors
def discard(
    computation: ComputationArgument,
    graph: GraphArgument = None,
    key: KeyOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Release parked keys without the record that failed, which becomes a dead letter."""
    released = _request(graph, database, computation, key, discard=True)
    if as_json:
        print_json(released)
    else:
        tables.say(f"releasing {released['keys']} keys of {computation} without the records that failed")


def _request(graph: str | None, database: str | None, computation: str, key: str | None, *, discard: bool) -> Row:
    """Request the release of a computation's parked keys. Return the document that --json prints."""
    keys, name = 0, None
    with connected_to(settings_of(database), graph) as admin:
        name = graph_in(admin, graph)
        graphs = admin.graphs_with_parked(name, computation)
        if len(graphs) > 1:
            raise UsageError(f"{computation!r} has parked keys in several graphs", hint="give the graph's file as well")
        for name in graphs:
            keys = admin.release_parked(name, computation, key, discard=discard)
    if not keys:
        what = f"{computation!r} has no parked key" + (f" {key}" if key is not None else "")
        raise UsageError(
            what, hint="`millpy parked list` lists them; the keys that it shows as requested are released soon"
        )
    return {"graph": name, "computation": computation, "key": key, "discarded": discard, "keys": keys}
