"""`millpy spark run`: a graph over its whole history as a Spark batch, or as a stream that runs on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import JsonOption, connected_to, duration_option, handle_errors, print_json, settings_of
from millpy.cli.report import quiet_at_ctrl_c
from millpy.cli.time_arguments import moment
from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import MillError, UsageError
from millpy.observability.status_line import working

if TYPE_CHECKING:
    from millpy.spark.archive_input import Archive
    from millpy.spark.job import HostedPlan

log = logging.getLogger(__name__)
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
ExactOption = Annotated[
    bool, typer.Option("--exact", help="With --archive: make every bundle again as the workers did, by their takes.")
]
ManifestOption = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="URL", help="With --stream: also write tables there. With --archive: the manifest."
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
    archive: Annotated[
        str | None, typer.Option("--archive", metavar="DIR", help="Read the graph's archives in place of its sources.")
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="With --archive: only records that happen from here.")
    ] = "",
    end: Annotated[
        str, typer.Option("--to", metavar="TIME", help="With --archive: only records that happen before.")
    ] = "",
    exact: ExactOption = False,
    state: Annotated[bool, typer.Option("--state", help="Write the final state, too.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Run on, batch by batch, and resume after a stop.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="DIR", help="With --stream: where to resume.")
    ] = None,
    every: Annotated[float, duration_option("--every", "1s", "With --stream: time of a batch.")] = 1.0,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="With --stream: end behind what the sources have at the start.")
    ] = False,
    database: ManifestOption = None,
    master: MasterOption = "local[*]",
    memory: MemoryOption = "2g",
    as_json: JsonOption = False,
) -> None:
    """Run a graph over its whole history on Spark: the same rows as its workers would write.

    Reads NDJSON, CSV and Parquet files in place of the graph's sources, and ends when they end. Writes result tables,
    late records and dead letters as Parquet, and prints the accounting. Uses no database.

    With --archive, reads the bundles that workers have taken, as they were, so that rows are equal to the last digit.
    With --exact, several partitions are read in the workers' order, too, and what is open there stays open.

    With --stream, reads directories, Kafka and archives that grow, and writes rows, with --database also to PostgreSQL.
    """
    span = _span(archive, start, end, inputs, stream=stream)
    _check_exact(exact, archive, span, stream=stream)
    if stream:
        places = _places(checkpoint, output, database, state=state)
        rhythm = {"every": timedelta(seconds=every), "available_now": available_now}
        source = _archive(graph, archive, span, None) if archive else inputs
        _stream(graph, source, places, (master, memory), rhythm, as_json=as_json)
        return
    given = {"--checkpoint": checkpoint, "--database": database, "--available-now": available_now or None}
    _check_batch(given, output, archive)
    with working(f"loading {graph}"):
        source = inputs if archive is None else replace(_archive(graph, archive, span, database), exact=exact)
        hosted = job_of(graph, source, state=state)
        with running_spark(f"{graph} as a batch", master, memory) as session:
            from millpy.spark.batch import run_hosted

            with run_hosted(session, hosted) as result:
                result.write(output)
                summary = result.summary()
    _show(summary, output, as_json=as_json)


def _check_batch(given: Mapping[str, object], output: str, archive: str | None) -> None:
    """Check that no option is for a stream only, and that the output is empty."""
    for name, value in given.items():
        if value is not None and (archive is None or name != "--database"):
            raise UsageError(f"{name} is for --stream", hint="a batch starts anew, and writes files only")
    if "://" not in output and Path(output).exists() and any(Path(output).iterdir()):
        raise UsageError(f"{output} is not empty", hint="name a new directory")


def _span(
    archive: str | None, start: str, end: str, inputs: Sequence[str] | None, *, stream: bool
) -> list[datetime | None]:
    """Check the options of an archive; return its time range."""
    clock = SystemClock()
    span = [moment(option, text, clock) for option, text in (("--from", start), ("--to", end))]
    if archive is None and any(span):
        raise UsageError("--from and --to are for --archive", hint="name only the files to read: --input FILES")
    if archive is not None and inputs:
        raise UsageError("--archive and --input exclude each other", hint="an archive replaces all sources")
    if stream and end:
        raise UsageError("--to is for a batch", hint="a stream of an archive runs on")
    return [datetime.fromisoformat(text) if text else None for text in span]


def _check_exact(exact: bool, archive: str | None, span: Sequence[datetime | None], *, stream: bool) -> None:
    if exact and (archive is None or stream or any(span)):
        raise UsageError("--exact is for a batch over a whole --archive", hint="leave out --stream, --from and --to")


def _archive(graph: str, directory: str, span: Sequence[datetime | None], database: str | None) -> Archive:
    """Return the archives of a graph, by the manifest if a database is named."""
    from millpy.graph.loader import load_graph
    from millpy.spark.archive_input import Archive

    first, last = span
    if database is None:
        return Archive(directory, first, last)
    spec = load_graph(graph).spec()
    with connected_to(settings_of(database), str(Path(graph.partition(":")[0])), doing="") as admin:
        deployed = admin.name_of(spec.name, spec.generation)
        if deployed is None:
            raise UsageError(f"{spec.name} is not deployed", hint="`millpy graphs` lists what is")
        archives = [computation.name for computation in spec.computations if computation.kind == "archive"]
        for row in admin.archives(deployed):
            if row["pending"]:
                log.warning(
                    "%s: %s records are not archived yet, and are not read", row["archive"], f"{row['pending']:,}"
                )
        return Archive(directory, first, last, {name: admin.archive_files(deployed, name) for name in archives})


def _show(summary: dict[str, Any], output: str, *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    show_accounting(summary)
    tables.say(f"written to {output}")


def show_accounting(summary: dict[str, Any]) -> None:
    """Print the accounting, and what is left undone."""
    for title, rows in summary["accounting"].items():
        tables.say(f"{title}\n")
        tables.echo([_shown(row) for row in rows])
        tables.say("")
    for computation, left in summary["undone"].items():
        tables.say(f"left undone in {computation}: " + ", ".join(f"{count} {what}" for what, count in left.items()))


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
    inputs: Sequence[str] | Archive | None,
    places: Mapping[str, Any],
    machine: tuple[str, str],
    rhythm: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Run a graph until its sources have ended, or until Ctrl-C; `rhythm` is how `stream_hosted` runs batches."""
    with working(f"loading {graph}"):
        hosted = job_of(graph, inputs, state=False, streams=True)
        with running_spark(f"{graph} as a stream", *machine) as session:
            from millpy.spark.stream import StreamPlaces, stream_hosted

            running = stream_hosted(session, hosted, StreamPlaces(**places), **rhythm)
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


def job_of(graph: str, inputs: Sequence[str] | Archive | None, *, state: bool, streams: bool = False) -> HostedPlan:
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
