"""Graphs and their generations, as they are deployed."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from millpy.admin.json_output import json_text
from millpy.admin.pages import PagedView
from millpy.admin.queries import Admin, Row
from millpy.api.answers import OBJECT, ROWS, add_pages, answer_shared, described
from millpy.api.authentication import Viewer
from millpy.api.parameters import GraphName
from millpy.api.problems import not_found

GRAPHS = "SELECT * FROM millpy.graphs ORDER BY family, generation"
GRAPHS_OF_ROLE = """
SELECT * FROM millpy.graphs AS g
 WHERE EXISTS (SELECT FROM millpy.result_tables AS t
                WHERE t.graph = g.graph
                  AND has_table_privilege(:role, to_regclass(format('%I.%I', t.graph, t.name || '_status')), 'SELECT'))
 ORDER BY family, generation
"""
DESCRIBED = """
SELECT g.*, d.description FROM millpy.graphs AS g JOIN millpy.descriptions AS d USING (graph) WHERE g.graph = :graph
"""
PARTITIONS = PagedView(
    source="millpy.partitions", order={"result_table": "text", "starts_at": "timestamptz"}, equal=("result_table",)
)
router = APIRouter(tags=["graphs"])


def graphs(admin: Admin, role: str | None) -> list[Row]:
    """Return the graphs; with a role of the database, those with a result table that it may read."""
    return admin.ask(GRAPHS) if role is None else admin.ask(GRAPHS_OF_ROLE, role=role)


@router.get("/v1/graphs", responses=described(ROWS, "Graphs"), response_class=Response)
async def list_graphs(request: Request, caller: Viewer) -> Response:
    """List the deployed graphs, and their generations."""

    def read(admin: Admin) -> str:
        return json_text({"rows": graphs(admin, caller.principal.database_role), "next": None}, indent=0)

    return await answer_shared(request, caller, read, as_login=True)


@router.get("/v1/graphs/{graph}", responses=described(OBJECT, "A graph"), response_class=Response)
async def describe_graph(request: Request, caller: Viewer, graph: GraphName) -> Response:
    """Describe a graph: its nodes with operators and settings, the edges between them, and the types of its streams."""
    return await answer_shared(request, caller, partial(find_graph, graph=graph))


def find_graph(admin: Admin, graph: str) -> dict[str, Any]:
    """Return a graph with its description, nodes and edges.

    Raises:
        ProblemError: it is not deployed.
    """
    found = admin.ask(DESCRIBED, graph=graph)
    if not found:
        raise not_found(f"no graph {graph!r} is deployed", "GET /v1/graphs lists them")
    row = dict(found[0])
    return {**row, **drawn(row.pop("description"))}


def drawn(description: Any) -> dict[str, Any]:
    """Return the nodes and edges of a description.

    A node is a computation or a result table. An edge is a stream on its way from its producer to a consumer, with the
    operators that run on the way; it names both by `id`.
    """
    streams, tables = description["streams"], description["tables"]
    nodes = [
        {
            "id": name,
            "name": name,
            "kind": found["kind"],
            **{part: found[part] for part in ("identity", "settings", "intervals", "partitions")},
        }
        for name, found in description["computations"].items()
    ]
    nodes += [{"id": f"table:{name}", "name": name, "kind": "table", "table": found} for name, found in tables.items()]
    edges = [
        {
            "from": streams[found["stream"]]["producer"],
            "to": found["consumer"],
            "stream": found["stream"],
            "input": found["input"],
            "key": found["key"],
            "operators": found["operators"],
        }
        for found in description["subscriptions"]
    ]
    edges += [
        {"from": streams[found["stream"]]["producer"], "to": f"table:{name}", "stream": found["stream"]}
        for name, found in tables.items()
    ]
    return {"nodes": nodes, "edges": edges, "streams": streams}


add_pages(router, "partitions", PARTITIONS, "The partitions of result tables with a retention.")
