"""Nodes: injectors and stages, as a graph holds them before it is deployed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millpy.injectors.protocol import Source
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime, Wait
from millpy.model.record import RecordType
from millpy.model.stage import InputSpec, StageLogic
from millpy.windowing.columnar import WindowedLogic

if TYPE_CHECKING:
    from millpy.graph.streams import KeyedStream, Stream


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
