"""`millpy doctor`: check the database and the brokers, and say what to do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import textwrap
from typing import Annotated

import typer

from millpy.admin.doctor import examine
from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, GraphArgument, JsonOption, handle_errors, print_json, settings_of
from millpy.clock import SystemClock
from millpy.config.escape import visible
from millpy.model.finding import Finding, Severity
from millpy.observability.status_line import working
from millpy.process.exit import EXIT_FAILED

_COLORS = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}
INDENT = 8
QuietOption = Annotated[bool, typer.Option("--quiet", help="Hide the checks that pass.")]


@handle_errors
def doctor(
    graph: GraphArgument = None,
    database: DatabaseOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> int:
    """Check the database (settings, locks, leases, rights, space) and the brokers of GRAPH.py, and say what to do.

    Exit status: 0 nothing is worse than a warning; 1 something is.
    """
    from millpy.admin.diagnosis import read_facts  # imported here: --help does not need it
    from millpy.process.launcher import database as connected

    settings = settings_of(database)
    with connected(settings, graph, create=False) as url, working("checking the database"):
        facts = read_facts(url, SystemClock())
        findings = examine(facts, settings.limits)
        if graph is not None and ".py" in graph:
            from millpy.admin.doctor_sources import examine_sources
            from millpy.admin.doctor_statements import examine_statements
            from millpy.admin.doctor_tables import examine_tables
            from millpy.graph.loader import load_graph

            with working(f"checking the sources and sinks of {graph}"):
                loaded, worker = load_graph(graph), None if facts.roles is None else facts.roles.worker
                findings += examine_statements(url, loaded, worker)
                findings += examine_tables(url, loaded, worker)
                findings += asyncio.run(examine_sources(loaded))
    shown = [finding for finding in findings if not quiet or finding.severity is not Severity.OK]
    if as_json:
        print_json([dataclasses.asdict(finding) | {"severity": finding.severity.value} for finding in shown])
    else:
        for finding in shown:
            _print(finding)
    return EXIT_FAILED if any(finding.severity is Severity.ERROR for finding in findings) else 0


def _print(finding: Finding) -> None:
    first, *rest = _wrapped(f"{finding.severity.value:<{INDENT}}{finding.check}: {visible(finding.found)}")
    head = first[:INDENT]
    colored = head if os.environ.get("NO_COLOR") else typer.style(head, fg=_COLORS[finding.severity])
    tables.say(first[INDENT:], head=colored)
    if finding.meaning:
        meaning, action = visible(finding.meaning), visible(finding.action)
        rest += [*_wrapped(" " * INDENT + meaning), *_wrapped(f"{'':{INDENT}}do: {action}")]
    for line in rest:
        tables.say(line)


def _wrapped(line: str) -> list[str]:
    """Return lines that fit the terminal, all but the first indented; one whole line when there is no terminal."""
    width = tables.terminal_width()
    if width is None or len(line) <= width:
        return [line]
    within = max(width, 2 * INDENT)
    return textwrap.wrap(line, within, subsequent_indent=" " * INDENT, drop_whitespace=True, break_long_words=False)
