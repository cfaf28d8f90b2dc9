"""The deployed graph as the runtime walks it: computations in topological order, with their producers and consumers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from millpy.graph import Graph, InjectorNode, StageNode
from millpy.graph.nodes import Input
from millpy.limits import Limits
from millpy.model.deployment import DeployedInterval, Deployment
from millpy.model.lookup import LookupTable
from millpy.model.record import RecordType
from millpy.model.stage import UNBOUNDED, Stage, StageBinding
from millpy.model.step_progress import StepProgress
from millpy.model.stored_windows import ClosedKind
from millpy.model.time import microseconds
from millpy.operators.archive import ArchiveLogic
from millpy.operators.map import Map
from millpy.operators.stateless import Chain
from millpy.sinks.protocol import Sink
from millpy.sinks.statement import StatementLogic
from millpy.windowing.logic import WindowedStage
from millpy.windowing.window_spec import WindowSpec


@dataclass(frozen=True, slots=True)
class OutgoingSubscription:
    """One subscription as its producer sees it.

    Attributes:
        input: index of the stream among the consumer's inputs.
        operators: operators that productions go through before they are split by key.
        record_type: type of the records behind the operators.
        consumer_ids: interval ids of the consuming computation, by index.
        los: lower bound of each of those intervals (int64), ascending from 0.
        archived: whether the consumer is an archive.
        watermarked: whether the consumer uses watermarks, which archives and sinks do not.
        site: the field that names the site, if watermarks go by site; operators must not change it.
    """

    subscription_id: int
    stream: str
    consumer: str
    input: int
    operators: Chain
    key_fields: tuple[str, ...]
    record_type: RecordType
    consumer_ids: tuple[int, ...]
    los: npt.NDArray[np.int64]
    archived: bool
    watermarked: bool
    site: str = ""


@dataclass(frozen=True, slots=True)
class IncomingSubscription:
    """One subscription as its consumer sees it."""

    subscription_id: int
    input: int
    key_fields: tuple[str, ...]
    record_type: RecordType


@dataclass(frozen=True, slots=True)
class ComputationPlan:
    """One computation with its subscriptions and its neighbors.

    Attributes:
        outgoing: subscriptions to its streams.
        incoming: its own subscriptions, by id.
        producers: producer interval id -> ids of this computation's subscriptions to it.
        consumers: interval ids of all consuming computations (each once).
        stage: the stage; None for an injector.
        immediate: whether the user has declared that the operators behind it only compute.
        takes: the stream of its takes, if they are archived.
    """

    name: str
    node: InjectorNode | StageNode
    intervals: tuple[DeployedInterval, ...]
    outgoing: tuple[OutgoingSubscription, ...]
    incoming: dict[int, IncomingSubscription]
    producers: dict[int, tuple[int, ...]]
    consumers: tuple[int, ...]
    stage: Stage | None
    immediate: bool
    takes: str | None

    @property
    def archives(self) -> bool:
        """Whether it archives its input."""
        return isinstance(self.node, StageNode) and self.node.archives

    @property
    def runs_statements(self) -> bool:
        """Whether its commits run a user's statement for each record."""
        return isinstance(self.node, StageNode) and isinstance(self.node.logic, StatementLogic)

    @property
    def sink(self) -> Sink | None:
        """The sink that its messages are delivered to after the commit, if there is one."""
        return self.node.sink if isinstance(self.node, StageNode) else None

    @property
    def input_types(self) -> tuple[RecordType, ...]:
        """The types of the records that it takes; none for an injector."""
        return tuple(taken.record_type for taken in self.node.inputs) if isinstance(self.node, StageNode) else ()

    @property
    def delivers(self) -> bool:
        """Whether it has an outbox."""
        return self.sink is not None

    @property
    def tables(self) -> tuple[LookupTable, ...]:
        """The lookup tables that it reads."""
        return self.node.tables if isinstance(self.node, StageNode) else ()

    @property
    def skips(self) -> bool:
        """Whether it is an archive that leaves records out when it is too far behind."""
        return isinstance(self.node, StageNode) and isinstance(self.node.logic, ArchiveLogic) and self.node.logic.skips

    @property
    def closed_rows_max(self) -> int:
        """The most windows of an interval of which a new owner reads those that have fired; unbounded if it must."""
        return self.stage.closed_rows_max if isinstance(self.stage, WindowedStage) else UNBOUNDED

    @property
    def closed_kind(self) -> ClosedKind:
        """The kind of its windows for a new owner, which may leave some of them in the store."""
        return self.stage.closed_kind if isinstance(self.stage, WindowedStage) else ClosedKind.WINDOWS

    @property
    def keeps_runs(self) -> bool:
        """Whether it deduplicates or joins, so that its intervals need their dedupe runs."""
        return (
            self.node.keeps_ids or self.node.joins if isinstance(self.node, StageNode) else self.node.dedupe is not None
        )

    def devices(self) -> tuple[str, ...]:
        """Return the fields that name a source's devices: the graph's choice, or the first key without operators."""
        assert isinstance(self.node, InjectorNode)
        if self.node.device is not None:
            return self.node.device
        return next((subscription.key_fields for subscription in self.outgoing if not subscription.operators), ())


