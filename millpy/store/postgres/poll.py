"""Polling: reads headers and the segments above the cursors in one statement, and so in one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.model.time import Instant
from millpy.store.postgres.arrays import Bigints
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import PolledSegment, PollResult, SegmentQuery

SEGMENTS_MAX = 512
"""Segments of one subscription and slot that one poll reads at most."""


async def poll(connection: Connection, queries: Sequence[SegmentQuery], bytes_max: int) -> list[PollResult]:
    """Read headers and segments; see `Store.poll`."""
    if not queries:
        return []
    pairs = [(place, subscription) for place, query in enumerate(queries) for subscription in query.subscription_ids]
    parameters: dict[str, Any] = {
        "places": Bigints(list(range(len(queries)))),
        "consumer_indexes": Bigints([query.consumer_index for query in queries]),
        "producers": Bigints([query.producer for query in queries]),
        "afters": Bigints([query.after for query in queries]),
        "subscribed_places": Bigints([place for place, _ in pairs]),
        "subscriptions": Bigints([subscription for _, subscription in pairs]),
        "bytes_max": bytes_max,
        "segments_max": SEGMENTS_MAX,
    }
    heads: dict[int, tuple[int, int, bool]] = {}
    segments: dict[int, list[PolledSegment]] = {}
    for row in await all_rows(connection, statement("poll"), parameters):
        (
            place,
            head_seq,
            head_watermark,
            truncated,
            subscription,
            seq,
            previous,
            watermark,
            records,
            checksum,
            payload,
        ) = row
        heads[place] = (head_seq, head_watermark, truncated)
        if seq is not None:
            given = PolledSegment(subscription, seq, previous, Instant(watermark), records, payload, checksum)
            segments.setdefault(place, []).append(given)
    return [
        PollResult(queries[place], tuple(segments.get(place, ())), head_seq, Instant(head_watermark), truncated)
        for place, (head_seq, head_watermark, truncated) in sorted(heads.items())
    ]
