"""What makes stored state mean something else makes another identity, which is the same in every process."""

from __future__ import annotations

import enum
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import numpy as np
import pytest

from millpy import (
    Accumulation,
    Combiner,
    Computation,
    Context,
    Count,
    EventTime,
    File,
    FixedWindows,
    Graph,
    ListCell,
    MapCell,
    Max,
    SessionWindows,
    SlidingWindows,
    Stream,
    Value,
    minutes,
    seconds,
)
from millpy.errors import SchemaError
from millpy.model.graph_changes import changes_between
from millpy.model.identity import identity_of_type, identity_of_value
from millpy.model.identity_text import identity_text, type_text

ROOT = Path(__file__).resolve().parents[3]


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float
    note: str | None = None


class Inner(msgspec.Struct):
    a: int


def struct(*fields: Any, name: str = "Usual", **config: Any) -> Any:
    return msgspec.defstruct(name, fields, **config)


def members(*names: str) -> Any:
    return enum.Enum("Color", {name: name for name in names})


@dataclass
class One:
    a: int = 0


@dataclass
class Two:
    a: int = 0
    b: int = 0


Two.__name__ = "One"


class OnePair(NamedTuple):
    a: int


class TwoPair(NamedTuple):
    a: int
    b: int


class OneDict(TypedDict):
    a: int


class TwoDict(TypedDict):
    a: str


CELLS: dict[str, tuple[Any, Any]] = {
    "default": (Value(int, default=0), Value(int, default=100)),
    "default that is None": (Value(int), Value(int, default=0)),
    "default of a list": (Value(list[int], default=[]), Value(list[int], default=[1])),
    "default of a struct": (Value(Inner, default=Inner(0)), Value(Inner, default=Inner(1))),
    "default of a struct's field": (Value(struct(("a", int, 0))), Value(struct(("a", int, 1)))),
    "default that is left out inside": (
        ListCell(struct(("a", int, 0), omit_defaults=True)),
        ListCell(struct(("a", int, 1), omit_defaults=True)),
    ),
    "type": (Value(int, default=0), Value(float, default=0)),
    "nullable": (Value(int | None, default=1), Value(int, default=1)),
    "fields": (ListCell(struct(("a", int))), ListCell(struct(("a", int), ("b", int, 0)))),
    "fields' names in JSON": (ListCell(struct(("a", int))), ListCell(struct(("a", int), rename="upper"))),
    "array or object": (ListCell(struct(("a", int))), ListCell(struct(("a", int), array_like=True))),
    "tag": (ListCell(struct(("a", int), tag="x")), ListCell(struct(("a", int), tag="y"))),
    "fields of a dataclass": (ListCell(One), ListCell(Two)),
    "fields of a named tuple": (ListCell(OnePair), ListCell(TwoPair)),
    "fields of a typed dict": (ListCell(OneDict), ListCell(TwoDict)),
    "members of an enum": (Value(members("r", "g")), Value(members("r"))),
    "literals": (Value(Literal["r", "g"]), Value(Literal["r"])),
    "bounds": (Value(int, default=5), Value(Annotated[int, msgspec.Meta(ge=3)], default=5)),
    "kind of cell": (ListCell(int), Value(list[int], default=[])),
    "keys of a map": (MapCell(int, int), MapCell(str, int)),
    "values of a map": (MapCell(str, int), MapCell(str, Inner)),
    "datetime or text": (Value(datetime), Value(str)),
    "uuid or text": (Value(UUID), Value(str)),
}


def spikes(cell: Any) -> Computation:
    def process_record(self: Computation, context: Context, record: Any) -> None:
        context.produce(record)

    made: Computation = type("Spikes", (Computation,), {"cell": cell, "process_record": process_record})()
    return made


def described(build: Callable[[Stream], Any], schema: type[msgspec.Struct] = Reading) -> dict[str, Any]:
    graph = Graph("factory")
    stream = graph.inject(
        "readings", File("r"), schema=schema, event_time=EventTime("at", unit="s", max_disorder=seconds(1))
    )
    build(stream)
    return graph.spec().description()


def with_cell(cell: Any) -> dict[str, Any]:
    return described(lambda stream: stream.key_by("device").process(spikes(cell), name="spikes", output=Reading))


