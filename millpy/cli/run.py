"""`millpy run`: run a graph until its sources end, or until a signal drains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millpy.admin.queries import Admin
from millpy.cli.options import DatabaseOption, JsonOption, handle_errors, print_json, settings_of
from millpy.cli.ui import check_installed

if TYPE_CHECKING:
    from millpy.graph import Graph


@handle_errors
def run(
    graph: Annotated[str, typer.Argument(metavar="[GRAPH.py]", help="Python file that defines a Graph.")] = "graph.py",
    only: Annotated[str, typer.Option("--only", metavar="A,B", help="Run only these computations.")] = "",
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Number of worker processes.")] = 1,
    start: Annotated[
        str,
        typer.Option("--from", metavar="TIME", help="Time at which to begin Kafka partitions that were never read."),
    ] = "",
    archive: Annotated[
        str, typer.Option("--archive", metavar="DIR", help="Also write the graph's archives into this directory.")
    ] = "",
    http: Annotated[
        str, typer.Option("--http", metavar="HOST:PORT", help="Serve health and metrics of all workers there.")
    ] = "",
    ui: Annotated[bool, typer.Option("--ui", help="Serve the page beside, and print its address.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Run a graph until its sources end, or until SIGTERM or Ctrl-C drains it.

    TIME is a time with its zone (2026-11-20T08:00:00Z). With --json, prints the sources and the accounting at the end.
    """
    from millpy.process.launcher import run as launch  # imported here: `status` does not need the engine
    from millpy.process.worker_process import archive_settings

    if ui:
        check_installed()
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    ended = _print if as_json else None
    settings = settings_of(database, **archive_settings(archive))
    return launch(graph, settings, only=names, workers=workers, start=start, http=http, page=ui, ended=ended)


def _print(url: str, graph: Graph) -> None:
    admin = Admin(url)
    name = admin.name_of(graph.name, graph.generation) or graph.name
    print_json({"graph": name, "sources": admin.sources(name), "accounting": admin.accounting(name)})
