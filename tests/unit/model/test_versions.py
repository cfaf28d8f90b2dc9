"""What may change in a deployed graph, and how the difference reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from millpy import (
    Accumulation,
    AdvanceWithClock,
    AfterCount,
    AfterWatermark,
    Computation,
    Context,
    Count,
    Dedupe,
    EventTime,
    File,
    FiringBehavior,
    FixedWindows,
    Graph,
    Max,
    Mean,
    Min,
    Mqtt,
    Stream,
    Sum,
    Value,
    minutes,
    seconds,
)
from millpy.errors import GraphError, GraphVersionError
from millpy.model.graph_changes import changes_between
from millpy.model.taking_back import cannot_take_back, changes_back
from millpy.model.versions import merged, refuse_changes
from millpy.windowing.triggers import Trigger

MONTH = minutes(60 * 24 * 30)


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
            "addition hourly: the computation is new; it starts with new data",
            "addition result table hourly: it is new; it starts with new data",
        ],
    ),
    "a result table": (
        varied(more=lambda graph, stream, panes, found: found.to_table("spikes")),
        ["addition result table spikes: it is new; it starts with new data"],
    ),
    "an aggregate": (
        varied({"n": Count(), "mean": Mean("value"), "high": Max("value")}),
        [
            "addition per_minute: aggregate 'high' is new, Max('value')",
            "addition result table per_minute: column 'high' is new, double precision; NULL in existing windows",
        ],
    ),
    "a cell": (
        varied(cells={"last": Value(float, default=0.0), "usual": Value(Usual)}),
        ["addition spikes: cell 'last' is new, Value(float, default=0.0)"],
    ),
    "a field with a default": (
        varied(schema=ReadingMore, more=lambda graph, stream, panes, found: found.to_table("spikes")),
        [
            "addition stream readings: field 'unit' is new, str",
            "addition stream spikes: field 'unit' is new, str",
            "addition result table spikes: it is new; it starts with new data",
        ],
    ),
    "a source": (
        varied(more=lambda graph, *others: windows_of_another_source(graph)),
        [
            "addition others: the source is new",
            "addition theirs: the computation is new; it starts with new data",
        ],
    ),
    "the bound of disorder": (
        varied(disorder=20),
        ["setting readings: max_disorder changed from seconds(10) to seconds(20)"],
    ),
    "a longer lateness": (
        varied(window={"lateness": 5}),
        ["setting per_minute: allowed_lateness changed from seconds(0) to minutes(5); windows that are over stay over"],
    ),
    "what silence means": (
        varied(idle=AdvanceWithClock(after=seconds(30))),
        ["setting readings: idle changed from Wait() to AdvanceWithClock(after=seconds(30))"],
    ),
}


def windows_of_another_source(graph: Graph) -> None:
    others = readings(graph, name="others")
    others.key_by("device").window(FixedWindows(minutes(1)), name="theirs").aggregate(n=Count())


@pytest.mark.parametrize("what", list(GOES_IN))
def test_change_that_affects_nothing_stored_is_accepted(what: str) -> None:
    build, words = GOES_IN[what]

    assert [f"{change.kind} {change}" for change in changes_between(spec(base), spec(build))] == words


REFUSED = {
    "the size of windows": (
        varied(window={"size": 2}),
        "per_minute: the window changed from FixedWindows(minutes(1)) to FixedWindows(minutes(2))",
    ),
    "the intervals": (varied(window={"intervals": 8}), "per_minute: the number of intervals changed from 4 to 8"),
    "an aggregate replaced": (
        varied({"n": Count(), "mean": Max("value")}),
        "per_minute: aggregate 'mean' changed from Mean('value') to Max('value')",
    ),
    "an aggregate removed": (varied({"n": Count()}), "per_minute: aggregate 'mean' was removed"),
    "an aggregate in front": (
        varied({"low": Min("value"), "n": Count(), "mean": Mean("value")}),
        "the order of aggregates changed from n, mean to low, n, mean, but new ones must come last",
    ),
    "the key": (varied(window={"key": "at"}), "the key of readings changed from device: str to at: int"),
    "a table removed": (varied(window={"table": None}), "result table per_minute: it was removed"),
    "a table renamed": (varied(window={"table": "minutes"}), "result table per_minute: it was removed"),
    "a computation removed": (lambda graph: windows(readings(graph)), "spikes: the computation was removed"),
    "a type": (
        varied(schema=ReadingOther),
        "stream readings: the type of field 'value' changed from float to int",
    ),
    "a field without a default": (
        varied(schema=ReadingNeedsMore),
        "stream readings: new fields: unit: str; a new field needs a default",
    ),
    "a field before others": (
        varied(schema=ReadingMoreBefore),
        "stream readings: new fields: unit: str; a new field needs a default",
    ),
    "the event time": (
        varied(field="value"),
        "readings: the event time changed from EventTime('at', unit='s') to EventTime('value', unit='s')",
    ),
    "the ids": (
        varied(dedupe=Dedupe("at", within=minutes(5))),
        "readings: dedupe changed from None to Dedupe('at')",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_change_of_meaning_is_refused_with_a_description(what: str) -> None:
    build, words = REFUSED[what]
    stored, wanted = spec(base), spec(build)
    changes = changes_between(stored, wanted)

    assert any(words in str(change) and change.kind == "meaning" for change in changes), list(map(str, changes))
    with pytest.raises(GraphError, match=r"cannot deploy 'factory': \d changes? do(es)? not fit the stored data"):
        refuse_changes("factory", 1, stored, wanted, on_purpose=True, changes=changes)


STATES = {
    "a cell's type": (
        varied(cells={"usual": Value(UsualToo)}),
        "spikes: cell 'usual' changed from Value({mean: float}, default={\"mean\":0.0}) "
        'to Value({mean: float, n: int}, default={"mean":0.0,"n":0})',
    ),
    "a cell removed": (varied(cells={"other": Value(Usual)}), "spikes: cell 'usual' was removed"),
}


@pytest.mark.parametrize("what", list(STATES))
def test_change_of_state_needs_a_function_that_migrates_it(what: str) -> None:
    build, words = STATES[what]
    stored, wanted = spec(base), spec(build)
    changes = changes_between(stored, wanted)

    assert any(words in str(change) and change.kind == "state" for change in changes), list(map(str, changes))
    with pytest.raises(GraphError, match="not fit the stored data") as refused:
        refuse_changes("factory", 1, stored, wanted, on_purpose=True, changes=changes)

    assert "--upgrade" in refused.value.hint
    refuse_changes("factory", 1, stored, wanted, on_purpose=True, changes=changes, upgrades=["spikes"])


def test_new_aggregate_of_a_step_that_is_read_by_another_is_refused() -> None:
    def read(graph: Graph, stream: Stream, panes: Stream, found: Stream) -> None:
        panes.key_by("device").window(FixedWindows(minutes(60)), name="hours").aggregate(n=Count())

    more = {"n": Count(), "mean": Mean("value"), "high": Max("value")}

    changes = changes_between(spec(varied(more=read)), spec(varied(more, more=read)))

    assert "stream per_minute: new fields: high; but hours already reads its windows" in map(str, changes)


@pytest.mark.parametrize(("aggregate", "refused"), [(Count("value"), True), (Max("value"), False)])
def test_step_cannot_read_windows_that_lack_a_required_column(aggregate: Any, refused: bool) -> None:
    def read(graph: Graph, stream: Stream, panes: Stream, found: Stream) -> None:
        panes.key_by("device").window(FixedWindows(minutes(60)), name="hours").aggregate(n=Count())

    more = {"n": Count(), "mean": Mean("value"), "more": aggregate}
    deployed = merged(spec(base), spec(varied(more)))

    changes = changes_between(deployed, spec(varied(more, more=read)))

    assert changes_between(deployed, spec(varied(more))) == []
    assert ("meaning" in [change.kind for change in changes]) == refused
    assert merged(deployed, spec(varied(more)))["computations"]["per_minute"]["grown"] == ["more"]


def of_mode(mode: Accumulation, lateness: int, reader: str = "", **options: Any) -> Graph:
    graph = Graph("factory")
    source = graph.inject("readings", File("r"), schema=Reading, event_time=EventTime("at", unit="s", sorted=True))
    windows = source.key_by("device").window(
        FixedWindows(minutes(1)), allowed_lateness=minutes(lateness), accumulation=mode, name="inner", **options
    )
    panes = windows.aggregate(n=Count())
    if reader == "window":
        panes.key_by("device").window(FixedWindows(minutes(5)), name="outer").aggregate(n=Sum("n"))
    if reader == "archive":
        panes.key_by("device").archive("panes")
    return graph


def test_another_mode_is_refused() -> None:
    stored = of_mode(Accumulation.ACCUMULATING, 5).spec().description()

    (change,) = changes_between(stored, of_mode(Accumulation.RETRACTING, 5).spec().description())

    assert change.kind == "meaning"
    assert str(change) == ("inner: accumulation changed from Accumulation.ACCUMULATING to Accumulation.RETRACTING")


def test_other_empty_panes_are_refused() -> None:
    stored = of_mode(Accumulation.RETRACTING, 5).spec().description()
    wanted = of_mode(Accumulation.RETRACTING, 5, final_pane=FiringBehavior.ALWAYS).spec().description()

    changes = changes_between(stored, wanted)

    assert [(change.kind, str(change)) for change in changes] == [
        ("meaning", "inner: final_pane changed from FiringBehavior.IF_NOT_EMPTY to FiringBehavior.ALWAYS")
    ]


@pytest.mark.parametrize("mode", [Accumulation.RETRACTING, Accumulation.DISCARDING])
@pytest.mark.parametrize(
    ("lateness", "trigger"), [(0, AfterWatermark()), (5, AfterWatermark()), (0, AfterWatermark(early=AfterCount(1)))]
)
def test_step_cannot_begin_to_read_records_that_may_be_retracted(
    mode: Accumulation, lateness: int, trigger: Trigger
) -> None:
    """It would get retractions of panes that it has not got."""
    retracts = mode is Accumulation.RETRACTING and (lateness > 0 or trigger.per_pane)
    stored = of_mode(mode, lateness, trigger=trigger).spec().description()

    added = changes_between(stored, of_mode(mode, lateness, "window", trigger=trigger).spec().description())
    archived = changes_between(stored, of_mode(mode, lateness, "archive", trigger=trigger).spec().description())

    assert any("retractions of records from before" in str(change) for change in added) == retracts
    assert {change.kind for change in added} == ({"addition", "meaning"} if retracts else {"addition"})
    assert {change.kind for change in archived} == {"addition"}


def test_graph_before_an_addition_is_reported_as_older() -> None:
    stored, wanted = spec(varied(more=hourly)), spec(base)

    with pytest.raises(GraphVersionError, match="version 2 of graph 'factory' has more than") as refused:
        refuse_changes("factory", 2, stored, wanted, on_purpose=False, changes=changes_between(stored, wanted))

    assert "hourly: the computation is new" in str(refused.value)


def test_setting_changes_only_when_a_user_requests_it() -> None:
    stored, wanted = spec(base), spec(varied(disorder=20))
    changes = changes_between(stored, wanted)

    with pytest.raises(GraphVersionError, match="other settings") as refused:  # a file that is deployed in a moment
        refuse_changes("factory", 1, stored, wanted, on_purpose=False, changes=changes)

    assert "millpy deploy" in refused.value.hint
    refuse_changes("factory", 1, stored, wanted, on_purpose=True, changes=changes)


def horizons(lateness: int, within: int) -> Any:
    return varied(window={"lateness": lateness}, dedupe=Dedupe("at", within=minutes(within)))


def test_horizons_change_with_a_word_on_what_becomes_of_state() -> None:
    found = changes_between(spec(horizons(5, 60)), spec(horizons(1, 30)))

    assert [f"{change.kind} {change}" for change in found] == [
        "setting readings: the horizon of dedupe ids changed from hours(1) to minutes(30); "
        "ids beyond it are forgotten at once",
        "setting per_minute: allowed_lateness changed from minutes(5) to minutes(1); "
        "windows beyond it are over at once",
    ]
    (longer,) = changes_between(spec(horizons(5, 30)), spec(horizons(5, 60)))
    assert str(longer).endswith("from minutes(30) to hours(1); forgotten ids stay forgotten")


def test_lateness_cannot_grow_where_each_site_has_a_watermark() -> None:
    def sites(lateness: int) -> Any:
        graph = Graph("factory")
        time = EventTime("at", unit="s", max_disorder=seconds(10), watermark_by="device")
        windows(graph.inject("readings", File("r.ndjson"), schema=Reading, event_time=time), lateness=lateness)
        return graph.spec().description()

    assert [change.kind for change in changes_between(sites(5), sites(1))] == ["setting"]
    longer = changes_between(sites(1), sites(5))
    assert [change.kind for change in longer] == ["setting", "meaning"]
    refused = partial(refuse_changes, "factory", stored=sites(1), wanted=sites(5), changes=longer)
    with pytest.raises(GraphVersionError, match="other settings than deployed version 2"):  # the file from before
        refused(version=2, on_purpose=False)
    for version, on_purpose in ((1, False), (2, True)):
        with pytest.raises(GraphError, match="cannot grow") as error:
            refused(version=version, on_purpose=on_purpose)
        assert not isinstance(error.value, GraphVersionError)
    assert changes_back(sites(1), sites(5), longer) is None  # nor by --back, which would open windows that are over
    assert "cannot grow" in str(cannot_take_back("factory", 1, sites(1), sites(5)))


def feeds(*filters: str) -> Any:
    graph = Graph("factory")
    time = EventTime("at", unit="s", max_disorder=seconds(10))
    windows(
        graph.inject("readings", Mqtt(*filters), schema=Reading, event_time=time, dedupe=Dedupe("at", within=MONTH))
    )
    return graph.spec().description()


def test_source_takes_more_topics_and_keeps_those_that_it_has() -> None:
    stored, wanted = feeds("a/{device}"), feeds("b/+", "a/{device}")

    (added,) = changes_between(stored, wanted)
    assert f"{added.kind} {added}" == "addition readings: source partition 'b/+' is new"
    lost = changes_between(merged(stored, wanted), stored)
    assert [f"{change.kind} {change}" for change in lost] == [
        "meaning readings: 'b/+' is no longer among its filters, but its broker may still keep messages for it"
    ]
    assert changes_back(merged(stored, wanted), stored, lost) is None
    assert "'b/+' is no longer" in str(cannot_take_back("factory", 2, merged(stored, wanted), stored))
    with pytest.raises(GraphVersionError, match=r"more than this file: readings: source partition 'b/\+' is new"):
        refuse_changes("factory", 2, merged(stored, wanted), stored, on_purpose=False, changes=lost)


def test_topic_whose_names_fill_other_fields_is_refused() -> None:
    found = changes_between(feeds("a/{device}"), feeds("a/+"))

    assert [change.kind for change in found] == ["meaning"]


def test_source_partitions_are_kept_when_a_program_declares_fewer() -> None:
    stored, wanted = spec(varied()), spec(varied(more=hourly))
    stored["computations"]["readings"]["partitions"] += ["r2.ndjson"]

    after = merged(stored, wanted)

    assert changes_between(after, wanted) == []
    assert after["computations"]["readings"]["partitions"][1:] == ["r2.ndjson"]
    assert "hourly" in after["computations"]
