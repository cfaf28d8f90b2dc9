"""`millpy workers`: drain a worker."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.admin.actions import refused_drain
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

workers = typer.Typer(help="Drain a worker.", no_args_is_help=True)


@workers.command("drain")
@handle_errors
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, or its beginning.")],
    graph: GraphArgument = None,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the event.")] = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a worker give its intervals to other workers and end with status 0, as SIGTERM does, wherever it runs."""
    with connected_to(settings_of(database), graph) as admin:
        chosen = _chosen(admin.workers(graph_in(admin, graph)), worker)
        requested = admin.drain_worker(chosen["graph"], chosen["worker_id"], why)
        if not requested and (refused := refused_drain(admin, chosen["graph"], chosen["worker_id"])):
            raise UsageError(refused.message, hint=refused.hint)
    if as_json:
        print_json({"graph": chosen["graph"], "worker_id": chosen["worker_id"], "requested": requested})
    else:
        tables.say(f"worker {chosen['worker_id']} drains" + ("" if requested else " already"))


def _chosen(rows: list[Row], beginning: str) -> Row:
    """Return the worker whose id begins like this.

    Raises:
        UsageError: there is none, or there are several.
    """
    found = [row for row in rows if beginning and str(row["worker_id"]).startswith(beginning.lower())]
    if not found:
        raise UsageError(f"there is no worker {beginning!r}", hint="`millpy status` lists the workers")
    if len(found) > 1:
        raise UsageError(f"{len(found)} workers have ids that begin with {beginning!r}", hint="give more of the id")
    return found[0]
