"""Graph: computations joined by streams, as a user writes them.

A stream exists before anybody can consume it, so a graph is acyclic by construction and its nodes are in
topological order. Every stateful step is named, explicitly or by its table: positional names would orphan state
when a step is inserted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from millpy.computation import Computation
from millpy.errors import GraphError
from millpy.injectors.protocol import Source
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime, Wait
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.deployment import (
    ColumnSpec,
    ComputationSpec,
    GraphSpec,
    StreamSpec,
    SubscriptionSpec,
    TableSpec,
)
from millpy.model.record import RecordType, without_none
from millpy.model.stage import InputSpec, StageLogic
from millpy.model.time import microseconds
from millpy.runtime.keyed import ComputationLogic
from millpy.windowing.aggregate import Aggregate
from millpy.windowing.columnar import WindowedLogic
from millpy.windowing.window import FixedWindows

IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}")
RESERVED_SCHEMAS = {"mill", "millpy", "public", "information_schema"}
RESERVED_COLUMNS = {
    "records": {"event_time", "ordinal", "interval_id", "bundle", "emitted_at"},
    "windowed": {"window_start", "window_end", "pane_index", "pane_timing", "late_count"}
    | {"interval_id", "bundle", "emitted_at", "is_final"},
}
SQL_TYPES: dict[Any, str] = {
    str: "text",
    int: "bigint",
    float: "double precision",
    bool: "boolean",
    bytes: "bytea",
    datetime: "timestamptz",
    UUID: "uuid",
}


def checked_name(name: str, what: str) -> str:
    """A name that is a plain lower-case SQL identifier, or a GraphError that says so."""
    if not IDENTIFIER.fullmatch(name):
        raise GraphError(
            f"{what} {name!r} is not a plain name", hint="use lower-case letters, digits and underscores, at most 63"
        )
    return name


@dataclass(slots=True, eq=False)
class InjectorNode:
    """A source and how its payloads become records."""

    name: str
    source: Source
    record_type: RecordType
    event_time: EventTime
    dedupe: Dedupe | None
    idle: AdvanceWithClock | Wait

    def meaning(self) -> str:
        """What must not change under a stored position."""
        return f"{self.source!r} {self.event_time!r} {self.dedupe!r} {self.idle!r}"


@dataclass(slots=True, eq=False)
class StageNode:
    """A computation: its inputs by key, its logic, its output streams."""

    name: str
    inputs: tuple[KeyedStream, ...]
    logic: StageLogic
    intervals: int
    outputs: list[Stream] = field(default_factory=list)
    allowed_lateness_us: int = 0

    @property
    def windowed(self) -> bool:
        """Whether its results are panes of windows."""
        return isinstance(self.logic, WindowedLogic)

    def input_specs(self) -> tuple[InputSpec, ...]:
        """The inputs as the stage sees them."""
        return tuple(
            InputSpec(
                stream=keyed.stream.name,
                record_type=keyed.stream.record_type,
                key_fields=keyed.fields,
                key_types=keyed.key_types,
                source_fed=isinstance(keyed.stream.producer, InjectorNode),
            )
            for keyed in self.inputs
        )


@dataclass(slots=True, eq=False)
class Stream:
    """A named, typed flow of records. Made by `Graph.inject`, `process` and `aggregate`."""

    graph: Graph
    producer: InjectorNode | StageNode
    record_type: RecordType
    own_name: str = ""
    table: str | None = None

    @property
    def name(self) -> str:
        """Its own name, or its producer's."""
        return self.own_name or self.producer.name

    def key_by(self, *fields: str) -> KeyedStream:
        """Group the records by one field (the key is its value) or several (the key is a tuple).

        Raises:
            SchemaError: a field does not exist, may be None, or has a type that cannot be a key.
        """
        if not fields:
            raise GraphError("key_by needs at least one field")
        return KeyedStream(self, fields, self.record_type.key_types(fields))

    def to_table(self, name: str) -> Stream:
        """Write the stream to a result table in the graph's schema; names an unnamed step.

        Windowed streams: newest pane per (key, window). Computation outputs: one row a record.
        """
        checked_name(name, "table")
        if isinstance(self.producer, InjectorNode):
            raise GraphError(
                f"stream {self.name!r} comes straight from a source",
                hint="process or aggregate it first, then write that to a table",
            )
        if self.table is not None:
            raise GraphError(f"stream {self.name!r} goes to table {self.table!r} already")
        self.table = name
        if not self.producer.name:
            self.producer.name = name
        return self


