"""Where a feed's graph reads: the broker in FEED_BROKER, else FEED_DIRECTORIES, else the files in FEED_FILES.

FEED_MODE is the mode of all its windows.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from millpy.graph import KeyedStream
from millpy.ingest.protocol import Source
from millpy.sources.files.source import Directory, File
from millpy.sources.mqtt.source import Mqtt
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, Sum


def source(topic: str, file: str) -> Source:
    broker = os.environ.get("FEED_BROKER")
    if broker:
        host, _, port = broker.rpartition(":")
        return Mqtt(topic, host=host, port=int(port))
    directories = os.environ.get("FEED_DIRECTORIES")
    if directories:
        return Directory(Path(directories) / file.partition(".")[0], pattern="*.csv", settle=timedelta(0))
    return File(Path(os.environ["FEED_FILES"]) / file)


def kept(keyed: KeyedStream) -> KeyedStream:
    """Archive the records too, if FEED_ARCHIVED is set: for an audit."""
    if os.environ.get("FEED_ARCHIVED"):
        keyed.archive()
    return keyed


def mode() -> Accumulation:
    """What a further pane of a window has of those before it; the table is the same in each mode."""
    return Accumulation(os.environ.get("FEED_MODE", "accumulating"))


def all_of(value: str) -> dict[str, Aggregate]:
    """The aggregates of the expected tables."""
    return {
        "n_rows": Count(),
        "n_values": Count(value),
        "value_sum": Sum(value),
        "value_mean": Mean(value),
        "value_min": Min(value),
        "value_max": Max(value),
    }
