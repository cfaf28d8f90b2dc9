"""The errors for a source that breaks its promises."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpy import EventTime, Graph, seconds
from millpy.errors import GraphError
from millpy.sources import Source, SourceBatch


class Ticks(Source):
    def __init__(self, identity: Any, partitions: tuple[str, ...] = ("all",)) -> None:
        self._identity = identity
        self._partitions = partitions

    def identity(self) -> Any:
        return self._identity

    def partitions(self) -> tuple[str, ...]:
        return self._partitions

    def connect(self, setup: Any) -> Any:
        raise AssertionError("a graph connects nothing")


class Tick(msgspec.Struct):
    at: float


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ticks", "'ticks' is not a source"),
        (Ticks({"count": 1}), "Ticks.identity() returns no kind: {'count': 1}"),
        (Ticks("ticks"), "Ticks.identity() returns no kind: 'ticks'"),
        (
            Ticks({"kind": "ticks", "of": object()}),
            "Ticks.identity() is not JSON: Encoding objects of type object is unsupported",
        ),
        (Ticks({"kind": "ticks"}, "abc"), "Ticks.partitions() returns no names: 'abc'"),
        (Ticks({"kind": "ticks"}, (1, 2)), "Ticks.partitions() returns no names: (1, 2)"),
        (Ticks({"kind": "ticks"}, ("a\0b",)), r"Ticks.partitions() returns no names: ('a\x00b',)"),
        (Ticks({"kind": "ticks"}, ("\ud800",)), r"Ticks.partitions() returns no names: ('\ud800',)"),
        (Ticks({"kind": "ticks"}, ("",)), "Ticks.partitions() returns no names: ('',)"),
        (Ticks({"kind": "ticks"}, ()), "source Ticks() needs at least one partition, each named once"),
        (Ticks({"kind": "ticks"}, ("a", "a")), "source Ticks() needs at least one partition, each named once"),
    ],
)
def test_graph_refuses_a_source_that_it_could_not_store_or_read(source: Any, message: str) -> None:
    with pytest.raises(GraphError) as refused:
        Graph("ticks").inject(
            "ticks", source, schema=Tick, event_time=EventTime("at", unit="s", max_disorder=seconds(0))
        )

    assert refused.value.message == message


@pytest.mark.parametrize("position", [b"", b"line 7", b'{"line":', 7])
def test_batch_refuses_a_position_that_is_not_json(position: Any) -> None:
    with pytest.raises(ValueError, match="is not JSON text as bytes"):
        SourceBatch(format="json", arrived_at=0, position=position)


@pytest.mark.parametrize("position", [None, b"7", b'{"line":7}', b"null"])
def test_batch_accepts_a_position_of_json_or_none(position: bytes | None) -> None:
    assert SourceBatch(format="json", arrived_at=0, position=position).position == position


@pytest.mark.parametrize("format", ["csvv", None, "JSON"])
def test_batch_refuses_a_format_that_nothing_reads(format: Any) -> None:
    with pytest.raises(ValueError, match="is none of json, csv, columns"):
        SourceBatch(format=format, arrived_at=0, payloads=[b"{}"])
