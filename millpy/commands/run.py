"""`millpy run`: a graph, until its sources have ended or somebody ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millpy.commands.common import DatabaseOption, JsonOption, print_json, settings_of, worded
from millpy.store.admin import Admin

if TYPE_CHECKING:
    from millpy.graph import Graph


@worded
def run(
    graph: Annotated[str, typer.Argument(metavar="[GRAPH.py]", help="Python file that defines a Graph.")] = "graph.py",
    only: Annotated[str, typer.Option("--only", metavar="A,B", help="Take only these computations.")] = "",
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Worker processes.")] = 1,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Where Kafka partitions begin that were never read.")
    ] = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Run a graph until its sources have ended, or until SIGTERM or Ctrl-C drains it.

    With --json the sources and the accounting of all records are printed in the end.
    """
    from millpy.launch import run as launch  # the engine is not loaded for `status`

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    ended = _print if as_json else None
    return launch(graph, settings_of(database), only=names, workers=workers, start=start, ended=ended)


def _print(url: str, graph: Graph) -> None:
    admin = Admin(url)
    name = admin.name_of(graph.name, graph.generation) or graph.name
    print_json({"graph": name, "sources": admin.sources(name), "accounting": admin.accounting(name)})
