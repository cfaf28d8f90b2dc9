"""`millpy doctor`: looks the database over and says what to do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import textwrap
from typing import Annotated

import typer

from millpy.clock import SystemClock
from millpy.commands import tables
from millpy.commands.common import DatabaseOption, GraphArgument, JsonOption, print_json, settings_of, worded
from millpy.complaint import EXIT_FAILED
from millpy.doctor import Finding, Severity, examine
from millpy.progress import working
from millpy.visible import visible

_COLOURS = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}
INDENT = 8
QuietOption = Annotated[bool, typer.Option("--quiet", help="Show only what is not well.")]


@worded
def doctor(
    graph: GraphArgument = None,
    database: DatabaseOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> int:
    """Look the database over, and the brokers of GRAPH.py: settings, locks, leases, rights, space; says what to do.

    Ends with 0 when nothing is worse than a warning, with 1 otherwise.
    """
    from millpy.launch import database as connected
    from millpy.store.postgres.diagnosis import look  # not loaded for --help

    settings = settings_of(database)
    with connected(settings, graph, create=False) as url, working("looking at the database"):
        findings = examine(look(url, SystemClock()), settings.limits)
    if graph is not None and ".py" in graph:
        from millpy.doctor_sources import examine_sources
        from millpy.graph_file import load_graph

        with working(f"looking at the sources of {graph}"):
            findings += asyncio.run(examine_sources(load_graph(graph)))
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
    coloured = head if os.environ.get("NO_COLOR") else typer.style(head, fg=_COLOURS[finding.severity])
    tables.say(first[INDENT:], head=coloured)
    if finding.meaning:
        meaning, action = visible(finding.meaning), visible(finding.action)
        rest += [*_wrapped(" " * INDENT + meaning), *_wrapped(f"{'':{INDENT}}do: {action}")]
    for line in rest:
        tables.say(line)


def _wrapped(line: str) -> list[str]:
    """As lines that fit the terminal, all but the first indented; what is no terminal gets it whole."""
    width = tables.terminal_width()
    if width is None or len(line) <= width:
        return [line]
    within = max(width, 2 * INDENT)
    return textwrap.wrap(line, within, subsequent_indent=" " * INDENT, drop_whitespace=True, break_long_words=False)
