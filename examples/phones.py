"""Sessions of phones: a phone is in use until nothing happens on it for five minutes (on the kiosk's, for one).

millpy run examples/phones.py
millpy sql "SELECT phone, window_start, window_end, taps, first_app, apps FROM phones.sessions ORDER BY 1, 2"
"""

from datetime import datetime
from pathlib import Path

import msgspec

from millpy import Collect, Count, EventTime, File, First, Graph, SessionWindows, minutes


class Tap(msgspec.Struct):
    phone: str
    at: datetime
    app: str


graph = Graph("phones")
(
    graph.inject(
        "taps",
        File(Path(__file__).parent / "data/taps.ndjson"),
        schema=Tap,
        event_time=EventTime("at", max_disorder=minutes(2)),
    )
    .key_by("phone")
    .window(SessionWindows(minutes(5), by_key={"kiosk": minutes(1)}), allowed_lateness=minutes(30))
    .aggregate(taps=Count(), first_app=First("app"), apps=Collect("app", limit=100))
    .to_table("sessions")
)
