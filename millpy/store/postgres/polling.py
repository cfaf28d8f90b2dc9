"""Polling: headers and segments above the cursors, in one statement and so in one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.model.time import Instant
from millpy.store.postgres.arrays import Bigints
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import Polled, PolledSegment, Want

SEGMENTS_MAX = 512
"""So many segments of one subscription and slot are looked at in one poll."""


async def poll(connection: Connection, wants: Sequence[Want], bytes_max: int) -> list[Polled]:
    """See `Store.poll`. Wants of producers that do not exist are left out."""
    if not wants:
        return []
    asked = [(place, subscription) for place, want in enumerate(wants) for subscription in want.subscription_ids]
    parameters: dict[str, Any] = {
        "places": Bigints(list(range(len(wants)))),
        "consumer_indexes": Bigints([want.consumer_index for want in wants]),
        "producers": Bigints([want.producer for want in wants]),
        "afters": Bigints([want.after for want in wants]),
        "asked_places": Bigints([place for place, _ in asked]),
        "asked_subscriptions": Bigints([subscription for _, subscription in asked]),
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
        Polled(wants[place], tuple(segments.get(place, ())), head_seq, Instant(head_watermark), truncated)
        for place, (head_seq, head_watermark, truncated) in sorted(heads.items())
    ]
