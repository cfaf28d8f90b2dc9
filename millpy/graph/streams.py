"""Streams, and what a user calls on them: keys, windows, aggregates, computations, tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from millpy.computation import Computation
from millpy.errors import GraphError
from millpy.graph.names import RESERVED_COLUMNS, checked_name
from millpy.graph.nodes import FailurePolicy, InjectorNode, Input, StageNode
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.record import RecordType, column_name
from millpy.model.time import check_length, microseconds
from millpy.runtime.deduplicate import DeduplicateLogic
from millpy.runtime.mapping import FlatMap, Map
from millpy.runtime.operators import Chain, Filter, Operator, Split
from millpy.windowing.columnar import WindowedLogic
from millpy.windowing.fold import Aggregate
from millpy.windowing.window import Windows

if TYPE_CHECKING:
    from millpy.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Route:
    """What a computation produces, and the operators behind it."""

    stream: Stream
    operators: Chain


@dataclass(slots=True, eq=False)
class Stream:
    """A typed flow of records: what an injector or computation produces, or operators make of it.

    Made by `Graph.inject`, `process` and `aggregate`; and by `map`, `filter`, `flat_map`, `split` and `union`, which
    have no producer of their own: they run in that of the stream that they start from, for each consumer.

    Attributes:
        routes: where its records come from: itself, or other streams behind operators.
    """

    graph: Graph
    producer: InjectorNode | StageNode | None
    record_type: RecordType
    own_name: str = ""
    table: str | None = None
    routes: tuple[Route, ...] = ()

    def __post_init__(self) -> None:
        self.routes = self.routes or (Route(self, ()),)

    @property
    def name(self) -> str:
        """Its own name, or its producer's; without a producer, what it is made of."""
        if self.producer is None:
            return " + ".join(".".join([r.stream.name, *map(repr, r.operators)]) for r in self.routes)
        return self.own_name or self.producer.name

    def map(
        self,
        function: Callable[[Any], Any],
        output: type[msgspec.Struct] | None = None,
        *,
        columns: bool = False,
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream:
        """Make one record of each.

        Args:
            function: from a record to a record; with `columns`, from a `pyarrow.RecordBatch` to one with as many rows
                (or a dict of columns). It depends on nothing but the record, and may be called again.
            output: the type of the new records; without it, they are of the old one.
            columns: whether the function takes whole columns.
            event_time: a datetime field of the new record that is its event time, by default that of the old one.
                An earlier one is refused: the watermark may have passed it.
            immediate: the function only computes; see `Computation.immediate`.
        """
        made = RecordType(output) if output is not None else self.record_type
        if event_time is not None and made.field_type(event_time) is not datetime:
            raise GraphError(f"event time {event_time!r} of a map is not a datetime", hint="leave event_time= out")
        _check_function(function, "map")
        return self._through(
            Map(function, self.record_type, made, columns=columns, event_time=event_time, immediate=immediate)
        )

    def filter(self, function: Callable[[Any], Any], *, columns: bool = False, immediate: bool = False) -> Stream:
        """Keep the records for which the function is true.

        Args:
            function: from a record to a truth value; with `columns`, from a `pyarrow.RecordBatch` to a boolean column
                (null is false). It depends on nothing but the record, and may be called again.
            columns: whether the function takes whole columns.
            immediate: the function only computes; see `Computation.immediate`.
        """
        _check_function(function, "filter")
        return self._through(Filter(function, self.record_type, columns=columns, immediate=immediate))

    def flat_map(
        self,
        function: Callable[[Any], Any],
        output: type[msgspec.Struct] | None = None,
        *,
        columns: bool = False,
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream:
        """Make any number of records of each, in order.

        Args:
            function: from a record to an iterable of records; with `columns`, from a `pyarrow.RecordBatch` to
                (columns, for each of their rows the row that it is made of, rising).
            output: as for `map`.
            columns: whether the function takes whole columns.
            event_time: as for `map`.
            immediate: as for `map`.
        """
        made = RecordType(output) if output is not None else self.record_type
        if event_time is not None and made.field_type(event_time) is not datetime:
            raise GraphError(f"event time {event_time!r} of a flat_map is not a datetime", hint="leave event_time= out")
        _check_function(function, "flat_map")
        return self._through(
            FlatMap(function, self.record_type, made, columns=columns, event_time=event_time, immediate=immediate)
        )

    def split(
        self, function: Callable[[Any], Any], into: Sequence[str], *, columns: bool = False, immediate: bool = False
    ) -> dict[str, Stream]:
        """Send each record to one of several streams.

        Args:
            function: from a record to the name of its stream, or None for none of them; with `columns`, from a
                `pyarrow.RecordBatch` to a column of names.
            into: the names. A record with another one is set aside.
            columns: whether the function takes whole columns.
            immediate: the function only computes; see `Computation.immediate`.

        Returns:
            The streams by name.
        """
        if not into or len(set(into)) < len(into):
            raise GraphError(f"split into {list(into)}: names are wanted, each once")
        _check_function(function, "split")
        split = Split(function, self.record_type, into, columns=columns, immediate=immediate)
        return {name: self._through(split, split.branch(name)) for name in into}

    def union(self, *others: Stream) -> Stream:
        """The records of several streams of one type; each keeps the order of its own."""
        streams = (self, *others)
        if any(stream.graph is not self.graph for stream in others):
            raise GraphError(f"a union of {self.name!r} with a stream of another graph")
        if len({stream.record_type.struct for stream in streams}) > 1:
            names = ", ".join(stream.record_type.struct.__name__ for stream in streams)
            raise GraphError(f"a union of streams of different types: {names}", hint="map them to one type first")
        routes = tuple(route for stream in streams for route in stream.routes)
        return Stream(self.graph, None, self.record_type, routes=routes)

    def deduplicate(
        self,
        by: str | Sequence[str],
        within: timedelta,
        *,
        name: str,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Let the first record of each id through: a step of its own, keyed by the id.

        For feeds that share ids across source partitions; a single feed does it for less with `inject(dedupe=…)`. A
        record is a duplicate when one of its id that has come before and was let through has an event time at most
        `within` away. A record more than `within` behind the watermark cannot be judged and is set aside as late.

        Args:
            by: the field or fields that are the id.
            within: the horizon of event time.
            name: the step's name.
            intervals: key intervals, the unit of ownership.
        """
        checked_name(name, "step")
        if within <= timedelta(0):
            raise GraphError(f"deduplicate {name!r}: within must be positive")
        check_length("a horizon", within)
        fields = (by,) if isinstance(by, str) else tuple(by)
        node = StageNode(name, self.key_by(*fields).inputs(), DeduplicateLogic(fields, within), intervals)
        stream = Stream(self.graph, node, self.record_type)
        node.outputs.append(stream)
        self.graph.add(node)
        return stream

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
        if self.producer is None:
            raise GraphError(
                f"stream {self.name!r} has no computation of its own that could write a table",
                hint="aggregate or process it, and write that to a table",
            )
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

    def _through(self, *operators: Operator) -> Stream:
        routes = tuple(Route(route.stream, (*route.operators, *operators)) for route in self.routes)
        return Stream(self.graph, None, operators[-1].output, routes=routes)


@dataclass(frozen=True, slots=True)
class KeyedStream:
    """A stream by a key: what computations consume."""

    stream: Stream
    fields: tuple[str, ...]
    key_types: tuple[type, ...]

    def inputs(self) -> tuple[Input, ...]:
        """The subscriptions that it takes: one a route."""
        return tuple(
            Input(route.stream, route.operators, self.stream.record_type, self.fields, self.key_types)
            for route in self.stream.routes
        )

    def process(
        self,
        computation: Computation,
        *,
        name: str,
        output: type[msgspec.Struct] | Mapping[str, type[msgspec.Struct]] | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
        on_failure: FailurePolicy = "quarantine",
    ) -> Any:
        """Run a Computation on this stream; see `Graph.process`."""
        return self.stream.graph.process(
            computation, name=name, inputs=[self], output=output, intervals=intervals, on_failure=on_failure
        )

    def window(
        self,
        windows: Windows,
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

        Raises:
            GraphError: a negative lateness; or panes that may come again or be taken back, which would count twice.
        """
        if name:
            checked_name(name, "step")
        for route in self.stream.routes:
            _refuse_amended_panes(route.stream)
        if allowed_lateness < timedelta(0):
            raise GraphError("allowed_lateness is negative", hint="use zero or a positive duration")
        check_length("a lateness", allowed_lateness)
        return WindowedStream(self, windows, allowed_lateness, name, intervals)


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """Records by key and window, waiting for their aggregates."""

    keyed: KeyedStream
    windows: Windows
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
            self.name, keyed.inputs(), logic, self.intervals, allowed_lateness_us=microseconds(self.allowed_lateness)
        )
        stream = Stream(keyed.stream.graph, node, output)
        node.outputs.append(stream)
        keyed.stream.graph.add(node)
        return stream


def _refuse_amended_panes(stream: Stream) -> None:
    """Refuse to group panes that are not the last of their window: each would be a record, and so would retractions."""
    producer = stream.producer
    if not isinstance(producer, StageNode):
        return
    if producer.keeps_ids:
        for earlier in producer.inputs:
            _refuse_amended_panes(earlier.stream)
    if producer.windowed and producer.allowed_lateness_us:
        lateness = timedelta(microseconds=producer.allowed_lateness_us)
        name = stream.name or producer.name
        raise GraphError(
            f"windows over the panes of {name!r}: with allowed_lateness={lateness!r} a window has several "
            "panes, or one that is taken back, and each would count",
            hint="leave allowed_lateness out there, or keep the newest pane of each window in a Computation between",
        )


def _check_function(function: Callable[[Any], Any], what: str) -> None:
    if not callable(function):
        raise GraphError(f"{what} needs a function, not {function!r}")
    if inspect.iscoroutinefunction(function):
        raise GraphError(f"{what} cannot wait for {function.__qualname__}", hint="a Computation may be async def")
