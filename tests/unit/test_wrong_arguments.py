"""Arguments of the wrong kind are refused when the graph is built, by an error that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pytest

from millpy import (
    AdvanceWithClock,
    Collect,
    Computation,
    Context,
    Count,
    Csv,
    Dedupe,
    EventTime,
    File,
    FixedWindows,
    Graph,
    Kafka,
    KafkaBrokers,
    KafkaTopic,
    Mean,
    MessagePack,
    Mqtt,
    PolledTable,
    Quantile,
    Stream,
    Top,
    minutes,
    seconds,
)
from millpy.errors import UsageError
from millpy.graph.streams import KeyedStream
from millpy.graph.windowed import WindowedStream


class Reading(msgspec.Struct):
    device: str
    at: datetime
    celsius: float


class Spike(Computation):
    def process(self, context: Context, record: Any) -> None: ...


def inject(**given: Any) -> Stream[Reading]:
    arguments = {"event_time": EventTime("at", max_disorder=seconds(1)), **given}
    return Graph("plant").inject("readings", File("r.ndjson"), schema=Reading, **arguments)


def keyed() -> KeyedStream[Reading]:
    return inject().key_by("device")


def windowed() -> WindowedStream:
    return keyed().window(FixedWindows(minutes(1)))


def process(**given: Any) -> Any:
    key = keyed()
    arguments = {"computation": Spike(), "inputs": [key], **given}
    return key.stream.graph.process(name="spikes", **arguments)


EVENT_TIME = r'for example event_time=EventTime\("at", max_disorder=seconds\(10\)\)'
AT = EventTime("at", max_disorder=seconds(1))
COMPUTED = "a computed value needs a map"


@pytest.mark.parametrize(
    ("build", "message", "hint"),
    [
        (lambda: inject().key_by(lambda r: r.device), "key_by takes names of fields, not <function", COMPUTED),
        (lambda: inject().key_by(["device"]), r"key_by takes names of fields, not \['device'\]", "name a field"),
        (lambda: inject().key_by(), "key_by needs at least one field", 'key_by."device"'),
        (lambda: inject(device=lambda r: r.device), "device takes names of fields, not <function", COMPUTED),
        (lambda: inject().deduplicate(lambda r: 1, minutes(1), name="d"), "by takes names of fields", COMPUTED),
        (lambda: inject().deduplicate("device", 5, name="d"), "within must be a duration, not 5", r"hours\(1\)"),
        (lambda: windowed().aggregate(mean=Mean), "aggregate mean is the class Mean, not an", r'mean=Mean\("temp'),
        (lambda: windowed().aggregate(n=Count), "aggregate n is the class Count, not an", r"n=Count\(\)"),
        (lambda: windowed().aggregate(mean="celsius"), "mean is not an Aggregate: 'cel", r'mean=Mean\("celsius"\)'),
        (lambda: windowed().aggregate(m=lambda r: 1), "aggregate m is not an Aggregate: <function", "Combiner"),
        (lambda: windowed().aggregate(m=Mean(lambda r: r.celsius)), "is not the name of a field", "device, at, cels"),
        (lambda: keyed().changes(lambda r: r.celsius, name="c"), "is not the name of a field", "device, at, celsius"),
        (lambda: keyed().window(FixedWindows(minutes(1)), allowed_lateness=60), "_lateness is not a timedelta", "minu"),
        (lambda: windowed().aggregate(n=Count()).to_table(None), "table None is not a plain name", "lower-case"),
        (lambda: inject(event_time=None), "needs an event_time", EVENT_TIME),
        (lambda: inject(event_time="at"), "event_time is not an EventTime: 'at'", EVENT_TIME),
        (lambda: inject(event_time=EventTime), "event_time is the class EventTime", EVENT_TIME),
        (lambda: inject(dedupe="device"), "dedupe is not a Dedupe: 'device'", r'Dedupe\("id", within'),
        (lambda: inject(dedupe=Dedupe), "dedupe is the class Dedupe", "Dedupe"),
        (lambda: inject(idle=seconds(3)), "idle is not an AdvanceWithClock", "after=seconds"),
        (lambda: inject(pause_above=0.5), "pause_above is not an ErrorRate: 0.5", "share=0.1"),
        (lambda: inject().split(lambda r: "hot", into="hot"), "into='hot' is not a list of names", '"hot", "others"'),
        (lambda: inject().union([inject()]), "an input of union is not a Stream", "readings.union"),
        (lambda: keyed().join(inject(), within=minutes(1)), "right side of a join is not a KeyedStream", "key_by"),
        (lambda: process(computation=lambda r: r), "the logic is not a Computation: <function", "class Spike"),
        (lambda: process(computation=Spike), "the logic is the class Spike, not an instance", "class Spike"),
        (lambda: process(inputs=keyed()), "inputs is not a Sequence", "inputs=.readings"),
        (lambda: process(inputs=[inject()]), "an input of 'spikes' is not a KeyedStream", "inputs=.readings"),
        (lambda: process(intervals=0), "intervals=0 of 'spikes' is not a number from 1", "intervals=8"),
        (lambda: process(intervals="4"), "intervals='4' of 'spikes' is not a number", "intervals=8"),
        (lambda: process(intervals=10**9), "is not a number from 1 to 10000", "intervals=8"),
        (lambda: keyed().fill_gaps("celsius", every=5, limit=5, name="g"), "every=5, limit=5", r"every=minutes\(1\)"),
        (lambda: Quantile("celsius", "0.5"), "between 0 and 1, not '0.5'", "0.99"),
        (lambda: Top("celsius", n="3"), "n of Top must be between 1 and .*, not '3'", "n=3"),
        (lambda: Collect("celsius", limit="3"), "limit of Collect must be between 1 and .*, not '3'", "limit=100"),
        (lambda: Graph(3), "graph 3 is not a plain name", "lower-case"),
        (lambda: EventTime("at", max_disorder=10), "max_disorder must be a duration, not 10", "max_disorder=seconds"),
        (lambda: EventTime("at", max_disorder=0), "max_disorder must be a duration, not 0", "max_disorder=seconds"),
        (lambda: AdvanceWithClock(5), "after must be a duration, not 5", "after=seconds"),
        (lambda: Dedupe("id", within=5), "within must be a duration, not 5", "within=hours"),
        (lambda: Csv(null="---"), "null='---' is not a list of texts", "null="),
        (lambda: Csv(rename=["at"]), "is not a dict", "rename="),
        (lambda: Csv(delimiter=None), "delimiter=None must be one character", "for example"),
        (lambda: MessagePack(Csv()), "is not a Json", "many="),
        (lambda: Mqtt(5), "invalid MQTT topic filter 5", "an example"),
        (lambda: Mqtt("a", format="json"), "unknown format 'json'", "format=Json"),
        (lambda: Kafka(5, partitions=1), "needs a topic and its number", "partitions=4"),
        (lambda: Kafka("a", partitions="1"), "needs a topic and its number", "partitions=4"),
        (
            lambda: Kafka("a", partitions=1, fields={"key": "device"}),
            "fields is not a FieldMapping",
            "FieldMapping.key=",
        ),
        (
            lambda: Kafka("a", partitions=1, brokers="h:9092"),
            "brokers is not a KafkaBrokers, but a str",
            "KafkaBrokers",
        ),
        (lambda: KafkaTopic("a", brokers="h:9092"), "brokers is not a KafkaBrokers, but a str", "KafkaBrokers"),
        (lambda: KafkaBrokers(["h:9092"]), r"servers=\['h:9092'\] is not text", "one:9092,two:9092"),
        (lambda: KafkaBrokers("h:9092", sasl=("me", "secret")), "sasl is not a Sasl", "sasl=Sasl"),
        (lambda: KafkaBrokers("h:9092", tls="ca.pem"), "tls='ca.pem' is not a Tls", 'tls=Tls.ca="ca.pem"'),
        (lambda: PolledTable("a.b", column="n", lag=5), "lag=5 is out of range", r"lag=seconds\(30\)"),
        (lambda: Graph("plant").inject("r", "a/b", schema=Reading, event_time=AT), "'a/b' is not a source", "Mqtt"),
        (lambda: Graph("plant", max_skew=3), "max_skew must be a duration, not 3", "leave it out"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_write(build: Callable[[], Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        build()

    with pytest.raises(UsageError, match=hint):
        raise UsageError(refused.value.hint)


def test_a_source_needs_an_event_time() -> None:
    with pytest.raises(UsageError, match="needs an event_time"):
        Graph("plant").inject("readings", File("r.ndjson"), schema=Reading)
