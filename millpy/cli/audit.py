"""`millpy audit`: recompute result tables from their history with Spark, and compare them with the database."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpy.admin.audits import list_audits
from millpy.cli import text_table as tables
from millpy.cli.auditor import end_with_auditor, follow_hours
from millpy.cli.graph_audit import GraphAudit
from millpy.cli.options import DatabaseOption, JsonOption, connected_to, handle_errors, print_json, settings_of
from millpy.cli.spark import InputOption, MasterOption, MemoryOption, job_of, running_spark
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.config.settings import Settings
from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, instant
from millpy.observability.status_line import working
from millpy.process.exit import EXIT_FAILED

if TYPE_CHECKING:
    from millpy.model.deployment import GraphSpec, TableSpec
    from millpy.spark.audit import TableAudit
    from millpy.spark.job import HostedPlan


def _of_service(given: bool) -> bool:
    """Let the audit end with the service that started it."""
    if given:
        end_with_auditor()
    return given


@handle_errors
def audit(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines the graph.")],
    inputs: InputOption = None,
    engine: Annotated[
        Literal["hosted", "native"],
        typer.Option("--engine", help="hosted: millpy's windows inside Spark; native: Spark's own, over an archive."),
    ] = "hosted",
    archive: Annotated[
        str,
        typer.Option("--archive", metavar="DIRECTORY", help="Read the archives; for native, default: MILLPY_ARCHIVE."),
    ] = "",
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Only windows that end after, and records from here on.")
    ] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Only windows that end, and records, by then.")] = "",
    named: Annotated[
        list[str] | None, typer.Option("--table", metavar="TABLE", help="Only this result table; repeatable.")
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the hours that were audited, without another audit.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Audit each hour when it is final, until SIGTERM or Ctrl-C.")
    ] = False,
    by_service: Annotated[bool, typer.Option("--by-service", hidden=True, callback=_of_service)] = False,
    master: MasterOption = "local[*]",
    memory: MemoryOption = "2g",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Recompute the result tables from their history with Spark, and compare every row with the database.

    The history of a source is the records that it gave, in the order of their arrival, or its archive. Only what
    is final is compared. The exit status is 1 if a row is missing, added or changed. The database remembers the hours
    that were compared whole, if the role may write there.
    """
    settings = settings_of(database, archive=archive)
    clock = SystemClock()
    span = moment("--from", start, clock), moment("--to", end, clock)
    if listing:
        return _list(graph, settings, span, as_json=as_json)
    if follow:
        if any(span) or named or inputs:
            raise UsageError("--follow takes no --from, --to, --table or --input", hint="leave them out")
        follow_hours(graph, settings, ("--master", master, "--memory", memory))
        return 0
    with working(f"loading {graph}"):
        spec, hosted = loaded(graph, inputs, engine, settings if engine == "native" else None, archive)
    chosen = chosen_tables(spec, named)
    with connected_to(settings, str(Path(graph.partition(":")[0])), doing="") as admin, working("asking the database"):
        graph_audit = GraphAudit(admin, spec, microseconds(span))
        if engine == "hosted" and hosted is None:
            hosted = job_of(graph, graph_audit.archive(archive), state=False)
        with graph_audit.unchanged(chosen), running_spark(f"audit of {graph_audit.graph}", master, memory) as session:
            if hosted is None:
                found, refused = _natively(graph_audit, session, chosen, settings.archive)
            else:
                found, refused = graph_audit.hosted(session, hosted, chosen), {}
        recorded = graph_audit.record(found, engine, by_service=by_service)
    return _print(graph_audit.graph, found, refused, recorded, as_json=as_json)


def _natively(
    graph_audit: GraphAudit, session: Any, chosen: Sequence[TableSpec], directory: str
) -> tuple[list[TableAudit], dict[str, str]]:
    """Audit the tables that Spark can compute by itself; return why it cannot compute the others, too."""
    from millpy.spark.native import native_plans

    plans, refused = native_plans(graph_audit.spec)
    if not plans:
        raise UsageError(
            "the native engine can compute no table: "
            + "; ".join(f"{name}: {reason}" for name, reason in refused.items()),
            hint="--engine hosted computes all",
        )
    names = {table.name for table in chosen}
    found = graph_audit.native(session, [plan for plan in plans if plan.table.name in names], directory)
    return found, {name: reason for name, reason in refused.items() if name in names}


