"""A source for graphs that only a test feeds."""

from __future__ import annotations

from dataclasses import dataclass

from millpy.errors import ConfigError, GraphError
from millpy.ingest.protocol import Injector, Source, SourceSetup
from millpy.model.identity import Identity

PARTITION = "manual"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class ManualSource(Source):
    """A source that a test feeds by hand: `ManualSource()`, or `ManualSource("north", "south")` with two partitions.

    Use it in a graph that is made for a test. The graph of a program keeps its own sources, which a `GraphDriver` does
    not open.

    Args:
        names: the names of the source partitions; by default there is one.

    Raises:
        GraphError: a name occurs twice, or is empty.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if len(set(names)) < len(names) or not all(names):
            raise GraphError(f"ManualSource needs different names of partitions, not {list(names)}")
        object.__setattr__(self, "names", names or (PARTITION,))

    def identity(self) -> Identity:
        """Describe the partitions."""
        return {"kind": "manual_source", "names": list(self.names)}

    def ends(self) -> bool:
        """Return True: a test may end it."""
        return True

    def partitions(self) -> tuple[str, ...]:
        """Return the names of the source partitions."""
        return self.names

    def connect(self, setup: SourceSetup) -> Injector:
        """Refuse: a worker cannot read this source.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"source {setup.stream!r} is a ManualSource, which only a test feeds",
            hint="give the graph a source that a worker can read, such as Mqtt, Kafka, Http or Files",
        )
