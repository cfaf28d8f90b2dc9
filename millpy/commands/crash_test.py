"""`millpy crash-test`: arguments in, report out."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from millpy.clock import SystemClock
from millpy.commands import tables
from millpy.commands.common import JsonOption
from millpy.config import Settings, configure_logging
from millpy.launch import EMBEDDED_DIRECTORY
from millpy.testing.crash_test.options import FaultKind, Options, fault_kinds

LEASE_S = 1.0


def command(
    graph: Annotated[str, typer.Argument(metavar="GRAPH.py", help="Python file that defines a Graph.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="[STREAM=]FILE", help="Records to feed; one for each injector."),
    ] = None,
    generate: Annotated[
        int | None, typer.Option("--generate", metavar="N", help="Make up N records for injectors without an input.")
    ] = None,
    kills: Annotated[int, typer.Option("--kills", metavar="N", help="How many faults.")] = 20,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Worker processes.")] = 3,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="The same seed plans the same faults.")] = 1,
    faults: Annotated[
        str, typer.Option("--faults", metavar="A,B", help=f"Any of: {', '.join(FaultKind)}.")
    ] = "kill,freeze,db,network",
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            help="An empty database to run in; default: MILLPY_DATABASE_URL, else embedded.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Where the report goes; JSON beside it.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep databases and logs.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Run your graph while killing it, and compare every result with a run without faults.

    Exit status 0: nothing was lost, doubled or changed. 1: something was, or could not be decided. 2: wrong usage.
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
        report=out or Path(f"crash-test-{Path(graph.partition(':')[0]).stem}.html"),
        keep=keep,
    )
    return _run(options, as_json=as_json)


def _run(options: Options, *, as_json: bool) -> int:
    # The engine is not loaded for the other commands.
    from rich.console import Console

    from millpy.testing.crash_test.display import display_for
    from millpy.testing.crash_test.page import page
    from millpy.testing.crash_test.report import as_json as document
    from millpy.testing.crash_test.report import build
    from millpy.testing.crash_test.session import crash_test
    from millpy.testing.crash_test.words import words

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # everything that was started ends too
    options.report.open("a").close()  # better now than when the minutes are over
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
    tables.say(words(found))
    tables.say(f"\n  report: {options.report} and {as_json_too}")
    if found.files is not None:
        tables.say(f"  data and logs of the run: {found.files}")
    return 0 if found.passed else 1
