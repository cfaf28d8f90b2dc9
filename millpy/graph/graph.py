"""Graph: its nodes in topological order, by name.

A stream exists before anybody can consume it, so a graph is acyclic by construction. Every stateful step is named,
explicitly or by its table: positional names would orphan state when a step is inserted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec

from millpy.computation import Computation
from millpy.errors import GraphError
from millpy.graph.names import RESERVED_SCHEMAS, checked_name
from millpy.graph.nodes import FailurePolicy, InjectorNode, StageNode
from millpy.graph.spec import graph_spec
from millpy.graph.streams import KeyedStream, Stream
from millpy.injectors.protocol import FillsFields, Source
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime, Rate, Wait
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.deployment import GraphSpec, own_name
from millpy.model.record import RecordType
from millpy.model.time import check_length
from millpy.runtime.keyed import ComputationLogic
from millpy.runtime.upgrades import StateFunction, StateUpgrade

GENERATION_MAX = 2**31 - 1


class Graph:
    """A graph of computations; its name is also the schema of its result tables.

    Args:
        name: a plain SQL identifier.
        generation: 2 and more for a graph that takes the place of the one before it. It is deployed beside that, with
            state, positions and result tables of its own (in schema NAME_GENERATION), until `millpy switch`.
        max_skew: no source reads further ahead in event time than this of the slowest that has something to say.

    Examples:
        >>> graph = Graph("factory")
    """

    def __init__(self, name: str, *, generation: int = 1, max_skew: timedelta | None = None) -> None:
        checked_name(name, "graph")
        if max_skew is not None and max_skew <= timedelta(0):
            raise GraphError("max_skew is not positive", hint="leave it out, or give a duration")
        check_length("a skew", max_skew or timedelta(0))
        if type(generation) is not int or not 1 <= generation <= GENERATION_MAX:  # a bool is an int, too
            raise GraphError(
                f"there is no generation {generation!r}", hint=f"it is a whole number from 1 to {GENERATION_MAX:,}"
            )
        self.max_skew = max_skew
        if name in RESERVED_SCHEMAS or name.startswith("pg_"):
            raise GraphError(f"{name!r} is a reserved schema", hint="give the graph another name")
        self.name = name
        self.generation = generation
        self.nodes: list[InjectorNode | StageNode] = []
        self.upgrades: dict[str, StateUpgrade] = {}

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r})" if self.generation == 1 else f"Graph({self.name!r}, generation={self.generation})"
        )

    @property
    def own_name(self) -> str:
        """What this generation is known by to brokers and to monitoring, before and after a switch."""
        return own_name(self.name, self.generation)

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
        pause_above: Rate | None = None,
        device: str | tuple[str, ...] | None = None,
    ) -> Stream:
        """Bring an outside feed in as a stream.

        Args:
            name: the stream's name.
            source: where records come from: `Mqtt`, `Kafka`, `Files`, `File` or `Directory`.
            schema: the msgspec.Struct that decides which payloads are valid.
            event_time: which field says when it happened, and how far records may come out of order.
            dedupe: which fields identify a record, and for how long.
            idle: what the watermark does while the source is silent; the default waits.
            pause_above: when more than this is set aside, the source stands still until a person resumes it
                (`millpy sources resume`), rather than empty a feed into the dead letters. May be changed at any time.
            device: which fields name a device in the view `millpy.fleet`, `()` for none; by default the key of the
                first computation that takes the stream as it is. May be changed at any time.

        Raises:
            GraphError: a name that is taken or no plain identifier, a field that does not exist; with a hint.
            SchemaError: a record type that millpy cannot carry.
        """
        checked_name(name, "stream")
        record_type = RecordType(schema)
        event_time.validate(record_type)
        if dedupe is not None:
            dedupe.validate(record_type)
        if isinstance(source, FillsFields):
            source.validate(record_type)
        devices = (device,) if isinstance(device, str) else device
        if devices:
            record_type.key_types(devices)
        if len(set(source.partitions())) != len(source.partitions()) or not source.partitions():
            raise GraphError(f"source {source!r} names no partition, or one twice")
        node = InjectorNode(name, source, record_type, event_time, dedupe, idle or Wait(), pause_above, devices)
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
        on_failure: FailurePolicy = "quarantine",
    ) -> Any:
        """Run a Computation on several keyed streams.

        Args:
            computation: the logic; shared by all keys.
            name: the step's name.
            inputs: streams by keys of one type.
            output: the type of what it produces, or several by stream name.
            intervals: key intervals, the unit of ownership.
            on_failure: what becomes of a record (or timer) for which it raises, after its retries. "quarantine": it is
                set aside as a dead letter and its key goes on. "park": its key stops; its records wait and hold the
                watermark until a person lets it go on (`millpy parked`).

        Returns:
            One Stream for one output type; a dict of Streams by name for several; None for none.
        """
        checked_name(name, "step")
        if on_failure not in ("quarantine", "park"):
            raise GraphError(f"on_failure={on_failure!r} of {name!r}", hint='it is "quarantine" or "park"')
        if not inputs:
            raise GraphError(f"step {name!r} has no inputs")
        if len({keyed.key_types for keyed in inputs}) > 1:
            raise GraphError(f"the inputs of {name!r} have keys of different types")
        if any(keyed.stream.graph is not self for keyed in inputs):
            raise GraphError(f"an input of {name!r} belongs to another graph")
        taken = tuple(each for keyed in inputs for each in keyed.inputs())
        node = StageNode(name, taken, ComputationLogic(computation, parks=on_failure == "park"), intervals)
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

    def upgrade(self, name: str, function: StateFunction) -> None:
        """Say how the stored cells of a computation become those of this version; for `millpy deploy --upgrade`.

        Args:
            name: the step's name.
            function: from the stored cells of one key to what the cells are to hold, both by name: plain data as JSON
                reads it, a `MapCell` as a dict. A cell that has its default is not stored, and may be left out. It
                depends on nothing but its argument, and is called once for every key that has state.

        Raises:
            GraphError: no step of this name is a Computation.
        """
        node = next((node for node in self.nodes if node.name == name and isinstance(node, StageNode)), None)
        if not (isinstance(node, StageNode) and isinstance(node.logic, ComputationLogic)):
            raise GraphError(f"there is no Computation {name!r} to upgrade", hint="name a step after process(…)")
        self.upgrades[name] = node.logic.upgrade(name, function)

    def streams(self) -> list[Stream]:
        """All streams, in the order in which they were made (injectors' first appear by their consumers)."""
        found: list[Stream] = []
        for node in self.nodes:
            if isinstance(node, StageNode):
                found.extend(taken.stream for taken in node.inputs if taken.stream not in found)
                found.extend(stream for stream in node.outputs if stream not in found)
        return found

    def spec(self) -> GraphSpec:
        """The graph as it is deployed.

        Raises:
            GraphError: an unnamed step, a name twice, or nothing to run.
        """
        self._check()
        return replace(graph_spec(self.name, self.nodes), generation=self.generation)

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
