"""Topics of the hour, with early results: what has been said so far is in the table every ten seconds.

A window of an hour fires by the clock every ten seconds, and at last when the watermark has passed it. The table shows
the newest pane of each topic, and SQL ranks them.

    MILLPY_MQTT_URL=mqtt://localhost:1883 millpy run examples/trending.py
    millpy sql "SELECT topic, n, pane_timing FROM trending.hourly WHERE window_start = date_trunc('hour', now())
                ORDER BY n DESC, topic LIMIT 5"
"""

import re
from datetime import datetime

import msgspec

from millpy import AfterWatermark, Count, EventTime, Every, FixedWindows, Graph, Mqtt, hours, minutes, seconds


class Post(msgspec.Struct):
    at: datetime
    text: str


class Topic(msgspec.Struct):
    topic: str


def topics_of(post: Post) -> list[Topic]:
    """Return the topics that a post names, each once."""
    return [Topic(topic) for topic in dict.fromkeys(re.findall(r"#(\w+)", post.text.lower()))]


graph = Graph("trending")
posts = graph.inject("posts", Mqtt("posts"), schema=Post, event_time=EventTime("at", max_disorder=seconds(30)))
(
    posts.flat_map(topics_of, Topic)
    .key_by("topic")
    .window(
        FixedWindows(hours(1)),
        trigger=AfterWatermark(early=Every(seconds(10))),
        allowed_lateness=minutes(10),
    )
    .aggregate(n=Count())
    .to_table("hourly")
)
