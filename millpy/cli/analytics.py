"""`millpy analytics`: profiles, anomalies and completeness of the devices of a graph, kept current by Spark."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from millpy.cli.options import DatabaseOption, JsonOption, duration_option, handle_errors, print_json, settings_of
from millpy.cli.report import ZoneOption
from millpy.cli.spark import MasterOption, running_spark
from millpy.clock import SystemClock
from millpy.config.database_url import complete
from millpy.config.secrets import secret
from millpy.config.settings import READER_URL, Settings
from millpy.errors import MillError, OwnershipError, UsageError
from millpy.observability.status_line import working
from millpy.process.launcher import database as connected

log = logging.getLogger("millpy.analytics")
FAILED_S_MAX = 300.0
"""How long a failing round waits at most for the next."""


@handle_errors
def analytics(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines the graph, or its name.")],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Directory of checkpoints and Parquet.")],
    every: Annotated[float, duration_option("--every", "60s", "Time between two rounds.")] = 60.0,
    days: Annotated[int, typer.Option("--days", min=1, help="Days of windows that are kept for the baseline.")] = 56,
    value: Annotated[
        list[str] | None, typer.Option("--value", metavar="TABLE=COLUMN", help="Column to analyze; repeatable.")
    ] = None,
    zone: ZoneOption = "UTC",
    once: Annotated[bool, typer.Option("--once", help="Analyze what is committed, and end.")] = False,
    database: DatabaseOption = None,
    master: MasterOption = "local[2]",
    memory: Annotated[str, typer.Option(help="Memory of Spark's driver.")] = "1g",
    as_json: JsonOption = False,
) -> None:
    """Keep the devices of a graph analyzed: SQL views and Parquet of their hours, anomalies and completeness.

    Reads the panes of every table of windows as a Spark stream, as MILLPY_READER_DATABASE_URL if it is set, and writes
    millpy.device_profiles, millpy.device_hours and millpy.device_anomalies. Needs the extra spark.
    """
    values = dict(_pair(text) for text in value or ())
    settings = settings_of(database)
    name = _graph_name(graph)
    done = 0
    started = running_spark(f"{name}: analytics", master, memory)
    with _database(settings, graph) as url, _shown(name, once=once), started as spark:
        from millpy.spark.analytics import AnalyticsPlan, GraphAnalytics
        from millpy.spark.device_analytics import AnalyticsSettings
        from millpy.spark.scores import History

        plan = AnalyticsPlan(
            graph=name,
            directory=Path(to),
            database_url=url,
            reader_url=_reader_url() or url,
            values=values,
            settings=AnalyticsSettings(history=History(zone=zone), days=days),
        )
        plan.directory.mkdir(parents=True, exist_ok=True)
        running = GraphAnalytics(spark, plan, SystemClock())
        failures = 0
        while not once:
            try:
                running.round()
                failures = 0
                (plan.directory / "alive").touch()
            except OwnershipError:
                raise
            except MillError as error:
                failures += 1
                log.warning("%s", error.message)
            asyncio.run(SystemClock().sleep(min(max(every, 1.0) * 2 ** min(failures, 8), max(FAILED_S_MAX, every))))
        done = running.round()
    if as_json:
        print_json({"graph": name, "tables": done})


def _pair(text: str) -> tuple[str, str]:
    table, equals, column = text.partition("=")
    if not (table and equals and column):
        raise UsageError(f"--value {text!r} is not TABLE=COLUMN", hint="for example --value temperature_1m=mean")
    return table, column


def _graph_name(graph: str) -> str:
    """Return the name of a graph given by its file or its name; of its generations, the current one has it."""
    if not graph.partition(":")[0].endswith(".py"):
        return graph
    from millpy.graph.loader import load_graph  # imported here: --help does not need the engine

    return load_graph(graph).name


def _database(settings: Settings, graph: str) -> AbstractContextManager[str]:
    return connected(settings, graph if graph.endswith(".py") else None, create=False)


def _reader_url() -> str | None:
    url = secret(READER_URL)
    return complete(url) if url else None


def _shown(name: str, *, once: bool) -> AbstractContextManager[object]:
    return working(f"analyzing {name}") if once else nullcontext()
