"""Nodes: injectors and stages, as a graph holds them before it is deployed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from millpy.injectors.protocol import Source
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime, Rate, Wait
from millpy.model.deployment import Meaning
from millpy.model.record import RecordType
from millpy.model.stage import InputSpec, StageLogic
from millpy.runtime.deduplicate import DeduplicateLogic
from millpy.runtime.operators import Chain
from millpy.windowing.columnar import WindowedLogic

if TYPE_CHECKING:
    from millpy.graph.streams import Stream


FailurePolicy = Literal["quarantine", "park"]


@dataclass(slots=True, eq=False)
class InjectorNode:
    """A source and how its payloads become records."""

    name: str
    source: Source
    record_type: RecordType
    event_time: EventTime
    dedupe: Dedupe | None
    idle: AdvanceWithClock | Wait
    pause_above: Rate | None = None
    device: tuple[str, ...] | None = None

    def meaning(self) -> Meaning:
        """What must not change under a stored position."""
        unit = f", unit={self.event_time.unit!r}" if self.event_time.unit else ""
        return {
            "source": repr(self.source),
            "event_time": f"{self.event_time.field!r}{unit}",
            "dedupe": repr(self.dedupe),
        }

    def settings(self) -> Mapping[str, str]:
        """How its watermark goes on: what is published stays (I5), so these may change."""
        return {"disorder": self.event_time.promise, "idle": repr(self.idle)}


@dataclass(frozen=True, slots=True)
class Input:
    """One subscription of a stage: what a computation produces, behind operators, by a key.

    Attributes:
        record_type: of the records behind the operators.
    """

    stream: Stream
    operators: Chain
    record_type: RecordType
    fields: tuple[str, ...]
    key_types: tuple[type, ...]

    @property
    def producer(self) -> InjectorNode | StageNode:
        """Whose stream it is."""
        assert self.stream.producer is not None, self.stream
        return self.stream.producer


@dataclass(slots=True, eq=False)
class StageNode:
    """A computation: its inputs by key, its logic, its output streams."""

    name: str
    inputs: tuple[Input, ...]
    logic: StageLogic
    intervals: int
    outputs: list[Stream] = field(default_factory=list)
    allowed_lateness_us: int = 0

    @property
    def windowed(self) -> bool:
        """Whether its results are panes of windows."""
        return isinstance(self.logic, WindowedLogic)

    @property
    def keeps_ids(self) -> bool:
        """Whether it keeps dedupe ids."""
        return isinstance(self.logic, DeduplicateLogic)

    def input_specs(self) -> tuple[InputSpec, ...]:
        """The inputs as the stage sees them."""
        return tuple(
            InputSpec(
                stream=taken.stream.name,
                record_type=taken.record_type,
                key_fields=taken.fields,
                key_types=taken.key_types,
                source_fed=isinstance(taken.producer, InjectorNode),
            )
            for taken in self.inputs
        )
