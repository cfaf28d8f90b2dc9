"""A file of records, whose running sums leave by a sink of each kind."""

from __future__ import annotations

import os

from tests.crash.sinks import graph_of

graph = graph_of(
    os.environ["CRASH_INPUT"],
    os.environ["SINK_LINES"],
    os.environ.get("SINK_KAFKA", ""),
    refuses=bool(os.environ.get("SINK_REFUSES")),
)
