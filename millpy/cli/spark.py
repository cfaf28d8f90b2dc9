"""`millpy spark run`: a graph over its whole history as a Spark batch, or as a stream that runs on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import JsonOption, handle_errors, print_json, settings_of
from millpy.cli.report import quiet_at_ctrl_c
from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import MillError, UsageError
from millpy.observability.status_line import working

if TYPE_CHECKING:
    from millpy.spark.job import HostedPlan

progress = logging.getLogger("millpy.observability.status_line")
TASK_FAILURES_MAX = 4
"""How often a task is tried, as on a cluster."""
spark = typer.Typer(help="Run a graph on Spark.", no_args_is_help=True)


InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input", metavar="[SOURCE=]FILES", help="History of a source: a file or a quoted pattern; repeatable."
    ),
]
MasterOption = Annotated[str, typer.Option(help="Spark master; default: all cores of this machine.")]
MemoryOption = Annotated[str, typer.Option(help="Memory of Spark's driver.")]


@spark.command("run")
@handle_errors
def run(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines the graph.")],
    output: Annotated[str, typer.Option("--output", metavar="DIR", help="New directory for the results, as Parquet.")],
    inputs: InputOption = None,
    state: Annotated[bool, typer.Option("--state", help="Write the final state, too.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Run on, batch by batch, and resume after a stop.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="DIR", help="With --stream: where to resume.")
    ] = None,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="With --stream: time of a batch.")] = 1.0,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="With --stream: also write tables there.")
    ] = None,
    master: MasterOption = "local[*]",
    memory: MemoryOption = "2g",
    as_json: JsonOption = False,
) -> None:
    """Run a graph over its whole history on Spark: the same rows as its workers would write.

    Reads NDJSON, CSV and Parquet files in place of the graph's sources, and ends when they end. Writes result tables,
    late records and dead letters as Parquet, and prints the accounting. Uses no database.

    With --stream, reads watched directories as well, and writes rows as they are computed; with --database also into
    the graph's tables in PostgreSQL.
    """
    if stream:
        places = _places(checkpoint, output, database, state=state)
        _stream(graph, inputs, places, (master, memory), every, as_json=as_json)
        return
    for name, value in {"--checkpoint": checkpoint, "--database": database}.items():
        if value is not None:
            raise UsageError(f"{name} is for --stream", hint="a batch starts anew, and writes files only")
    if "://" not in output and Path(output).exists() and any(Path(output).iterdir()):
        raise UsageError(f"{output} is not empty", hint="name a new directory")
    with working(f"loading {graph}"):
        hosted = job_of(graph, inputs, state=state)
        with running_spark(f"{graph} as a batch", master, memory) as session:
            from millpy.spark.batch import run_hosted

            with run_hosted(session, hosted) as result:
                result.write(output)
                summary = result.summary()
    _show(summary, output, as_json=as_json)


def _show(summary: dict[str, Any], output: str, *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    for title, rows in summary["accounting"].items():
        tables.say(f"{title}\n")
        tables.echo([_shown(row) for row in rows])
        tables.say("")
    for computation, left in summary["undone"].items():
        tables.say(f"left undone in {computation}: " + ", ".join(f"{count} {what}" for what, count in left.items()))
    tables.say(f"written to {output}")


def _places(checkpoint: str | None, output: str, database: str | None, *, state: bool) -> dict[str, str | None]:
    """Check the options of a stream; return the fields of its `StreamPlaces`."""
    if checkpoint is None:
        raise UsageError("--stream needs --checkpoint DIR", hint="a directory in which the query keeps its state")
    if state:
        raise UsageError("--state is for a batch", hint="a stream keeps its state in --checkpoint")
    if "://" in checkpoint + output:
        raise UsageError("--stream writes to directories that all machines see, not to URLs", hint="mount one")
    url = settings_of(database).database_url if database is not None else None
    return {"checkpoint": checkpoint, "output": output, "database": url}


def _stream(
    graph: str,
    inputs: Sequence[str] | None,
    places: Mapping[str, Any],
    machine: tuple[str, str],
    every: float,
    *,
    as_json: bool,
) -> None:
    """Run a graph until its sources have ended, or until Ctrl-C."""
    with working(f"loading {graph}"):
        hosted = job_of(graph, inputs, state=False, streams=True)
        with running_spark(f"{graph} as a stream", *machine) as session:
            from millpy.spark.stream import StreamPlaces, stream_hosted

            running = stream_hosted(session, hosted, StreamPlaces(**places), timedelta(seconds=every))
            # PySpark's own handler would cancel the jobs of the batch that is running, which `stop` waits for.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                running.wait()
            finally:
                running.stop()
                signal.signal(signal.SIGINT, before)
            summary = running.summary()
    _show(summary, places["output"], as_json=as_json)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "subscription_id"}


def job_of(graph: str, inputs: Sequence[str] | None, *, state: bool, streams: bool = False) -> HostedPlan:
    """Load a graph and check that it can run on Spark, before Spark starts, which takes seconds."""
    from millpy.spark.job import HostedPlan, make_job  # imported here: --help does not need the engine

    limits, now_us = settings_of(None).limits, SystemClock().now_us()
    return HostedPlan(make_job(graph, inputs or (), limits=limits, now_us=now_us, state=state, streams=streams))


@contextmanager
def running_spark(name: str, master: str, memory: str) -> Iterator[Any]:
    """Start Spark, or use the session that this process has. Its errors are one line."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        from millpy.spark.session import session
        from millpy.spark.spark_errors import readable_error
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed", hint=to_install("spark")) from None
    running = SparkSession.getActiveSession()
    with quiet_at_ctrl_c():
        progress.debug("starting Spark")
        started = running or session(name=name, master=_retrying(master), memory=memory)
        try:
            yield started
        except PySparkException as error:
            raise MillError(readable_error(str(error)), hint="the full error of Spark is above") from error
        finally:
            if running is None:
                started.stop()


def _retrying(master: str) -> str:
    """Let tasks be repeated on this machine as on a cluster; Spark's default there is to fail at the first loss."""
    return f"{master[:-1]},{TASK_FAILURES_MAX}]" if master.startswith("local[") and "," not in master else master
