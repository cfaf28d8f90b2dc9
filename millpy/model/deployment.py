"""Deployed graphs: a `GraphSpec` goes into the database, a `Deployment` with ids comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa

from millpy.errors import GraphError, GraphVersionError
from millpy.model.identity import Identity
from millpy.model.keys import KeyInterval

FORMAT = 1
"""The version of the stored descriptions of graphs. Raise it when a description changes its meaning."""

StateRow: TypeAlias = "tuple[str, str, bytes]"
"""(cell, entry of a MapCell as JSON text or "", value as JSON text)."""
Upgrade: TypeAlias = "Callable[[bytes, Sequence[StateRow]], list[StateRow]]"
"""Takes a key as JSON text and its stored cells; returns its new stored cells."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of a result table.

    `sql_type` is one of: text, bigint, numeric, decimal, double precision, boolean, bytea, timestamptz, date,
    uuid, jsonb.
    """

    name: str
    sql_type: str
    nullable: bool


PANE_INFO = ("pane_on_time_index", "pane_last")
"""The columns that a window with `pane_info` has, in this order, behind its aggregates."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A result table in the graph's schema.

    windowed: `keys`, window_start, window_end, `values`, pane_index, pane_timing, late_count,
        + emitted_at, interval_id, bundle; primary key (keys, window_start, window_end); newest pane only.
    records: `values`, event_time, ordinal, + emitted_at, interval_id, bundle;
        primary key (interval_id, bundle, ordinal), with event_time in it if there is a retention; one row per record,
        `keys` is empty.
    `ResultRows.columns` has the columns before the `+`, in this order.

    Attributes:
        history: the mode of the windows whose panes and retractions are kept in a second table; "" for no history.
        history_kept_s: how long a pane stays there after it was replaced; None without limit. It is not part of the
            deployed graph, and may change at any time.
        retention_us: how long rows are kept, by their `time`; None for ever. The table has partitions then.
        live: of each aggregate the place of its accumulator in a stored window, and the form in which SQL reads it
            ("" if it cannot); empty if it cannot read the windows. It is not part of the deployed graph.
    """

    name: str
    kind: Literal["windowed", "records"]
    computation: str
    stream: str
    keys: tuple[ColumnSpec, ...]
    values: tuple[ColumnSpec, ...]
    allowed_lateness_us: int = 0
    history: str = ""
    history_kept_s: float | None = None
    retention_us: int | None = None
    live: tuple[tuple[int, str], ...] = ()

    @property
    def time(self) -> str:
        """The column by whose time rows are kept: the end of a window, or the event time of a record."""
        return "window_end" if self.kind == "windowed" else "event_time"

    @property
    def retracts(self) -> bool:
        """Whether its history has a retraction of each pane that another replaces."""
        return self.history == "retracting"

    def columns(self) -> tuple[ColumnSpec, ...]:
        """Return the specs of `ResultRows.columns`, in order."""
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
    """One computation: an injector with its source partitions, or a stage, archive or sink with its key intervals.

    `identity` describes the parts that must not change under stored state: windows, aggregates, cells. `settings`
    affect only future processing and may change when an operator deploys them. `accumulators` is the number of
    accumulators of a stored window; 0 without windows. `statement` is what the commit runs for each record of a sink to
    SQL, with a typed place for each parameter; it is not part of the deployed graph, whose settings name the statement.
    """

    name: str
    kind: Literal["injector", "stage", "archive", "sink"]
    partitions: tuple[str, ...] = ()
    intervals: int = 0
    identity: Identity = field(default_factory=dict)
    settings: Identity = field(default_factory=dict)
    accumulators: int = 0
    statement: str = ""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A named, typed stream and the computation that produces it.

    Attributes:
        schema: columns of the stream.
        fields: fields with their described types, which are more precise than columns; by default the columns.
        optional: fields that have a default.
        names: what a record has in JSON: the names of its fields there, and its tag; by default those of the columns.
    """

    name: str
    producer: str
    schema: pa.Schema
    fields: tuple[tuple[str, Any], ...] = ()
    optional: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubscriptionSpec:
    """A stream as one computation consumes it. `input` is its index among the consumer's inputs.

    `operators` describes the operators before the consumer, `key_types` the types of the key's fields.
    """

    stream: str
    consumer: str
    input: int
    key_fields: tuple[str, ...]
    operators: tuple[Identity, ...] = ()
    key_types: tuple[Any, ...] = ()

    def key(self) -> list[tuple[str, Any]]:
        """Return (field, described type) of each key field; "any" for an unknown type."""
        return list(zip(self.key_fields, self.key_types or ("any",) * len(self.key_fields), strict=True))


