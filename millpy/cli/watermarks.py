"""`millpy watermarks`: how far event time has come, and what holds it back."""

from __future__ import annotations

from typing import Annotated

import typer

from millpy.admin.queries import Admin, Row
from millpy.cli import explanation
from millpy.cli.options import (
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    graph_in,
    handle_errors,
    settings_of,
    show,
)
from millpy.errors import UsageError


@handle_errors
def watermarks(
    graph: GraphArgument = None,
    explain: Annotated[
        str, typer.Option("--explain", metavar="[GRAPH.]COMPUTATION", help="Explain what holds back its watermark.")
    ] = "",
    disorder: Annotated[
        bool, typer.Option("--disorder", help="Show how far the records of each source lie behind the newest one.")
    ] = False,
    sites: Annotated[
        bool, typer.Option("--sites", help="Show the watermark of each site of sources with watermark_by.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the watermarks: how far event time has come, and what holds it back."""
    if sum((disorder, sites, bool(explain))) > 1:
        raise UsageError("--disorder and --sites show sources, --explain one computation", hint="give one of the three")

    def ask(admin: Admin, name: str | None) -> dict[str, list[Row]]:
        if disorder:
            return {"disorder": admin.disorder(name)}
        if sites:
            return {"site_watermarks": admin.site_watermarks(name)}
        if not explain:
            return {"watermarks": admin.watermarks(name)}
        return {"explanation": _explained(admin, name, explain)}

    if explain and not as_json:
        with connected_to(settings_of(database), graph) as admin:
            steps = _explained(admin, graph_in(admin, graph), explain)
        explanation.echo(steps)
        return
    show(graph, database, as_json, ask)


def _explained(admin: Admin, graph: str | None, computation: str) -> list[Row]:
    named = computation if graph is None or "." in computation else f"{graph}.{computation}"
    return admin.explain_watermark(named)
