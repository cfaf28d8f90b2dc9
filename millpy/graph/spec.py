"""Specs: a graph as it is deployed, with its computations in topological order, their streams and tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from millpy.errors import GraphError
from millpy.graph.names import RESERVED_COLUMNS, checked_name
from millpy.graph.nodes import InjectorNode, StageNode
from millpy.graph.sql_types import sql_type
from millpy.graph.streams import Stream
from millpy.model.deployment import (
    ColumnSpec,
    ComputationSpec,
    GraphSpec,
    StreamSpec,
    SubscriptionSpec,
    TableSpec,
)
from millpy.model.identity import identity_of_type
from millpy.model.record import RecordType, column_name
from millpy.model.time import microseconds
from millpy.sinks.statement import StatementLogic
from millpy.windowing.logic import WindowedLogic


def graph_spec(name: str, nodes: Sequence[InjectorNode | StageNode]) -> GraphSpec:
    """Return the nodes of a checked graph as specs."""
    computations, streams, subscriptions, tables = [], [], [], []
    for node in nodes:
        if isinstance(node, InjectorNode):
            computations.append(
                ComputationSpec(
                    node.name,
                    "injector",
                    partitions=node.source.partitions(),
                    identity=node.identity(),
                    settings=node.settings(),
                )
            )
            streams.append(_stream_spec(node.name, node.name, node.record_type))
            continue
        computations.append(
            ComputationSpec(
                node.name,
                node.kind,
                intervals=node.intervals,
                identity=node.logic.identity(),
                settings=node.settings(),
                accumulators=_accumulators(node),
                statement=node.logic.query if isinstance(node.logic, StatementLogic) else "",
            )
        )
        for stream in node.all_streams:
            streams.append(_stream_spec(stream.name, node.name, stream.record_type))
            if stream.table is not None:
                tables.append(_table_spec(node, stream))
        for index, taken in enumerate(node.inputs):
            operators = tuple(operator.identity() for operator in taken.operators)
            types = tuple(map(identity_of_type, taken.key_types))
            subscriptions.append(SubscriptionSpec(taken.stream.name, node.name, index, taken.fields, operators, types))
    return GraphSpec(name, tuple(computations), tuple(streams), tuple(subscriptions), tuple(tables))


def _accumulators(node: StageNode) -> int:
    if not isinstance(node.logic, WindowedLogic):
        return 0
    return len(node.logic.accumulators(node.inputs[0].record_type).members)


def _stream_spec(name: str, producer: str, record_type: RecordType) -> StreamSpec:
    fields, tag = tuple(record_type.described_fields()), record_type.struct.__struct_config__.tag_field
    names = (*map(record_type.alias, record_type.fields), *([] if tag is None else [tag]))
    return StreamSpec(name, producer, record_type.schema, fields, tuple(record_type.defaults), names)


def _columns(record_type: RecordType, names: Sequence[str]) -> tuple[ColumnSpec, ...]:
    return tuple(
        ColumnSpec(
            checked_name(column_name(name), "column"),
            sql_type(record_type.annotations_along(name)[-1]),
            record_type.is_nullable(name),
        )
        for name in names
    )


def _table_spec(node: StageNode, stream: Stream) -> TableSpec:
    assert stream.table is not None
    retention_us = None if stream.retention is None else microseconds(stream.retention)
    if isinstance(node.logic, WindowedLogic):
        keys = node.inputs[0].fields
        return TableSpec(
            name=stream.table,
            kind="windowed",
            computation=node.name,
            stream=stream.name,
            keys=_columns(node.inputs[0].record_type, keys),
            values=_columns(stream.record_type, (*node.logic.columns(), *node.logic.info_columns())),
            allowed_lateness_us=node.allowed_lateness_us,
            history=node.logic.accumulation.value if stream.history else "",
            history_kept_s=stream.history.total_seconds() if isinstance(stream.history, timedelta) else None,
            retention_us=retention_us,
            live=node.logic.stored_forms(node.inputs[0].record_type),
        )
    if taken := RESERVED_COLUMNS["records"] & set(stream.record_type.fields):
        raise GraphError(f"field {sorted(taken)[0]!r} is a column of every result table", hint="rename the field")
    return TableSpec(
        name=stream.table,
        kind="records",
        computation=node.name,
        stream=stream.name,
        keys=(),
        values=_columns(stream.record_type, stream.record_type.fields),
        retention_us=retention_us,
    )
