"""`millpy backfill`: the whole history of a graph through Spark, then its workers go on."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, JsonOption, duration_option, handle_errors, print_json, settings_of
from millpy.cli.spark import InputOption, MasterOption, MemoryOption, running_spark, show_accounting
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.observability.status_line import working

StartOption = Annotated[
    str, typer.Option("--from", metavar="TIME", help="With --archive: only records at or after this event time.")
]
UntilOption = Annotated[
    str, typer.Option("--until", metavar="TIME", help="Read topics up to this time; workers continue there.")
]


@handle_errors
def backfill(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines the graph.")],
    work: Annotated[Path, typer.Option("--work", metavar="DIR", help="New directory to work in, or to continue in.")],
    inputs: InputOption = None,
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="DIR", help="Read what an earlier generation has archived instead."),
    ] = None,
    start: StartOption = "",
    until: UntilOption = "now",
    may_overlap: Annotated[
        bool, typer.Option("--may-overlap", help="Accept a history of a source without Dedupe.")
    ] = False,
    settle: Annotated[
        float, duration_option("--settle", "0s", "Time for the history's files to catch up at first.")
    ] = 0.0,
    database: DatabaseOption = None,
    master: MasterOption = "local[*]",
    memory: MemoryOption = "2g",
    as_json: JsonOption = False,
) -> None:
    """Compute the history of a new graph or generation on Spark, then hand it over to its workers.

    Workers that are started meanwhile wait. A backfill that was killed continues with the same command. Afterwards
    the working directory can be deleted; a new generation becomes the current one by `millpy switch`.
    """
    from millpy.process.launcher import database as connected  # imported here: --help does not need it

    try:
        from millpy.spark.backfill import Backfill, BackfillRequest
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed", hint=to_install("spark")) from None
    if start and archive is None:
        raise UsageError("--from is for --archive", hint="name only the files to read: --input FILES")
    begin, end = _time("--from", start), _time("--until", "" if until == "now" else until)
    settings = settings_of(database)
    with connected(settings, graph, create=True) as url, working(f"loading {graph}"):
        request = BackfillRequest(
            graph,
            inputs or (),
            database=url,
            work=work,
            archive=archive,
            start=begin,
            until=end,
            may_overlap=may_overlap,
            settle_s=settle,
            limits=settings.limits,
        )
        summary = Backfill(request).run(lambda: running_spark(f"backfill of {graph}", master, memory))
    if as_json:
        print_json(summary)
        return
    show_accounting(summary)
    spec = load_graph(graph).spec()
    tables.say("handed over: workers go on from here")
    if spec.generation > 1:
        tables.say(f"to make it the current generation: millpy switch {spec.name} {spec.generation}")


def _time(option: str, text: str) -> datetime | None:
    found = moment(option, text, SystemClock())
    return datetime.fromisoformat(found) if found else None