@dataclass(frozen=True, slots=True)
class KeyedStream:
    """A stream by a key: what computations consume."""

    stream: Stream
    fields: tuple[str, ...]
    key_types: tuple[type, ...]

    def process(
        self,
        computation: Computation,
        *,
        name: str,
        output: type[msgspec.Struct] | Mapping[str, type[msgspec.Struct]] | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Any:
        """Run a Computation on this stream; see `Graph.process`."""
        return self.stream.graph.process(computation, name=name, inputs=[self], output=output, intervals=intervals)

    def window(
        self,
        windows: FixedWindows,
        *,
        allowed_lateness: timedelta = timedelta(0),
        name: str = "",
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> WindowedStream:
        """Group the records of each key into event-time windows.

        Args:
            windows: where records are grouped.
            allowed_lateness: how long past a window's end late records still amend it.
            name: the step's name; without it, that of its table.
            intervals: key intervals, the unit of ownership.
        """
        if name:
            checked_name(name, "step")
        if allowed_lateness < timedelta(0):
            raise GraphError("allowed_lateness is negative", hint="use zero or a positive duration")
        return WindowedStream(self, windows, allowed_lateness, name, intervals)


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """Records by key and window, waiting for their aggregates."""

    keyed: KeyedStream
    windows: FixedWindows
    allowed_lateness: timedelta
    name: str
    intervals: int

    def aggregate(self, **aggregates: Aggregate) -> Stream:
        """One column per aggregate; `aggregate(n=Count(), mean=Mean("temperature")).to_table("t")`."""
        if not aggregates:
            raise GraphError("aggregate needs at least one aggregate", hint="aggregate(n=Count())")
        keyed = self.keyed
        logic = WindowedLogic(self.windows, self.allowed_lateness, aggregates)
        for name in aggregates:
            checked_name(name, "column")
            if name in keyed.fields or name in RESERVED_COLUMNS["windowed"]:
                raise GraphError(f"column {name!r} is taken", hint="give the aggregate another name")
        output = logic.output_type(keyed.stream.record_type, keyed.fields)
        node = StageNode(
            self.name, (keyed,), logic, self.intervals, allowed_lateness_us=microseconds(self.allowed_lateness)
        )
        stream = Stream(keyed.stream.graph, node, output)
        node.outputs.append(stream)
        keyed.stream.graph.add(node)
        return stream


class Graph:
    """A graph of computations; its name is also the schema of its result tables.

    Example:
        >>> graph = Graph("factory")
    """

    def __init__(self, name: str) -> None:
        checked_name(name, "graph")
        if name in RESERVED_SCHEMAS or name.startswith("pg_"):
            raise GraphError(f"{name!r} is a reserved schema", hint="give the graph another name")
        self.name = name
        self.nodes: list[InjectorNode | StageNode] = []

    def __repr__(self) -> str:
        return f"Graph({self.name!r})"

    def add(self, node: InjectorNode | StageNode) -> None:
        """Append a node; a name twice is refused."""
        if node.name and any(other.name == node.name for other in self.nodes):
            raise GraphError(f"two steps are named {node.name!r}", hint="names are identities of stored state")
        self.nodes.append(node)

    def inject(
        self,
        name: str,
        source: Source,
        *,
        schema: type[msgspec.Struct],
        event_time: EventTime,
        dedupe: Dedupe | None = None,
        idle: AdvanceWithClock | Wait | None = None,
    ) -> Stream:
        """Bring an outside feed in as a stream.

        Args:
            name: the stream's name.
            source: `File(...)`, `Mqtt(...)`.
            schema: the msgspec.Struct that decides which payloads are valid.
            event_time: which field says when it happened, and how far records may come out of order.
            dedupe: which fields identify a record, and for how long.
            idle: what the watermark does while the source is silent; the default waits.

        Raises:
            GraphError, SchemaError: with a hint.
        """
        checked_name(name, "stream")
        record_type = RecordType(schema)
        event_time.validate(record_type)
        if dedupe is not None:
            dedupe.validate(record_type)
        if len(set(source.partitions())) != len(source.partitions()) or not source.partitions():
            raise GraphError(f"source {source!r} names no partition, or one twice")
        node = InjectorNode(name, source, record_type, event_time, dedupe, idle if idle is not None else Wait())
        self.add(node)
        return Stream(self, node, record_type)

    def process(
        self,
        computation: Computation,
        *,
        name: str,
        inputs: Sequence[KeyedStream],
        output: type[msgspec.Struct] | Mapping[str, type[msgspec.Struct]] | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Any:
        """Run a Computation on several keyed streams.

        Returns:
            One Stream for one output type; a dict of Streams by name for several; None for none.
        """
        checked_name(name, "step")
        if not inputs:
            raise GraphError(f"step {name!r} has no inputs")
        if len({keyed.key_types for keyed in inputs}) > 1:
            raise GraphError(f"the inputs of {name!r} have keys of different types")
        if any(keyed.stream.graph is not self for keyed in inputs):
            raise GraphError(f"an input of {name!r} belongs to another graph")
        node = StageNode(name, tuple(inputs), ComputationLogic(computation), intervals)
        streams = {}
        if isinstance(output, Mapping):
            streams = {
                checked_name(own, "stream"): Stream(self, node, RecordType(struct), own_name=own)
                for own, struct in output.items()
            }
        elif output is not None:
            streams = {name: Stream(self, node, RecordType(output))}
        node.outputs.extend(streams.values())
        self.add(node)
        if isinstance(output, Mapping):
            return streams
        return streams.get(name)

    def streams(self) -> list[Stream]:
        """All streams, in the order in which they were made (injectors' first appear by their consumers)."""
        found: list[Stream] = []
        for node in self.nodes:
            if isinstance(node, StageNode):
                found.extend(keyed.stream for keyed in node.inputs if keyed.stream not in found)
                found.extend(stream for stream in node.outputs if stream not in found)
        return found

    def spec(self) -> GraphSpec:
        """The graph as it is deployed.

        Raises:
            GraphError: an unnamed step, a name twice, or nothing to run.
        """
        self._check()
        computations, streams, subscriptions, tables = [], [], [], []
        for node in self.nodes:
            if isinstance(node, InjectorNode):
                computations.append(
                    ComputationSpec(node.name, "injector", partitions=node.source.partitions(), meaning=node.meaning())
                )
                streams.append(StreamSpec(node.name, node.name, node.record_type.schema))
                continue
            computations.append(
                ComputationSpec(node.name, "stage", intervals=node.intervals, meaning=node.logic.meaning())
            )
            for stream in node.outputs:
                streams.append(StreamSpec(stream.name, node.name, stream.record_type.schema))
                if stream.table is not None:
                    tables.append(_table_spec(node, stream))
            for index, keyed in enumerate(node.inputs):
                subscriptions.append(SubscriptionSpec(keyed.stream.name, node.name, index, keyed.fields))
        return GraphSpec(self.name, tuple(computations), tuple(streams), tuple(subscriptions), tuple(tables))

    def _check(self) -> None:
        if not any(isinstance(node, StageNode) for node in self.nodes):
            raise GraphError(f"graph {self.name!r} computes nothing", hint="aggregate or process one of its streams")
        for node in self.nodes:
            if not node.name:
                raise GraphError("a windowed step has no name", hint="window(..., name=…) or .to_table(…) names it")
        for what, names in (
            ("step", [node.name for node in self.nodes]),
            ("stream", [stream.name for stream in self.streams()]),
            ("table", [stream.table for stream in self.streams() if stream.table]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise GraphError(f"two {what}s are named {twice[0]!r}", hint="names are identities of stored state")


def sql_type(annotation: Any) -> str:
    """The column type of a field in a result table; what nests becomes jsonb."""
    return SQL_TYPES.get(without_none(annotation)[0], "jsonb")


def _columns(record_type: RecordType, names: Sequence[str]) -> tuple[ColumnSpec, ...]:
    return tuple(
        ColumnSpec(checked_name(name, "column"), sql_type(record_type.annotations[name]), record_type.is_nullable(name))
        for name in names
    )


def _table_spec(node: StageNode, stream: Stream) -> TableSpec:
    assert stream.table is not None
    if isinstance(node.logic, WindowedLogic):
        keys = node.inputs[0].fields
        return TableSpec(
            name=stream.table,
            kind="windowed",
            computation=node.name,
            stream=stream.name,
            keys=_columns(node.inputs[0].stream.record_type, keys),
            values=_columns(stream.record_type, node.logic.columns()),
            allowed_lateness_us=node.allowed_lateness_us,
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
    )