@pytest.mark.parametrize("what", CELLS)
def test_cell_that_decodes_state_differently_is_another_state(what: str) -> None:
    before, after = map(with_cell, CELLS[what])

    assert [change.kind for change in changes_between(before, after)] == ["state"]
    assert [change.kind for change in changes_between(after, before)] == ["state"]
    assert changes_between(before, with_cell(CELLS[what][0])) == []


class Own(Combiner[Any]):
    accumulator = dict[str, int]
    result_type = int
    top = 0

    def create(self) -> Any:
        return {}

    def add(self, accumulator: Any, record: Any) -> Any:
        return accumulator

    def merge(self, one: Any, other: Any) -> Any:
        return one

    def result(self, accumulator: Any) -> Any:
        return 0


def own(accumulator: Any) -> Combiner[Any]:
    made: Combiner[Any] = type("Own", (Own,), {"accumulator": accumulator})()
    return made


class Scaled(Own):
    def __init__(self, factor: float, names: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.factor = factor
        self._names = set(names)


@dataclass(frozen=True)
class Banded(Own):
    low: int = 0
    high: int = 1


COMBINERS: dict[str, tuple[Any, Any]] = {
    "accumulator": (own(dict[str, int]), own(list[int])),
    "fields of the accumulator": (own(struct(("a", int))), own(struct(("a", int), ("b", int, 0)))),
    "fields of a dataclass": (own(One), own(Two)),
    "accumulator inside": (own(list[struct(("a", int))]), own(list[struct(("a", float))])),  # type: ignore[misc]
    "parameter": (Scaled(1.0), Scaled(2.0)),
    "hidden parameter": (Scaled(1.0, {"a"}), Scaled(1.0, {"a", "b"})),
    "parameter of a dataclass": (Banded(low=1), Banded(low=2)),
    "class": (Own(), Scaled(1.0)),
}


def windowed(windows: Any, **aggregates: Any) -> dict[str, Any]:
    return described(lambda stream: stream.key_by("device").window(windows, name="windows").aggregate(**aggregates))


@pytest.mark.parametrize("what", COMBINERS)
def test_combiner_that_decodes_accumulators_differently_is_refused(what: str) -> None:
    before, after = (windowed(FixedWindows(minutes(1)), own=combiner) for combiner in COMBINERS[what])

    assert {change.kind for change in changes_between(before, after)} == {"meaning"}
    assert changes_between(before, windowed(FixedWindows(minutes(1)), own=COMBINERS[what][0])) == []


SLICES = SlidingWindows(minutes(10), every=minutes(5))


@pytest.mark.parametrize(
    ("windows", "aggregates", "kinds"),
    [
        (SLICES, {"own": Own()}, {"addition", "meaning"}),
        (SLICES, {"high": Max("value")}, {"addition"}),
        (SlidingWindows(minutes(10), every=minutes(4)), {"own": Own()}, {"addition"}),
        (FixedWindows(minutes(1)), {"own": Own()}, {"addition"}),
        (SessionWindows(minutes(1)), {"own": Own()}, {"addition"}),
    ],
)
def test_aggregate_with_another_stored_form_is_refused(windows: Any, aggregates: Any, kinds: set[str]) -> None:
    changes = changes_between(windowed(windows, n=Count()), windowed(windows, n=Count(), **aggregates))

    assert {change.kind for change in changes if change.subject == "windows"} == kinds
    if "meaning" in kinds:
        assert "windows: the stored form changed from slices to whole windows" in "; ".join(map(str, changes))


def test_lateness_from_which_on_windows_retract_is_refused_with_the_step_behind_them() -> None:
    def chained(late_s: int) -> dict[str, Any]:
        def build(stream: Any) -> Any:
            keyed = stream.key_by("device").window(
                FixedWindows(minutes(1)),
                name="first",
                allowed_lateness=seconds(late_s),
                accumulation=Accumulation.RETRACTING,
            )
            return (
                keyed.aggregate(n=Count())
                .key_by("device")
                .window(FixedWindows(minutes(5)), name="second")
                .aggregate(total=Count("n"))
            )

        return described(build)

    refused = [str(change) for change in changes_between(chained(60), chained(0)) if change.kind == "meaning"]
    assert refused == ["second: whether the windows before it retract changed from True to False"]


FIELDS: dict[str, tuple[Any, Any, str]] = {
    "text or uuid": (str, UUID, "meaning"),
    "number or text": (float, str, "meaning"),
    "None any more": (float | None, float, "meaning"),
    "None from now on": (float, float | None, "addition"),
    "inside": (Inner, struct(("a", str), name="Inner"), "meaning"),
    "bounds inside": (list[int], list[Annotated[int, msgspec.Meta(ge=0)]], "meaning"),
}


@pytest.mark.parametrize("what", FIELDS)
def test_new_type_of_a_field_is_refused_while_old_records_are_in_flight(what: str) -> None:
    def of(kind: Any) -> dict[str, Any]:
        schema = struct(("device", str), ("at", int), ("value", kind), name="Reading")
        build = lambda stream: stream.key_by("device").process(spikes(ListCell(int)), name="spikes")  # noqa: E731
        return described(build, schema)

    before, after, kind = FIELDS[what]

    assert [change.kind for change in changes_between(of(before), of(after))] == [kind]
    assert changes_between(of(before), of(before)) == []


def test_key_of_another_type_is_refused_though_its_column_is_the_same() -> None:
    def of(kind: Any) -> dict[str, Any]:
        made = struct(("device", kind), ("at", int), ("value", float), name="Made")
        return described(
            lambda stream: (
                stream.map(len, made).key_by("device").process(spikes(ListCell(int)), name="spikes", output=Reading)
            )
        )

    changes = changes_between(of(str), of(UUID))

    assert "spikes: the key of readings changed from device: str to device: UUID" in map(str, changes)
    assert {change.kind for change in changes} == {"meaning"}


class Node(msgspec.Struct):
    next: Node | None = None
    kids: list[Node] = []


def function(record: Any, factor: int = 1) -> Any:
    return record


class Named:
    def __call__(self, record: Any) -> Any:
        return record


def text_of(value: Any) -> str:
    return identity_text(identity_of_value(value))


GRAPH = """
import functools
from uuid import uuid4
from millpy import hours
from tests.unit.model.test_identity import *
print(text_of([{"b", "a", "ccc"}, {"x": {1, 2}}, Named(), functools.partial(function, factor=2), timedelta(1)]))
print(type_text(identity_of_type(Node)), type_text(identity_of_type(dict[str, set[Literal["b", "a"]]])))
print(with_cell(ListCell(struct(("id", UUID, msgspec.field(default_factory=uuid4)), omit_defaults=True))))
print(with_cell(Value(set[str], default={"b", "a", "ccc", "dd"})))
print(windowed(SessionWindows(minutes(1), by_key={"b": hours(1), "a": hours(2)}), own=Scaled(1.0, {"b", "a", "dd"})))
print(described(lambda stream: stream.map(functools.partial(function, factor=2)).filter(Named())
    .key_by("device").window(FixedWindows(minutes(1)), name="w").aggregate(n=Count())))
"""


def test_identity_is_the_same_in_every_process() -> None:
    def reported(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", GRAPH]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    first = reported("1")

    assert " at 0x" not in first
    assert "{next: ... | None, kids: list[...]} dict[str, set[Literal['a', 'b']]]" in first
    assert "[{'a', 'b', 'ccc'}, {'x': {1, 2}}, Named, partial(function, factor=2), hours(24)]" in first
    assert all(reported(seed) == first for seed in ("2", "3"))


def test_identities_of_values_differ_by_their_parts() -> None:
    values = [One(3), Inner(1), OnePair(2), members("r")["r"], 1.5, None, int, timedelta(0), b"a", 2**70, math.inf]
    values += [UUID(int=1), np.int32(7), (1, "a"), Minutes(FixedWindows(minutes(1)))]

    assert text_of(values) == (
        "[One(a=3), Inner(a=1), (2,), 'r', 1.5, None, int, seconds(0), bytes('YQ=='), 1180591620717411303424, inf, "
        "uuid('00000000-0000-0000-0000-000000000001'), 7, (1, 'a'), Minutes(windows=FixedWindows(minutes(1)))]"
    )
    assert type_text(identity_of_type(tuple[int, ...])) == "tuple[int, ...]"


@dataclass
class Minutes:
    windows: FixedWindows


def test_parameter_without_an_identity_is_refused() -> None:
    class Plain:
        pass

    with pytest.raises(SchemaError, match="cannot detect changes of parameter") as refused:
        windowed(FixedWindows(minutes(1)), own=Scaled(1.0, {Plain()}))  # type: ignore[arg-type]

    assert "give Plain a method identity()" in str(refused.value.hint)
