"""Each parameter of the public API takes wrong kinds of arguments, one after the other.

Such an argument is refused with the graph, by an error of ours with a hint, or the graph has a meaning and can be
deployed. No other error is raised, at once or when the graph is described. What a parameter says that it takes (`bool`,
`str | None`) it takes, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import EnumType
from typing import Any

import msgspec
import pytest

import millpy
from millpy import (
    AdvanceWithClock,
    AfterAll,
    AfterAny,
    AfterCount,
    AfterEach,
    AfterPercentile,
    AfterProcessingTime,
    AfterWatermark,
    ApproxDistinct,
    Avro,
    CalendarWindows,
    Cbor,
    ChangeFields,
    Collect,
    Computation,
    Context,
    Count,
    Csv,
    Decode,
    Dedupe,
    Directory,
    ErrorRate,
    EventTime,
    Every,
    FieldMapping,
    File,
    Files,
    First,
    FixedWindows,
    Graph,
    Gzip,
    Http,
    HttpBounds,
    InjectedStream,
    Json,
    Kafka,
    KafkaBrokers,
    KafkaTopic,
    KeyedStream,
    Last,
    LineProtocol,
    ListCell,
    Login,
    LookupTable,
    MapCell,
    Max,
    Mean,
    Median,
    MessagePack,
    Min,
    Mqtt,
    MqttSession,
    MqttTopic,
    OrFinally,
    Pattern,
    PolledTable,
    PostgresTable,
    Protobuf,
    Quantile,
    RefusalPolicy,
    Repeatedly,
    Sasl,
    Scalar,
    SchemaRegistry,
    SessionWindows,
    SlidingWindows,
    Sparkplug,
    SparkplugMessage,
    StandardDeviation,
    Stream,
    Sum,
    Tls,
    Top,
    Value,
    Variance,
    Webhook,
    WebhookAccess,
    WebhookTimeouts,
    When,
    WindowedStream,
    hours,
    minutes,
    seconds,
)
from millpy.errors import UsageError


class Reading(msgspec.Struct):
    device: str
    at: datetime
    celsius: float
    count: int
    url: str


class Row(msgspec.Struct):
    device: str
    limit: float


class Spike(Computation):
    def process_record(self, context: Context, record: Any) -> None: ...


class Thing:
    """An object of no kind that anything takes."""


AT = EventTime("at", max_disorder=seconds(1))
WRONG: Mapping[str, Any] = {
    "a number": 5,
    "zero": 0,
    "a negative number": -1,
    "a huge number": 10**30,
    "a fraction": 0.5,
    "not a number": float("nan"),
    "infinity": float("inf"),
    "text": "no",
    "empty text": "",
    "NUL": "a\x00b",
    "bytes": b"no",
    "None": None,
    "a bool": True,
    "a list": ["no"],
    "an empty list": [],
    "a nested list": [["no"]],
    "a dict": {"no": 5},
    "a set": {"no"},
    "an object": Thing(),
    "a class": Thing,
    "a function": lambda: 1,
    "a duration": minutes(5),
    "a negative duration": -minutes(5),
}

KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,), "str": (str,), "int": (int,), "float": (int, float), "timedelta": (timedelta,),
    "Path": (str,), "None": (type(None),),
}  # fmt: skip
"""Plain types of parameters, and those of the arguments above that they take."""

# The parameters of what is called: a good argument for each that needs one, or has others that it goes with.
Use = Callable[[Any], Any]


def stream(**given: Any) -> Stream[Any]:
    graph = Graph("plant")
    return graph.inject("readings", **{"source": File("r.ndjson"), "schema": Reading, "event_time": AT, **given})


def keyed() -> KeyedStream[Any]:
    return stream().key_by("device")


def as_source(source: Any) -> Any:
    return stream(source=source).key_by("device").window(FixedWindows(minutes(1)), name="w").aggregate(n=Count())


def as_format(form: Any) -> Any:
    return as_source(Mqtt("a", format=form))


def as_aggregate(aggregate: Any) -> Any:
    return keyed().window(FixedWindows(minutes(1)), name="w").aggregate(found=aggregate)


def as_windows(windows: Any) -> Any:
    return keyed().window(windows, name="w").aggregate(n=Count())


def as_trigger(trigger: Any) -> Any:
    early = AfterWatermark(early=trigger)
    return keyed().window(FixedWindows(minutes(1)), trigger=early, name="w").aggregate(n=Count())


def as_sink(sink: Any) -> Any:
    source = stream()
    source.to_sink(sink, key="device", name="out")
    return source


def as_cell(cell: Any) -> Any:
    kind = type("Counting", (Spike,), {"cell": cell})
    return keyed().process(kind(), name="counting", output=Row)


def as_parameter(parameter: str) -> Use:
    return lambda value: as_source_of(**{parameter: value})


def as_source_of(**given: Any) -> Any:
    return stream(**given).key_by("device").window(FixedWindows(minutes(1)), name="w").aggregate(n=Count())


def as_itself(found: Any) -> Any:
    return found


CLASSES: dict[Any, tuple[dict[str, Any], Use]] = {
    AdvanceWithClock: ({"after": seconds(5)}, as_parameter("idle")),
    AfterCount: ({"n": 5}, as_trigger),
    AfterPercentile: ({"percentile": 90.0}, as_itself),
    AfterProcessingTime: ({"delay": seconds(5)}, as_trigger),
    AfterWatermark: ({}, lambda t: keyed().window(FixedWindows(minutes(1)), trigger=t, name="w").aggregate(n=Count())),
    ApproxDistinct: ({"field": "device"}, as_aggregate),
    Avro: ({"schema": {"type": "string"}}, as_format),
    CalendarWindows: ({"unit": "day", "zone": "Europe/Berlin"}, as_windows),
    Cbor: ({}, as_format),
    ChangeFields: ({}, lambda fields: as_source(PostgresTable("a.b", fields=fields))),
    Collect: ({"field": "celsius"}, as_aggregate),
    Count: ({}, as_aggregate),
    Csv: ({}, as_format),
    Decode: ({"function": lambda message: [message]}, as_format),
    Dedupe: ({"within": hours(1)}, as_parameter("dedupe")),
    Directory: ({"path": "there"}, as_source),
    ErrorRate: ({"share": 0.1}, as_parameter("pause_above")),
    EventTime: ({"field": "at", "max_disorder": seconds(5)}, as_parameter("event_time")),
    Every: ({"period": seconds(5)}, as_trigger),
    FieldMapping: ({}, lambda fields: as_source(Kafka("a", partitions=1, fields=fields))),
    File: ({"path": "r.ndjson"}, as_source),
    Files: ({}, as_source),
    First: ({"field": "celsius"}, as_aggregate),
    FixedWindows: ({"size": minutes(1)}, as_windows),
    Graph: ({"name": "plant"}, as_itself),
    Gzip: ({"format": Json()}, as_format),
    Http: ({"path": "/a"}, as_source),
    HttpBounds: ({}, lambda bounds: as_source(Http("/a", bounds=bounds))),
    InjectedStream: ({"stream": "a"}, as_source),
    Json: ({}, as_format),
    Kafka: ({"topic": "a", "partitions": 1}, as_source),
    KafkaBrokers: ({"servers": "h:9092"}, lambda brokers: as_source(Kafka("a", partitions=1, brokers=brokers))),
    KafkaTopic: ({"topic": "a"}, as_sink),
    Last: ({"field": "celsius"}, as_aggregate),
    LineProtocol: ({}, as_format),
    ListCell: ({"type_": int}, as_cell),
    Login: ({"username": "me", "password": "x"}, lambda login: as_source(Mqtt("a", host="h", login=login))),
    LookupTable: ({"name": "a.b", "row": Row, "key": "device", "refresh": seconds(5)}, as_cell),
    MapCell: ({"key_type": str, "value_type": int}, as_cell),
    Max: ({"field": "celsius"}, as_aggregate),
    Mean: ({"field": "celsius"}, as_aggregate),
    Median: ({"field": "celsius"}, as_aggregate),
    MessagePack: ({}, as_format),
    Min: ({"field": "celsius"}, as_aggregate),
    Mqtt: ({}, as_source),
    MqttSession: ({}, lambda session: as_source(Mqtt("a", session=session))),
    MqttTopic: ({"topic": "a"}, as_sink),
    OrFinally: ({"trigger": Repeatedly(AfterCount(5)), "until": AfterCount(50)}, as_trigger),
    Pattern: ({"name": "a", "condition": lambda e: True}, lambda pattern: keyed().match(pattern, name="m")),
    PolledTable: ({"table": "a.b", "column": "n"}, as_source),
    PostgresTable: ({"table": "a.b"}, as_source),
    Protobuf: ({"message": "a.B", "descriptors": b""}, as_itself),
    Quantile: ({"field": "celsius", "q": 0.5}, as_aggregate),
    RefusalPolicy: ({"attempts": 3}, lambda refusals: as_sink(MqttTopic("a", refusals=refusals))),
    Repeatedly: ({"trigger": AfterCount(5)}, as_trigger),
    Sasl: (
        {"username": "me", "password": "x"},
        lambda sasl: as_source(Kafka("a", partitions=1, brokers=KafkaBrokers("h:9092", sasl=sasl))),
    ),
    Scalar: ({"field": "celsius"}, as_format),
    SchemaRegistry: ({}, lambda registry: as_format(Avro(registry=registry))),
    SessionWindows: ({"gap": minutes(1)}, as_windows),
    SlidingWindows: ({"size": minutes(5), "every": minutes(1)}, as_windows),
    StandardDeviation: ({"field": "celsius"}, as_aggregate),
    Sum: ({"field": "celsius"}, as_aggregate),
    Tls: ({}, lambda tls: as_source(Mqtt("a", host="h", tls=tls))),
    Top: ({"field": "celsius"}, as_aggregate),
    Value: ({"type_": int, "default": 0}, as_cell),
    Variance: ({"field": "celsius"}, as_aggregate),
    Webhook: ({"url": "https://a.b/c"}, as_sink),
    WebhookAccess: ({}, lambda access: as_sink(Webhook("https://a.b/c", access=access))),
    WebhookTimeouts: ({}, lambda timeouts: as_sink(Webhook("https://a.b/c", timeouts=timeouts))),
    When: ({"predicate": lambda pane: True}, as_trigger),
}
SEVERAL: dict[Any, Use] = {
    AfterAll: as_trigger,
    AfterAny: as_trigger,
    AfterEach: as_trigger,
    Dedupe: lambda value: as_source_of(dedupe=value),
    Files: as_source,
    Mqtt: as_source,
}
"""Classes with any number of arguments without a name."""
PARTS: dict[Any, tuple[str, ...]] = {Dedupe: ("device",), Files: ("r.ndjson",), Mqtt: ("a",)}
WITHOUT: dict[str, str] = {
    "Combiner": "a class that users extend",
    "Computation": "a class that users extend",
    "Format": "a class that users extend",
    "WindowFunction": "a class that users extend",
    "Context": "made by millpy",
    "KeyedStream": "made by key_by",
    "Stream": "made by inject",
    "WindowedStream": "made by window",
    "Timer": "made by millpy",
    "Message": "a record",
    "RejectedMetric": "a record",
    "SparkplugEvent": "a record",
    "SparkplugMessage": "a record",
    "SparkplugMetric": "a record",
    "GlobalWindow": "without parameters",
    "Never": "without parameters",
    "Sparkplug": "without parameters",
    "Wait": "without parameters",
    "sparkplug_rebirth": "called by users' own functions",
    **dict.fromkeys(("days", "hours", "minutes", "seconds", "milliseconds"), "numbers of a unit"),
}

METHODS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "inject": (
        lambda: Graph("plant"),
        {"name": "readings", "source": File("r.ndjson"), "schema": Reading, "event_time": AT},
    ),
    "process": (keyed, {"computation": Spike(), "name": "spikes", "output": Row}),
    "archive": (keyed, {"name": "kept"}),
    "changes": (keyed, {"field": "celsius", "name": "changes"}),
    "fill_gaps": (keyed, {"fields": "celsius", "every": minutes(1), "limit": minutes(5), "name": "filled"}),
    "in_order": (keyed, {"name": "ordered"}),
    "join": (keyed, {"right": None, "within": minutes(1)}),
    "join_as_of": (keyed, {"right": None, "within": minutes(1)}),
    "match": (
        keyed,
        {"pattern": Pattern("a", lambda e: True).then("b", lambda e: True, within=minutes(1)), "name": "m"},
    ),
    "rates": (keyed, {"field": "count", "name": "rates"}),
    "silent_after": (keyed, {"after": minutes(5), "name": "silent"}),
    "window": (keyed, {"windows": FixedWindows(minutes(1)), "name": "w"}),
    "deduplicate": (stream, {"by": "device", "within": minutes(5), "name": "d"}),
    "filter": (stream, {"function": lambda r: True}),
    "map": (stream, {"function": lambda r: Row("a", 1.0), "output": Row}),
    "flat_map": (stream, {"function": lambda r: [Row("a", 1.0)], "output": Row}),
    "key_by": (stream, {"fields": "device"}),
    "lookup": (stream, {"table": "a.b", "row": Row, "key": "device", "refresh": seconds(5), "name": "l"}),
    "split": (stream, {"function": lambda r: "a", "into": ["a", "b"]}),
    "to_kafka": (stream, {"topic": "a", "key": "device", "name": "out"}),
    "to_mqtt": (stream, {"topic": "a", "key": "device", "name": "out"}),
    "to_sink": (stream, {"sink": MqttTopic("a"), "key": "device", "name": "out"}),
    "to_sql": (stream, {"statement": "INSERT INTO a VALUES (:device)", "key": "device", "name": "out"}),
    "to_webhook": (stream, {"url": "https://a.b/c", "key": "device", "name": "out"}),
    "to_table": (lambda: keyed().window(FixedWindows(minutes(1))).aggregate(n=Count()), {"name": "t"}),
    "top_n": (
        lambda: keyed().window(FixedWindows(minutes(1)), name="w").aggregate(n=Count()),
        {"n": 3, "by": "n", "name": "top"},
    ),
    "union": (stream, {}),
    "aggregate": (lambda: keyed().window(FixedWindows(minutes(1)), name="w"), {}),
    "archive_takes": (lambda: keyed().window(FixedWindows(minutes(1)), name="w").aggregate(n=Count()).graph, {}),
    "upgrade": (lambda: Graph("plant"), {"name": "spikes", "function": lambda state: state}),
    "sparkplug": (lambda: stream(source=Mqtt("spBv1.0/#", format=Sparkplug()), schema=SparkplugMessage), {}),
}


def parameters_of(call: Any) -> Iterator[tuple[str, inspect.Parameter]]:
    for name, parameter in inspect.signature(call).parameters.items():
        if name != "self":
            yield name, parameter


def described(found: Any) -> None:
    """Describe the graph that something is part of, as a deployment does; what is in no graph is only made."""
    stream = getattr(found, "keyed", found)
    graph = getattr(getattr(stream, "stream", stream), "graph", stream)
    if isinstance(graph, Graph) and graph.nodes:
        graph.spec().description()


def is_of(annotation: object, given: object) -> bool:
    """Tell whether an annotation permits an argument; of one that has more than plain types, suppose so."""
    kinds = str(annotation).split(" | ")
    if not all(kind in KINDS for kind in kinds) or ("Path" in kinds and "str" not in kinds):  # a path in JSON
        return True
    return any(type(given) in KINDS[kind] for kind in kinds)


def fault_of(build: Callable[[Any], Any], wrong: Any, annotation: object) -> str | None:
    """Return what is wrong with how an argument is taken; None for nothing."""
    try:
        described(build(wrong))
    except UsageError as error:
        return None if error.hint or "computes nothing" in error.message else f"no hint: {error.message}"
    except Exception as error:  # what this test looks for
        return f"{type(error).__name__}: {error}"
    return None if is_of(annotation, wrong) else f"taken, though it is no {annotation}"


def faults_of(name: str, build: Callable[[Any], Any], annotation: object = "Any") -> list[str]:
    faults = {what: fault_of(build, wrong, annotation) for what, wrong in WRONG.items()}
    return [f"{name} = {what}: {fault}" for what, fault in faults.items() if fault is not None]


def test_each_public_name_is_swept() -> None:
    classes = {kind.__name__ for kind in (*CLASSES, *SEVERAL)}
    enums = {name for name in millpy.__all__ if isinstance(getattr(millpy, name), EnumType)}

    assert classes | set(WITHOUT) | enums == set(millpy.__all__)
    assert not classes & set(WITHOUT)
    methods = {
        name
        for kind in (Graph, Stream, KeyedStream, WindowedStream)
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert methods - set(METHODS) == {"add", "add_step", "through", "injectors", "sinks", "spec", "streams", "inputs"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_refuses_wrong_kinds_of_arguments_or_gives_them_a_meaning(kind: Any) -> None:
    good, use = CLASSES[kind]
    found = []
    for name, parameter in parameters_of(kind):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue

        def build(wrong: Any, name: str = name) -> Any:
            return use(kind(*PARTS.get(kind, ()), **{**good, name: wrong}))

        found += faults_of(name, build, parameter.annotation)

    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", SEVERAL, ids=lambda kind: kind.__name__)
def test_a_class_of_several_parts_refuses_those_of_wrong_kinds(kind: Any) -> None:
    more = {"within": hours(1)} if kind is Dedupe else {}
    found = faults_of("a part", lambda wrong: SEVERAL[kind](kind(wrong, **more)))

    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_refuses_wrong_kinds_of_arguments_or_gives_them_a_meaning(name: str) -> None:
    make, good = METHODS[name]
    found = []
    for parameter, described_as in parameters_of(getattr(make(), name)):

        def build(wrong: Any, parameter: str = parameter, kind: Any = described_as.kind) -> Any:
            subject, given = make(), {**good, parameter: wrong}
            if "right" in given and parameter != "right":
                given["right"] = subject
            several = [given.pop(each) for each in ("fields", "others") if each in given]
            if kind is inspect.Parameter.VAR_KEYWORD:
                given = {"found": wrong}
            result = getattr(subject, name)(*several, **given)
            if isinstance(result, WindowedStream):
                result.aggregate(n=Count())
            return subject

        found += faults_of(parameter, build, described_as.annotation)

    assert not found, "\n".join(found)
