"""Changing the allowed lateness of windows and the horizons of ids in a deployed graph (`model/horizons.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.model.deployment import GraphSpec
from millpy.model.horizons import HORIZON, LATENESS, HorizonChange
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.ddl import status_view
from millpy.store.postgres.statements import statement


async def change_horizons(
    connection: Connection, graph_id: int, schema: str, spec: GraphSpec, changes: Sequence[HorizonChange]
) -> None:
    """Set floors where a horizon grows, and let stored runs, the catalog and status views follow the new horizons."""
    for change in changes:
        of: dict[str, Any] = {"graph_id": graph_id, "computation": change.computation}
        if change.grows:
            raise_floors = statement("raise_watermark_floors")
            if change.setting == HORIZON:
                raise_floors = statement("raise_id_floors")
            await connection.execute(raise_floors, {**of, "before_us": change.floor_us})
        if change.setting == LATENESS:
            lateness = {**of, "allowed_lateness_us": change.after_us}
            await connection.execute(statement("change_table_lateness"), lateness)
            await _renew_views(connection, schema, spec, change.computation)
        if change.longer_us > 0:
            await connection.execute(statement("keep_runs_longer"), {**of, "longer_us": change.longer_us})


async def _renew_views(connection: Connection, schema: str, spec: GraphSpec, computation: str) -> None:
    for table in spec.tables:
        if table.computation == computation:
            relation = {"schema": schema, "relation": f"{table.name}_status"}
            shown = await all_rows(connection, statement("read_columns"), relation)
            if shown:  # the table is not new
                await connection.execute(status_view(schema, table, [row[0] for row in shown]))
