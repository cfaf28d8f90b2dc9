"""Resetting computations of a deployed graph: they lose all that is stored of them, and begin anew.

One transaction deploys the graph without them and with them again, so that a process which is killed half way changes
nothing. Result tables get the rights back that they had.
"""

from __future__ import annotations

from collections.abc import Collection

from millpy.errors import GraphError
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.graph_changes import changes_between, changes_text
from millpy.model.reset import drop_computations
from millpy.store.postgres.connection import Connection
from millpy.store.postgres.deployment.ddl import with_history, with_views
from millpy.store.postgres.deployment.deploy import deploy, read_deployed
from millpy.store.postgres.deployment.privileges import Rights, give_rights, read_rights


async def reset(connection: Connection, spec: GraphSpec, names: Collection[str]) -> Deployment:
    """Let some computations of a deployed graph begin anew. `connection` is in a transaction of the owner.

    Raises:
        GraphError: the graph is not deployed as given, a name is wrong, other computations read the results of one of
            these, or users' views read a result table.
    """
    lacking = drop_computations(spec, names)
    stored = await read_deployed(connection, spec)
    if stored is None:
        raise GraphError(f"graph {spec.name!r} is not deployed, so that nothing can be reset", hint="deploy it")
    if changes := changes_between(stored.description, spec.description()):
        raise GraphError(
            f"graph {spec.name!r} is not deployed as in this file: {changes_text(changes)}",
            hint="deploy these changes first, without --reset",
        )
    tables = [table for table in spec.tables if table.computation in names]
    stores = [relation for table in tables for relation in with_history(table)]
    relations = with_views(stores)
    had = await read_rights(connection, stored.name, relations)
    await deploy(connection, lacking, on_purpose=True, back=True, reset=names)
    deployment = await deploy(connection, spec, on_purpose=True)
    made = await read_rights(connection, stored.name, relations)
    for relation, rights in had.items():
        present, is_table = made.get(relation, Rights()), relation in stores
        await give_rights(connection, stored.name, relation, present, rights, is_table=is_table)
    return deployment
