"""`millpy archive`: write the archives of a graph, beside the workers that run it."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.admin.queries import Admin
from millpy.cli.options import DatabaseOption, JsonOption, handle_errors, print_json, settings_of
from millpy.graph import Graph


@handle_errors
def archive(
    graph: Annotated[str, typer.Argument(metavar="[GRAPH.py]", help="Python file that defines a Graph.")] = "graph.py",
    to: Annotated[
        str, typer.Option("--to", metavar="DIRECTORY", help="Directory to write to; default: MILLPY_ARCHIVE.")
    ] = "",
    every: Annotated[
        float | None,
        typer.Option(
            "--every", metavar="S", help="Seconds between two files; default: MILLPY_ARCHIVE_EVERY_S, else 10."
        ),
    ] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write a graph's archives as Parquet until its sources have ended, or until SIGTERM or Ctrl-C drains it.

    With --json, prints the archives at the end: files, records, and what is not archived yet.
    """
    from millpy.process.launcher import run  # imported here: `status` does not need the engine

    settings = settings_of(database, archive=to, archive_every_s=every)
    return run(graph, settings, only=(), workers=1, archive=True, ended=_print if as_json else None)


def _print(url: str, graph: Graph) -> None:
    admin = Admin(url)
    name = admin.name_of(graph.name, graph.generation) or graph.name
    print_json({"graph": name, "archives": admin.archives(name)})