@dataclass(frozen=True, slots=True)
class Plan:
    """All computations of one deployed graph, producers before consumers.

    Attributes:
        permanent_name: the name of this generation for brokers and monitoring.
        by_interval: interval id -> its computation.
        max_skew_us: how far a source may be ahead of the slowest; None for no limit.
        progress: what the watchdog sees of a step.
    """

    deployment: Deployment
    permanent_name: str
    generation: int
    computations: tuple[ComputationPlan, ...]
    by_interval: dict[int, ComputationPlan]
    max_skew_us: int | None = None
    progress: StepProgress = field(default_factory=StepProgress)

    def names(self) -> tuple[str, ...]:
        """Return the names of the computations in topological order."""
        return tuple(computation.name for computation in self.computations)

    def table_writers(self) -> dict[int, str]:
        """Return the name of the computation that writes each result table, by the table's id."""
        return {
            self.deployment.table_ids[stream.table]: computation.name
            for computation in self.computations
            if isinstance(computation.node, StageNode)
            for stream in computation.node.outputs
            if stream.table is not None
        }

    def writer_of(self, table: str) -> str | None:
        """Return the name of the computation that writes a result table, if there is one."""
        table_id = self.deployment.table_ids.get(table)
        return None if table_id is None else self.table_writers().get(table_id)

    def __iter__(self) -> Iterator[ComputationPlan]:
        return iter(self.computations)


