"""`millpy archive`: write the archives of a graph, beside the workers that run it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated

import typer

from millpy.admin.queries import Admin
from millpy.cli import text_table as tables
from millpy.cli.options import (
    DatabaseOption,
    JsonOption,
    connected_to,
    duration_option,
    handle_errors,
    print_json,
    settings_of,
)
from millpy.config.settings import Settings
from millpy.errors import UsageError
from millpy.graph import Graph


@handle_errors
def archive(
    graph: Annotated[str, typer.Argument(metavar="[GRAPH.py]", help="Python file that defines a Graph.")] = "graph.py",
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE", help="Directory or s3://… to write to; default: MILLPY_ARCHIVE.")
    ] = "",
    every: Annotated[
        float | None,
        duration_option("--every", None, "Time between two files; default: MILLPY_ARCHIVE_EVERY_S, else 10s."),
    ] = None,
    erase: Annotated[
        str | None,
        typer.Option("--erase", metavar="KEY", help="Erase the records of this key, as text or as JSON, and exit."),
    ] = None,
    of: Annotated[
        str, typer.Option("--of", metavar="ARCHIVE", help="With --erase: which archive, if there are several.")
    ] = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write a graph's archives as Parquet until its sources have ended, or until SIGTERM or Ctrl-C drains it.

    With --json, prints the archives at the end: files, records, and what is not archived yet.

    With --erase, rewrites the files that have records of a key. Archivers may run meanwhile.
    """
    from millpy.process.launcher import run  # imported here: `status` does not need the engine

    settings = settings_of(database, archive=to, archive_every_s=every)
    if erase is not None:
        _erase(graph, settings, of, erase, as_json=as_json)
        return 0
    if of:
        raise UsageError("--of is for --erase", hint="`millpy archive` writes all archives of the graph")
    return run(graph, settings, only=(), workers=1, archive=True, ended=_print if as_json else None)


def _erase(location: str, settings: Settings, archive: str, key: str, *, as_json: bool) -> None:
    from millpy.graph.loader import load_graph
    from millpy.process.archive_erasure import erase_key
    from millpy.process.worker_process import archive_of

    graph, into = load_graph(location), archive_of(settings)
    if into is None:
        raise UsageError("no directory is set for the archive", hint="set MILLPY_ARCHIVE, or use `millpy archive --to`")
    with connected_to(settings, location.partition(":")[0], doing="erasing") as admin:
        if admin.name_of(graph.name, graph.generation) is None:
            raise UsageError(f"{graph.name} is not deployed", hint="`millpy graphs` lists what is")
        done = asyncio.run(erase_key(graph, archive, key, admin.url, into, settings.limits))
    if as_json:
        print_json(dataclasses.asdict(done))
    else:
        tables.say(f"{done.archive}: erased {done.records:,} records from {done.files:,} files")


def _print(url: str, graph: Graph) -> None:
    admin = Admin(url)
    name = admin.name_of(graph.name, graph.generation) or graph.name
    print_json({"graph": name, "archives": admin.archives(name)})
