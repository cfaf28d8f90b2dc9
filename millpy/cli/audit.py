"""`millpy audit`: recompute result tables from their history with Spark, and compare them with the database."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millpy.admin.queries import Admin
from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, JsonOption, connected_to, handle_errors, print_json, settings_of
from millpy.cli.spark import InputOption, MasterOption, MemoryOption, job_of, running_spark
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.config.settings import Settings
from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.observability.status_line import working
from millpy.process.exit import EXIT_FAILED

if TYPE_CHECKING:
    from millpy.model.deployment import GraphSpec
    from millpy.spark.audit import AuditScope, TableAudit
    from millpy.spark.job import HostedPlan
    from millpy.store.archive.reader import TimeRange

FINAL = """
SELECT computation, count(*) AS intervals,
       min(CASE low_watermark WHEN 'infinity' THEN 4611686018427387904 WHEN '-infinity' THEN -4611686018427387904
           ELSE (extract(epoch FROM low_watermark) * 1000000)::bigint END) AS us
  FROM millpy.watermarks WHERE graph = :graph GROUP BY computation
"""


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
        typer.Option("--archive", metavar="DIRECTORY", help="For native: the archives; default: MILLPY_ARCHIVE."),
    ] = "",
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Only windows that start, and records that happen, from here.")
    ] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Only windows that end, and records, by then.")] = "",
    master: MasterOption = "local[*]",
    memory: MemoryOption = "2g",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Recompute the result tables from their history with Spark, and compare every row with the database.

    The history of each source are the records that it gave, in the order of their arrival, or its archive. Only what
    is final is compared. The exit status is 1 if a row is missing, added or changed.
    """
    settings = settings_of(database, archive=archive)
    clock = SystemClock()
    span = [moment("--from", start, clock), moment("--to", end, clock)]
    with working(f"loading {graph}"):
        if engine == "native":
            hosted, spec = None, _native_spec(graph, inputs, settings)
        else:
            if archive:
                raise UsageError("the hosted engine reads no archive", hint="--engine native, or --input FILES")
            hosted = job_of(graph, inputs, state=False)
            spec = hosted.spec
    with connected_to(settings, str(Path(graph.partition(":")[0])), doing="") as admin, working("asking the database"):
        schema = admin.name_of(spec.name, spec.generation)
        if schema is None:
            raise UsageError(f"{spec.name} is not deployed", hint="`millpy graphs` lists what is")
        graph_audit = _GraphAudit(admin, schema, span, master, memory)
        if hosted is None:
            found, refused = graph_audit.native(spec, Path(settings.archive))
        else:
            found, refused = graph_audit.hosted(hosted)
    differences = sum(table.differences for table in found)
    if as_json:
        documents = [dataclasses.asdict(table) for table in found]
        print_json({"differences": differences, "tables": documents, "not_audited": refused})
    else:
        for table in found:
            _show(schema, table)
        for name, reason in refused.items():
            tables.say(f"{schema}.{name}: not audited, because {reason}")
    return EXIT_FAILED if differences else 0


def _native_spec(graph: str, inputs: list[str] | None, settings: Settings) -> GraphSpec:
    if inputs:
        raise UsageError("the native engine reads archives, not files", hint="--archive DIRECTORY instead of --input")
    if not settings.archive:
        raise UsageError("no directory is set for the archive", hint="--archive DIRECTORY, or set MILLPY_ARCHIVE")
    return load_graph(graph).spec()


class _GraphAudit:
    """A deployed graph and what of it is to be audited."""

    def __init__(self, admin: Admin, schema: str, span: list[str], master: str, memory: str) -> None:
        self._admin = admin
        self._schema = schema
        self._span = span
        self._rows = admin.ask(FINAL, graph=schema)
        self._final = {row["computation"]: int(row["us"]) for row in self._rows}
        self._spark = master, memory

    def hosted(self, hosted: HostedPlan) -> tuple[list[TableAudit], dict[str, str]]:
        """Audit all tables by a batch."""
        with running_spark(f"audit of {self._schema}", *self._spark) as session:
            from millpy.spark.audit import audit
            from millpy.spark.batch import run_hosted

            with run_hosted(session, hosted) as result:
                return audit(session, result.tables, hosted.spec.tables, self._scope()), {}

    def native(self, spec: GraphSpec, root: Path) -> tuple[list[TableAudit], dict[str, str]]:
        """Audit the tables that Spark can compute by itself; return why it cannot compute the others, too.

        Raises:
            UsageError: there is none, or an archive is empty.
        """
        from millpy.store.archive.reader import ArchiveReader

        with running_spark(f"audit of {self._schema}", *self._spark) as session:
            from millpy.spark.audit import audit_natively
            from millpy.spark.native import native_plans, native_table

            plans, refused = native_plans(spec)
            if not plans:
                raise UsageError(
                    "the native engine can compute no table: "
                    + "; ".join(f"{name}: {reason}" for name, reason in refused.items()),
                    hint="--engine hosted computes all",
                )
            found = []
            files: dict[str, list[str]] = {}
            for plan in plans:
                for name in (plan.table.computation, plan.archive, plan.source):
                    if name not in self._final:
                        raise UsageError(f"{name} is not deployed", hint="deploy the graph with which the workers run")
                final = min(self._final[plan.table.computation], self._final[plan.archive])
                if plan.archive not in files:
                    listed = self._admin.archive_files(self._schema, plan.archive)
                    reader = ArchiveReader(root, plan.archive, listed)
                    files[plan.archive] = [reader.find(file) for file in reader.holding(self._times())]
                partitions = next(row["intervals"] for row in self._rows if row["computation"] == plan.source)
                table = native_table(session, plan, files[plan.archive], partitions=partitions)
                found.append(audit_natively(session, table, plan, self._scope({plan.table.computation: final})))
        return found, refused

    def _times(self) -> TimeRange:
        from millpy.model.time import INSTANT_MAX, INSTANT_MIN, instant
        from millpy.store.archive.reader import TimeRange

        first, end = (instant(datetime.fromisoformat(text)) if text else None for text in self._span)
        return TimeRange(INSTANT_MIN if first is None else first, INSTANT_MAX if end is None else end)

    def _scope(self, final: dict[str, int] | None = None) -> AuditScope:
        from millpy.spark.audit import AuditScope

        times = self._times()
        return AuditScope(self._schema, final or self._final, times.first, times.end, self._admin.url)


def _show(schema: str, table: TableAudit) -> None:
    tables.say(f"{schema}.{table.table}: {table.rows:,} rows, {table.differences:,} differences")
    if table.left_out:
        tables.say(f"(not compared: {', '.join(table.left_out)})")
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