def plan(graph: Graph, deployment: Deployment, limits: Limits, *, observed: bool = False) -> Plan:
    """Join a graph with the ids under which it is deployed.

    Args:
        graph: the graph.
        deployment: its ids.
        limits: the bounds of its stages.
        observed: whether stages make the records of all their streams, also of those without a consumer.
    """
    progress = StepProgress()
    stages = [node for node in graph.nodes if isinstance(node, StageNode)]
    # The first consumer names the devices: archives and sinks change no meaning.
    stages.sort(key=lambda stage: stage.archives or stage.is_sink)
    windowed = sum(len(deployment.intervals_of(stage.name)) for stage in stages if isinstance(stage.logic, WindowSpec))
    joining = sum(len(deployment.intervals_of(stage.name)) for stage in stages if stage.joins)
    computations = []
    for node in graph.nodes:
        takes = node.takes if isinstance(node, StageNode) else None
        streams = _streams(node)
        outgoing = [
            subscription
            for stage in stages
            for subscription in _outgoing(stage, deployment)
            if subscription.stream in streams
        ]
        incoming, producers = _incoming(node, deployment) if isinstance(node, StageNode) else ({}, {})
        consumers = tuple(dict.fromkeys(c for subscription in outgoing for c in subscription.consumer_ids))
        stage = None
        if isinstance(node, StageNode):
            subscribed = frozenset(streams if observed else [o.stream for o in outgoing])
            binding = _binding(node, deployment, subscribed, limits, progress)
            binding = replace(binding, windowed_intervals=max(1, windowed), joining_intervals=max(1, joining))
            stage = node.logic.bind(replace(binding, is_current=deployment.name == graph.name))
        immediate = all(operator.immediate for subscription in outgoing for operator in subscription.operators)
        computations.append(
            ComputationPlan(
                node.name,
                node,
                deployment.intervals_of(node.name),
                tuple(outgoing),
                incoming,
                producers,
                consumers,
                stage,
                immediate,
                takes.name if takes is not None and any(o.stream == takes.name for o in outgoing) else None,
            )
        )
    by_interval = {interval.interval_id: c for c in computations for interval in c.intervals}
    max_skew_us = None if graph.max_skew is None else microseconds(graph.max_skew)
    return Plan(
        deployment, graph.permanent_name, graph.generation, tuple(computations), by_interval, max_skew_us, progress
    )


def _streams(node: InjectorNode | StageNode) -> list[str]:
    if isinstance(node, InjectorNode):
        return [node.name]
    return [stream.name for stream in node.all_streams]


def _outgoing(consumer: StageNode, deployment: Deployment) -> list[OutgoingSubscription]:
    intervals = deployment.intervals_of(consumer.name)
    los = np.array([interval.keys.lo for interval in intervals if interval.keys is not None], np.int64)
    return [
        OutgoingSubscription(
            subscription_id=deployment.subscription_ids[(taken.stream.name, consumer.name, index)],
            stream=taken.stream.name,
            consumer=consumer.name,
            input=index,
            operators=taken.operators,
            key_fields=taken.fields,
            record_type=taken.record_type,
            consumer_ids=tuple(interval.interval_id for interval in intervals),
            los=los,
            archived=consumer.archives,
            watermarked=not (consumer.archives or consumer.is_sink),
            site="" if consumer.archives or consumer.is_sink else _site_to_keep(taken),
        )
        for index, taken in enumerate(consumer.inputs)
    ]


def _site_to_keep(taken: Input) -> str:
    """Return the field that names the site, if operators that make new records are before the stage."""
    makes = any(isinstance(operator, Map) for operator in taken.operators)
    return taken.site or "" if makes else ""


def _incoming(
    node: StageNode, deployment: Deployment
) -> tuple[dict[int, IncomingSubscription], dict[int, tuple[int, ...]]]:
    incoming: dict[int, IncomingSubscription] = {}
    producers: dict[int, tuple[int, ...]] = {}
    for index, taken in enumerate(node.inputs):
        subscription_id = deployment.subscription_ids[(taken.stream.name, node.name, index)]
        incoming[subscription_id] = IncomingSubscription(subscription_id, index, taken.fields, taken.record_type)
        for interval in deployment.intervals_of(taken.producer.name):
            known = producers.get(interval.interval_id, ())
            producers[interval.interval_id] = (*known, subscription_id)
    return incoming, producers


def _binding(
    node: StageNode, deployment: Deployment, subscribed: frozenset[str], limits: Limits, progress: StepProgress
) -> StageBinding:
    return StageBinding(
        computation=node.name,
        inputs=tuple(
            replace(spec, subscription_id=deployment.subscription_ids[(spec.stream, node.name, index)])
            for index, spec in enumerate(node.input_specs())
        ),
        outputs={stream.name: stream.record_type for stream in node.outputs},
        tables={stream.name: deployment.table_ids[stream.table] for stream in node.outputs if stream.table},
        subscribed=subscribed,
        limits=limits,
        progress=progress,
        is_taken=node.takes is not None,
    )
