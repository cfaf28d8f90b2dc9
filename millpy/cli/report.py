"""`millpy report`: profile the devices of a result table with PySpark, as text and as one HTML page."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, GraphArgument, JsonOption, handle_errors, print_json, settings_of
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import MillError, UsageError
from millpy.observability.status_line import working

progress = logging.getLogger("millpy.observability.status_line")
CountOption = Annotated[str | None, typer.Option(help="Column that counts records; default: n, if the table has it.")]
ZoneOption = Annotated[str, typer.Option(metavar="NAME", help="Time zone of hours and weekdays, as Europe/Berlin.")]


@handle_errors
def report(
    table: Annotated[str, typer.Argument(metavar="GRAPH.TABLE", help="Result table of windows.")],
    graph: GraphArgument = None,
    value: Annotated[str | None, typer.Option(help="Column to analyze; default: the first with decimals.")] = None,
    count: CountOption = None,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Only windows that start at or after this.")
    ] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Only windows that start before this.")] = "",
    zone: ZoneOption = "UTC",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with charts to this file.")] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Profile every device of a result table, find windows that differ from its history, and count late records.

    TIME is a time with its zone (2026-11-20T08:00:00Z), or how long ago (90s, 10m, 2h, 7d).
    Needs the extra spark. docs/spark.md explains each figure.
    """
    from millpy.process.launcher import database as connected  # imported here: --help does not need it

    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        from millpy.spark.page import page
        from millpy.spark.report import Question, make_report, subject
        from millpy.spark.scores import History
        from millpy.spark.session import session
        from millpy.spark.spark_errors import readable_error
        from millpy.spark.words import as_text
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed", hint=to_install("spark")) from None

    _check(table, html)
    span = [moment("--from", start, SystemClock()), moment("--to", end, SystemClock())]
    first, last = (datetime.fromisoformat(text) if text else None for text in span)
    question = Question(table=table, value=value, count=count, start=first, end=last, history=History(zone=zone))
    database_of = connected(settings_of(database), graph, create=False)
    with database_of as url, working(f"looking for {table}"), quiet_at_ctrl_c():
        subject(url, question)
        running = SparkSession.getActiveSession()
        progress.debug("starting Spark")
        spark = session(database_url=url, name=f"report on {table}")
        progress.debug("Spark reads %s", table)
        try:
            found = make_report(spark, url, question)
        except PySparkException as error:
            raise MillError(readable_error(str(error)), hint="the full error of Spark is above") from error
        finally:
            if running is None:
                spark.stop()
    if html is not None:
        html.write_text(page(found), encoding="utf-8")
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    tables.say(as_text(found))
    if html is not None:
        tables.say(f"\nwritten to {html}")


def _check(table: str, html: Path | None) -> None:
    """Raise UsageError or OSError for wrong arguments, before Spark starts, which takes seconds."""
    if table.count(".") != 1:
        raise UsageError(f"{table!r} is not GRAPH.TABLE", hint="`millpy windows` names the result tables")
    if html is not None and not html.parent.is_dir():
        raise UsageError(f"there is no directory {html.parent}", hint="create it, or give another file")
    if html is not None:
        html.open("a").close()


@contextmanager
def quiet_at_ctrl_c() -> Iterator[None]:
    """Drop the records of the root logger inside the block: at Ctrl-C, PySpark logs each call that it interrupts."""

    def ours(record: logging.LogRecord) -> bool:
        return record.name != "root"

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(ours)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(ours)
