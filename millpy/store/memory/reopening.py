"""Reading a source partition on that has ended, in a `MemoryDatabase`; see `Store.reopen_source`."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from millpy.model.checkpoint import Grant, Kind
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.tables import Header, overlaid
from millpy.store.protocol import ClosedEnds, Event
from millpy.store.reopening import IntervalBehind, reopened


def reopen_source(
    database: MemoryDatabase, grant: Grant, watermark: Instant, closed_ends: ClosedEnds, told: Event
) -> Instant | None:
    """Set the end of a source partition back. The caller holds the locks of all headers of the graph."""
    source = database.headers[grant.interval_id]
    if source.low_watermark < INSTANT_MAX:
        return None
    behind = _consumers(database, source)
    found = reopened(watermark, list(map(_watermarks, behind)))
    if found is None:
        return None
    back = [source, *(database.headers[one.interval_id] for one in found.intervals)]
    ids = {header.interval.interval_id for header in back}
    readers = [(header, producer) for header in behind for producer in header.cursors.keys() & ids]
    if any(header.cursors[producer][1] < INSTANT_MAX for header, producer in readers):
        return None
    ends = closed_ends(_newest(database, source.graph_id))
    for header, producer in readers:
        header.cursors[producer] = (header.cursors[producer][0], found.watermark)
    for consumer in {header.interval.interval_id for header, _ in readers} - ids:
        database.headers[consumer].disown()  # its owner remembers the end
    for header in back:
        header.input_watermark = header.low_watermark = found.watermark
        header.horizon_floor = max(header.horizon_floor, ends.get(header.interval.computation, INSTANT_MIN))
        header.dedupe_clock = INSTANT_MIN
        header.disown()
    database.dedupe_runs.remove(lambda stored: stored.interval_id in ids)
    database.events.append((source.graph_id, replace(told, detail={**told.detail, **found.described(ends)})))
    return found.watermark


def _watermarks(header: Header) -> IntervalBehind:
    interval = header.interval
    return IntervalBehind(interval.interval_id, interval.computation, header.input_watermark, header.low_watermark)


def _consumers(database: MemoryDatabase, source: Header) -> list[Header]:
    """Return the headers of all computations behind a source."""
    deployed = database.graphs[source.graph_id]
    found, left = list[str](), [source.interval.computation]
    while left:
        name = left.pop()
        for sub in deployed.subscriptions:
            if sub.producer == name and sub.consumer not in found:
                found.append(sub.consumer)
                left.append(sub.consumer)
    return [database.headers[i.interval_id] for name in found for i in deployed.deployment.intervals_of(name)]


def _newest(database: MemoryDatabase, graph_id: int) -> dict[str, Instant]:
    """Return the newest event time of each source."""
    newest: dict[str, Instant] = {}
    for header in database.headers.values():
        if header.graph_id != graph_id or header.interval.keys is not None:
            continue
        for (kind, namespace, *_), row in overlaid(header.keyed, database.unfolded(header)).items():
            if kind is Kind.POSITION and namespace == "source" and row.value is not None:
                at, name = msgspec.json.decode(row.value)["newest_event_time"], header.interval.computation
                newest[name] = max(newest.get(name, INSTANT_MIN), at)
    return newest
