"""The lookup tables of a worker: read in the background, again and again, and given to its turns.

A read never waits in a turn, nor a turn for a read: the next turn takes the newest versions that there are. If a read
fails, the version before stays in use, however old it becomes; an event says so, and `millpy.lookups`, `millpy doctor`
and the metrics. Until the first read of a table has succeeded, the stages that need it take no step. What is for them
waits in segments, and the backpressure of these pauses the sources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import UUID

from millpy.errors import TableLoadError, TransientError
from millpy.hosting.interval_state import IntervalState
from millpy.hosting.plan import Plan
from millpy.ingest.table_rows import check_size, table_version
from millpy.limits import Limits
from millpy.model.lookup import LookupTable, TableVersion
from millpy.runtime.events import EventQueue
from millpy.runtime.guarded_clock import GuardedClock
from millpy.store.protocol import LookupReport, SegmentQuery, Store

log = logging.getLogger(__name__)
REPORT_EVERY_S = 5.0
"""Seconds between two reports of a table of which nothing has changed."""


@dataclass(slots=True)
class LookupStatus:
    """What a worker knows of the reads of one table.

    Attributes:
        error: why the last read failed; "" if it succeeded, or there was none.
        failing_since: when the first of the failed reads ended, in seconds on the monotonic clock; None without one.
        checked_at: the same of the last read that succeeded.
        reported_at: the same of the last report.
    """

    error: str = ""
    failing_since: float | None = None
    checked_at: float | None = None
    reported_at: float = float("-inf")


class Lookups:
    """Reads the lookup tables of the computations that a worker runs.

    Args:
        only: names of the computations that run; all when empty.
        wake: called when there is a new version.

    Attributes:
        versions: the newest version of each table that was read.
        statuses: how the reads of each table go.
    """

    def __init__(  # noqa: PLR0913 - the shared objects of a worker, whose context makes it
        self,
        store: Store,
        plan: Plan,
        worker_id: UUID,
        limits: Limits,
        clock: GuardedClock,
        events: EventQueue,
        only: Sequence[str],
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._limits = limits
        self._clock = clock
        self._events = events
        self._wake = wake
        running = [computation for computation in plan if not only or computation.name in only]
        self._needed_by: dict[LookupTable, tuple[str, ...]] = {}
        for computation in running:
            for table in computation.tables:
                self._needed_by[table] = (*self._needed_by.get(table, ()), computation.name)
        self.tables = tuple(self._needed_by)
        self.versions: dict[LookupTable, TableVersion] = {}
        self.statuses = {table: LookupStatus() for table in self.tables}
        self._thread = ThreadPoolExecutor(1, "lookups") if self.tables else None

    def apply(self, intervals: Mapping[int, IntervalState]) -> None:
        """Hold the intervals whose tables were not all read yet, and let go the others."""
        for interval in intervals.values():
            interval.use_tables(self.versions)

    async def keep(self, table: LookupTable) -> None:
        """Read a table for ever: `refresh` after each read, and sooner if the read failed."""
        every_s = table.refresh.total_seconds()
        while True:
            succeeded = await self.load(table)
            await self._clock.sleep(every_s if succeeded else min(every_s, self._limits.retry_s_max))

    async def load(self, table: LookupTable) -> bool:
        """Read a table once and report it; return False if that failed."""
        before, status = self.versions.get(table), self.statuses[table]
        try:
            version = await self._read(table, before)
        except TransientError as error:
            await self._failed(table, status, error)
            return False
        self.versions[table] = version
        status.checked_at = self._clock.monotonic()
        if before is not version:
            log.info("lookup table %s: %d rows, version %s", table.name, version.rows, version.version)
            if version.misfits:
                log.warning("lookup table %s: %d rows do not fit: %s", table.name, version.misfits, version.misfit)
            self._wake()
        recovered, status.error, status.failing_since = bool(status.error), "", None
        if recovered:
            self._events.add_of_worker("lookup_restored", {"table": table.name, "version": version.version})
        await self._report(table, changed=recovered or before is not version)
        return True

    async def _read(self, table: LookupTable, before: TableVersion | None) -> TableVersion:
        """Read a table; decode its rows in a thread of its own, unless they are the same as before."""
        limits = self._limits
        read = await self._store.read_lookup_table(
            table, rows_max=limits.lookup_rows_max, bytes_max=limits.lookup_bytes_max
        )
        check_size(table, read.rows, read.size, limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, table_version, table, read.text, read.read_at, before)

    async def _failed(self, table: LookupTable, status: LookupStatus, error: TransientError) -> None:
        """Keep the version before. Tell operators once, and again if the reason changes."""
        if status.failing_since is None:
            status.failing_since = self._clock.monotonic()
        changed = status.error != error.message
        if changed:
            status.error = error.message
            hint = f" ({error.hint})" if error.hint else ""
            use = "the version before stays in use" if table in self.versions else "records wait for it"
            log.warning("%s; %s%s", error.message, use, hint)
            if isinstance(error, TableLoadError):
                detail: dict[str, object] = {"table": table.name, "why": error.message, "hint": error.hint}
                self._events.add_of_worker("lookup_failed", detail)
        await self._report(table, changed=changed)

    async def _report(self, table: LookupTable, *, changed: bool) -> None:
        """Store what is known of a table, if it has changed or the last report is old. A failure is tried again."""
        status, now = self.statuses[table], self._clock.monotonic()
        if not changed and now - status.reported_at < REPORT_EVERY_S:
            return
        version = self.versions.get(table)
        report = LookupReport(self._worker_id, table, self._needed_by[table], version, status.error)
        status.reported_at = now
        try:
            await self._store.report_lookup_table(report)
        except TransientError as error:
            status.reported_at = float("-inf")
            log.debug("cannot report lookup table %s: %s", table.name, error)

    def close(self) -> None:
        """End the thread, without waiting for it."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def without_held(queries: Sequence[SegmentQuery], intervals: Mapping[int, IntervalState]) -> list[SegmentQuery]:
    """Return the queries without those of intervals that take no step."""
    return [query for query in queries if not intervals[query.consumer].held]