def loaded(
    graph: str, inputs: list[str] | None, engine: str, native: Settings | None, archive: str
) -> tuple[GraphSpec, HostedPlan | None]:
    """Load a graph, and check what an engine needs before Spark starts. A batch over archives is planned later."""
    if native is None and not archive:
        hosted = job_of(graph, inputs, state=False)
        return hosted.spec, hosted
    if inputs:
        raise UsageError(
            f"the {engine} engine reads archives, not files, with --archive"
            if native is None
            else "the native engine reads archives, not files",
            hint="--archive DIRECTORY instead of --input",
        )
    if native is not None and not native.archive:
        raise UsageError("no directory is set for the archive", hint="--archive DIRECTORY, or set MILLPY_ARCHIVE")
    return load_graph(graph).spec(), None


def chosen_tables(spec: GraphSpec, named: Sequence[str] | None) -> list[TableSpec]:
    """Return the named result tables, or all."""
    unknown = sorted(set(named or ()) - {table.name for table in spec.tables})
    if unknown:
        raise UsageError(
            f"{spec.name} has no result table {unknown[0]}",
            hint="there are: " + ", ".join(table.name for table in spec.tables),
        )
    return [table for table in spec.tables if not named or table.name in named]


def microseconds(span: Sequence[str]) -> tuple[int, int]:
    """Return the start and the end of a time range; all of time without them."""
    start, end = (instant(datetime.fromisoformat(text)) if text else None for text in span)
    return INSTANT_MIN if start is None else start, INSTANT_MAX if end is None else end


def _list(graph: str, settings: Settings, span: tuple[str, str], *, as_json: bool) -> int:
    """Print what is remembered; the exit status is 1 if an hour of it has differences."""
    spec = load_graph(graph).spec()
    with connected_to(settings, str(Path(graph.partition(":")[0]))) as admin:
        rows = list_audits(admin, GraphAudit(admin, spec).graph, *span)
    if as_json:
        print_json(rows)
    else:
        tables.echo(rows)
    return EXIT_FAILED if any(row["differences"] for row in rows) else 0


def _print(
    schema: str, found: Sequence[TableAudit], refused: dict[str, str], recorded: int | None, *, as_json: bool
) -> int:
    differences = sum(table.differences for table in found)
    if as_json:
        documents: list[dict[str, Any]] = [{**dataclasses.asdict(table), "hours": len(table.hours)} for table in found]
        print_json(
            {"differences": differences, "tables": documents, "not_audited": refused, "hours_recorded": recorded}
        )
        return EXIT_FAILED if differences else 0
    for table in found:
        show_audit(schema, table)
    for name, reason in refused.items():
        tables.say(f"{schema}.{name}: not audited, because {reason}")
    if recorded is None:
        tables.say("(not recorded, because this role may only read)")
    return EXIT_FAILED if differences else 0


def show_audit(schema: str, table: TableAudit) -> None:
    """Print what an audit of a table has found."""
    tables.say(f"{schema}.{table.table}: {table.rows:,} rows, {table.differences:,} differences")
    if table.left_out:
        tables.say(f"(not compared: {', '.join(table.left_out)})")
    if table.corrected:
        tables.say(f"({table.corrected:,} rows that operators have corrected: see `millpy corrections`)")
    if table.uncertain:
        tables.say(f"({table.uncertain:,} windows not compared, because a record may have missed them)")
    if table.examples:
        tables.echo(
            [
                {"difference": one.kind, **one.row, "expected": one.expected, "stored": one.stored}
                | ({"records": len(one.records)} if one.records else {})
                for one in table.examples
            ]
        )
        if len(table.examples) < table.differences:
            tables.say(f"(the first {len(table.examples)} of {table.differences:,})")
