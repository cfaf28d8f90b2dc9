"""`millpy audit`: recompute result tables from their history with Spark, and compare them with the database."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpy.admin.queries import Admin
from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, JsonOption, connected_to, handle_errors, print_json, settings_of
from millpy.cli.spark import InputOption, MasterOption, MemoryOption, job_of, running_spark
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.errors import UsageError
from millpy.observability.status_line import working
from millpy.process.exit import EXIT_FAILED

if TYPE_CHECKING:
    from millpy.spark.audit import TableAudit

FINAL = """
SELECT computation,
       min(CASE low_watermark WHEN 'infinity' THEN 4611686018427387904 WHEN '-infinity' THEN -4611686018427387904
           ELSE (extract(epoch FROM low_watermark) * 1000000)::bigint END) AS us
  FROM millpy.watermarks WHERE graph = :graph GROUP BY computation
"""


@handle_errors
def audit(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines the graph.")],
    inputs: InputOption = None,
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

    The history of each source are the records that it gave, in the order of their arrival. Only what is final is
    compared. The exit status is 1 if a row is missing, added or changed.
    """
    settings = settings_of(database)
    clock = SystemClock()
    span = [moment("--from", start, clock), moment("--to", end, clock)]
    with working(f"loading {graph}"):
        hosted = job_of(graph, inputs, state=False)
    with connected_to(settings, str(Path(graph.partition(":")[0])), doing="") as admin, working("asking the database"):
        schema = admin.name_of(hosted.spec.name, hosted.spec.generation)
        if schema is None:
            raise UsageError(f"{hosted.spec.name} is not deployed", hint="`millpy graphs` lists what is")
        final = {row["computation"]: int(row["us"]) for row in admin.ask(FINAL, graph=schema)}
        found = _compare(hosted, admin, schema, final, span, master=master, memory=memory)
    differences = sum(table.differences for table in found)
    if as_json:
        print_json({"differences": differences, "tables": [dataclasses.asdict(table) for table in found]})
    else:
        for table in found:
            _show(schema, table)
    return EXIT_FAILED if differences else 0


def _compare(
    hosted: Any, admin: Admin, schema: str, final: dict[str, int], span: list[str], *, master: str, memory: str
) -> list[TableAudit]:
    with running_spark(f"audit of {schema}", master, memory) as session:
        from millpy.model.time import INSTANT_MAX, INSTANT_MIN, instant
        from millpy.spark.audit import AuditScope, audit
        from millpy.spark.batch import run_hosted

        first, last = (instant(datetime.fromisoformat(text)) if text else None for text in span)
        scope = AuditScope(
            schema, final, INSTANT_MIN if first is None else first, INSTANT_MAX if last is None else last, admin.url
        )
        with run_hosted(session, hosted) as result:
            return audit(session, result.tables, hosted.spec.tables, scope)


def _show(schema: str, table: TableAudit) -> None:
    tables.say(f"{schema}.{table.table}: {table.rows:,} rows, {table.differences:,} differences")
    if table.examples:
        tables.echo(
            [
                {"difference": one.kind, **one.row, "expected": one.expected, "stored": one.stored}
                for one in table.examples
            ]
        )
        if len(table.examples) < table.differences:
            tables.say(f"(the first {len(table.examples)} of {table.differences:,})")
