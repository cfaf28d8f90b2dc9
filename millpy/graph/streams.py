"""Streams, and what a user calls on them: keys, windows, aggregates, computations, tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from millpy.computation import Computation
from millpy.errors import GraphError
from millpy.graph.names import RESERVED_COLUMNS, checked_name
from millpy.graph.nodes import InjectorNode, StageNode
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.record import RecordType, column_name
from millpy.model.time import microseconds
from millpy.windowing.aggregate import Aggregate
from millpy.windowing.columnar import WindowedLogic
from millpy.windowing.window import FixedWindows

if TYPE_CHECKING:
    from millpy.graph.graph import Graph


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

        "a.b" is field b of the struct in field a; in a result table its column is a_b.

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
        taken = [column_name(field) for field in keyed.fields]
        if len(set(taken)) < len(taken):
            raise GraphError(f"the key fields {keyed.fields} have one column name", hint="map one to another name")
        for name in aggregates:
            checked_name(name, "column")
            if name in taken or name in RESERVED_COLUMNS["windowed"]:
                raise GraphError(f"column {name!r} is taken", hint="give the aggregate another name")
        output = logic.output_type(keyed.stream.record_type, keyed.fields)
        node = StageNode(
            self.name, (keyed,), logic, self.intervals, allowed_lateness_us=microseconds(self.allowed_lateness)
        )
        stream = Stream(keyed.stream.graph, node, output)
        node.outputs.append(stream)
        keyed.stream.graph.add(node)
        return stream
