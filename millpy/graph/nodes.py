"""Nodes of a graph before its deployment: injectors and stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from millpy.errors import GraphError
from millpy.ingest.protocol import Source
from millpy.ingest.settings import AdvanceWithClock, Dedupe, ErrorRate, EventTime, Wait
from millpy.limits import KEY_INTERVALS_MAX
from millpy.model.horizons import HORIZON
from millpy.model.identity import Identity
from millpy.model.lookup import LookupTable
from millpy.model.record import RecordType
from millpy.model.stage import InputSpec, StageLogic
from millpy.operators.archive import ArchiveLogic
from millpy.operators.deduplicate import DeduplicateLogic
from millpy.operators.interval_join import IntervalJoinLogic
from millpy.operators.keyed import ComputationLogic
from millpy.operators.lookup import LookupLogic
from millpy.operators.stateless import Chain
from millpy.sinks.outbox import OutboxLogic
from millpy.sinks.protocol import Sink
from millpy.sinks.statement import StatementLogic
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.logic import WindowedLogic

if TYPE_CHECKING:
    from millpy.graph.streams import Stream


FailurePolicy = Literal["dead_letter", "park"]
WhenBehind = Literal["wait", "skip"]
"""What happens when too much waits for an archive."""


@dataclass(slots=True, eq=False)
class InjectorNode:
    """A source, and how its payloads become records."""

    name: str
    source: Source
    record_type: RecordType
    event_time: EventTime
    dedupe: Dedupe | None
    idle: AdvanceWithClock | Wait
    pause_above: ErrorRate | None = None
    device: tuple[str, ...] | None = None
    lax: tuple[str, ...] = ()

    def identity(self) -> Identity:
        """Describe what must not change while positions of the source are stored."""
        return {
            "source": self.source.identity(),
            "event_time": self.event_time.identity(),
            "dedupe": None if self.dedupe is None else _omit(self.dedupe.identity(), HORIZON),
        }

    def settings(self) -> Identity:
        """Describe what only records to come depend on, so that it may change: a published watermark stays (I5)."""
        every = self.lax == self.record_type.fields
        lax = {"lax": every or list(self.lax)} if self.lax else {}
        dedupe = {} if self.dedupe is None else self.dedupe.settings()
        return {**self.event_time.settings(), "idle": self.idle.identity(), **lax, **dedupe}


def _omit(identity: Identity, setting: str) -> Identity:
    return {name: value for name, value in identity.items() if name != setting}


@dataclass(frozen=True, slots=True)
class Input:
    """One subscription of a stage: a stream, the operators behind it, and the key.

    Attributes:
        record_type: the type of the records behind the operators.
    """

    stream: Stream
    operators: Chain
    record_type: RecordType
    fields: tuple[str, ...]
    key_types: tuple[type, ...]

    @property
    def producer(self) -> InjectorNode | StageNode:
        """Node that produces the stream."""
        assert self.stream.producer is not None, self.stream
        return self.stream.producer

    @property
    def site(self) -> str | None:
        """The field whose values have a watermark each, if it comes from a source with `watermark_by`."""
        producer = self.producer
        return producer.event_time.watermark_by if isinstance(producer, InjectorNode) else None

    @property
    def retracts(self) -> bool:
        """Whether some of the records may be retractions."""
        producer = self.producer
        return isinstance(producer, StageNode) and producer.retracts and self.stream is not producer.takes


@dataclass(slots=True, eq=False)
class StageNode:
    """A computation: its inputs by key, its logic, its output streams.

    Attributes:
        takes: the stream of its takes, if the graph archives them.
    """

    name: str
    inputs: tuple[Input, ...]
    logic: StageLogic
    intervals: int
    outputs: list[Stream] = field(default_factory=list)
    allowed_lateness_us: int = 0
    takes: Stream | None = None

    def __post_init__(self) -> None:
        if type(self.intervals) is not int or not 1 <= self.intervals <= KEY_INTERVALS_MAX:
            raise GraphError(
                f"intervals={self.intervals!r} of {self.name!r} is not a number from 1 to {KEY_INTERVALS_MAX}",
                hint="as many workers as it has key intervals can share a step, for example intervals=8",
            )

    @property
    def all_streams(self) -> list[Stream]:
        """Its output streams, and that of its takes."""
        return self.outputs if self.takes is None else [*self.outputs, self.takes]

    @property
    def by_site(self) -> bool:
        """Whether its inputs have a watermark for each site."""
        return any(taken.site is not None for taken in self.inputs)

    @property
    def windowed(self) -> bool:
        """Whether its results are panes of windows."""
        return isinstance(self.logic, WindowedLogic)

    @property
    def retracts(self) -> bool:
        """Whether some of the records of its output may be retractions."""
        if isinstance(self.logic, WindowedLogic):
            return self.logic.panes_repeat and self.logic.accumulation is Accumulation.RETRACTING
        if isinstance(self.logic, IntervalJoinLogic):
            return self.logic.retracts
        return self.keeps_ids and any(taken.retracts for taken in self.inputs)

    @property
    def archives(self) -> bool:
        """Whether it archives its input, which only an archiver does."""
        return isinstance(self.logic, ArchiveLogic)

    @property
    def is_sink(self) -> bool:
        """Whether it only sends its input out of the graph."""
        return isinstance(self.logic, OutboxLogic | StatementLogic)

    @property
    def sink(self) -> Sink | None:
        """The sink that its messages are delivered to after the commit, if there is one."""
        return self.logic.sink if isinstance(self.logic, OutboxLogic) else None

    @property
    def kind(self) -> Literal["stage", "archive", "sink"]:
        """The kind of the computation in a deployed graph."""
        return "archive" if self.archives else "sink" if self.is_sink else "stage"

    @property
    def keeps_ids(self) -> bool:
        """Whether it is a `deduplicate` step, whose interval stores the ids that it has let through."""
        return isinstance(self.logic, DeduplicateLogic)

    @property
    def joins(self) -> bool:
        """Whether it joins two streams, so that its interval stores the records that may still match."""
        return isinstance(self.logic, IntervalJoinLogic)

    @property
    def tables(self) -> tuple[LookupTable, ...]:
        """The lookup tables that it reads."""
        if isinstance(self.logic, LookupLogic):
            return (self.logic.table,)
        return self.logic.tables if isinstance(self.logic, ComputationLogic) else ()

    def settings(self) -> Identity:
        """Describe what only records to come depend on, so that it may change."""
        described = WindowedLogic | DeduplicateLogic | StatementLogic
        return self.logic.settings() if isinstance(self.logic, described) else {}

    def input_specs(self) -> tuple[InputSpec, ...]:
        """Return the inputs as the stage sees them."""
        return tuple(
            InputSpec(
                stream=taken.stream.name,
                record_type=taken.record_type,
                key_fields=taken.fields,
                key_types=taken.key_types,
                source_fed=isinstance(taken.producer, InjectorNode),
                site=taken.site or "",
            )
            for taken in self.inputs
        )
