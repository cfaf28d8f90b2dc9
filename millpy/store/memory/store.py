"""MemoryStore: the reference implementation of `store.protocol`, for unit tests and the simulator.

Several stores, one per worker, connect to one `MemoryDatabase`, whose clock is the server's clock. An operation
acts between two awaits, which models a statement on one snapshot. These operations wait:

    commit                 for the row locks of its headers; then, in tests, inside the fence
    claim, release,        for a commit in flight that holds a header. A claim or a switch instead terminates an expired
    take_over_from_self,   owner's transaction that has not reached COMMIT
    switch

`database.faults` loses connections and answers of COMMIT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from millpy.errors import (
    CommitUnknownError,
    GraphVersionError,
    MillError,
    StaleSequencerError,
    StoreUnavailableError,
    TableLoadError,
)
from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant, Kind, OutboxRows
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.lease import Renewal
from millpy.model.lookup import LookupTable
from millpy.model.stage import UNBOUNDED
from millpy.model.stored_windows import ClosedKind, WindowQuery
from millpy.model.time import INSTANT_MAX, Instant
from millpy.store.memory import reopening
from millpy.store.memory.database import MemoryDatabase, Transaction
from millpy.store.memory.faults import Landing
from millpy.store.memory.generations import switch
from millpy.store.memory.state import MemoryState
from millpy.store.memory.tables import Header, RegisteredWorker, overlaid
from millpy.store.protocol import (
    Backlog,
    ClosedEnds,
    CommitFailpoint,
    Event,
    IntervalOwner,
    LiveWorker,
    LookupReport,
    Ownership,
    OwnerSnapshot,
    PendingRequests,
    PollResult,
    SegmentQuery,
    SinkReport,
    SourceReport,
    SourceState,
    TableText,
    WorkerInfo,
)

__all__ = ["MemoryDatabase", "MemoryStore"]


class MemoryStore:
    """One worker's connection to a `MemoryDatabase`."""

    def __init__(self, database: MemoryDatabase) -> None:
        self.database = database
        self._state = MemoryState(database)
        self._closed = False

    async def open(self) -> None:
        """Connect."""
        self._closed = False
        await self._reach_server()

    async def close(self) -> None:
        """Disconnect. Later operations raise StoreUnavailableError."""
        self._closed = True
        for place in [place for place in self.database.listeners if place[0] is self]:
            del self.database.listeners[place]

    async def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Register the graph, or apply its additions to the deployed one after its commits in flight have ended."""
        await self._reach_server()
        while self.database.is_locked_against(spec):
            await self.database.wait_for_release()
        return self.database.deploy(spec, on_purpose=on_purpose)

    async def reset(self, spec: GraphSpec, names: Collection[str]) -> Deployment:
        """Let computations begin anew, after the commits in flight of the graph have ended."""
        await self._reach_server()
        while self.database.is_locked(spec):
            await self.database.wait_for_release()
        return self.database.reset(spec, names)

    async def switch(self, family: str, generation: int) -> bool:
        """Make a generation the current one. Return False when it already is."""
        await self._reach_server()
        return await switch(self.database, family, generation)

    # Ownership.

    async def register(self, worker: WorkerInfo, ttl_s: float) -> None:
        """Register a worker, which owns nothing yet, with a lease from now on the server's clock."""
        await self._reach_server()
        deployed = self.database.graphs[worker.graph_id].deployment.version
        if worker.graph_version != deployed:
            raise GraphVersionError(f"version {worker.graph_version} of the graph is not the deployed version")
        for interval_id, header in sorted(self.database.headers.items()):
            while header.owner == worker.worker_id:
                if self.database.holder(interval_id) is None:
                    header.disown()
                else:
                    await self.database.wait_for_release()
        known = self.database.workers.get(worker.worker_id)
        self.database.workers[worker.worker_id] = RegisteredWorker(
            worker, self._deadline(ttl_s), int(ttl_s * 1_000_000), known is not None and known.drain_requested
        )

    async def heartbeat(self, worker_id: UUID, ttl_s: float) -> Renewal | None:
        """Renew the lease. Return None if it has expired or the worker is unknown."""
        await self._reach_server()
        worker = self.database.workers.get(worker_id)
        if worker is None or worker.expires_at <= self.database.clock.now_us():
            return None
        worker.expires_at = self._deadline(ttl_s)
        return Renewal(worker.drain_requested)

    async def unregister(self, worker_id: UUID) -> None:
        """Delete the registration of a worker."""
        await self._reach_server()
        self.database.workers.pop(worker_id, None)

    async def ownership(self, graph_id: int) -> Ownership:
        """Read the live workers and the owner of each interval."""
        await self._reach_server()
        database = self.database
        workers = [w.info for w in database.workers.values() if w.info.graph_id == graph_id]
        return Ownership(
            tuple(LiveWorker(w.worker_id, w.only) for w in workers if database.is_live(w.worker_id)),
            tuple(
                IntervalOwner(interval_id, header.owner, database.is_live(header.owner))
                for interval_id, header in database.headers.items()
                if header.graph_id == graph_id and not header.gone
            ),
            database.graphs[graph_id].deployment.version,
        )

    async def claim(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Claim intervals without a live owner, and terminate a frozen transaction of an expired owner."""
        await self._reach_server()
        grants = []
        for interval_id in sorted(set(interval_ids)):
            header = self.database.headers[interval_id]
            while self._may_claim(worker_id, header):
                holder = self.database.holder(interval_id)
                if holder is None:
                    grants.append(self._grant(header, worker_id))
                    break
                if holder.committing or header.owner == worker_id:
                    await self.database.wait_for_release()
                else:
                    self.database.terminate(holder)
        return grants

    async def seize(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Take intervals over from their owners, after any commit in flight."""
        await self._reach_server()
        grants = []
        for interval_id in sorted(set(interval_ids)):
            while self.database.holder(interval_id) is not None:
                await self.database.wait_for_release()
            if self.database.is_live(worker_id):
                grants.append(self._grant(self.database.headers[interval_id], worker_id))
        return grants

    async def release(self, worker_id: UUID, grants: Sequence[Grant]) -> None:
        """Release intervals. Stale grants are ignored."""
        await self._reach_server()
        for grant in sorted(grants, key=lambda g: g.interval_id):
            header = await self._own_header(worker_id, grant)
            if header is not None:
                header.disown()

    async def take_over_from_self(self, worker_id: UUID, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Raise the sequencers of the grants that are still current, after any commit in flight."""
        await self._reach_server()
        taken = []
        for grant in sorted(grants, key=lambda g: g.interval_id):
            header = await self._own_header(worker_id, grant)
            if header is not None:
                taken.append(self._grant(header, worker_id))
        return taken

    # Reading.

    async def read(
        self,
        grants: Sequence[Grant],
        *,
        state_rows_max: int,
        closed_rows_max: int = UNBOUNDED,
        closed: ClosedKind = ClosedKind.WINDOWS,
    ) -> Sequence[OwnerSnapshot]:
        """Read the stored data of owned intervals; see `Store.read`."""
        await self._reach_server()
        self._check_current(grants)
        bounds = {"state_rows_max": state_rows_max, "closed_rows_max": closed_rows_max}
        return [self._state.read(grant, **bounds, closed=closed) for grant in grants]

    async def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """Read the STATE entries of these keys."""
        await self._reach_server()
        self._check_current([grant])
        return self._state.load_state(grant, keys)

    async def load_windows(
        self, grant: Grant, folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]
    ) -> Entries:
        """Read folded rows of windows; see `Store.load_windows`."""
        await self._reach_server()
        self._check_current([grant])
        return self._state.load_windows(grant, folded_bundle, subkeys, keys)

    async def query_windows(self, grant: Grant, folded_bundle: int, query: WindowQuery) -> Entries:
        """Read the folded rows that a query asks for; see `Store.query_windows`."""
        await self._reach_server()
        self._check_current([grant])
        return self._state.query_windows(grant, folded_bundle, query)

    async def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Read the runs that have not expired, oldest first."""
        await self._reach_server()
        self._check_current([grant])
        return self._state.load_dedupe_runs(grant)

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Read headers, and segments above the cursors, from one snapshot."""
        await self._reach_server()
        return self._state.poll(queries, bytes_max)

    async def backlog(self, graph_id: int, *, without: Sequence[str] = ()) -> dict[str, Backlog]:
        """Count the stored records and bytes above the cursors, by producing computation."""
        await self._reach_server()
        deployed = self.database.graphs[graph_id]
        producers = {sub.producer for sub in deployed.subscriptions}
        return {
            name: self.database.pending(sub for sub in deployed.written_by(name) if sub.consumer not in without)
            for name in sorted(producers)
        }

    async def compare_sources(self, graph_id: int, own: Sequence[SourceState]) -> Sequence[SourceState]:
        """Record which of the worker's sources are quiet. Return the states of all sources of the graph."""
        await self._reach_server()
        database = self.database
        database.quiet.update({state.interval_id: state.quiet for state in own})
        return [
            SourceState(interval_id, header.low_watermark, database.quiet.get(interval_id, False))
            for interval_id, header in sorted(database.headers.items())
            if header.graph_id == graph_id and header.interval.keys is None
        ]

    async def archives_are_available(self) -> bool:
        """Return True: archives have no files here."""
        return True

    async def finished(self, graph_id: int, *, without: Sequence[str] = ()) -> bool:
        """Tell whether the graph has no work left; see `Store.finished`."""
        await self._reach_server()
        deployed = self.database.graphs[graph_id]
        counted = {c.name for c in deployed.spec.computations} - set(without)
        headers = [
            header
            for header in self.database.headers.values()
            if header.graph_id == graph_id and header.interval.computation in counted and not header.gone
        ]
        requested = self.database.requests.any_of([header.interval.interval_id for header in headers])
        reached = not requested and all(header.low_watermark >= INSTANT_MAX for header in headers)
        reached = reached and not any(
            self.database.outbox.get(header.interval.interval_id)
            or self.database.refused_messages.get(header.interval.interval_id)
            for header in headers
        )
        return reached and not self.database.pending(s for s in deployed.subscriptions if s.consumer in counted).records

    async def reopen_source(
        self, graph_id: int, grant: Grant, watermark: Instant, closed_ends: ClosedEnds, told: Event
    ) -> Instant | None:
        """Set the end of a source partition back, after the commits in flight; see `Store.reopen_source`."""
        await self._reach_server()
        headers = [h.interval.interval_id for h in self.database.headers.values() if h.graph_id == graph_id]
        while any(self.database.holder(interval_id) is not None for interval_id in headers):
            await self.database.wait_for_release()
        self._check_current([grant])
        return reopening.reopen_source(self.database, grant, watermark, closed_ends, told)

    async def now_us(self) -> Instant:
        """Read the server's clock."""
        await self._reach_server()
        return self.database.clock.now_us()

    async def read_requests(self, interval_ids: Sequence[int], *, records_max: int, bytes_max: int) -> PendingRequests:
        """Read the requests for these intervals."""
        await self._reach_server()
        return self.database.requests.read_requests(interval_ids, records_max, bytes_max)

    # Writing.

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitFailpoint | None = None,
        trial: bool = False,
    ) -> None:
        """Commit a turn in one transaction, fenced by all its grants (I2); a trial is rolled back."""
        database = self.database
        transaction = Transaction(database, checkpoints, graph_version)
        await self._reach_server()
        loss = None if trial else database.faults.take_loss(self)
        if loss == "delayed":
            raise database.faults.lose(loss, transaction)
        try:
            await database.lock(transaction)
            transaction.check_fence()
            if inside is not None:
                await inside()
            if trial:
                transaction.check()
            else:
                await self._end(transaction, loss)
        except MillError as error:
            if loss is None or isinstance(error, CommitUnknownError):
                raise
            # The client does not receive the answer, whatever it was.
            raise database.faults.lose("never", transaction) from error
        finally:
            if not transaction.committing:
                database.unlock(transaction)

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Fold all deltas of this interval into rows, whatever `bytes_max` says."""
        await self._reach_server()
        self._check_current([grant])
        header = self.database.headers[grant.interval_id]
        header.keyed = overlaid(header.keyed, self.database.unfolded(header))
        header.folded_bundle = header.bundle
        return header.folded_bundle

    async def delete_windows(
        self, grant: Grant, subkeys: Sequence[str], *, progressed: Callable[[], None] | None = None
    ) -> None:
        """Delete the folded rows of windows that have expired; see `Store.delete_windows`."""
        await self._reach_server()
        self._check_current([grant])
        header, gone = self.database.headers[grant.interval_id], set(subkeys)
        header.keyed = {n: row for n, row in header.keyed.items() if n[0] is not Kind.WINDOW or n[3] not in gone}

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Free the slots that nothing needs, then start new epochs where they are due."""
        await self._reach_server()
        database = self.database
        headers, now = database.headers, database.clock.now_us()
        freed = database.segments.free(database.is_consumed)
        freed += database.deltas.free(lambda d: d.bundle <= headers[d.interval_id].folded_bundle)
        freed += database.dedupe_runs.free(lambda r: not headers[r.interval_id].needs_run(r.bundle, r.run))
        database.segments.turn(now, epoch_s=epoch_s, epoch_bytes=epoch_bytes)
        database.deltas.turn(now, epoch_s=epoch_s, epoch_bytes=epoch_bytes)
        database.dedupe_runs.turn(now, epoch_s=epoch_s, epoch_bytes=epoch_bytes)
        return freed

    async def forget_old(
        self, *, now_us: Instant, dead_letter_kept_s: float, settled_kept_s: float, events_kept_s: float
    ) -> int:
        """Delete nothing: ids are positions here, so dead letters and late records stay."""
        await self._reach_server()
        return 0

    async def drop_expired(self) -> None:
        """Drop nothing: tables here keep their rows."""

    async def record_events(self, graph_id: int, events: Sequence[Event]) -> None:
        """Store events for operators."""
        await self._reach_server()
        self.database.events.extend((graph_id, event) for event in events)

    # Lookup tables.

    async def read_lookup_table(self, table: LookupTable, *, rows_max: int, bytes_max: int) -> TableText:
        """Read the rows that a test has put into `MemoryDatabase.lookup_tables`."""
        await self._reach_server()
        text = self.database.lookup_tables.get(table.name)
        if text is None:
            raise TableLoadError(f"table {table.name} does not exist")
        rows = text.count(b"\n") + bool(text)
        is_whole = rows <= rows_max and len(text) <= bytes_max
        return TableText(rows, len(text), self.database.clock.now_us(), text if is_whole else b"")

    async def report_lookup_table(self, report: LookupReport) -> None:
        """Keep the last report of each worker and table."""
        await self._reach_server()
        self.database.lookup_reports[report.worker_id, report.table.name] = report

    async def report_sources(self, worker_id: UUID, reports: Sequence[SourceReport]) -> None:
        """Keep the last report of each source partition that the worker owns."""
        await self._reach_server()
        for report in reports:
            header = self.database.headers.get(report.interval_id)
            if header is not None and header.owner == worker_id:
                self.database.source_reports[report.interval_id] = (worker_id, report)

    async def source_addresses(self, interval_ids: Sequence[int]) -> Mapping[int, str]:
        """Return what live owners have reported."""
        await self._reach_server()
        found: dict[int, str] = {}
        for interval_id in interval_ids:
            worker_id, report = self.database.source_reports.get(interval_id, (None, None))
            is_owner = worker_id is not None and self.database.headers[interval_id].owner == worker_id
            if report is not None and report.address and is_owner and self.database.is_live(worker_id):
                found[interval_id] = report.address
        return found

    # Hints.

    async def notify(self, graph_id: int) -> None:
        """Wake the other stores that wait for this graph."""
        await self._reach_server()
        for (store, listened), hint in self.database.listeners.items():
            if store is not self and listened == graph_id:
                hint.set()

    async def wait_hint(self, graph_id: int, timeout_s: float) -> bool:
        """Wait for a hint from another worker. A hint that came since the last call counts."""
        await self._reach_server()
        hint = self.database.listeners.setdefault((self, graph_id), asyncio.Event())
        if not hint.is_set() and timeout_s > 0:
            tasks = [asyncio.ensure_future(hint.wait()), asyncio.ensure_future(self.database.clock.sleep(timeout_s))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        came = hint.is_set()
        hint.clear()
        return came

    async def read_outbox(self, grant: Grant, position: int, bytes_max: int) -> Sequence[OutboxRows]:
        """Read rows of an outbox; see `Store.read_outbox`."""
        await self._reach_server()
        found: list[OutboxRows] = []
        for rows in self.database.outbox.get(grant.interval_id, ()):
            if rows.end > position and (not found or bytes_max > 0):
                found.append(rows)
                bytes_max -= len(rows.payload)
        return found

    async def record_delivered(self, reports: Sequence[SinkReport]) -> None:
        """Store how far outboxes are delivered; see `Store.record_delivered`."""
        await self._reach_server()
        stale = []
        for report in reports:
            interval_id = report.grant.interval_id
            if self.database.headers[interval_id].sequencer != report.grant.sequencer:
                stale.append(interval_id)
                continue
            delivered = max(report.delivered, self.database.outbox_state(interval_id).delivered)
            self.database.sink_reports[interval_id] = replace(report, delivered=delivered)
            rows = self.database.outbox.get(interval_id, [])
            rows[:] = [row for row in rows if row.end > delivered]
            refused = self.database.refused_messages.setdefault(interval_id, {})
            refused.update({found.position: found for found in report.refused})
            for position in report.accepted:
                refused.pop(position, None)
        if stale:
            raise StaleSequencerError(f"stale grants for intervals {stale}", stale=stale)

    # Helpers.

    async def _reach_server(self) -> None:
        """Model a round trip: other tasks may run meanwhile, and the connection may turn out to be lost."""
        await asyncio.sleep(0)
        if self._closed:
            raise StoreUnavailableError("the store is closed")
        self.database.faults.meet_outage(self)

    async def _end(self, transaction: Transaction, loss: Landing | None) -> None:
        """Commit a transaction, unless `loss` ends or delays it. Raises CommitUnknownError when `loss` is given."""
        if loss == "later":
            transaction.check_fence()
        elif loss != "never":
            transaction.land()
        if loss is not None:
            raise self.database.faults.lose(loss, transaction)

    def _deadline(self, ttl_s: float) -> Instant:
        return Instant(self.database.clock.now_us() + int(ttl_s * 1_000_000))

    def _may_claim(self, worker_id: UUID, header: Header) -> bool:
        """Tell whether a live worker may claim an interval of the graph version that it knows.

        It may when the interval has no live owner, or is its own because the answer to an earlier claim was lost.
        """
        free = header.owner == worker_id or not self.database.is_live(header.owner)
        return free and self.database.is_live(worker_id) and self.database.knows(worker_id, header)

    def _grant(self, header: Header, worker_id: UUID) -> Grant:
        """Assign an unlocked header to a worker under a new sequencer."""
        header.owner = worker_id
        header.sequencer += 1
        return Grant(header.interval.interval_id, header.sequencer)

    async def _own_header(self, worker_id: UUID, grant: Grant) -> Header | None:
        """Return the header of a grant once it is unlocked; None when the grant is stale by then."""
        while self.database.holder(grant.interval_id) is not None:
            await self.database.wait_for_release()
        header = self.database.headers[grant.interval_id]
        return header if (header.owner, header.sequencer) == (worker_id, grant.sequencer) else None

    def _check_current(self, grants: Sequence[Grant]) -> None:
        headers = self.database.headers
        stale = [g.interval_id for g in grants if headers[g.interval_id].sequencer != g.sequencer]
        if stale:
            raise StaleSequencerError(f"stale grants for intervals {stale}", stale=stale)
