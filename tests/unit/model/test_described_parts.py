"""Every public part of a graph describes itself: by what changes the meaning of stored data, and by no more."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

import millpy
from millpy import (
    AfterCount,
    Avro,
    ChangeFields,
    Combiner,
    Csv,
    Decode,
    EventTime,
    Every,
    FieldMapping,
    HttpBounds,
    Json,
    Kafka,
    KafkaBrokers,
    LineProtocol,
    ListCell,
    Login,
    MapCell,
    MqttSession,
    MqttTopic,
    Never,
    Protobuf,
    RefusalPolicy,
    Sasl,
    Scalar,
    SchemaRegistry,
    Tls,
    Value,
    Webhook,
    WebhookAccess,
    WebhookTimeouts,
    minutes,
    seconds,
)
from millpy.model.identity import identity_of_function
from millpy.model.identity_text import identity_text
from millpy.operators.state import identity_of_cell
from millpy.sinks import SendBound
from millpy.windowing.accumulator import Aggregate
from tests.unit.model.described_graph import described_graph


def takes_a_field_only(part: object) -> bool:
    is_aggregate = isinstance(part, type) and issubclass(part, Aggregate) and part is not Combiner
    return is_aggregate and list(inspect.signature(part).parameters) == ["field"]  # type: ignore[arg-type]


FIELD = {"field": ["a", "b"]}
FORMATS = [None, Json(), Json(many="a"), Csv(), Csv(delimiter=";"), Scalar("a"), LineProtocol(), Decode(len)]
FILES = {"format": ["csv", "json", *FORMATS], "partitions": [1, 2]}
PATHS = [None, "a", "a.b"]
ARRIVAL = {"arrival": [None, "at"]}
INSIDE = {"inside": [Json(), Json(many="a")]}
SEVERAL = ("AfterAny", "AfterAll", "AfterEach")
LENGTHS = [seconds(10), minutes(1), seconds(0.001)]

MEANINGS: Mapping[str, Mapping[str, list[Any]]] = {
    "FixedWindows": {"size": [seconds(10), minutes(1)], "offset": [seconds(0), seconds(5), seconds(0.001)]},
    "SlidingWindows": {
        "size": [minutes(10), minutes(20)],
        "every": [minutes(1), minutes(5)],
        "offset": [seconds(0), seconds(30)],
    },
    "CalendarWindows": {
        "unit": ["hour", "day", "week", "month", "quarter", "year"],
        "zone": ["Europe/Berlin", "Europe/Paris", "UTC"],
        "starts_at": [seconds(0), minutes(15), seconds(0.001)],
    },
    "SessionWindows": {
        "gap": LENGTHS,
        "by_key": [
            None,
            {"a": minutes(1)},
            {"a": minutes(2)},
            {"b": minutes(1)},
            {("a", 1): minutes(1)},
            {1: minutes(1)},
        ],
        "by_field": ["", "a", "a.b"],
        "max_length": [None, minutes(5), minutes(6)],
        "max_records": [None, 1, 1_000],
    },
    "GlobalWindow": {},
    **{name: FIELD for name in millpy.__all__ if takes_a_field_only(getattr(millpy, name))},
    "Count": {"field": [None, "a", "b"]},
    "Variance": {**FIELD, "population": [False, True]},
    "StandardDeviation": {**FIELD, "population": [False, True]},
    "Top": {**FIELD, "n": [10, 3], "smallest": [False, True]},
    "Collect": {**FIELD, "limit": [1_000, 5]},
    "Quantile": {**FIELD, "q": [0.5, 0.99], "accuracy": [0.01, 0.02]},
    "Median": {**FIELD, "q": [0.5], "accuracy": [0.01, 0.02]},
    "Value": {"type_": [int, float, int | None], "default": [None, 0, 100]},
    "ListCell": {"type_": [int, str, list[int]]},
    "MapCell": {"key_type": [int, str], "value_type": [int, str]},
    "Files": {"paths": [("a",), ("b",), ("a", "b"), ("b", "a")], **FILES},
    "Directory": {"path": ["a", "b"], "pattern": ["*", "*.csv"], **FILES},
    "Http": {
        "path": ["/a", "/b"],
        "partitions": [1, 4],
        "key_field": [None, "a", "b"],
        "format": FORMATS,
    },
    "KafkaTopic": {"topic": ["a", "b"]},
    "MqttTopic": {},
    "Webhook": {},
    "InjectedStream": {"stream": ["a", "b"], "id_field": [None, "a", "b"]},
    "PolledTable": {"table": ["a", "b", "other.a"], "column": ["a", "b"]},
    "PostgresTable": {
        "table": ["a", "b", "other.a"],
        "fields": [
            ChangeFields(),
            ChangeFields(operation="a"),
            ChangeFields(before="a"),
            ChangeFields(committed_at="a"),
        ],
        "operations": [("snapshot", "insert", "update", "delete"), ("insert",), ("insert", "update")],
    },
    "ChangeFields": {"operation": [None, "a", "b"], "before": [None, "a"], "committed_at": [None, "a"]},
    "Kafka": {
        "topic": ["a", "b"],
        "fields": [
            FieldMapping(),
            FieldMapping("k"),
            FieldMapping(headers={"a": "b"}),
            FieldMapping(headers={"a": "c"}),
            FieldMapping(timestamp="at"),
        ],
        "tombstones": ["dead_letter", "skip", "record"],
        "format": FORMATS,
    },
    "Json": {
        "path": PATHS,
        "many": PATHS,
        "envelope": [None, {"a": "b"}, {"a": "c"}, {"a": "b.c"}, {"a": ("b.c",)}],
        "fields": [None, {"a": "b"}, {"b": "a"}],
        **ARRIVAL,
    },
    "Scalar": {**FIELD, "decimal": [".", ","], **ARRIVAL, "null": [(), ("nan",), ("nan", "-")]},
    "Csv": {
        "delimiter": [";", "\t"],
        "decimal": [".", ","],
        "encoding": ["utf-8", "cp1252"],
        "null": [("",), ("", "---")],
        "quote": ['"', None, "'"],
        "header": [True, ("a",), ("a", "b")],
        "rename": [None, {"a": "b"}, {"b": "a"}],
        "skip": [0, 1],
        "comment": [None, "#", "//"],
        "unpivot": [None, ("a", "b"), ("b", "a")],
    },
    "LineProtocol": {
        "precision": ["ns", "us", "ms", "s"],
        "time": ["time", "at"],
        "measurement": [None, "a"],
        "arrival": [False, True],
    },
    "MessagePack": INSIDE,
    "Cbor": INSIDE,
    "Gzip": {"format": [Json(), Scalar("a")]},
    "Sparkplug": {},
    "Decode": {"function": [len, str]},
    "Avro": {
        "schema": ['"int"', {"type": "long"}],
        "registry": [None, SchemaRegistry()],
        "inside": [Json(), Json(many="a")],
    },
    "Protobuf": {"message": [Timestamp, Duration], "framed": [False, True], "inside": [Json(), Json(many="a")]},
    "FieldMapping": {
        "key": [None, "k"],
        "headers": [{}, {"a": "b"}, {"a": "c"}],
        "timestamp": [None, "at"],
    },
    "Mqtt": {
        "filters": [("a/+",), ("a/{b}",), ("a/+", "b/+"), ("b/+", "a/+")],
        "retained": [False, True],
        "format": FORMATS,
    },
    "EventTime": {
        "field": ["a", "b"],
        "unit": [None, "s", "ms"],
        "max_disorder": [None, seconds(1), seconds(2)],
        "future_tolerance": [minutes(1), minutes(10)],
        "watermark_by": [None, "a", "b"],
    },
    "Dedupe": {"fields": [("a",), ("a", "b"), ("b", "a")], "within": LENGTHS, "time": [None, "at"]},
    "AdvanceWithClock": {"after": LENGTHS},
    "Wait": {},
    "AfterWatermark": {
        "early": [None, Every(seconds(1)), AfterCount(1)],
        "late": [AfterCount(1), None, AfterCount(2), Never()],
    },
    "AfterCount": {"n": [1, 2]},
    "AfterProcessingTime": {"delay": [seconds(0), *LENGTHS]},
    "Every": {"period": LENGTHS},
    "Never": {},
    "AfterPercentile": {"percentile": [0.5, 0.99]},
    "When": {"predicate": [bool, callable]},
    "Repeatedly": {"trigger": [AfterCount(1), AfterCount(2), Never()]},
    **{name: {"triggers": [(AfterCount(1),), (Never(), AfterCount(1)), (AfterCount(1), Never())]} for name in SEVERAL},
    "Pattern": {"name": ["a", "b"], "condition": [minutes, seconds]},
    "OrFinally": {"trigger": [AfterCount(1), Never()], "until": [AfterCount(1), Never()]},
}
"""What each constructor takes that changes the meaning of stored data or, for the watermark, the deployed settings."""

HARMLESS: Mapping[str, Mapping[str, list[Any]]] = {
    "Files": {"broken": ["stop", "dead_letter"]},
    "Directory": {
        "broken": ["stop", "dead_letter"],
        "settle": [seconds(2), seconds(0)],
        "every": [seconds(1), seconds(3)],
    },
    "Http": {
        "bad_records": ["refuse", "dead_letter"],
        "url": [None, "http://127.0.0.1:1"],
        "anonymous": [False, True],
        "bounds": [HttpBounds(), HttpBounds(body_bytes=1)],
    },
    "PolledTable": {
        "lag": [seconds(10), seconds(0)],
        "every": [seconds(1), seconds(2)],
        "database": [None, "postgresql://me:secret@a/b"],
    },
    "PostgresTable": {
        "copy": [True, False],
        "database": [None, "postgresql://me:secret@a/b"],
        "publication": [None, "a"],
    },
    "InjectedStream": {"waiting_max": [1, 1_000_000]},
    "Kafka": {
        "partitions": [1, 4],
        "start": ["earliest", "latest", datetime(2026, 1, 1, tzinfo=UTC)],
        "lost": ["stop", "continue"],
        "new_partitions": ["read", "report"],
        "brokers": [
            KafkaBrokers(),
            KafkaBrokers("a:1"),
            KafkaBrokers(sasl=Sasl("me", "secret", "SCRAM-SHA-256")),
            KafkaBrokers(tls=True),
            KafkaBrokers(tls=Tls(ca="ca.pem")),
        ],
    },
    "Avro": {"register": [True, False]},
    "KafkaTopic": {
        "value": ["", "a"],
        "format": [None, Avro(registry=SchemaRegistry())],
        "headers": [(), ("a", "b")],
        "compression": [None, "gzip"],
        "partitioner": ["murmur2", "crc32", max],
        "message_bytes_max": [1_000_000, 10],
        "brokers": [KafkaBrokers(), KafkaBrokers("a:1")],
        "bound": [SendBound(), SendBound(records=1)],
        "transaction_timeout_s": [30.0, 900.0],
    },
    "MqttTopic": {
        "topic": ["a/{b}", "b", repr],
        "value": ["", "a"],
        "headers": [(), ("a", "b")],
        "qos": [1, 2],
        "retain": [False, True],
        "expiry": [None, timedelta(minutes=1)],
        "content_type": [None, "text/plain"],
        "message_bytes_max": [1_000_000, 10],
        "host": [None, "h"],
        "port": [None, 1],
        "login": [Login(), Login("me", "secret")],
        "tls": [None, True, Tls(ca="ca.pem")],
        "keepalive_s": [20, 30],
        "bound": [SendBound(), SendBound(records=1)],
        "refusals": [RefusalPolicy(), RefusalPolicy(attempts=3)],
    },
    "Webhook": {
        "url": ["https://a.org", "https://b.org/c"],
        "value": ["", "a"],
        "content_type": ["text/plain", "application/json"],
        "headers": [None, {"X-A": "a"}],
        "fixed_headers": [None, {"X-B": "b"}],
        "bound": [SendBound(), SendBound(records=1)],
        "in_flight": [4, 1],
        "access": [WebhookAccess(), WebhookAccess(signing="A"), WebhookAccess(headers={"X-C": "C"})],
        "timeouts": [WebhookTimeouts(), WebhookTimeouts(answer_s=60)],
        "message_bytes_max": [1_000_000, 10],
        "refusals": [RefusalPolicy(), RefusalPolicy(attempts=1)],
    },
    "Mqtt": {
        "host": [None, "h"],
        "port": [None, 1],
        "login": [Login(), Login("me", "secret")],
        "tls": [None, True, Tls(ca="ca.pem")],
        "session": [MqttSession(), MqttSession(client_id="me"), MqttSession(expiry_s=60), MqttSession(keepalive_s=30)],
        "protocol": [5, 311],
    },
}
"""What each constructor takes beside that: it may change at any time."""

DECODED = ("Files", "Directory", "Http", "Kafka", "Mqtt")

TIED = {
    **{name: {"decode"} for name in DECODED},
    "EventTime": {"percentile", "sorted", "format", "zone"},
    "Dedupe": {"unit"},
    "SessionWindows": {"max_gap"},
    "Protobuf": {"descriptors"},
    "Csv": {"skip_below"},
    "Webhook": {"url_field", "hosts", "batch"},
}
"""Parameters that another one decides here, because not all combinations are accepted."""

OWN_LOGIC = {"Combiner", "Computation", "Format", "WindowFunction"}
"""Parts that users define; see below, and tests/unit/model/test_identity.py."""


def is_part(found: object) -> bool:
    return isinstance(found, type) and (hasattr(found, "identity") or issubclass(found, Value | ListCell | MapCell))


def made(name: str, parameters: Mapping[str, Any], kind: Callable[..., Any] | None = None) -> Any:
    given = dict(parameters)
    if name == "EventTime":
        given["sorted"] = given["max_disorder"] is None
        learns = given["max_disorder"] == seconds(2) and given["watermark_by"] is None
        given["percentile"] = 0.99 if learns else None
    if name == "SessionWindows":
        given["max_gap"] = minutes(2) if given["by_field"] else None
    if name == "Dedupe":
        given["unit"] = "s" if given["time"] else None
    kind = kind or getattr(millpy, name)
    arguments: list[Any] = []
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += given.pop(parameter.name)
    return kind(*arguments, **given)


def described(part: Any) -> Any:
    if isinstance(part, Value | ListCell | MapCell):
        return identity_of_cell(part)
    return {**part.identity(), **part.settings()} if isinstance(part, EventTime) else part.identity()


def text_of(part: Any) -> str:
    return json.dumps(described(part), sort_keys=True)


def every(name: str) -> Mapping[str, list[Any]]:
    return {**MEANINGS[name], **HARMLESS.get(name, {})}


def first(name: str) -> dict[str, Any]:
    return {parameter: options[0] for parameter, options in every(name).items()}


def test_every_public_part_and_parameter_is_tested_here() -> None:
    parts = {name for name in millpy.__all__ if is_part(getattr(millpy, name))} - OWN_LOGIC

    assert parts == set(MEANINGS), "say what of a new part changes the meaning of stored data"
    for name in parts:
        parameters = set(inspect.signature(getattr(millpy, name)).parameters)
        assert parameters == {*every(name), *TIED.get(name, ())}, f"{name}: is a new parameter part of the identity?"


@pytest.mark.parametrize("name", MEANINGS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_descriptions_are_equal_if_and_only_if_stored_data_means_the_same(name: str, data: st.DataObject) -> None:
    one = {parameter: data.draw(st.sampled_from(options), parameter) for parameter, options in every(name).items()}
    changed = data.draw(st.sets(st.sampled_from(sorted(one))) if one else st.just(set()), "changed")
    other = one | {parameter: data.draw(st.sampled_from(every(name)[parameter]), parameter) for parameter in changed}
    same = all(one[parameter] == other[parameter] for parameter in MEANINGS[name])

    assert (described(made(name, one)) == described(made(name, other))) == same


@pytest.mark.parametrize("name", MEANINGS)
def test_each_parameter_that_changes_the_meaning_changes_the_description(name: str) -> None:
    for parameter, options in MEANINGS[name].items():
        found = [
            json.dumps(described(made(name, first(name) | {parameter: value})), sort_keys=True) for value in options
        ]
        assert len(set(found)) == len(options), parameter


@pytest.mark.parametrize("name", MEANINGS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_description_survives_json_and_reads_as_its_constructor(name: str, data: st.DataObject) -> None:
    part = made(name, {key: data.draw(st.sampled_from(options), key) for key, options in every(name).items()})
    identity = described(part)

    stored = msgspec.json.decode(msgspec.json.encode(identity))

    assert stored == identity
    assert identity_text(dict(sorted(stored.items(), reverse=True))) == identity_text(identity)
    if not isinstance(
        part, EventTime | Kafka | MqttTopic | Protobuf | Webhook
    ):  # their repr omits required parameters that are not part of the identity
        assert described(eval(identity_text(stored), vars(millpy))) == identity


@pytest.mark.parametrize("name", MEANINGS)
def test_identity_of_a_part_does_not_depend_on_its_name_or_module(name: str) -> None:
    kind = getattr(millpy, name)
    renamed = type("Renamed", (kind,), {"__module__": "elsewhere", "__slots__": ()})

    assert described(made(name, first(name), renamed)) == described(made(name, first(name)))


@contextmanager
def our_classes_renamed() -> Iterator[None]:
    ours = [found for name, module in list(sys.modules.items()) if is_ours(name) for found in vars(module).values()]
    classes = list({found: None for found in ours if isinstance(found, type) and is_ours(found.__module__)})
    names = [(found.__name__, found.__qualname__, found.__module__) for found in classes]
    try:
        for number, found in enumerate(classes):
            found.__name__ = found.__qualname__ = found.__module__ = f"renamed_{number}"
        yield
    finally:
        for found, own in zip(classes, names, strict=True):
            found.__name__, found.__qualname__, found.__module__ = own


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "millpy"


def test_no_name_of_a_millpy_class_or_module_is_stored() -> None:
    before = described_graph().spec().description()

    with our_classes_renamed():
        assert type(described_graph()).__name__.startswith("renamed_")
        assert described_graph().spec().description() == before


class Range(Combiner[list[float]]):
    accumulator = list[float]
    result_type = float

    def __init__(self, low: float = 0.0, cache: object = None) -> None:
        self.low = low
        self.cache = cache


def test_combiner_that_keeps_its_stored_name_can_be_renamed() -> None:
    class Spread(Range):
        stored_as = "Range"

    class Other(Range):
        pass

    assert Spread().identity() == Range().identity() != Other().identity()
    assert identity_text(Range(1.5).identity()) == "Range(low=1.5) keeping list[float]"


def test_combiner_may_say_which_of_its_attributes_are_parameters() -> None:
    class Cached(Range):
        stored_as = "Range"

        def parameters(self) -> Mapping[str, Any]:
            return {"low": self.low}

    assert Cached(cache=object()).identity() == Range().identity()
    assert Cached(1.0, cache=object()).identity() == Range(1.0).identity() != Range().identity()


def test_function_that_keeps_its_stored_name_can_be_renamed() -> None:
    def celsius(record: Any) -> Any:
        return record

    def to_celsius(record: Any) -> Any:
        return record

    to_celsius.stored_as = "celsius"  # type: ignore[attr-defined]

    assert identity_of_function(to_celsius) == identity_of_function(celsius) == {"function": "celsius"}
