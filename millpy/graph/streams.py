"""Streams and their methods: operators, keys, windows, aggregates, computations, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, overload

import msgspec

from millpy.computation import Computation
from millpy.errors import GraphError
from millpy.graph.arguments import field_names
from millpy.graph.joins import Within, as_of_join_node, interval_join_node
from millpy.graph.lookups import lookup_node
from millpy.graph.names import checked_name
from millpy.graph.nodes import FailurePolicy, InjectorNode, Input, StageNode, WhenBehind
from millpy.graph.per_key import PerKeyTools
from millpy.graph.refusals import refuse_repeated_panes, refuse_retention, refuse_several_ways
from millpy.graph.sinks import SinkMethods
from millpy.graph.sparkplug import SparkplugStreams, sparkplug_streams
from millpy.graph.stateless import StatelessOperators, T, U
from millpy.graph.top_n import TopOfPanes
from millpy.graph.windowed import Windowing
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.arguments import check_instance, is_whole
from millpy.model.lookup import LookupTable
from millpy.model.record import RecordType
from millpy.model.retention import checked_retention
from millpy.model.time import check_length, check_positive
from millpy.operators.archive import ADDED_COLUMNS, ArchiveLogic, has_empty_struct
from millpy.operators.deduplicate import DeduplicateLogic
from millpy.operators.join_output import How
from millpy.operators.lookup import Missing
from millpy.operators.stateless import Chain, Operator

if TYPE_CHECKING:
    from millpy.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Route:
    """A computation's output stream and the operators behind it."""

    stream: Stream
    operators: Chain


