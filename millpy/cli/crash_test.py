"""`millpy crash-test`: read the options, run the test, write the report."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import JsonOption, handle_errors
from millpy.clock import SystemClock
from millpy.config.settings import Settings, configure_logging
from millpy.embedded import EMBEDDED_DIRECTORY
from millpy.testing.crash_test.options import FaultKind, Options, fault_kinds

LEASE_S = 1.0


@handle_errors
def command(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines a Graph.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="[STREAM=]FILE", help="File of records for an injector; give one for each."),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option("--generate", metavar="N", help="Generate N records for each injector without an input."),
    ] = None,
    kills: Annotated[int, typer.Option("--kills", metavar="N", help="Number of faults.")] = 20,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Number of worker processes.")] = 3,
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", help="Seed of the fault plan; the same seed plans the same faults.")
    ] = 1,
    faults: Annotated[
        str, typer.Option("--faults", metavar="A,B", help=f"Faults to inject; any of: {', '.join(FaultKind)}.")
    ] = "kill,freeze,db,network",
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            help="Empty database to run in; default: MILLPY_DATABASE_URL, else an embedded one.",
        ),
    ] = None,
    sql: Annotated[
        Path | None,
        typer.Option("--sql", metavar="FILE.sql", help="SQL that makes the tables in which the graph looks up."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="File of the HTML report; the JSON goes beside it."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the databases and the logs.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Run a graph while injecting faults, and compare every result with a run without faults.

    Exit status: 0 nothing was lost, doubled or changed; 1 something was, or the test could not decide; 2 a mistake
    in the command.
    """
    settings = Settings.load(database_url=database, log_level="warning")
    configure_logging(settings)
    options = Options(
        graph=graph,
        inputs=tuple(inputs or ()),
        generate=generate,
        count=kills,
        workers=workers,
        seed=seed,
        faults=fault_kinds(faults.split(",")),
        lease_s=LEASE_S,
        database_url=settings.database_url,
        sql=sql,
        report=out or Path(f"crash-test-{Path(graph.partition(':')[0]).stem}.html"),
        keep=keep,
    )
    return _run(options, as_json=as_json)


def _run(options: Options, *, as_json: bool) -> int:
    # Imported here: the other commands do not need the engine.
    from rich.console import Console

    from millpy.testing.crash_test.page import page
    from millpy.testing.crash_test.report import as_json as document
    from millpy.testing.crash_test.report import build
    from millpy.testing.crash_test.session import crash_test
    from millpy.testing.crash_test.terminal import display_for
    from millpy.testing.crash_test.text_report import report_text

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the exit also ends every child process
    options.report.open("a").close()  # fail before the test runs, not after
    console, clock = Console(stderr=True), SystemClock()
    directory = Path(options.graph.partition(":")[0]).parent / EMBEDDED_DIRECTORY / "crash-test"
    findings = crash_test(options, directory, clock, display_for(console, clock))
    found = build(findings, clock.now_us())
    as_json_too = options.report.with_suffix(".json")
    options.report.write_text(page(found), encoding="utf-8")
    as_json_too.write_bytes(document(found))
    if as_json:
        typer.echo(document(found).decode())
        return 0 if found.passed else 1
    tables.say(report_text(found))
    tables.say(f"\n  report: {options.report} and {as_json_too}")
    if found.files is not None:
        tables.say(f"  data and logs of the run: {found.files}")
    return 0 if found.passed else 1
