"""`millpy report`: what a table of windows says of its devices, by PySpark, printed and as one HTML page."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from millpy.clock import SystemClock
from millpy.commands import tables
from millpy.commands.common import DatabaseOption, GraphArgument, JsonOption, print_json, settings_of, worded
from millpy.commands.moments import moment
from millpy.errors import MillError, UsageError
from millpy.extras import to_install
from millpy.progress import working

progress = logging.getLogger("millpy.progress")


@worded
def report(
    table: Annotated[str, typer.Argument(metavar="GRAPH.TABLE", help="A result table of windows.")],
    graph: GraphArgument = None,
    value: Annotated[str | None, typer.Option(help="Column to look at; default: the first with decimals.")] = None,
    count: Annotated[
        str | None, typer.Option(help="Column that counts records; default: n, where there is one.")
    ] = None,
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="Only windows from this time on.")] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Only windows that start before this time.")] = "",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page with the charts there.")] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Profile every device of a result table, find windows unlike its own history, and count what came late.

    TIME is a moment with its zone (2026-11-20T08:00:00Z), or how long ago (90s, 10m, 2h, 7d).
    Needs the extra spark. What each figure means is in docs/spark.md.
    """
    from millpy.launch import database as connected  # not loaded for --help

    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        from millpy.spark.page import page
        from millpy.spark.report import Question, make_report, subject
        from millpy.spark.session import session
        from millpy.spark.words import as_text
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed", hint=to_install("spark")) from None

    _check(table, html)
    clock = SystemClock()
    span = [moment("--from", start, clock), moment("--to", end, clock)]
    first, last = (datetime.fromisoformat(text) if text else None for text in span)
    question = Question(table=table, value=value, count=count, start=first, end=last)
    database_of = connected(settings_of(database), graph, create=False)
    with database_of as url, working(f"looking for {table}"), _quiet_at_ctrl_c():
        subject(url, question)
        running = SparkSession.getActiveSession()
        progress.debug("starting Spark")
        spark = session(database_url=url, name=f"report on {table}")
        progress.debug("Spark reads %s", table)
        try:
            found = make_report(spark, url, question)
        except PySparkException as error:
            raise MillError(told(str(error)), hint="its own words are above") from error
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
    """What can be known to be wrong before Spark has started, which takes seconds."""
    if table.count(".") != 1:
        raise UsageError(f"{table!r} is not GRAPH.TABLE", hint="`millpy windows` names the tables that there are")
    if html is not None and not html.parent.is_dir():
        raise UsageError(f"there is no directory {html.parent}", hint="make it, or name another file")
    if html is not None:
        html.open("a").close()


@contextmanager
def _quiet_at_ctrl_c() -> Iterator[None]:
    """PySpark cancels its jobs then, from within a call, and its bridge tells the root logger what that breaks."""

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


def told(words: str) -> str:
    """What an error of Spark says: in its first line, or in that of ours, where ours was raised in its processes."""
    lines = words.strip().splitlines()
    ours = [found[1] for line in lines if (found := re.match(r"millpy\.[\w.]+Error: (.+)", line))]
    return ours[-1] if ours else f"Spark: {lines[0]}"
