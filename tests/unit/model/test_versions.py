"""What may change in a deployed graph, and how the difference reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from millpy import (
    AdvanceWithClock,
    Computation,
    Context,
    Count,
    Dedupe,
    EventTime,
    File,
    FixedWindows,
    Graph,
    Max,
    Mean,
    Min,
    Stream,
    Value,
    minutes,
    seconds,
)
from millpy.errors import GraphError, GraphVersionError
from millpy.model.versions import changes_between, merged, refuse


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


class ReadingMore(msgspec.Struct):
    device: str
    at: int
    value: float
    unit: str = ""


class ReadingNeedsMore(msgspec.Struct):
    device: str
    at: int
    value: float
    unit: str


class ReadingMoreBefore(msgspec.Struct, kw_only=True):
    device: str
    unit: str = ""
    at: int
    value: float


class ReadingOther(msgspec.Struct):
    device: str
    at: int
    value: int


class Usual(msgspec.Struct):
    mean: float = 0.0


class UsualToo(msgspec.Struct):
    mean: float = 0.0
    n: int = 0


def spikes(**cells: Any) -> Computation:
    def process_record(self: Computation, context: Context, record: Any) -> None:
        context.produce(record)

    kind = type("Spikes", (Computation,), {**cells, "process_record": process_record})
    made: Computation = kind()
    return made


def readings(
    graph: Graph,
    schema: type[msgspec.Struct] = Reading,
    disorder: int = 10,
    field: str = "at",
    dedupe: Dedupe | None = None,
    idle: AdvanceWithClock | None = None,
    name: str = "readings",
) -> Stream:
    event_time = EventTime(field, unit="s", max_disorder=seconds(disorder))
    return graph.inject(name, File("r.ndjson"), schema=schema, event_time=event_time, dedupe=dedupe, idle=idle)


def windows(
    stream: Stream,
    aggregates: dict[str, Any] | None = None,
    size: int = 1,
    key: str = "device",
    lateness: int = 0,
    intervals: int = 4,
    table: str | None = "per_minute",
) -> Stream:
    keyed = stream.key_by(key)
    found = keyed.window(
        FixedWindows(minutes(size)), allowed_lateness=minutes(lateness), name="per_minute", intervals=intervals
    ).aggregate(**(aggregates or {"n": Count(), "mean": Mean("value")}))
    return found.to_table(table) if table else found


def base(graph: Graph) -> None:
    stream = readings(graph)
    windows(stream)
    graph.process(spikes(usual=Value(Usual)), name="spikes", inputs=[stream.key_by("device")], output=Reading)


def spec(build: Callable[[Graph], Any]) -> dict[str, Any]:
    graph = Graph("factory")
    build(graph)
    return graph.spec().description()


def varied(
    aggregates: dict[str, Any] | None = None,
    cells: dict[str, Any] | None = None,
    window: dict[str, Any] | None = None,
    more: Callable[[Graph, Stream, Stream, Stream], Any] | None = None,
    **source: Any,
) -> Callable[[Graph], None]:
    def build(graph: Graph) -> None:
        stream = readings(graph, **source)
        panes = windows(stream, aggregates, **(window or {}))
        logic = spikes(**(cells or {"usual": Value(Usual)}))
        schema = source.get("schema", Reading)
        found = graph.process(logic, name="spikes", inputs=[stream.key_by("device")], output=schema)
        if more is not None:
            more(graph, stream, panes, found)

    return build


def hourly(graph: Graph, stream: Stream, panes: Stream, found: Stream) -> None:
    stream.key_by("device").window(FixedWindows(minutes(60))).aggregate(n=Count()).to_table("hourly")


GOES_IN = {
    "nothing": (varied(), []),
    "a computation": (
        varied(more=hourly),
        [
            "addition computation 'hourly' is new; it begins with what comes from now on",
            "addition result table 'hourly' is new; it begins with what comes from now on",
        ],
    ),
    "a result table": (
        varied(more=lambda graph, stream, panes, found: found.to_table("spikes")),
        ["addition result table 'spikes' is new; it begins with what comes from now on"],
    ),
    "an aggregate": (
        varied({"n": Count(), "mean": Mean("value"), "high": Max("value")}),
        [
            "addition computation 'per_minute' has a new aggregate 'high', Max('value')",
            "addition result table 'per_minute' has a new column 'high', double precision; "
            "NULL in windows that are open or over",
        ],
    ),
    "a cell": (
        varied(cells={"last": Value(float, default=0.0), "usual": Value(Usual)}),
        ["addition computation 'spikes' has a new cell 'last', Value(float, default=0.0)"],
    ),
    "a field with a default": (
        varied(schema=ReadingMore, more=lambda graph, stream, panes, found: found.to_table("spikes")),
        [
            "addition stream 'readings' has a new field 'unit', str",
            "addition stream 'spikes' has a new field 'unit', str",
            "addition result table 'spikes' is new; it begins with what comes from now on",
        ],
    ),
    "a source": (
        varied(more=lambda graph, *others: windows_of_another_source(graph)),
        [
            "addition source 'others' is new",
            "addition computation 'theirs' is new; it begins with what comes from now on",
        ],
    ),
    "the bound of disorder": (
        varied(disorder=20),
        [
            "setting source 'readings' has another disorder: "
            "was max_disorder=seconds(10) and is max_disorder=seconds(20)",
        ],
    ),
    "what silence means": (
        varied(idle=AdvanceWithClock(after=seconds(30))),
        ["setting source 'readings' has another idle: was Wait() and is AdvanceWithClock(after=seconds(30))"],
    ),
}


def windows_of_another_source(graph: Graph) -> None:
    others = readings(graph, name="others")
    others.key_by("device").window(FixedWindows(minutes(1)), name="theirs").aggregate(n=Count())


@pytest.mark.parametrize("what", list(GOES_IN))
def test_what_changes_nothing_that_is_stored_goes_in(what: str) -> None:
    build, words = GOES_IN[what]

    assert [f"{change.kind} {change}" for change in changes_between(spec(base), spec(build))] == words


REFUSED = {
    "the size of windows": (varied(window={"size": 2}), "has another windows: was ...Windows(size="),
    "the lateness": (varied(window={"lateness": 5}), "has another allowed lateness: was datetime.timedelta(0)"),
    "the intervals": (varied(window={"intervals": 8}), "has another intervals: was 4 and is 8"),
    "an aggregate replaced": (
        varied({"n": Count(), "mean": Max("value")}),
        "has another aggregate 'mean': was Mean('value') and is Max('value')",
    ),
    "an aggregate removed": (varied({"n": Count()}), "computation 'per_minute' has no aggregate 'mean' any more"),
    "an aggregate in front": (
        varied({"low": Min("value"), "n": Count(), "mean": Mean("value")}),
        "has its aggregates in another order (new ones come last): was n, mean and is low, n, mean",
    ),
    "the key": (varied(window={"key": "at"}), "has another key on 'readings': was device: str and is at: int"),
    "a table removed": (varied(window={"table": None}), "result table 'per_minute' is gone"),
    "a table renamed": (varied(window={"table": "minutes"}), "result table 'per_minute' is gone"),
    "a computation removed": (lambda graph: windows(readings(graph)), "computation 'spikes' is gone"),
    "a type": (
        varied(schema=ReadingOther),
        "stream 'readings' has another type of field 'value': was float and is int",
    ),
    "a field without a default": (varied(schema=ReadingNeedsMore), "stream 'readings' has new fields: 'unit', str"),
    "a field before others": (varied(schema=ReadingMoreBefore), "stream 'readings' has new fields: 'unit', str"),
    "the event time": (varied(field="value"), "source 'readings' has another event time: was 'at', unit='s'"),
    "the ids": (
        varied(dedupe=Dedupe("at", within=minutes(5))),
        "source 'readings' has another dedupe: was None and is",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_change_of_meaning_is_refused_in_words(what: str) -> None:
    build, words = REFUSED[what]
    stored, wanted = spec(base), spec(build)
    changes = changes_between(stored, wanted)

    assert any(words in str(change) and change.kind == "meaning" for change in changes), list(map(str, changes))
    with pytest.raises(GraphError, match="another meaning"):
        refuse("factory", 1, stored, wanted, on_purpose=True, changes=changes)


STATES = {
    "a cell's type": (
        varied(cells={"usual": Value(UsualToo)}),
        "has another cell 'usual': was Value(Usual(mean: float), default={\"mean\":0.0}) "
        'and is Value(UsualToo(mean: float, n: int), default={"mean":0.0,"n":0})',
    ),
    "a cell removed": (varied(cells={"other": Value(Usual)}), "computation 'spikes' has no cell 'usual' any more"),
}


@pytest.mark.parametrize("what", list(STATES))
def test_change_of_state_needs_a_function_that_migrates_it(what: str) -> None:
    build, words = STATES[what]
    stored, wanted = spec(base), spec(build)
    changes = changes_between(stored, wanted)

    assert any(words in str(change) and change.kind == "state" for change in changes), list(map(str, changes))
    with pytest.raises(GraphError, match="other state") as refused:
        refuse("factory", 1, stored, wanted, on_purpose=True, changes=changes)

    assert "--upgrade" in refused.value.hint
    refuse("factory", 1, stored, wanted, on_purpose=True, changes=changes, upgrades=["spikes"])


def test_new_aggregate_of_a_step_that_is_read_by_another_is_refused() -> None:
    def read(graph: Graph, stream: Stream, panes: Stream, found: Stream) -> None:
        panes.key_by("device").window(FixedWindows(minutes(60)), name="hours").aggregate(n=Count())

    more = {"n": Count(), "mean": Mean("value"), "high": Max("value")}

    changes = changes_between(spec(varied(more=read)), spec(varied(more, more=read)))

    assert "stream 'per_minute' has new fields high, and is read by hours" in map(str, changes)


@pytest.mark.parametrize(("aggregate", "refused"), [(Count("value"), True), (Max("value"), False)])
def test_step_cannot_read_windows_that_lack_what_is_never_none(aggregate: Any, refused: bool) -> None:
    def read(graph: Graph, stream: Stream, panes: Stream, found: Stream) -> None:
        panes.key_by("device").window(FixedWindows(minutes(60)), name="hours").aggregate(n=Count())

    more = {"n": Count(), "mean": Mean("value"), "more": aggregate}
    deployed = merged(spec(base), spec(varied(more)))

    changes = changes_between(deployed, spec(varied(more, more=read)))

    assert changes_between(deployed, spec(varied(more))) == []
    assert ("meaning" in [change.kind for change in changes]) == refused
    assert merged(deployed, spec(varied(more)))["computations"]["per_minute"]["grown"] == ["more"]


def test_graph_as_it_was_before_an_addition_is_named_as_older() -> None:
    stored, wanted = spec(varied(more=hourly)), spec(base)

    with pytest.raises(GraphVersionError, match="version 2 of graph 'factory' is deployed, which has more") as refused:
        refuse("factory", 2, stored, wanted, on_purpose=False, changes=changes_between(stored, wanted))

    assert "computation 'hourly' is new" in str(refused.value)


def test_setting_changes_only_when_a_person_says_so() -> None:
    stored, wanted = spec(base), spec(varied(disorder=20))
    changes = changes_between(stored, wanted)

    with pytest.raises(GraphError, match="other settings") as refused:
        refuse("factory", 1, stored, wanted, on_purpose=False, changes=changes)

    assert "millpy deploy" in refused.value.hint
    refuse("factory", 1, stored, wanted, on_purpose=True, changes=changes)


def test_no_source_partition_is_lost_when_another_program_knows_fewer() -> None:
    stored, wanted = spec(varied()), spec(varied(more=hourly))
    stored["computations"]["readings"]["partitions"] += ["r2.ndjson"]

    after = merged(stored, wanted)

    assert changes_between(after, wanted) == []
    assert after["computations"]["readings"]["partitions"][1:] == ["r2.ndjson"]
    assert "hourly" in after["computations"]
