"""`millpy repair`: recompute a result table from its history with Spark, and put its rows right."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from millpy.admin.corrections import corrected_windows, without_corrected
from millpy.admin.repairs import graph_id, repair_rows
from millpy.cli import text_table as tables
from millpy.cli.audit import chosen_tables, loaded, microseconds, show_audit
from millpy.cli.graph_audit import GraphAudit
from millpy.cli.options import DatabaseOption, JsonOption, connected_to, handle_errors, print_json, settings_of
from millpy.cli.spark import InputOption, MasterOption, MemoryOption, job_of, running_spark
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.errors import UsageError
from millpy.observability.status_line import working


@handle_errors
def repair(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines the graph.")],
    named: Annotated[str, typer.Option("--table", metavar="TABLE", help="The result table, one of windows.")],
    inputs: InputOption = None,
    archive: Annotated[str, typer.Option("--archive", metavar="DIRECTORY", help="Read the archives instead.")] = "",
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="Only windows that end after.")] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Only windows that end by then.")] = "",
    also_corrected: Annotated[
        bool, typer.Option("--also-corrected", help="Replace rows that operators have corrected, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what differs, and change nothing.")] = False,
    master: MasterOption = "local[*]",
    memory: MemoryOption = "2g",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute a table of windows from its history with Spark, and put right each row that differs.

    Workers run on: only windows that are final are compared and changed, all in one transaction. A history that
    lacks records deletes rows: look at --dry-run first. `millpy events` shows who has repaired what.
    """
    settings = settings_of(database, archive=archive)
    clock = SystemClock()
    span = moment("--from", start, clock), moment("--to", end, clock)
    with working(f"loading {graph}"):
        spec, hosted = loaded(graph, inputs, "hosted", None, archive)
    (table,) = chosen_tables(spec, [named])
    if table.kind != "windowed":
        raise UsageError(
            f"{named} is a table of records, which nothing identifies", hint="only tables of windows can be repaired"
        )
    with connected_to(settings, str(Path(graph.partition(":")[0])), doing="") as admin, working("asking the database"):
        graph_audit = GraphAudit(admin, spec, microseconds(span))
        # A role that cannot write these tables is refused here, before Spark starts.
        number = graph_id(admin, graph_audit.graph)
        if hosted is None:
            hosted = job_of(graph, graph_audit.archive(archive), state=False)
        with (
            graph_audit.unchanged([table]),
            running_spark(f"repair of {graph_audit.graph}", master, memory) as session,
        ):
            found, rows = graph_audit.differing(session, hosted, table)
        of = (graph_audit.graph, number)
        corrected = set() if also_corrected else corrected_windows(admin, graph_audit.graph, table.name)
        wrong = without_corrected(rows, corrected)
        done = None if dry_run else repair_rows(admin, of, table, wrong, span)
    if as_json:
        counts = {"repaired": done, "corrected_rows_kept": len(rows) - len(wrong)}
        print_json({**counts, "found": {**dataclasses.asdict(found), "hours": len(found.hours)}})
        return
    show_audit(graph_audit.graph, found)
    if len(wrong) < len(rows):
        tables.say(f"rows that operators have corrected stay: {len(rows) - len(wrong):,}; see `millpy corrections`")
    tables.say(
        "(nothing was changed)"
        if done is None
        else f"rows replaced: {done['replaced']:,}, added: {done['added']:,}, deleted: {done['deleted']:,}"
    )
