"""`Graph`: named nodes in topological order.

A stream exists before a step can consume it, so a graph is acyclic by construction. Every stateful step has a name,
its own or that of its table: with positional names, inserting a step would orphan state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, overload

import msgspec

from millpy.computation import Computation
from millpy.errors import GraphError
from millpy.graph.arguments import field_names
from millpy.graph.lookups import check_rows, check_tables
from millpy.graph.names import RESERVED_SCHEMAS, checked_name
from millpy.graph.nodes import FailurePolicy, InjectorNode, StageNode, WhenBehind
from millpy.graph.sites import refuse_without_sites
from millpy.graph.spec import graph_spec
from millpy.graph.stateless import U
from millpy.graph.streams import KeyedStream, Stream
from millpy.ingest.protocol import Source
from millpy.ingest.settings import AdvanceWithClock, Dedupe, ErrorRate, EventTime, Wait
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.arguments import check_function, check_instance
from millpy.model.dead_letter import printable
from millpy.model.deployment import GraphSpec, permanent_name
from millpy.model.identity import canonical_json
from millpy.model.record import RecordType
from millpy.model.take import TAKE_TYPE
from millpy.model.time import check_positive
from millpy.operators.keyed import ComputationLogic
from millpy.operators.state_migration import StateFunction, StateUpgrade
from millpy.sinks.protocol import Sink

GENERATION_MAX = 2**31 - 1


class Graph:
    """A graph of computations; its name is also the schema of its result tables.

    Args:
        name: a plain SQL identifier.
        generation: 2 or more for a graph that is to replace the previous generation. Until `millpy switch`, it runs
            beside the previous generation with separate state, positions and result tables (in schema
            NAME_GENERATION).
        max_skew: how far in event time a source may read ahead of the slowest source that has records.

    Examples:
        >>> graph = Graph("factory")
    """

    def __init__(self, name: str, *, generation: int = 1, max_skew: timedelta | None = None) -> None:
        checked_name(name, "graph")
        if max_skew is not None:
            check_positive("max_skew", max_skew, "leave it out, or pass a duration such as hours(1)")
        if type(generation) is not int or not 1 <= generation <= GENERATION_MAX:  # a bool is an int, too
            raise GraphError(
                f"invalid generation {generation!r}", hint=f"use a whole number from 1 to {GENERATION_MAX:,}"
            )
        self.max_skew = max_skew
        if name in RESERVED_SCHEMAS or name.startswith("pg_"):
            raise GraphError(f"{name!r} is a reserved schema", hint="give the graph another name")
        self.name = name
        self.generation = generation
        self.nodes: list[InjectorNode | StageNode] = []
        self.upgrades: dict[str, StateUpgrade] = {}
        self._is_complete = False

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r})" if self.generation == 1 else f"Graph({self.name!r}, generation={self.generation})"
        )

    @property
    def permanent_name(self) -> str:
        """Name of this generation for brokers and monitoring; a switch does not change it."""
        return permanent_name(self.name, self.generation)

    def injectors(self) -> list[InjectorNode]:
        """Return the nodes with a source, in order of creation."""
        return [node for node in self.nodes if isinstance(node, InjectorNode)]

    def sinks(self) -> list[tuple[StageNode, Sink]]:
        """Return the nodes whose messages are delivered after the commit, and their sinks, in order of creation."""
        stages = [node for node in self.nodes if isinstance(node, StageNode)]
        return [(node, node.sink) for node in stages if node.sink is not None]

    def add(self, node: InjectorNode | StageNode) -> None:
        """Append a node, behind the nodes that produce its input.

        Raises:
            GraphError: another node has its name, the takes of all nodes are archived already, or it would take records
                with watermarks by site, and does not work by site.
        """
        if self._is_complete:
            raise GraphError(f"step {node.name!r} comes behind archive_takes()", hint="call archive_takes() last")
        if node.name and any(other.name == node.name for other in self.nodes):
            raise GraphError(f"two steps are named {node.name!r}", hint="rename one: a name identifies stored state")
        if isinstance(node, StageNode):
            check_tables(node, self.nodes)
            refuse_without_sites(node)
        self.nodes.append(node)

    def inject(  # noqa: PLR0913 - keywords of the public interface
        self,
        name: str,
        source: Source,
        *,
        schema: type[U],
        event_time: EventTime | None = None,
        dedupe: Dedupe | None = None,
        idle: AdvanceWithClock | Wait | None = None,
        pause_above: ErrorRate | None = None,
        device: str | tuple[str, ...] | None = None,
        lax: bool | tuple[str, ...] = False,
    ) -> Stream[U]:
        """Read an external feed as a stream.

        Args:
            name: the stream's name.
            source: the origin of the records: `Mqtt`, `Kafka`, `Http`, `InjectedStream`, `PostgresTable`,
                `PolledTable`, `Files`, `File` or `Directory`, or one of your own.
            schema: the msgspec.Struct that decides which payloads are valid.
            event_time: the field that holds the event time, and how far out of order records may arrive. Required.
            dedupe: the fields that identify a record, and the horizon.
            idle: how the watermark behaves while the source is silent; the default waits.
            pause_above: the rate of dead letters above which the source pauses until an operator resumes it with
                `millpy sources resume`, so that a broken feed does not drain into the dead-letter queue. May change
                at any time.
            device: the fields that name a device in the view `millpy.fleet`, `()` to list no devices. Default: the
                key of the first computation that consumes the stream without operators. May change at any time.
            lax: True, or the fields whose numbers and booleans JSON may write as text, as cells of CSV are: "21.5" is
                21.5, "1e3" is 1000, "true" and "1" are True, and "" is None if the field may be None. May change with
                a deployment.

        Raises:
            GraphError: a name is taken or is not a plain identifier, a field does not exist, or there is no event time.
            SchemaError: the record type is one that millpy cannot carry.
        """
        checked_name(name, "stream")
        record_type = RecordType(schema)
        event_time = _checked_event_time(event_time, record_type)
        event_time.validate(record_type)
        if dedupe is not None:
            check_instance("dedupe", dedupe, Dedupe, 'for example dedupe=Dedupe("id", within=hours(1))')
            dedupe.validate(record_type)
        if idle is not None and not isinstance(idle, Wait):
            check_instance("idle", idle, AdvanceWithClock, "for example idle=AdvanceWithClock(after=seconds(30))")
        if pause_above is not None:
            check_instance("pause_above", pause_above, ErrorRate, "for example pause_above=ErrorRate(share=0.1)")
        _check_source(source)
        source.validate(record_type)
        devices = None if device is None else field_names("device", device)
        if devices:
            record_type.key_types(devices)
        lax_fields = _lax_fields(lax, record_type)
        node = InjectorNode(
            name, source, record_type, event_time, dedupe, idle or Wait(), pause_above, devices, lax_fields
        )
        self.add(node)
        return Stream(self, node, record_type)

    @overload
    def process(
        self,
        computation: Computation,
        *,
        name: str,
        inputs: Sequence[KeyedStream],
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
        inputs: Sequence[KeyedStream],
        output: Mapping[str, type[msgspec.Struct]] | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
        on_failure: FailurePolicy = "dead_letter",
    ) -> Any: ...

    def process(
        self,
        computation: Computation,
        *,
        name: str,
        inputs: Sequence[KeyedStream],
        output: type[msgspec.Struct] | Mapping[str, type[msgspec.Struct]] | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
        on_failure: FailurePolicy = "dead_letter",
    ) -> Any:
        """Run a Computation on several keyed streams.

        Args:
            computation: the logic; shared by all keys.
            name: the step's name.
            inputs: keyed streams with keys of one type.
            output: the record type of the output stream, or several types by stream name.
            intervals: number of key intervals, the unit of ownership.
            on_failure: what happens to a record (or timer) whose call still raises after its retries. "dead_letter"
                dead-letters it, and its key continues. "park" stops its key: the key's records wait and hold the
                watermark until an operator releases the key (`millpy parked`).

        Returns:
            A Stream for one output type, a dict of Streams by name for several, None without an output.

        Raises:
            GraphError: there are no inputs, their keys have different types, the policy is unknown, or records of an
                input may be retracted, and the Computation does not declare `handles_retractions`.
        """
        checked_name(name, "step")
        if on_failure not in ("dead_letter", "park"):
            raise GraphError(f"unknown on_failure={on_failure!r} of step {name!r}", hint='use "dead_letter" or "park"')
        self._check_inputs(computation, name, inputs)
        taken = tuple(each for keyed in inputs for each in keyed.inputs())
        if not computation.handles_retractions and (names := [each.stream.name for each in taken if each.retracts]):
            raise GraphError(
                f"records of {names[0]!r} may be retracted, and {type(computation).__name__} would take retractions for"
                " new records",
                hint="subtract where context.retracts is true, and declare handles_retractions = True in the class",
            )
        node = StageNode(name, taken, ComputationLogic(computation, parks=on_failure == "park"), intervals)
        check_rows(computation)
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

    def _check_inputs(self, computation: Computation, name: str, inputs: Sequence[KeyedStream]) -> None:
        """Raise GraphError for what is no Computation, or inputs that do not fit the graph and each other."""
        check_instance("the logic", computation, Computation, "class Spike(Computation): …; then process(Spike(), …)")
        computation.check()
        example = 'for example inputs=[readings.key_by("device")]'
        if not inputs:
            raise GraphError(f"step {name!r} has no inputs", hint=example)
        check_instance("inputs", inputs, Sequence, example)
        for keyed in inputs:
            check_instance(f"an input of {name!r}", keyed, KeyedStream, example)
        if len({keyed.key_types for keyed in inputs}) > 1:
            raise GraphError(f"the inputs of {name!r} have keys of different types")
        if any(keyed.stream.graph is not self for keyed in inputs):
            raise GraphError(f"an input of {name!r} belongs to another graph")

    def upgrade(self, name: str, function: StateFunction) -> None:
        """Register a function that migrates a computation's stored cells to this version.

        `millpy deploy --upgrade` runs it, once for every key that has state.

        Args:
            name: the step's name.
            function: maps the stored cells of one key to the new cells, both by name, as plain JSON data; a `MapCell`
                is a dict. A cell that has its default is not stored, and may be left out. The result depends only on
                the argument.

        Raises:
            GraphError: the graph has no Computation of this name.
        """
        node = next((node for node in self.nodes if node.name == name and isinstance(node, StageNode)), None)
        if not (isinstance(node, StageNode) and isinstance(node.logic, ComputationLogic)):
            raise GraphError(f"cannot upgrade {name!r}: no Computation has that name", hint="name a step of process(…)")
        check_function(
            "upgrade", function, 'for example graph.upgrade("balance", lambda cells: {"total": cells["sum"]})'
        )
        self.upgrades[name] = node.logic.upgrade(name, function)

    def archive_takes(self, *, when_behind: WhenBehind = "wait") -> None:
        """Archive what each step of each computation has consumed, so that it can be repeated exactly.

        A take is a record that says which bundles a step consumed, in which order and at what time. With the archives
        of the sources, `millpy spark run --archive --exact` makes every bundle again as it was: with several source
        partitions, too, and with timers in processing time. Call this last; each computation NAME gets an archive
        NAME_takes.

        Args:
            when_behind: see `KeyedStream.archive`. What is left out ends what can be repeated.

        Raises:
            GraphError: a computation has no name, or closes windows by site.
        """
        stages = [n for n in self.nodes if isinstance(n, StageNode) and not (n.archives or n.is_sink)]
        for node in stages:
            if node.by_site:
                raise GraphError(
                    f"cannot archive the takes of {node.name!r}: they do not have the watermarks of its sites",
                    hint="omit watermark_by=, or archive_takes()",
                )
        for node in stages:
            if not node.name:
                raise GraphError("a step has no name", hint="write it to a table before archive_takes()")
            node.takes = Stream(self, node, TAKE_TYPE, own_name=f"{node.name}_takes")
            node.takes.key_by("interval").archive(node.takes.name, buckets=1, when_behind=when_behind)
        self._is_complete = True

    def streams(self) -> list[Stream]:
        """Return all streams in order of creation; an injector's stream appears with its first consumer."""
        found: list[Stream] = []
        for node in self.nodes:
            if isinstance(node, StageNode):
                found.extend(taken.stream for taken in node.inputs if taken.stream not in found)
                found.extend(stream for stream in node.outputs if stream not in found)
        return found

    def spec(self) -> GraphSpec:
        """Return the graph as it is deployed.

        Raises:
            GraphError: a step has no name, a name occurs twice, or the graph computes nothing.
        """
        self._check()
        return replace(graph_spec(self.name, self.nodes), generation=self.generation)

    def _check(self) -> None:
        if not any(isinstance(node, StageNode) for node in self.nodes):
            raise GraphError(f"graph {self.name!r} computes nothing", hint="aggregate or process one of its streams")
        for node in self.nodes:
            if not node.name:
                raise GraphError(
                    "a step has no name", hint="name it: window(..., name=…), lookup(…, name=…), or .to_table(…)"
                )
        for what, names in (
            ("step", [node.name for node in self.nodes]),
            ("stream", [stream.name for stream in self.streams()]),
            ("table", [stream.table for stream in self.streams() if stream.table]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise GraphError(
                    f"two {what}s are named {twice[0]!r}", hint="rename one: a name identifies stored state"
                )


def _checked_event_time(event_time: EventTime | None, record_type: RecordType) -> EventTime:
    """Return the event time of a source; raise GraphError, with fields that may hold it, if there is none."""
    fields = [name for name in record_type.fields if record_type.field_type(name) is datetime] or ["at"]
    hint = f'for example event_time=EventTime("{fields[0]}", max_disorder=seconds(10))'
    if event_time is None:
        raise GraphError("a source needs an event_time: the field that says when a record happened", hint=hint)
    check_instance("event_time", event_time, EventTime, hint)
    return event_time


def _lax_fields(lax: object, record_type: RecordType) -> tuple[str, ...]:
    """Return the lax fields in the order of the class.

    Raises:
        GraphError: a field does not exist, or `lax` is neither a bool nor a tuple.
    """
    if isinstance(lax, bool):
        return record_type.fields if lax else ()
    if not isinstance(lax, tuple) or not all(name in record_type.fields for name in lax):
        raise GraphError(
            f"lax={lax!r} does not name fields of {record_type.struct.__name__}",
            hint=f"lax=True, or a tuple of its fields: {', '.join(record_type.fields)}",
        )
    return tuple(name for name in record_type.fields if name in lax)


def _check_source(source: Any) -> None:
    name = type(source).__name__
    if not isinstance(source, Source):
        hint = 'for example Mqtt("sensors/+/reading") or File("readings.ndjson"); your own derives from Source'
        raise GraphError(f"{source!r} is not a source", hint=hint)
    identity = source.identity()
    if not isinstance(identity, dict) or not isinstance(identity.get("kind"), str):
        raise GraphError(
            f"{name}.identity() returns no kind: {identity!r}", hint='name one of your own: {"kind": "ticks", …}'
        )
    try:
        canonical_json(identity)
    except TypeError as error:
        raise GraphError(
            f"{name}.identity() is not JSON: {error}", hint="use numbers, texts, lists and dicts"
        ) from None
    partitions: Any = source.partitions()
    if isinstance(partitions, str) or not all(map(_is_partition_name, partitions)):
        raise GraphError(
            f"{name}.partitions() returns no names: {partitions!r}", hint='return a tuple of texts: ("readings",)'
        )
    if not partitions or len(set(partitions)) != len(partitions):
        raise GraphError(f"source {source!r} needs at least one partition, each named once")


def _is_partition_name(name: object) -> bool:
    """Tell whether a name is text that PostgreSQL can store."""
    return isinstance(name, str) and bool(name) and printable(name) == name
