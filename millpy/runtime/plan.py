"""The deployed graph as the runtime walks it: computations in topological order, who feeds whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from millpy.graph import Graph, InjectorNode, StageNode
from millpy.limits import Limits
from millpy.model.deployment import DeployedInterval, Deployment
from millpy.model.record import RecordType
from millpy.model.stage import Binding, Stage
from millpy.model.step_progress import StepProgress
from millpy.model.time import microseconds
from millpy.runtime.operators import Chain
from millpy.windowing.interval import Windowing


@dataclass(frozen=True, slots=True)
class Outlet:
    """One subscription as its producer sees it.

    Attributes:
        operators: what productions go through before they are cut by key.
        record_type: of the records behind the operators.
        consumer_ids: interval ids of the consuming computation, by index.
        los: int64, lower bound of each of those intervals, ascending from 0.
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


@dataclass(frozen=True, slots=True)
class Inlet:
    """One subscription as its consumer sees it."""

    subscription_id: int
    input: int
    key_fields: tuple[str, ...]
    record_type: RecordType


@dataclass(frozen=True, slots=True)
class ComputationPlan:
    """One computation with its neighbours.

    Attributes:
        inlets: by subscription id.
        producers: producer interval id -> subscription ids that this computation has of it.
        consumers: interval ids of all consuming computations (each once).
        stage: None for an injector.
        immediate: the operators behind it only compute, by the word of the user.
    """

    name: str
    node: InjectorNode | StageNode
    intervals: tuple[DeployedInterval, ...]
    outlets: tuple[Outlet, ...]
    inlets: dict[int, Inlet]
    producers: dict[int, tuple[int, ...]]
    consumers: tuple[int, ...]
    stage: Stage | None
    immediate: bool

    def devices(self) -> tuple[str, ...]:
        """What names a source's devices: what the graph says, else the key of the first that takes it as it is."""
        assert isinstance(self.node, InjectorNode)
        if self.node.device is not None:
            return self.node.device
        return next((outlet.key_fields for outlet in self.outlets if not outlet.operators), ())


@dataclass(frozen=True, slots=True)
class Plan:
    """All computations of one deployed graph, producers before consumers."""

    deployment: Deployment
    own_name: str
    generation: int
    computations: tuple[ComputationPlan, ...]
    by_interval: dict[int, ComputationPlan]
    max_skew_us: int | None = None
    progress: StepProgress = field(default_factory=StepProgress)

    def names(self) -> tuple[str, ...]:
        """Computation names in topological order."""
        return tuple(computation.name for computation in self.computations)

    def table_writers(self) -> dict[int, str]:
        """Which computation writes a result table, by the table's id."""
        return {
            self.deployment.table_ids[stream.table]: computation.name
            for computation in self.computations
            if isinstance(computation.node, StageNode)
            for stream in computation.node.outputs
            if stream.table is not None
        }

    def writer_of(self, table: str) -> str | None:
        """Which computation writes the result table of that name."""
        table_id = self.deployment.table_ids.get(table)
        return None if table_id is None else self.table_writers().get(table_id)

    def __iter__(self) -> Iterator[ComputationPlan]:
        return iter(self.computations)


def plan(graph: Graph, deployment: Deployment, limits: Limits) -> Plan:
    """Join a graph with the ids under which it is deployed."""
    progress = StepProgress()
    stages = [node for node in graph.nodes if isinstance(node, StageNode)]
    windowed = sum(len(deployment.of(stage.name)) for stage in stages if isinstance(stage.logic, Windowing))
    computations = []
    for node in graph.nodes:
        streams = [node.name] if isinstance(node, InjectorNode) else [stream.name for stream in node.outputs]
        outlets = [outlet for stage in stages for outlet in _outlets(stage, deployment) if outlet.stream in streams]
        inlets, producers = _inlets(node, deployment) if isinstance(node, StageNode) else ({}, {})
        consumers = tuple(dict.fromkeys(c for outlet in outlets for c in outlet.consumer_ids))
        stage = None
        if isinstance(node, StageNode):
            binding = _binding(node, deployment, frozenset(o.stream for o in outlets), limits, progress)
            stage = node.logic.bind(replace(binding, windowed_intervals=max(1, windowed)))
        immediate = all(operator.immediate for outlet in outlets for operator in outlet.operators)
        computations.append(
            ComputationPlan(
                node.name,
                node,
                deployment.of(node.name),
                tuple(outlets),
                inlets,
                producers,
                consumers,
                stage,
                immediate,
            )
        )
    by_interval = {interval.interval_id: c for c in computations for interval in c.intervals}
    max_skew_us = None if graph.max_skew is None else microseconds(graph.max_skew)
    return Plan(deployment, graph.own_name, graph.generation, tuple(computations), by_interval, max_skew_us, progress)


def _outlets(consumer: StageNode, deployment: Deployment) -> list[Outlet]:
    intervals = deployment.of(consumer.name)
    los = np.array([interval.keys.lo for interval in intervals if interval.keys is not None], np.int64)
    return [
        Outlet(
            subscription_id=deployment.subscription_ids[(taken.stream.name, consumer.name, index)],
            stream=taken.stream.name,
            consumer=consumer.name,
            input=index,
            operators=taken.operators,
            key_fields=taken.fields,
            record_type=taken.record_type,
            consumer_ids=tuple(interval.interval_id for interval in intervals),
            los=los,
        )
        for index, taken in enumerate(consumer.inputs)
    ]


def _inlets(node: StageNode, deployment: Deployment) -> tuple[dict[int, Inlet], dict[int, tuple[int, ...]]]:
    inlets: dict[int, Inlet] = {}
    producers: dict[int, tuple[int, ...]] = {}
    for index, taken in enumerate(node.inputs):
        subscription_id = deployment.subscription_ids[(taken.stream.name, node.name, index)]
        inlets[subscription_id] = Inlet(subscription_id, index, taken.fields, taken.record_type)
        for interval in deployment.of(taken.producer.name):
            known = producers.get(interval.interval_id, ())
            producers[interval.interval_id] = (*known, subscription_id)
    return inlets, producers


def _binding(
    node: StageNode, deployment: Deployment, subscribed: frozenset[str], limits: Limits, progress: StepProgress
) -> Binding:
    return Binding(
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
    )
