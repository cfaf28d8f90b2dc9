"""A graph as the database knows it: specs go in, a `Deployment` with ids comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa
import xxhash

from millpy.model.keys import KeyInterval

Meaning: TypeAlias = "Mapping[str, str | Sequence[tuple[str, str]]]"
"""What a computation is, part by part: a text, or named texts in their order."""

StateRow: TypeAlias = "tuple[str, str, bytes]"
"""(cell, entry of a MapCell as JSON text or "", value as JSON text)."""
Upgrade: TypeAlias = "Callable[[bytes, Sequence[StateRow]], list[StateRow]]"
"""From a key and its stored cells to its cells as they are to be stored."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of a result table. `sql_type` is one of: text, bigint, numeric, double precision, boolean, bytea,
    timestamptz, uuid, jsonb.
    """

    name: str
    sql_type: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A result table in the graph's own schema.

    windowed: `keys`, window_start, window_end, `values`, pane_index, pane_timing, late_count,
        + emitted_at, interval_id, bundle; primary key (keys, window_start, window_end); newest pane only.
    records: `values`, event_time, ordinal, + emitted_at, interval_id, bundle;
        primary key (interval_id, bundle, ordinal); one row a record, `keys` is empty.
    `ResultRows.columns` has the columns before the `+`, in this order.
    """

    name: str
    kind: Literal["windowed", "records"]
    computation: str
    stream: str
    keys: tuple[ColumnSpec, ...]
    values: tuple[ColumnSpec, ...]
    allowed_lateness_us: int = 0

    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns of `ResultRows.columns`, in order."""
        if self.kind == "windowed":
            return (
                *self.keys,
                ColumnSpec("window_start", "timestamptz", False),
                ColumnSpec("window_end", "timestamptz", False),
                *self.values,
                ColumnSpec("pane_index", "bigint", False),
                ColumnSpec("pane_timing", "text", False),
                ColumnSpec("late_count", "bigint", False),
            )
        return (
            *self.values,
            ColumnSpec("event_time", "timestamptz", False),
            ColumnSpec("ordinal", "bigint", False),
        )


@dataclass(frozen=True, slots=True)
class ComputationSpec:
    """One computation: an injector with its source partitions, or a stage with its key intervals.

    `meaning` is what must not change under stored state: windows, aggregators, cells. `settings` say how it goes on
    from now, and may change when a person says so. `accumulators`: how many a stored window has; 0 without windows.
    """

    name: str
    kind: Literal["injector", "stage"]
    partitions: tuple[str, ...] = ()
    intervals: int = 0
    meaning: Meaning = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    accumulators: int = 0


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A named, typed stream and the computation that produces it.

    Attributes:
        schema: its columns.
        fields: its fields with their types as text, which tells more than a column does; by default the columns'.
        optional: its fields that have a default.
    """

    name: str
    producer: str
    schema: pa.Schema
    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubscriptionSpec:
    """A stream as one computation consumes it, by its key. `input` is its index among the consumer's inputs.

    `operators`: what its records go through on the way, in words. `key_types`: of the key's fields, as text.
    """

    stream: str
    consumer: str
    input: int
    key_fields: tuple[str, ...]
    operators: tuple[str, ...] = ()
    key_types: tuple[str, ...] = ()

    def key(self) -> list[str]:
        """The key's fields with their types, where they are known."""
        if not self.key_types:
            return list(self.key_fields)
        return [f"{name}: {kind}" for name, kind in zip(self.key_fields, self.key_types, strict=True)]


def name_beside(name: str, generation: int) -> str:
    """What a generation of a graph is called while another one has the graph's name."""
    return f"{name}_{generation}"


def own_name(name: str, generation: int) -> str:
    """What a generation is known by outside the database, for ever: to brokers and to monitoring."""
    return name if generation == 1 else name_beside(name, generation)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A whole graph; computations in topological order.

    `generation`: which one of the graphs of this name. Each has its own state, positions and result tables.
    """

    name: str
    computations: tuple[ComputationSpec, ...]
    streams: tuple[StreamSpec, ...]
    subscriptions: tuple[SubscriptionSpec, ...]
    tables: tuple[TableSpec, ...]
    generation: int = 1

    def description(self) -> dict[str, Any]:
        """The graph as plain data, as JSON reads it back: what is stored and compared."""
        description = {
            "computations": {
                c.name: {
                    "kind": c.kind,
                    "partitions": list(c.partitions),
                    "intervals": c.intervals,
                    "meaning": dict(c.meaning),
                    "settings": dict(c.settings),
                }
                for c in self.computations
            },
            "streams": {
                s.name: {
                    "producer": s.producer,
                    "schema": list(s.fields) or [f"{f.name}: {f.type}" for f in s.schema],
                    "optional": list(s.optional),
                }
                for s in self.streams
            },
            "subscriptions": [
                [s.stream, s.consumer, s.input, s.key(), *([list(s.operators)] if s.operators else [])]
                for s in self.subscriptions
            ],
            "tables": {
                t.name: {
                    "kind": t.kind,
                    "stream": t.stream,
                    "columns": [f"{c.name} {c.sql_type}{'' if c.nullable else ' NOT NULL'}" for c in t.columns()],
                }
                for t in self.tables
            },
        }
        read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(description))
        return read

    def fingerprint(self) -> str:
        """A short hash of the description."""
        return fingerprint_of(self.description())


def fingerprint_of(description: object) -> str:
    """A short hash of a description, as it was made or as it was stored."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(description, order="sorted"))


@dataclass(frozen=True, slots=True)
class DeployedInterval:
    """One interval as deployed: the unit of ownership.

    `index` is its place among its computation's intervals; `keys` the range of a stage's interval, None for an
    injector's, whose `partition` names the source partition; `joined`: added to a deployed source.
    """

    interval_id: int
    computation: str
    index: int
    keys: KeyInterval | None
    partition: str
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Deployment:
    """The ids of a deployed graph; `name` is what it is called now, and the schema of its result tables."""

    graph_id: int
    version: int
    name: str
    intervals: tuple[DeployedInterval, ...]
    subscription_ids: dict[tuple[str, str, int], int]
    """(stream, consumer, input) -> id."""
    table_ids: dict[str, int]
    """Table name -> id."""
    changes: tuple[str, ...] = field(default=(), compare=False)
    """What deploying it has changed, in words."""
    secret: str = field(default="", compare=False, repr=False)
    """What names at brokers are made from, so that nobody else can guess them; its own for each generation."""

    def of(self, computation: str) -> tuple[DeployedInterval, ...]:
        """A computation's intervals, by index."""
        return tuple(sorted((i for i in self.intervals if i.computation == computation), key=lambda i: i.index))
