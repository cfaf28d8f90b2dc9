"""Arguments of the wrong kind are refused when the graph is built, by an error that says what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import msgspec
import pytest

from millpy import (
    AdvanceWithClock,
    Avro,
    Collect,
    Combiner,
    Computation,
    Context,
    Count,
    Csv,
    Dedupe,
    Directory,
    ErrorRate,
    EventTime,
    File,
    Files,
    FixedWindows,
    Graph,
    Http,
    HttpBounds,
    Kafka,
    KafkaBrokers,
    KafkaTopic,
    LineProtocol,
    ListCell,
    Mean,
    MessagePack,
    Mqtt,
    MqttSession,
    MqttTopic,
    Pattern,
    PolledTable,
    PostgresTable,
    Protobuf,
    Quantile,
    Scalar,
    SchemaRegistry,
    SessionWindows,
    Stream,
    Top,
    Webhook,
    WebhookAccess,
    WebhookTimeouts,
    When,
    WindowFunction,
    minutes,
    seconds,
)
from millpy.errors import UsageError
from millpy.graph.streams import KeyedStream
from millpy.graph.windowed import WindowedStream
from millpy.sinks import SendBound


class Reading(msgspec.Struct):
    device: str
    at: datetime
    celsius: float


class Spike(Computation):
    def process_record(self, context: Context, record: Any) -> None: ...


class Misnamed(Computation):
    def process(self, context: Context, record: Any) -> None: ...


class WithoutContext(Computation):
    def process_record(self, record: Any) -> None: ...  # type: ignore[override]


class Yielding(Computation):
    def process_record(self, context: Context, record: Any) -> Any:
        yield record


class Texts(Computation):
    seen = ListCell("str")  # type: ignore[arg-type]

    def process_record(self, context: Context, record: Any) -> None: ...


class Range(Combiner[list[float]]):
    accumulator = list[float]
    result_type = float

    def create(self) -> list[float]:
        return []


class Late(Range):
    async def add(self, accumulator: list[float], record: Any) -> list[float]:  # type: ignore[override]
        return accumulator


class Trips(WindowFunction):
    def assign(self, record: Any, at: datetime) -> Any: ...  # type: ignore[override]


def each(record: Reading) -> Iterator[bool]:
    yield record.celsius > 0


def inject(**given: Any) -> Stream[Reading]:
    arguments = {"event_time": EventTime("at", max_disorder=seconds(1)), **given}
    return Graph("plant").inject("readings", File("r.ndjson"), schema=Reading, **arguments)


def keyed() -> KeyedStream[Reading]:
    return inject().key_by("device")


def windowed(name: str = "") -> WindowedStream:
    return keyed().window(FixedWindows(minutes(1)), name=name)


def process(**given: Any) -> Any:
    key = keyed()
    arguments = {"computation": Spike(), "inputs": [key], **given}
    return key.stream.graph.process(name="spikes", **arguments)


def itself(**given: Any) -> Stream:
    key = keyed()
    return key.join(key, within=minutes(1), **given)


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
        (lambda: Graph("g" * 51), "graph 'g+' is not a plain name", "at most 50"),
        (lambda: windowed().aggregate(**{"n" * 51: Count()}), "column 'n+' is not a plain name", "at most 50"),
        (lambda: windowed().aggregate(n=Count()).to_table("t" * 51), "table 't+' is not a plain name", "at most 50"),
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
        (lambda: inject().filter(each), "filter cannot take what each yields", "filter.lambda"),
        (lambda: inject().filter(lambda r, s: True), "with one argument: missing a required argument: 's'", "filter"),
        (lambda: inject().map(Reading), "map calls Reading with one argument", r"map\(lambda"),
        (lambda: inject().map(None), "map needs a function, not None", r"map\(lambda"),
        (lambda: inject().split(lambda r: "hot", into=None), "into=None is not a list", '"hot", "others"'),
        (lambda: When(each), "When cannot take what each yields", "pane.n"),
        (lambda: Pattern("door", each), "step 'door' cannot take what each yields", "lambda event"),
        (lambda: Pattern("a", len).then("b", len, within=None), "within= of step 'b' must be a duration", "minutes"),
        (lambda: File("a", decode=lambda: [1]), "decode= calls .* with one argument", "lambda message"),
        (lambda: process(computation=Misnamed()), "Misnamed defines no process_record", "def process_record"),
        (lambda: process(computation=WithoutContext()), "with 2 arguments: too many", "self, context, record"),
        (lambda: process(computation=Yielding()), "cannot take what Yielding.process_record yields", "context, record"),
        (lambda: process(computation=Texts()), "cell 'seen' cannot be stored: Type ''str''", r"ListCell\(str\)"),
        (lambda: process(inputs=None), "step 'spikes' has no inputs", "inputs=.readings"),
        (lambda: windowed().aggregate(r=Range()), "Range does not define add", r"add\(self, accumulator, record\)"),
        (lambda: windowed().aggregate(r=Late()), "an aggregate cannot await Late.add", "plain function"),
        (lambda: keyed().window(Trips()), "window calls Trips.assign with 3 arguments", "self, record, at, key"),
        (lambda: itself(allowed_lateness=5), "_lateness is not a timedelta", "minu"),
        (lambda: keyed().fill_gaps("celsius", every=minutes(1), limit=minutes(5), name="g", offset=0), "offset=0", "s"),
        (lambda: windowed(name="w").aggregate(n=Count()).top_n(3, by=[], name="t"), "has no aggregate", "it has: n"),
        (
            lambda: windowed(name="w").aggregate(n=Count()).top_n(3, by="n", name="t", parts="4"),
            "parts='4' of top_n",
            "leave",
        ),
        (lambda: inject().lookup("a.b", Reading, key=None, refresh=seconds(5)), "key takes names of fields", "device"),
        (lambda: Quantile("celsius", 0.5, accuracy="1%"), "accuracy must be between .*, not '1%'", "0.01"),
        (lambda: ErrorRate(share="0.1"), "share must be from 0 to below 1, not '0.1'", "share=0.5"),
        (lambda: ErrorRate(share=0.1, minimum=True), "minimum must be a number from 1, not True", "minimum=100"),
        (lambda: Files("a", partitions="4"), "partitions='4' must be a number from 1 to 1,000", "partitions=4"),
        (lambda: Files("a", partitions=10**20), "partitions=10+ must be a number from 1 to 1,000", "partitions=4"),
        (lambda: Directory("a", settle=-seconds(1)), "settle not negative, .*settle=.*-1", r"settle=seconds\(2\)"),
        (lambda: Directory("a", every=seconds(0)), "every positive: .*every=.*0", r"every=seconds\(1\)"),
        (lambda: Directory("a", every=5), "settle= and every= must be durations, .*every=5", r"every=seconds\(1\)"),
        (lambda: Mqtt("a", host="h", port="1883"), "port='1883' is not between 1 and 65,535", "1883"),
        (lambda: Mqtt("a", host="h", login=("me", "x")), "login is not a Login", "login=Login"),
        (lambda: Mqtt("a", host="h", tls="ca.pem"), "tls='ca.pem' is not a Tls", 'tls=Tls.ca="ca.pem"'),
        (lambda: Mqtt("a", session="plant"), "session is not a MqttSession", "MqttSession.client_id"),
        (lambda: MqttTopic("a", expiry=60), "expiry=60 is not between 1 s and 136 years", "hours"),
        (lambda: MqttTopic("a", refusals=3), "refusals is not a RefusalPolicy", "attempts=3"),
        (lambda: MqttTopic(lambda: "a"), "topic calls .* with one argument: too many", "record.device"),
        (lambda: KafkaTopic("a", partitioner=lambda key: 0), "with 2 arguments: too many", "key, partitions"),
        (lambda: KafkaTopic("a", message_bytes_max="1"), "message_bytes_max='1' lets no", "positive number"),
        (lambda: Webhook("https://a.b", access="SECRET"), "access is not a WebhookAccess", "signing="),
        (lambda: Webhook("https://a.b", timeouts=5), "timeouts is not a WebhookTimeouts", "answer_s=10"),
        (lambda: Webhook("https://a.b", headers="X-Device"), "headers is not a Mapping", "X-Device"),
        (lambda: WebhookAccess(tls=True), "tls is not a Tls: True", "ca.pem"),
        (lambda: WebhookTimeouts(answer_s="5"), "is no pair of timeouts", "600"),
        (lambda: HttpBounds(body_bytes="5"), "body_bytes='5'. must be a number from 1", "leave"),
        (lambda: Csv(null=5), "null=5 is not a list of texts", "---"),
        (lambda: Csv(null={"", "-"}), "null={.*} is not a list of texts", "---"),
        (lambda: Scalar("celsius", null=None), "null=None is not a list of texts", "unavailable"),
        (lambda: Csv(quote=5), "quote=5 must be one character", "None"),
        (lambda: Csv(header=5), "header=5 names no columns", "device"),
        (lambda: Csv(header=("device", 5)), "header=.* names no columns", "device"),
        (lambda: LineProtocol(precision=["s"]), "unknown precision", "us, ns"),
        (lambda: LineProtocol(arrival="no"), "arrival='no' is neither True nor False", "arrival=True"),
        (lambda: EventTime("at", sorted="no"), "sorted='no' is neither True nor False", "sorted=True"),
        (lambda: Mqtt("a", retained="no"), "retained='no' is neither", "retained=True"),
        (lambda: MqttTopic("a", retain="no"), "retain='no' is neither", "retain=True"),
        (lambda: MqttTopic("a", content_type=5), "5 is no content type", "text/plain"),
        (lambda: MqttSession(client_id=5), "client_id= is no name", "leave out"),
        (lambda: Http("/a", anonymous="no"), "anonymous='no' is neither", "anonymous=True"),
        (lambda: Http("/a", url=8081), "url is not a str: 8081", "127.0.0.1"),
        (lambda: Avro({"type": "string"}, register="no"), "register='no' is neither", "register=True"),
        (lambda: Protobuf("a", descriptors=b"", framed="no"), "framed='no' is neither", "framed=True"),
        (lambda: PostgresTable("a.b", copy="no"), "copy='no' is neither", "copy=True"),
        (lambda: PostgresTable("a.b", operations=[["insert"]]), "unknown value operations=", "truncate"),
        (lambda: PostgresTable("a.b", publication=5), "publication is not a str: 5", "plant"),
        (lambda: Directory("a", pattern=5), "pattern is not a str: 5", "csv"),
        (lambda: SendBound(records="5"), "lets no message pass", "whole numbers"),
        (lambda: SendBound(records=1.5), "lets no message pass", "whole numbers"),
        (lambda: KafkaTopic("a", bound=5), "bound is not a SendBound: 5", "records=100"),
        (lambda: MqttTopic("a", bound=5), "bound is not a SendBound: 5", "records=10"),
        (lambda: Webhook("https://a.b", bound=5), "bound is not a SendBound: 5", "records=10"),
        (lambda: Webhook("https://a.b", content_type=5), "content_type=5 is no content type", "json"),
        (lambda: Webhook(url_field="a", hosts=5), "hosts=5 are no hosts", "hooks"),
        (lambda: SchemaRegistry(url=8081), "address of the schema registry is invalid", "registry:8081"),
        (lambda: SchemaRegistry(login="me"), "login is not a Login", "login=Login"),
        (lambda: PostgresTable("a.b", fields="op"), "fields is not a ChangeFields", "operation="),
        (lambda: keyed().window(SessionWindows(minutes(1), by_key=["a"])), "by_key is not a Mapping", "slow"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_write(build: Callable[[], Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        build()

    with pytest.raises(UsageError, match=hint):
        raise UsageError(refused.value.hint)


class Numbered(msgspec.Struct):
    number: int
    hall: str
    at: datetime


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        (("number",), "7"),
        (("number",), True),
        (("hall",), ("a",)),
        (("number", "hall"), "a"),
        (("hall", "number"), (7, "a")),
    ],
)
def test_a_session_gap_of_a_key_that_the_stream_cannot_have_is_refused(fields: tuple[str, ...], key: Any) -> None:
    stream = Graph("plant").inject("readings", File("r.ndjson"), schema=Numbered, event_time=AT)
    gaps: dict[Any, Any] = {key: minutes(5)}

    with pytest.raises(UsageError, match="which is no key"):
        stream.key_by(*fields).window(SessionWindows(minutes(1), by_key=gaps))


@pytest.mark.parametrize(("fields", "key"), [(("number",), 7), (("hall",), "a"), (("number", "hall"), (7, "a"))])
def test_a_session_gap_of_a_key_is_taken(fields: tuple[str, ...], key: Any) -> None:
    stream = Graph("plant").inject("readings", File("r.ndjson"), schema=Numbered, event_time=AT)

    windowed = stream.key_by(*fields).window(SessionWindows(minutes(1), by_key={key: minutes(5)}))

    assert windowed.aggregate(n=Count()).record_type.fields


def test_a_source_needs_an_event_time() -> None:
    with pytest.raises(UsageError, match="needs an event_time"):
        Graph("plant").inject("readings", File("r.ndjson"), schema=Reading)
