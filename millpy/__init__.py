"""millpy: exactly-once stream processing on PostgreSQL, after MillWheel. The whole public API."""

from millpy.computation import Computation, Context, ListCell, MapCell, Value
from millpy.graph import Graph, KeyedStream, Stream, WindowedStream
from millpy.injectors import AdvanceWithClock, Dedupe, EventTime, File, Mqtt, Rate, Wait
from millpy.injectors.files import Directory, Files
from millpy.injectors.kafka import Kafka
from millpy.model.time import days, hours, milliseconds, minutes, seconds
from millpy.model.timer import Timer
from millpy.windowing.aggregate import Count, Max, Mean, Min, StandardDeviation, Sum, Variance
from millpy.windowing.combiner import Combiner
from millpy.windowing.distinct import ApproxDistinct
from millpy.windowing.positional import Collect, First, Last, Top
from millpy.windowing.quantile import Median, Quantile
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows

__all__ = [
    "AdvanceWithClock",
    "ApproxDistinct",
    "Collect",
    "Combiner",
    "Computation",
    "Context",
    "Count",
    "Dedupe",
    "Directory",
    "EventTime",
    "File",
    "Files",
    "First",
    "FixedWindows",
    "Graph",
    "Kafka",
    "KeyedStream",
    "Last",
    "ListCell",
    "MapCell",
    "Max",
    "Mean",
    "Median",
    "Min",
    "Mqtt",
    "Quantile",
    "Rate",
    "SessionWindows",
    "SlidingWindows",
    "StandardDeviation",
    "Stream",
    "Sum",
    "Timer",
    "Top",
    "Value",
    "Variance",
    "Wait",
    "WindowedStream",
    "days",
    "hours",
    "milliseconds",
    "minutes",
    "seconds",
]