def generation_name(name: str, generation: int) -> str:
    """Return the name of a generation while another generation has the graph's name."""
    return f"{name}_{generation}"


def permanent_name(name: str, generation: int) -> str:
    """Return the name of a generation at brokers and in monitoring, which a switch does not change."""
    return name if generation == 1 else generation_name(name, generation)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A graph to deploy; its computations are in topological order.

    `generation` is its number among the graphs of this name. Each has its own state, positions and result tables.
    """

    name: str
    computations: tuple[ComputationSpec, ...]
    streams: tuple[StreamSpec, ...]
    subscriptions: tuple[SubscriptionSpec, ...]
    tables: tuple[TableSpec, ...]
    generation: int = 1

    def description(self) -> dict[str, Any]:
        """Return the graph as JSON data, to be stored and compared."""
        description = {
            "format": FORMAT,
            "computations": {
                c.name: {
                    "kind": c.kind,
                    "partitions": list(c.partitions),
                    "intervals": c.intervals,
                    "identity": dict(c.identity),
                    "settings": dict(c.settings),
                }
                for c in self.computations
            },
            "streams": {
                s.name: {
                    "producer": s.producer,
                    "fields": list(s.fields) or [(f.name, str(f.type)) for f in s.schema],
                    "optional": list(s.optional),
                }
                for s in self.streams
            },
            "subscriptions": [
                {
                    "stream": s.stream,
                    "consumer": s.consumer,
                    "input": s.input,
                    "key": s.key(),
                    "operators": list(s.operators),
                }
                for s in self.subscriptions
            ],
            "tables": {
                t.name: {
                    "kind": t.kind,
                    "stream": t.stream,
                    "columns": [(c.name, c.sql_type, c.nullable) for c in t.columns()],
                    **({"history": t.history} if t.history else {}),
                    **({"retention": t.retention_us} if t.retention_us else {}),
                }
                for t in self.tables
            },
        }
        read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(description))
        return read


def check_format(name: str, description: Mapping[str, Any]) -> None:
    """Raise if this version of millpy cannot read the stored description of a graph.

    Raises:
        GraphVersionError: a newer millpy stored it.
        GraphError: a millpy that is no longer supported stored it.
    """
    stored = description.get("format", 0)
    if stored == FORMAT:
        return
    what = f"cannot compare with deployed graph {name!r}: its description has format {stored}, not {FORMAT}"
    if isinstance(stored, int) and stored > FORMAT:
        raise GraphVersionError(
            f"{what}, so a newer millpy deployed it", hint="update millpy to the version of its workers"
        )
    raise GraphError(
        f"{what}: it was deployed by a version of millpy that is no longer supported",
        hint="run the millpy that deployed it, or deploy the file as the next generation: Graph(…, generation=…)",
    )


@dataclass(frozen=True, slots=True)
class DeployedInterval:
    """One interval as deployed: the unit of ownership.

    `index` is its place among its computation's intervals; `keys` is the range of a stage's interval and None for an
    injector's, whose `partition` names the source partition; `joined` tells whether the partition was added to a
    deployed source.
    """

    interval_id: int
    computation: str
    index: int
    keys: KeyInterval | None
    partition: str
    joined: bool = False

    @property
    def place(self) -> str:
        """Its name in archives: the computation, and the source partition or the place of the key interval."""
        return f"{self.computation}/{self.partition or self.index}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """The ids of a deployed graph. `name` is its present name, which is also the schema of its result tables."""

    graph_id: int
    version: int
    name: str
    intervals: tuple[DeployedInterval, ...]
    subscription_ids: dict[tuple[str, str, int], int]
    """(stream, consumer, input) -> id."""
    table_ids: dict[str, int]
    """Table name -> id."""
    changes: tuple[str, ...] = field(default=(), compare=False)
    """Descriptions of the changes that deploying has made."""
    secret: str = field(default="", compare=False, repr=False)
    """The secret from which unguessable names at brokers are derived; different for each generation."""

    def intervals_of(self, computation: str) -> tuple[DeployedInterval, ...]:
        """Return the intervals of a computation, ordered by index."""
        return tuple(sorted((i for i in self.intervals if i.computation == computation), key=lambda i: i.index))
