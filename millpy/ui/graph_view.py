"""The view of a graph: its nodes and edges with rates, backlogs and watermarks, and what holds the watermark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response

from millpy.admin.queries import Admin, Row
from millpy.api.actions import GenerationToSwitch, switch_to
from millpy.api.answers import find_page
from millpy.api.graphs import GRAPHS, find_graph
from millpy.api.live import PROGRESS, hub_of
from millpy.api.parameters import GraphName, Word
from millpy.api.problems import ProblemError
from millpy.api.workers import EXPLAINED, VIEWS
from millpy.errors import MillError
from millpy.ui.rendering import shared_page
from millpy.ui.routing import AdministratorForm, Visitor, done, page_router, read

GENERATIONS_MAX = 4
"""Generations that are shown side by side: the viewed one, and the newest others."""
SUBSCRIPTIONS_MAX = 1_000
KINDS = {"injector": "source", "stage": "step"}
AT_THE_END = "infinity"
router = page_router()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the watermark of a computation is where it is.

    Attributes:
        computation: the computation.
        steps: a step upstream each, the cause last.
        failed: why there is none; empty for no failure.
    """

    computation: str
    steps: Sequence[Row]
    failed: str = ""

    @property
    def holder(self) -> str:
        """The computation that holds the watermark; empty if nothing does."""
        return self.steps[-1]["computation"] if self.steps and self.steps[-1]["held_by"] != "nothing" else ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A generation of a graph, as it is drawn."""

    graph: Row
    nodes: Sequence[Mapping[str, Any]]
    edges: Sequence[Mapping[str, Any]]


@router.get("/graphs/{graph}")
async def show_graph(request: Request, caller: Visitor, graph: GraphName, explain: Word = None) -> Response:
    """Show a graph and its generations. `explain` names the computation whose watermark is explained."""
    hub = hub_of(request)

    def find(admin: Admin) -> dict[str, Any]:
        drawings, explanation = _find(admin, hub.series, graph, explain)
        return {"drawings": drawings, "explanation": explanation, "explain": explain or ""}

    return await shared_page(request, caller, find, "graph.html", view="graph", graph=graph)


@router.post("/graphs/{graph}/switch")
async def switch(request: Request, form: AdministratorForm, graph: GraphName) -> Response:
    """Make another generation of a graph the current one."""
    numbers = form.numbers("generation")
    if len(numbers) != 1 or not 1 <= numbers[0] < 2**31:
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "generation has to be one number")
    family = (await read(request, form.caller, partial(find_graph, graph=graph)))["family"]
    body = GenerationToSwitch(generation=numbers[0], anyway=form.text("anyway") == "yes")
    found = await switch_to(request, form.caller, family, body)
    if found["switched"]:
        text = f"Generation {numbers[0]} of {family} is the current one; before, generation {found['before']} was."
    else:
        text = f"Generation {numbers[0]} of {family} was the current one already."
    return done(request, form.caller, text, "/")


def _find(admin: Admin, hub_series: Any, graph: str, name: str | None) -> tuple[list[Drawing], Explanation | None]:
    viewed = find_graph(admin, graph)
    progress = admin.ask(PROGRESS)
    own = [row for row in progress if row["graph"] == graph]
    explanation = _explained(admin, graph, name or _slowest(own))
    others = [row for row in admin.ask(GRAPHS) if row["family"] == viewed["family"] and row["graph"] != graph]
    shown = [viewed, *(find_graph(admin, row["graph"]) for row in others[::-1][: GENERATIONS_MAX - 1])]
    shown.sort(key=lambda found: found["generation"])
    drawings = [
        _drawn(admin, found, progress, hub_series(found["graph"]), explanation if found is viewed else None)
        for found in shown
    ]
    return drawings, explanation


def _slowest(progress: Sequence[Row]) -> str:
    """Return the computation with the lowest watermark; empty if all have come to the end."""
    open_ = [row for row in progress if row["low_watermark"] != AT_THE_END]

    def order(row: Row) -> tuple[bool, int, str]:
        return str(row["low_watermark"]) != "-infinity", -(row["lag_s"] or 0), row["computation"]

    return min(open_, key=order)["computation"] if open_ else ""


def _explained(admin: Admin, graph: str, computation: str) -> Explanation | None:
    if not computation:
        return None
    try:
        return Explanation(computation, admin.ask(EXPLAINED, graph=graph, computation=computation))
    except MillError as error:  # the graph is shown without it
        return Explanation(computation, [], error.message)


def _drawn(
    admin: Admin,
    found: Mapping[str, Any],
    progress: Sequence[Row],
    series: Mapping[str, Any],
    explanation: Explanation | None,
) -> Drawing:
    name = found["graph"]
    own = {row["computation"]: row for row in progress if row["graph"] == name}
    backlog = find_page(admin, VIEWS["backlog"][0], name, (), SUBSCRIPTIONS_MAX).rows
    rates = {
        (line["stream"], line["consumer"]): line["rate"][-1] if line["rate"] else None for line in series["records"]
    }
    streams = {stream["producer"]: key for key, stream in found["streams"].items()}
    holder = explanation.holder if explanation else ""
    nodes = [
        {
            "id": node["id"],
            "name": node["name"],
            "kind": KINDS.get(node["kind"], node["kind"]),
            "what": _what(node),
            "progress": own.get(node["id"]),
            "rate": rates.get((streams.get(node["id"]), None)) if node["kind"] == "injector" else None,
            "holds": bool(holder) and node["id"] == holder,
        }
        for node in found["nodes"]
    ]
    edges = [
        {
            **edge,
            "operators": [operator["kind"] for operator in edge.get("operators", ())],
            "key": [pair[0] for pair in edge.get("key") or ()],
            "rate": rates.get((edge["stream"], edge["to"])),
            "backlog": _backlog(backlog, edge),
        }
        for edge in found["edges"]
    ]
    return Drawing(found, nodes, edges)


def _what(node: Mapping[str, Any]) -> str:
    """Return what kind of source, step or table a node is."""
    if node["kind"] == "table":
        return str(node["table"]["kind"])
    identity = node["identity"]
    found = identity.get("source", identity).get("kind", "")
    return str(found).replace("_", " ")


def _backlog(rows: Sequence[Row], edge: Mapping[str, Any]) -> int | None:
    """Return the records that wait on an edge; None if none can."""
    own = [row for row in rows if (row["stream"], row["consumer"]) == (edge["stream"], edge["to"])]
    return sum(row["records"] for row in own) if own else None
