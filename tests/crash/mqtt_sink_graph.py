"""A file of records, whose running sums leave by an MQTT sink."""

from __future__ import annotations

import os

from tests.crash.mqtt_sinks import graph_of, set_traps

set_traps()
graph = graph_of(os.environ["CRASH_INPUT"], int(os.environ["SINK_PORT"]), int(os.environ["SINK_QOS"]))
