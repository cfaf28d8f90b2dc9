"""An audit by Spark of the tables that a case of the crash matrix has left: a second judge beside the oracle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from millpy.admin.queries import Admin
from millpy.cli.graph_audit import GraphAudit
from millpy.clock import SystemClock
from millpy.limits import Limits
from millpy.spark.audit import AuditScope, audit
from millpy.spark.batch import run_hosted
from millpy.spark.job import HostedPlan, make_job
from tests.crash.checks import Fault
from tests.small_spark import small_spark

GRAPH = Path(__file__).with_name("graph.py")
Audit = Callable[[str], list[Fault]]
"""Audits the database at a URL."""


@contextmanager
def auditing(path: Path) -> Iterator[Audit]:
    """Compute the tables of the crash tests' graph over a file on Spark, once; audit any database against them."""
    os.environ["CRASH_INPUT"] = str(path)  # Spark's processes inherit it
    job = make_job(str(GRAPH), [str(path)], limits=Limits(), now_us=SystemClock().now_us())
    hosted = HostedPlan(job)
    in_turn = Lock()
    with (
        small_spark(name="audit of the crash matrix", master="local[2]") as spark,
        run_hosted(spark, hosted) as result,
    ):

        def run(url: str) -> list[Fault]:
            graph_audit = GraphAudit(Admin(url), hosted.spec)
            scope = AuditScope(graph_audit.graph, graph_audit.final, database_url=url)
            with in_turn:
                tables = audit(spark, result.tables, hosted.spec.tables, scope)
            assert all(table.rows for table in tables), tables
            return [
                Fault("violation", f"audit of {table.table}: {table.examples[:2]}", table.differences)
                for table in tables
                if table.differences
            ]

        yield run
