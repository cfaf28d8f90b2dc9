"""What `millpy` gives to graphs: its names, from where they are."""

from millpy.computation import Computation, Context, ListCell, MapCell, Value
from millpy.config.access import Login, Tls
from millpy.formats import (
    Avro,
    Cbor,
    Csv,
    Decode,
    Format,
    Gzip,
    Json,
    LineProtocol,
    Message,
    MessagePack,
    Protobuf,
    Scalar,
    SchemaRegistry,
    Sparkplug,
    SparkplugMessage,
    sparkplug_rebirth,
)
from millpy.graph import Graph, KeyedStream, Stream, WindowedStream
from millpy.model.lookup import LookupTable
from millpy.model.time import days, hours, milliseconds, minutes, seconds
from millpy.model.timer import Timer
from millpy.operators.pattern import Pattern
from millpy.operators.sparkplug import RejectedMetric, SparkplugEvent, SparkplugMetric
from millpy.sinks.kafka.topic import KafkaTopic
from millpy.sinks.mqtt.topic import MqttTopic
from millpy.sinks.refusal_policy import RefusalPolicy
from millpy.sinks.webhook.endpoint import Webhook, WebhookAccess, WebhookTimeouts
from millpy.sources import AdvanceWithClock, Dedupe, ErrorRate, EventTime, File, Mqtt, Wait
from millpy.sources.files.source import Directory, Files
from millpy.sources.http.source import Http, HttpBounds
from millpy.sources.kafka.records import FieldMapping
from millpy.sources.kafka.source import Kafka, KafkaBrokers, Sasl
from millpy.sources.mqtt.source import MqttSession
from millpy.sources.postgres.injected import InjectedStream
from millpy.sources.postgres.polled import PolledTable
from millpy.sources.postgres.table import ChangeFields, PostgresTable
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.combiner import Combiner
from millpy.windowing.aggregates.distinct import ApproxDistinct
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, StandardDeviation, Sum, Variance
from millpy.windowing.aggregates.positional import Collect, First, Last, Top
from millpy.windowing.aggregates.quantile import Median, Quantile
from millpy.windowing.calendar_windows import CalendarWindows
from millpy.windowing.composite_triggers import AfterAll, AfterAny, AfterEach, AfterWatermark, OrFinally, Repeatedly
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.pane_rules import FiringBehavior
from millpy.windowing.percentile_trigger import AfterPercentile
from millpy.windowing.predicate_trigger import When
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.triggers import AfterCount, AfterProcessingTime, Every, Never
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows
from millpy.windowing.window_function import WindowFunction

__all__ = [
    "Accumulation",
    "AdvanceWithClock",
    "AfterAll",
    "AfterAny",
    "AfterCount",
    "AfterEach",
    "AfterPercentile",
    "AfterProcessingTime",
    "AfterWatermark",
    "ApproxDistinct",
    "Avro",
    "CalendarWindows",
    "Cbor",
    "ChangeFields",
    "Collect",
    "Combiner",
    "Computation",
    "Context",
    "Count",
    "Csv",
    "Decode",
    "Dedupe",
    "Directory",
    "ErrorRate",
    "EventTime",
    "Every",
    "FieldMapping",
    "File",
    "Files",
    "FiringBehavior",
    "First",
    "FixedWindows",
    "Format",
    "GlobalWindow",
    "Graph",
    "Gzip",
    "Http",
    "HttpBounds",
    "InjectedStream",
    "Json",
    "Kafka",
    "KafkaBrokers",
    "KafkaTopic",
    "KeyedStream",
    "Last",
    "LineProtocol",
    "ListCell",
    "Login",
    "LookupTable",
    "MapCell",
    "Max",
    "Mean",
    "Median",
    "Message",
    "MessagePack",
    "Min",
    "Mqtt",
    "MqttSession",
    "MqttTopic",
    "Never",
    "OrFinally",
    "Pattern",
    "PolledTable",
    "PostgresTable",
    "Protobuf",
    "Quantile",
    "RefusalPolicy",
    "RejectedMetric",
    "Repeatedly",
    "Sasl",
    "Scalar",
    "SchemaRegistry",
    "SessionWindows",
    "SlidingWindows",
    "Sparkplug",
    "SparkplugEvent",
    "SparkplugMessage",
    "SparkplugMetric",
    "StandardDeviation",
    "Stream",
    "Sum",
    "Timer",
    "TimestampCombiner",
    "Tls",
    "Top",
    "Value",
    "Variance",
    "Wait",
    "Webhook",
    "WebhookAccess",
    "WebhookTimeouts",
    "When",
    "WindowFunction",
    "WindowedStream",
    "days",
    "hours",
    "milliseconds",
    "minutes",
    "seconds",
    "sparkplug_rebirth",
]
