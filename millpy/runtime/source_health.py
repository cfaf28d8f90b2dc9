"""What a worker tells about the connections of its sources, and about the database: rows, events, the log.

A source without messages makes no turn, so a background task looks at the connections once a second, and writes the
rows of those that have changed: `mill.source_connections`, for intervals that this worker owns. Attempts alone are
written at most every ATTEMPTS_EVERY_S. So a source in good health costs no statement.

    lost        `source_disconnected`, once; then `source_still_disconnected` after 30 s, 1, 2, 4 … minutes, up to 1 h
    back        `source_connected`, with the time from and until, and the number of attempts

The partitions of one source that change together are one event. While the database itself does not answer, nothing can
be written: the log and the metrics tell it, and `database_restored` says afterwards from when until when.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from millpy.clock import Clock
from millpy.errors import TransientError
from millpy.ingest.connection_state import ConnectionState, Outage
from millpy.ingest.request_traffic import RequestTraffic
from millpy.model.time import Instant, describe
from millpy.runtime.database_health import DatabaseHealth
from millpy.runtime.events import EventQueue
from millpy.store.protocol import SourceReport, Store

log = logging.getLogger(__name__)
REPORT_EVERY_S = 1.0
"""Seconds between two looks at the connections."""
ATTEMPTS_EVERY_S = 10.0
"""Seconds between two reports of a partition of which only the number of attempts has changed."""
REPEAT_S_MIN, REPEAT_S_MAX = 30.0, 3_600.0
"""Seconds until an event tells an outage again; after that twice as long each time, up to the maximum."""
PARTITIONS_TOLD_MAX = 10
"""How many partitions an event names; it counts the others."""


@dataclass(slots=True)
class SourcePart:
    """One source partition: its connection, and what was told of it.

    Attributes:
        reported: what was stored last.
        reported_at, repeat_at, repeat_s: when that was, when to tell an outage again, and how long after that; in
            seconds on the monotonic clock.
        told: whether an event has told the outage.
    """

    stream: str
    partition: str
    connection: ConnectionState
    reported: SourceReport | None = None
    reported_at: float = 0.0
    repeat_at: float = 0.0
    repeat_s: float = REPEAT_S_MIN
    told: bool = False
    outage: Outage | None = field(default=None)


class SourceHealth:
    """The connections of the source partitions that a worker owns, or tries to open.

    Args:
        store: where the states are stored.
        worker_id: the worker, which must own an interval to report it.
        clock: the clock of the times of change.
        events: where the events go.

    Attributes:
        parts: interval id -> its connection.
        database: whether the database answers.
        traffic: stream -> the requests of its clients, if the source accepts requests.
    """

    def __init__(self, store: Store, worker_id: UUID, clock: Clock, host_clock: Clock, events: EventQueue) -> None:
        self._store = store
        self._worker_id = worker_id
        self._clock = clock
        self._events = events
        self.parts: dict[int, SourcePart] = {}
        self.database = DatabaseHealth(host_clock)
        self.traffic: dict[str, RequestTraffic] = {}

    def connection_of(self, interval_id: int, stream: str, partition: str) -> ConnectionState:
        """Return the connection of a source partition that this worker owns; the same one until it is released."""
        part = self.parts.get(interval_id)
        if part is None:
            connection = ConnectionState(self._clock.now_us)
            part = self.parts[interval_id] = SourcePart(stream, partition, connection)
        return part.connection

    def forget(self, interval_ids: Iterable[int]) -> None:
        """Forget the intervals that this worker has released."""
        for interval_id in interval_ids:
            self.parts.pop(interval_id, None)

    def keep_only(self, interval_ids: Collection[int]) -> None:
        """Forget all intervals but these, which this worker still owns; the new owner of the others tells of them."""
        self.forget([interval_id for interval_id in self.parts if interval_id not in interval_ids])

    def disconnected(self) -> list[SourcePart]:
        """Return the partitions without a connection."""
        return [part for part in list(self.parts.values()) if part.connection.is_connected is False]

    async def report(self) -> None:
        """Store what has changed, and tell it in events. Raises TransientError; then the next call tries again."""
        now = self._clock.monotonic()
        changed: dict[int, SourceReport] = {}
        for interval_id, part in self.parts.items():
            report = _report_of(interval_id, part.connection)
            if report is not None and _is_due(part, report, now):
                changed[interval_id] = report
        if changed:
            await self._store.report_sources(self._worker_id, list(changed.values()))
            for interval_id, report in changed.items():
                if (reported := self.parts.get(interval_id)) is not None:
                    reported.reported, reported.reported_at = report, now
        self._tell(now)
        while self.database.outages:
            self._events.add_of_worker("database_restored", self.database.outages.pop(0))
        await self._events.store_all()

    def _tell(self, now: float) -> None:
        """Queue the events of all partitions, one for those of a source that change together."""
        kinds: dict[tuple[str, str], list[SourcePart]] = {}
        for part in self.parts.values():
            connection = part.connection
            if connection.outage is not part.outage:
                part.outage, part.told = connection.outage, False
                kinds.setdefault(("source_connected", part.stream), []).append(part)
            if connection.is_connected is not False:
                continue
            if not part.told:
                part.told, part.repeat_s, part.repeat_at = True, REPEAT_S_MIN, now + REPEAT_S_MIN
                kinds.setdefault(("source_disconnected", part.stream), []).append(part)
            elif now >= part.repeat_at:
                part.repeat_s = min(REPEAT_S_MAX, part.repeat_s * 2)
                part.repeat_at = now + part.repeat_s
                kinds.setdefault(("source_still_disconnected", part.stream), []).append(part)
        for (kind, stream), parts in kinds.items():
            detail = _detail(kind, stream, parts, self._clock.now_us())
            logged = log.info if kind == "source_connected" else log.warning
            logged("%s: source %s (%s)%s", kind.replace("_", " "), stream, detail["partition"], _reason(detail))
            self._events.add_of_worker(kind, detail)


def _report_of(interval_id: int, connection: ConnectionState) -> SourceReport | None:
    """Return what is to be stored; None before the first attempt has ended."""
    if connection.is_connected is None:
        return None
    return SourceReport(
        interval_id,
        connection.is_connected,
        connection.since_us,
        connection.why,
        connection.attempts,
        connection.address,
    )


def _is_due(part: SourcePart, report: SourceReport, now: float) -> bool:
    """Tell whether a report says more than the last one: at once, or later if only the attempts have changed."""
    before = part.reported
    if before is None or _place(before) != _place(report):
        return True
    return before != report and now - part.reported_at >= ATTEMPTS_EVERY_S


def _place(report: SourceReport) -> tuple[object, ...]:
    return report.connected, report.since_us, report.address


def _detail(kind: str, stream: str, parts: Sequence[SourcePart], now_us: Instant) -> dict[str, object]:
    """Return the detail of an event about partitions of one source."""
    names = [part.partition for part in parts]
    shown = ", ".join(names[:PARTITIONS_TOLD_MAX])
    more = len(names) - PARTITIONS_TOLD_MAX
    found: dict[str, object] = {"stream": stream, "partition": shown + (f" and {more} more" if more > 0 else "")}
    if kind == "source_connected":
        outages = [part.outage for part in parts if part.outage is not None]
        since, until = min(o.since_us for o in outages), max(o.until_us for o in outages)
        found |= {"since": describe(since), "until": describe(until), "seconds": round((until - since) / 1e6, 1)}
        return found | {"attempts": sum(o.attempts for o in outages), "why": outages[0].why}
    since = min(part.connection.since_us for part in parts)
    found |= {"since": describe(since), "seconds": max(0.0, round((now_us - since) / 1e6, 1))}
    return found | {
        "attempts": sum(part.connection.attempts for part in parts), "why": parts[0].connection.why
    }  # fmt: skip


def _reason(detail: dict[str, object]) -> str:
    return f", after {detail['seconds']} s: {detail['why']}" if detail["seconds"] else f": {detail['why']}"


async def report_at_last(health: SourceHealth) -> None:
    """Report once more before the worker ends; a database that cannot be reached is logged elsewhere."""
    try:
        await health.report()
    except TransientError as error:
        log.debug("cannot report the sources: %s", error)