@dataclass(slots=True, eq=False)
class Stream(StatelessOperators[T], TopOfPanes, SinkMethods):
    """A typed flow of records: the output of an injector or computation, or of operators behind it.

    `Graph.inject`, `process` and `aggregate` return streams, and so do `map`, `filter`, `flat_map`, `split` and
    `union`. The streams of those operators have no producer: the operators run in the producer of the original stream,
    once for each consumer.

    `Stream[Reading]` is a stream of readings for a type checker, which then checks the functions of `map`, `filter`,
    `flat_map` and `split`. Fields that are named by text are checked when the graph is built.

    Attributes:
        routes: the origins of its records: the stream itself, or other streams behind operators.
        history: whether its result table keeps every pane, or for how long.
        retention: how long its result table keeps rows; None for ever.
    """

    graph: Graph
    producer: InjectorNode | StageNode | None
    record_type: RecordType
    own_name: str = ""
    table: str | None = None
    routes: tuple[Route, ...] = ()
    history: bool | timedelta = False
    retention: timedelta | None = None

    def __post_init__(self) -> None:
        self.routes = self.routes or (Route(self, ()),)

    @property
    def name(self) -> str:
        """Name of the stream or of its producer; without a producer, a description of its routes."""
        if self.producer is None:
            return " + ".join(".".join([r.stream.name, *map(repr, r.operators)]) for r in self.routes)
        return self.own_name or self.producer.name

    def union(self, *others: Stream[T]) -> Stream[T]:
        """Merge streams of one type. The records of each stream keep their order."""
        for stream in others:
            check_instance("an input of union", stream, Stream, "for example readings.union(others, more)")
        streams = (self, *others)
        if any(stream.graph is not self.graph for stream in others):
            raise GraphError(f"cannot unite {self.name!r} with a stream of another graph")
        if len({stream.record_type.struct for stream in streams}) > 1:
            names = ", ".join(stream.record_type.struct.__name__ for stream in streams)
            raise GraphError(f"cannot unite streams of different types: {names}", hint="map them to one type first")
        routes = tuple(route for stream in streams for route in stream.routes)
        return Stream(self.graph, None, self.record_type, routes=routes)

    def deduplicate(
        self,
        by: str | Sequence[str],
        within: timedelta,
        *,
        name: str,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream[T]:
        """Keep the first record of each id. This is a separate step, keyed by the id.

        Use it for feeds that share ids across source partitions; for a single feed `inject(dedupe=…)` costs less. A
        record is a duplicate if an earlier record with its id was kept and their event times are at most `within`
        apart. A record more than `within` behind the watermark cannot be judged and becomes a late record.

        Args:
            by: the field or fields of the id.
            within: the horizon in event time.
            name: the step's name.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: the name is invalid, `within` is not positive, or records that may be retracted come by several
                ways.
        """
        checked_name(name, "step")
        check_positive("within", within, "for example within=hours(1)")
        fields = field_names("by", by)
        inputs = self.key_by(*fields).inputs()
        refuse_several_ways(name, inputs)
        logic = DeduplicateLogic(fields, within, takes_retractions=any(taken.retracts for taken in inputs))
        node = StageNode(name, inputs, logic, intervals)
        return _output_of(self.graph, node, self.record_type)

    def lookup(  # noqa: PLR0913 - keywords of the public interface
        self,
        table: str,
        row: type[msgspec.Struct],
        *,
        key: str | Sequence[str],
        refresh: timedelta,
        table_key: str | Sequence[str] = "",
        missing: Missing = "null",
        suffix: str = "_table",
        name: str = "",
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Add the columns of a SQL table's row to each record. This is a separate step, keyed by `key`.

        The output has the fields of the record, then those of `row` without its key. Each worker reads the table in the
        background, again and again; all records of a turn see one version of it. Until the first read has succeeded,
        records wait.

        Args:
            table: an ordinary table or view of the same database, with its schema: "registry.devices"; without one, in
                schema public.
            row: the class of the table's rows; its fields are the columns that are read.
            key: the field or fields of the records by which a row is found.
            refresh: how long after a read of the table the next one begins, at least 0.1 s. May change at any time.
            table_key: the field or fields of `row` with the same values. Default: those of `key`.
            missing: what becomes of a record without a row: "null" passes it, with None in the fields of the row, so
                these are optional in the output; "drop" drops it; "dead_letter" makes it a dead letter. All are
                counted. May change at any time.
            suffix: behind the name of a field of the row whose name the record has, too.
            name: the step's name. Default: the name of its table.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: the keys have different types, a name is taken or invalid, another step reads the table in
                another way, or records may be retracted.
            SchemaError: a field does not exist, may be None and is part of a key, or has a type that cannot be carried.
        """
        if name:
            checked_name(name, "step")
        fields = field_names("key", key)
        inputs = self.key_by(*fields).inputs()
        read = LookupTable(table, row, key=table_key or fields, refresh=refresh)
        node, joined = lookup_node(name, inputs, read, missing=missing, suffix=suffix, intervals=intervals)
        return _output_of(self.graph, node, joined.record_type)

    def key_by(self, *fields: str) -> KeyedStream[T]:
        """Key the records by one field (the key is its value) or by several (the key is a tuple).

        "a.b" names field b of the struct in field a; its column in a result table is a_b.

        Raises:
            GraphError: there is no field, or a function instead of the name of one.
            SchemaError: a field does not exist, may be None, or has a type that cannot be a key.
        """
        if not fields:
            raise GraphError("key_by needs at least one field", hint='for example key_by("device")')
        field_names("key_by", fields)
        return KeyedStream(self, fields, self.record_type.key_types(fields))

    def to_table(
        self, name: str, *, history: bool | timedelta = False, retention: timedelta | None = None
    ) -> Stream[T]:
        """Write the stream to a result table in the graph's schema. An unnamed step takes the table's name.

        A windowed stream keeps the newest pane per key and window; the output of a computation has one row per record.

        Args:
            name: the name of the table.
            history: whether a second table, whose name has `_history` behind it, keeps every pane and retraction of a
                windowed stream. A duration says how long a pane stays there after another has replaced it.
            retention: how long rows are kept: an hour to a hundred years behind the watermark, by the end of their
                window or their event time; None for ever. The table is partitioned by this time, and partitions are
                dropped whole. A window that still takes late records is never dropped.

        Raises:
            GraphError: the name is taken or invalid, no step writes the stream, its records may be retracted, and no
                row could be found again, a stream without windows should have a history, or the retention is no such
                duration, shorter than the allowed lateness, or one of windows that never end.
        """
        checked_name(name, "table")
        if self.producer is None:
            raise GraphError(
                f"stream {self.name!r} has no computation that could write a table",
                hint="aggregate or process it first, then write that to a table",
            )
        if isinstance(self.producer, InjectorNode):
            raise GraphError(
                f"stream {self.name!r} comes straight from a source",
                hint="process or aggregate it first, then write that to a table",
            )
        if self.table is not None:
            raise GraphError(f"stream {self.name!r} already goes to table {self.table!r}")
        if self.producer.retracts and not self.producer.windowed:
            raise GraphError(
                f"records of {self.name!r} may be retracted, and a row does not say which record it is",
                hint="aggregate them first, then write that to a table",
            )
        self.history = _checked_history(history, self.name, windowed=self.producer.windowed)
        self.retention = checked_retention(retention)
        if retention is not None:
            refuse_retention(self.producer, retention)
        self.table = name
        if not self.producer.name:
            self.producer.name = name
        return self

    def sparkplug(
        self,
        *,
        name: str = "sparkplug",
        rebirth_every: timedelta = timedelta(seconds=30),
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> SparkplugStreams:
        """Make metrics of Sparkplug messages, by the births before them. This is a separate step.

        It knows of each edge node what its births have defined, so that data with aliases gets names and types. Its
        state is keyed by group and edge node.

        Args:
            name: the step's name, and the beginning of the names of its three streams.
            rebirth_every: the least time between two events `rebirth_needed` of an edge node, by the time of messages.
            intervals: number of key intervals, the unit of ownership.

        Returns:
            The streams `metrics` (`SparkplugMetric`), `events` (`SparkplugEvent`: births, deaths, gaps, and when a
            rebirth is needed), and `rejected` (`RejectedMetric`: metrics without a name or a valid value).

        Raises:
            GraphError: the stream is none of `SparkplugMessage`.
        """
        return sparkplug_streams(self, name=name, rebirth_every=rebirth_every, intervals=intervals)

    def add_step(self, node: StageNode, record_type: RecordType) -> Stream:
        """Add a step that consumes this stream to the graph; return the step's stream. The tools of millpy call it."""
        return _output_of(self.graph, node, record_type)

    def through(self, *operators: Operator) -> Stream[Any]:
        """Return the stream behind more operators."""
        routes = tuple(Route(route.stream, (*route.operators, *operators)) for route in self.routes)
        return Stream(self.graph, None, operators[-1].output, routes=routes)


@dataclass(frozen=True, slots=True)
class KeyedStream(PerKeyTools, Windowing, Generic[T]):
    """A stream with a key, ready for a computation."""

    stream: Stream[T]
    fields: tuple[str, ...]
    key_types: tuple[type, ...]

    def inputs(self) -> tuple[Input, ...]:
        """Return the subscriptions to the stream, one per route."""
        return tuple(
            Input(route.stream, route.operators, self.stream.record_type, self.fields, self.key_types)
            for route in self.stream.routes
        )

    @overload
    def process(
        self,
        computation: Computation,
        *,
        name: str,
        output: type[U],
        intervals: int = KEY_INTERVALS_DEFAULT,
        on_failure: FailurePolicy = "dead_letter",
    ) -> Stream[U]: ...

    @overload
    def process(
        self,
        computation: Computation,
        *,
        name: str,
        output: Mapping[str, type[msgspec.Struct]] | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
        on_failure: FailurePolicy = "dead_letter",
    ) -> Any: ...

    def process(
        self,
        computation: Computation,
        *,
        name: str,
        output: type[msgspec.Struct] | Mapping[str, type[msgspec.Struct]] | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
        on_failure: FailurePolicy = "dead_letter",
    ) -> Any:
        """Run a Computation on this stream; see `Graph.process`."""
        return self.stream.graph.process(
            computation, name=name, inputs=[self], output=output, intervals=intervals, on_failure=on_failure
        )

    def join(
        self,
        right: KeyedStream,
        *,
        within: Within,
        how: How = "inner",
        allowed_lateness: timedelta = timedelta(0),
        suffix: str = "_right",
        name: str = "",
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Join the records of two streams that have one key and are near each other in event time.

        A joined record has the fields of the left record, then those of the right one without its key; its event time
        is the greater of both. Each pair is made once, by whichever record comes later.

        Args:
            right: the other stream, with a key of the same types.
            within: how far a right record may be before and after a left one, in event time: a pair of durations, or
                one for both. Both bounds belong to the interval. Or `FixedWindows`, for records of one window.
            how: "inner" makes pairs only. "left" also passes a left record without a match, with None for the fields
                of the right one, once the watermark has passed its interval; "full" also a right one.
            allowed_lateness: how far the watermark may be past a record that is still joined.
            suffix: behind the name of a field of the right record whose name the left record has, too.
            name: the step's name. Default: the name of its table.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: the keys have different types, the interval is empty, `how` is unknown, a name is taken, or a
                stream has panes that repeat.
        """
        self._check_join(right, name)
        node, joined = interval_join_node(
            name,
            self.inputs(),
            right.inputs(),
            within=within,
            how=how,
            allowed_lateness=allowed_lateness,
            suffix=suffix,
            intervals=intervals,
        )
        return _output_of(self.stream.graph, node, joined.record_type)

    def join_as_of(
        self,
        right: KeyedStream,
        *,
        within: timedelta,
        how: How = "left",
        allowed_lateness: timedelta = timedelta(0),
        suffix: str = "_right",
        name: str = "",
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Join each record with the last record of another stream that has its key and is not after it in event time.

        A record is joined once, when the watermark has passed it. Its event time stays. Of right records with one event
        time the last to arrive counts.

        Args:
            right: the other stream, with a key of the same types.
            within: how old the right record may be, in event time, at the left one.
            how: "left" also passes a record without a match, with None for the fields of the right one; "inner" does
                not.
            allowed_lateness: how far the watermark may be past a record that is still joined; results wait as long.
            suffix: as for `join`.
            name: the step's name. Default: the name of its table.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: as for `join`.
        """
        self._check_join(right, name)
        node, joined = as_of_join_node(
            name,
            self.inputs(),
            right.inputs(),
            within=within,
            how=how,
            allowed_lateness=allowed_lateness,
            suffix=suffix,
            intervals=intervals,
        )
        return _output_of(self.stream.graph, node, joined.record_type)

    def _check_join(self, right: KeyedStream, name: str) -> None:
        """Raise GraphError if the streams cannot be joined, or the name is invalid."""
        check_instance("the right side of a join", right, KeyedStream, 'for example payments.key_by("order")')
        if name:
            checked_name(name, "step")
        if right.stream.graph is not self.stream.graph:
            raise GraphError(f"cannot join {self.stream.name!r} with a stream of another graph")
        for route in (*self.stream.routes, *right.stream.routes):
            refuse_repeated_panes(route.stream, "join")

    def archive(
        self, name: str = "", *, buckets: int = 16, intervals: int = 1, when_behind: WhenBehind = "wait"
    ) -> None:
        """Archive the records as Parquet files, which `millpy archive` or workers (`millpy run --archive`) write.

        The archive is a consumer of the stream and changes nothing of what the graph computes. Until an archiver has
        written a record, its segment stays in the database.

        Args:
            name: the archive's name. Default: the stream's name with `_archive` behind it.
            buckets: number of parts of the key space, a power of two; a row group has the records of one.
            intervals: number of key intervals; as many archivers can share the work.
            when_behind: what happens when the records that wait for the archive exceed the bound above which sources
                pause: "wait" pauses them, "skip" leaves these records out of the archive, and counts them.
        """
        if when_behind not in ("wait", "skip"):
            raise GraphError(f"unknown when_behind={when_behind!r} of an archive", hint='use "wait" or "skip"')
        check_instance("name", name, str, 'for example archive("readings")')
        if not name and not self.stream.name.isidentifier():
            raise GraphError(
                f"the archive of {self.stream.name!r} needs a name", hint='for example archive("readings")'
            )
        checked_name(name := name or f"{self.stream.name}_archive", "archive")
        if not is_whole(buckets, 1, 4096) or buckets & (buckets - 1):
            raise GraphError(f"invalid number of buckets: {buckets!r}", hint="use a power of two from 1 to 4,096")
        if taken := sorted(set(ADDED_COLUMNS) & set(self.stream.record_type.fields)):
            raise GraphError(f"field {taken[0]!r} is a column of every archive", hint="rename the field")
        if empty := [field.name for field in self.stream.record_type.schema if has_empty_struct(field.type)]:
            raise GraphError(
                f"field {empty[0]!r} has a Struct without fields, which Parquet cannot store",
                hint="give it a field; or make it a dict",
            )
        inputs = self.inputs()
        logic = ArchiveLogic(
            buckets, skips=when_behind == "skip", takes_retractions=any(taken.retracts for taken in inputs)
        )
        self.stream.graph.add(StageNode(name, inputs, logic, intervals))


def _output_of(graph: Graph, node: StageNode, record_type: RecordType) -> Stream:
    """Add a step to the graph; return its stream."""
    stream = Stream(graph, node, record_type)
    node.outputs.append(stream)
    graph.add(node)
    return stream


def _checked_history(history: bool | timedelta, stream: str, *, windowed: bool) -> bool | timedelta:
    """Return whether a table keeps its panes, or for how long.

    Raises:
        GraphError: the stream has no panes, or the duration is not positive.
    """
    hint = "use history=True, or a duration such as history=days(90)"
    if history and not windowed:
        raise GraphError(f"{stream!r} has no windows, and its table keeps every record anyway", hint="omit history=")
    if isinstance(history, timedelta):
        if history <= timedelta(0):
            raise GraphError(f"history={history!r} is not positive", hint=hint)
        check_length("history", history)
    elif not isinstance(history, bool):
        raise GraphError(f"history={history!r} is neither true, false nor a duration", hint=hint)
    return history
