"""PostgresStore: `Store` on PostgreSQL, which is the only authority.

The channels (see `connection.py`) are commit, poll (and state on demand), admin (ownership and the read after a claim),
fold, hint, listen, and lookup in a graph with lookup tables. Each is one connection, used by one task at a time. The
commit channel is the backend that the worker records, so that others can end its frozen transaction.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import msgspec
import psycopg

from millpy.clock import random_id
from millpy.errors import ConfigError, NotMigratedError
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant, OutboxRows
from millpy.model.copied_results import ResultCopy
from millpy.model.dead_letter import printable, printable_values
from millpy.model.deployment import Deployment, GraphSpec, Upgrade
from millpy.model.graph_changes import GraphChange
from millpy.model.lease import Renewal, WorkerUsage
from millpy.model.lookup import LookupTable
from millpy.model.stage import UNBOUNDED
from millpy.model.stored_windows import ClosedKind, WindowQuery
from millpy.model.time import Instant
from millpy.store.postgres import fold as folding
from millpy.store.postgres import outbox, ownership, reopening, requests, retention, stored_sessions, stored_windows
from millpy.store.postgres import poll as polling
from millpy.store.postgres import recovery as reading
from millpy.store.postgres.arrays import Bigints, Booleans, Jsonbs, Texts
from millpy.store.postgres.commit import Committer
from millpy.store.postgres.connection import Channel, Connection, ConnectionGroup, ConnectionSettings, all_rows
from millpy.store.postgres.deployment import copied_results as copying
from millpy.store.postgres.deployment import deploy as deploying
from millpy.store.postgres.deployment import generations as generating
from millpy.store.postgres.deployment import reset as resetting
from millpy.store.postgres.errors import is_queue_full, translate
from millpy.store.postgres.lookups import read_table
from millpy.store.postgres.results import ResultTable
from millpy.store.postgres.sink_statements import check_statements, statements_of
from millpy.store.postgres.statements import statement
from millpy.store.protocol import (
    Backlog,
    ClosedEnds,
    CommitFailpoint,
    Engine,
    Event,
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
from millpy.store.revision import check_revision

log = logging.getLogger(__name__)
LOST_BACKENDS_MAX = 8


class PostgresStore:
    """The store of one worker process."""

    def __init__(
        self,
        url: str,
        *,
        limits: Limits | None = None,
        settings: ConnectionSettings | None = None,
        progressed: Callable[[], None] | None = None,
    ) -> None:
        """Create the channels; `open` connects. `progressed` is called while data moves for a turn or a takeover."""
        if settings is None:
            settings = ConnectionSettings.from_limits(limits or Limits())
        self._identity = random_id().hex
        self._queue_full = False
        self._progressed = progressed or _ignore_progress
        self._worker_id: UUID | None = None
        self._backends: list[ownership.Backend] = []
        self._tables: dict[int, ResultTable] = {}
        self._states = reading.StateReader()
        group = self._group = ConnectionGroup(url, settings, progressed)
        self._commit = Channel(group, "commit", prepare=self._record_backend, serves_turns=True)
        self._poll = Channel(group, "poll", serves_turns=True)
        self._admin = Channel(group, "admin")
        self._fold = Channel(group, "fold", long=True)
        self._hint = Channel(group, "hint", durable=False)
        self._listen = Channel(group, "listen", listens=True)
        self._lookup = Channel(group, "lookup", durable=False)
        self._outbox = Channel(group, "outbox")
        self._listening: Connection | None = None
        self._statements: dict[str, bytes] = {}
        self._committer = Committer(self._commit, self._tables, self._statements)
        self._copy_plans: dict[int, copying.CopyPlan] = {}

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises ConfigError when the tables are not those of this version, or NotMigratedError when older."""
        try:
            async with self._admin.use_raw() as connection:
                ((revision, build),) = await all_rows(connection, statement("read_revision"), {})
        except psycopg.errors.UndefinedTable as error:
            raise NotMigratedError("the database is not migrated", hint="run `millpy migrate`") from error
        except psycopg.Error as error:
            raise translate(error) from error
        try:
            check_revision(revision, build)
        except ConfigError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections."""
        own = (self._commit, self._poll, self._admin, self._fold, self._hint, self._listen, self._lookup, self._outbox)
        for channel in own:
            await channel.close()

    async def deploy(
        self,
        spec: GraphSpec,
        *,
        on_purpose: bool = False,
        upgrades: Mapping[str, Upgrade] | None = None,
        back: bool = False,
        copy_results: bool = False,
        dry_run: bool = False,
    ) -> Deployment:
        """Register the graph, or change the deployed one to match `spec`; see `Store.deploy`.

        Args:
            spec: the graph.
            on_purpose: whether an operator requested the change.
            upgrades: functions that migrate state, by computation.
            back: whether to remove the parts that only the deployed graph has.
            copy_results: whether a new generation gets rows of the current one; `copy_results` then copies them.
            dry_run: whether to roll it back, so that it only raises what the deployment would.
        """
        how: dict[str, Any] = {"on_purpose": on_purpose, "upgrades": upgrades, "back": back, "dry_run": dry_run}
        self._statements.update(statements_of(spec))
        async with self._fold.use() as connection:
            await check_statements(connection, self._statements)
            deployment = await deploying.deploy(connection, spec, **how, copy_results=copy_results)
        if dry_run:
            return deployment
        if back:
            await self._drop_unused_slots()
        for table in spec.tables:
            self._tables[deployment.table_ids[table.name]] = ResultTable.from_spec(deployment.name, table)
        return deployment

    async def reset(self, spec: GraphSpec, names: Collection[str], *, dry_run: bool = False) -> Deployment:
        """Let computations begin anew; see `resetting.reset`. With `dry_run`, roll it back."""
        async with self._as_owner(f"cannot reset {', '.join(names)}", "deploy", dry_run=dry_run) as connection:
            return await resetting.reset(connection, spec, names)

    async def plan_copies(self, spec: GraphSpec) -> Sequence[ResultCopy]:
        """Return which rows a generation is to get from the current one; see `millpy/model/copied_results.py`."""
        async with self._admin.use() as connection:
            stored = await deploying.read_deployed(connection, spec)
            if stored is not None:
                return await copying.copies_left(connection, spec, stored.graph_id)
            return (await copying.plan_copies(connection, spec))[1]

    async def copy_results(self, spec: GraphSpec, graph_id: int) -> tuple[str, int, Instant] | None:
        """Copy the next rows to a generation that was begun so; see `copied_results.copy_piece`."""
        async with self._as_owner(f"cannot copy results to graph {spec.name!r}", "deploy") as connection:
            return await copying.copy_piece(connection, spec, graph_id, self._copy_plans)

    async def compare(
        self, spec: GraphSpec, *, upgrades: Mapping[str, Upgrade] | None = None, back: bool = False
    ) -> tuple[int, Sequence[GraphChange]] | None:
        """Return the deployed version, and the changes that a deployment would make; None for a new graph."""
        async with self._admin.use() as connection:
            return await deploying.compare(connection, spec, upgrades=upgrades, back=back)

    async def generations(self, family: str) -> list[generating.Generation]:
        """Read all generations of a graph, oldest first."""
        async with self._admin.use() as connection:
            return await generating.read_generations(connection, family)

    async def switch(
        self,
        family: str,
        generation: int,
        *,
        behind_us_max: int | None = None,
        rights: generating.RightsOf | None = None,
        dry_run: bool = False,
    ) -> generating.SwitchResult | None:
        """Make a generation the current one; see `generations.switch`. With `dry_run`, roll the switch back."""
        what, command = f"cannot switch graph {family!r}", f"switch {family} {generation}"
        async with self._as_owner(what, command, dry_run=dry_run) as connection:
            return await generating.switch(connection, family, generation, behind_us_max=behind_us_max, rights=rights)

    async def drop(self, name: str, *, dry_run: bool = False) -> generating.DropResult:
        """Drop a graph, or one generation of it; see `generations.drop`. With `dry_run`, roll the drop back."""
        async with self._as_owner(f"cannot drop graph {name!r}", f"drop {name}", dry_run=dry_run) as connection:
            dropped = await generating.drop(connection, name)
        if not dry_run:
            await self._drop_unused_slots()
        return dropped

    async def register(self, worker: WorkerInfo, ttl_s: float) -> None:
        """Register a worker and its commit channel's backend; see `Store.register`."""
        async with self._admin.use() as connection:
            await self._group.follow_server(connection)
            await ownership.register(connection, worker, ttl_s)
        self._worker_id = worker.worker_id
        async with self._commit.use() as connection:
            await connection.execute(statement("record_backend"), {"worker_id": worker.worker_id})

    async def read_engine(self, graph_id: int) -> Engine | None:
        """Read what computes a generation; None if it has been dropped."""
        async with self._admin.use() as connection:
            rows = await all_rows(connection, statement("read_engine"), {"graph_id": graph_id})
        return rows[0][0] if rows else None

    async def is_begun(self, graph_id: int) -> bool:
        """Tell whether any interval of a graph has a commit."""
        async with self._admin.use() as connection:
            rows = await all_rows(connection, statement("is_begun"), {"graph_id": graph_id})
        return bool(rows[0][0])

    async def give_to_spark(self, deployment: Deployment) -> None:
        """Let Spark compute a generation that workers have not begun; see `ownership.give_to_spark`."""
        async with self._as_owner(f"cannot give graph {deployment.name!r} to Spark", "backfill") as connection:
            await ownership.give_to_spark(connection, deployment.graph_id)

    async def give_to_workers(self, deployment: Deployment, grants: Sequence[Grant]) -> None:
        """Let workers compute a generation from here; see `ownership.give_to_workers`."""
        async with self._as_owner(f"cannot hand graph {deployment.name!r} over", "backfill") as connection:
            await ownership.give_to_workers(connection, deployment.graph_id, grants)

    async def _drop_unused_slots(self) -> None:
        """Drop the replication slots of sources that are gone: PostgreSQL does that in no transaction."""
        async with self._fold.use() as connection:
            for (slot,) in await all_rows(connection, statement("find_unused_slots"), {}):
                try:
                    await connection.execute(statement("drop_slot"), {"slot": slot})
                except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ObjectInUse) as error:
                    log.warning("cannot drop replication slot %s: %s", slot, error.diag.message_primary)

    @asynccontextmanager
    async def _as_owner(self, what: str, command: str, *, dry_run: bool = False) -> AsyncIterator[Connection]:
        async with self._fold.use() as connection, connection.transaction(force_rollback=dry_run):
            await connection.execute(statement("act_as_owner"))
            await deploying.check_rights(connection, what, command)
            yield connection

    async def reopen_source(
        self, graph_id: int, grant: Grant, watermark: Instant, closed_ends: ClosedEnds, told: Event
    ) -> Instant | None:
        """Set the end of a source partition back; see `Store.reopen_source`."""
        async with self._admin.use() as connection, connection.transaction():
            return await reopening.reopen_source(connection, graph_id, grant, watermark, closed_ends, told)

    async def heartbeat(self, worker_id: UUID, ttl_s: float) -> Renewal | None:
        """Renew the lease. Return None when it has expired. Workers use `HeartbeatConnection`, from a thread."""
        parameters = {"worker_id": worker_id, "ttl_s": ttl_s, **asdict(WorkerUsage())}
        async with self._hint.use() as connection:
            rows = await all_rows(connection, statement("renew_lease"), parameters)
        return Renewal(*rows[0]) if rows else None

    async def unregister(self, worker_id: UUID) -> None:
        """Delete the registration of a worker that has released everything."""
        async with self._admin.use() as connection:
            await connection.execute(statement("forget_worker"), {"worker_id": worker_id})

    async def ownership(self, graph_id: int) -> Ownership:
        """Read the live workers and the owner of each interval."""
        async with self._admin.use() as connection:
            return await ownership.read_ownership(connection, graph_id)

    async def claim(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Claim the intervals that no live worker owns; see `Store.claim`."""
        if not interval_ids:
            return []
        async with self._admin.use() as connection:
            return await ownership.claim(connection, worker_id, interval_ids)

    async def seize(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Take intervals over from their owners; see `Store.seize`."""
        parameters: dict[str, Any] = {"worker_id": worker_id, "intervals": Bigints(sorted(interval_ids))}
        async with self._admin.use() as connection:
            rows = await all_rows(connection, statement("seize_intervals"), parameters)
        return [Grant(*row) for row in sorted(rows)]

    async def release(self, worker_id: UUID, grants: Sequence[Grant]) -> None:
        """Release intervals. Stale grants are ignored."""
        if grants:
            async with self._admin.use() as connection:
                await ownership.release(connection, worker_id, grants)

    async def take_over_from_self(self, worker_id: UUID, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Raise the sequencers of grants that are still current; see `Store.take_over_from_self`."""
        self._states.forget()
        if not grants:
            return []
        async with self._admin.use() as connection:
            await self._group.follow_server(connection)
            return await ownership.take_over_from_self(connection, worker_id, grants, self._backends)

    async def read(
        self,
        grants: Sequence[Grant],
        *,
        state_rows_max: int,
        closed_rows_max: int = UNBOUNDED,
        closed: ClosedKind = ClosedKind.WINDOWS,
    ) -> Sequence[OwnerSnapshot]:
        """Read the stored data of owned intervals; see `Store.read`."""
        if not grants:
            return []
        async with self._admin.use() as connection:
            bounds = state_rows_max, closed_rows_max, closed
            return await reading.read(connection, grants, *bounds, self._progressed)

    async def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """Read the STATE entries of these keys."""
        if not keys:
            return []
        async with self._poll.use() as connection:
            return await self._states.load(connection, grant, keys)

    async def load_windows(
        self, grant: Grant, folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]
    ) -> Entries:
        """Read folded rows of windows; see `Store.load_windows`."""
        async with self._poll.use() as connection:
            return await stored_windows.load(connection, grant, folded_bundle, subkeys, keys, self._progressed)

    async def query_windows(self, grant: Grant, folded_bundle: int, query: WindowQuery) -> Entries:
        """Read the folded rows that a query asks for; see `Store.query_windows`."""
        async with self._poll.use() as connection:
            return await stored_sessions.load(connection, grant, folded_bundle, query, self._progressed)

    async def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Read the dedupe runs of this source partition within the horizon, oldest first."""
        async with self._admin.use() as connection:
            return await reading.load_dedupe_runs(connection, grant, self._progressed)

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Read the producers' headers and the segments above the cursors; see `Store.poll`."""
        if not queries:
            return []
        async with self._poll.use() as connection:
            return await polling.poll(connection, queries, bytes_max)

    async def read_requests(self, interval_ids: Sequence[int], *, records_max: int, bytes_max: int) -> PendingRequests:
        """Read the requests for these intervals."""
        async with self._admin.use() as connection:
            return await requests.read(connection, interval_ids, records_max, bytes_max, self._tables)

    async def forget_old(
        self, *, now_us: Instant, dead_letter_kept_s: float, settled_kept_s: float, events_kept_s: float
    ) -> int:
        """Delete rows beyond their age; see `Store.forget_old`."""
        async with self._fold.use() as connection:
            forgotten = await retention.forget_old(
                connection, now_us, dead_letter_kept_s, settled_kept_s, events_kept_s
            )
            histories = {number: table.history for number, table in self._tables.items() if table.history is not None}
            forgotten += await retention.trim_histories(connection, histories)
            return forgotten + await retention.drop_partitions(connection, self._tables, now_us)

    async def drop_expired(self) -> None:
        """Drop the partitions of expired rows; see `Store.drop_expired`."""
        for table in self._tables.values():
            table.next_drop_us = 0
        async with self._fold.use() as connection:
            while await retention.drop_partitions(connection, self._tables, Instant(0)):
                pass  # each call drops some

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitFailpoint | None = None,
        trial: bool = False,
    ) -> None:
        """Commit a turn in one transaction, fenced by all its grants; see `Store.commit`."""
        await self._committer.commit(checkpoints, graph_version, inside, trial)

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Fold about `bytes_max` of this interval's deltas into rows; see `Store.fold`."""
        async with self._fold.use() as connection:
            return await folding.fold(connection, grant, bytes_max, progressed or _ignore_progress)

    async def delete_windows(
        self, grant: Grant, subkeys: Sequence[str], *, progressed: Callable[[], None] | None = None
    ) -> None:
        """Delete the folded rows of windows that have expired; see `Store.delete_windows`."""
        async with self._fold.use() as connection:
            await stored_windows.delete(connection, grant, subkeys, progressed or _ignore_progress)

    async def backlog(self, graph_id: int, *, without: Sequence[str] = ()) -> dict[str, Backlog]:
        """Return the records and bytes of stored segments above the cursors, by producing computation."""
        of = {"graph_id": graph_id, "without": list(without)}
        async with self._admin.use() as connection:
            rows = await all_rows(connection, statement("read_backlog"), of)
        return {name: Backlog(records, size) for name, records, size in rows}

    async def compare_sources(self, graph_id: int, own: Sequence[SourceState]) -> Sequence[SourceState]:
        """Record which of the worker's sources are quiet. Return the states of all sources of the graph."""
        stated: dict[str, Any] = {
            "intervals": Bigints([state.interval_id for state in own]),
            "quiets": Bigints([int(state.quiet) for state in own]),
        }
        async with self._admin.use() as connection:
            await connection.execute(statement("state_sources"), stated)
            rows = await all_rows(connection, statement("read_sources"), {"graph_id": graph_id})
        return [SourceState(interval_id, Instant(watermark), quiet) for interval_id, watermark, quiet in rows]

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Start new epochs where they are due, and free slots; see `Store.turn_rings`."""
        async with self._fold.use() as connection:
            freed = await retention.turn_rings(connection, epoch_s=epoch_s, epoch_bytes=epoch_bytes)
        self._committer.forget_slots()
        return freed

    async def archives_are_available(self) -> bool:
        """Return True: this store writes no archives; see `Store.archives_are_available`."""
        return True

    async def finished(self, graph_id: int, *, without: Sequence[str] = ()) -> bool:
        """Tell whether the graph has no work left; see `Store.finished`."""
        of = {"graph_id": graph_id, "without": list(without)}
        async with self._admin.use() as connection:
            ((reached,),) = await all_rows(connection, statement("read_finished"), of)
        backlog = await self.backlog(graph_id, without=without) if reached else {}
        return reached and not any(pending.records for pending in backlog.values())

    async def now_us(self) -> Instant:
        """Read the server's clock."""
        async with self._hint.use() as connection:
            return Instant((await all_rows(connection, statement("server_now"), {}))[0][0])

    async def notify(self, graph_id: int) -> None:
        """Hint to other workers that there is something to read. Do nothing when the notification queue is full."""
        async with self._hint.use() as connection:
            try:
                await connection.execute(statement("hint"), {"channel": _channel(graph_id), "sender": self._identity})
            except psycopg.Error as error:
                if not is_queue_full(error):
                    raise
                await connection.execute(statement("read_queue_usage"))
                if not self._queue_full:
                    log.warning("the notification queue is full, so other workers find new work by polling: %s", error)
                self._queue_full = True
            else:
                self._queue_full = False

    async def wait_hint(self, graph_id: int, timeout_s: float) -> bool:
        """Wait for a hint from another worker. Return False on timeout."""
        async with self._listen.use() as connection:
            if self._listening is not connection:
                await connection.execute(b"LISTEN " + psycopg.sql.Identifier(_channel(graph_id)).as_bytes())
                self._listening = connection
            async with aclosing(connection.notifies(timeout=timeout_s)) as hints:
                async for hint in hints:
                    if hint.payload != self._identity:
                        return True
        return False

    async def record_events(self, graph_id: int, events: Sequence[Event]) -> None:
        """Store events for operators."""
        if events:
            parameters: dict[str, Any] = {
                "graph_id": graph_id,
                "kinds": Texts([event.kind for event in events]),
                # Reasons come from brokers, and names from file systems: jsonb refuses NUL, and JSON half a character.
                "details": Jsonbs([msgspec.json.encode(printable_values(event.detail)) for event in events]),
            }
            async with self._hint.use() as connection:
                await connection.execute(statement("append_events"), parameters)

    async def read_lookup_table(self, table: LookupTable, *, rows_max: int, bytes_max: int) -> TableText:
        """Read an ordinary table; see `Store.read_lookup_table`."""
        return await read_table(self._lookup, table, rows_max=rows_max, bytes_max=bytes_max)

    async def report_lookup_table(self, report: LookupReport) -> None:
        """Store what a worker knows of a lookup table."""
        version = report.version
        parameters: dict[str, Any] = {
            "worker_id": report.worker_id,
            "table_name": report.table.name,
            "refresh_s": report.table.refresh.total_seconds(),
            "computations": list(report.computations),
            "version": version.version if version else None,
            "rows": version.rows if version else None,
            "bytes": version.size if version else None,
            "misfits": version.misfits if version else 0,
            "misfit": printable(version.misfit) if version else "",
            "loaded_at": version.loaded_at_us if version else None,
            "error": printable(report.error),
        }
        async with self._hint.use() as connection:
            await connection.execute(statement("report_lookup_table"), parameters)

    async def read_outbox(self, grant: Grant, position: int, bytes_max: int) -> Sequence[OutboxRows]:
        """Read rows of an outbox; see `Store.read_outbox`."""
        async with self._outbox.use() as connection:
            return await outbox.read_rows(connection, grant, position, bytes_max)

    async def record_delivered(self, reports: Sequence[SinkReport]) -> None:
        """Store how far outboxes are delivered; see `Store.record_delivered`."""
        async with self._outbox.use() as connection:
            await outbox.record_delivered(connection, reports)

    async def report_sources(self, worker_id: UUID, reports: Sequence[SourceReport]) -> None:
        """Store whether source partitions are connected."""
        parameters: dict[str, Any] = {
            "worker_id": worker_id,
            "intervals": Bigints([report.interval_id for report in reports]),
            "connected": Booleans([report.connected for report in reports]),
            "since": Bigints([report.since_us for report in reports]),
            "reasons": Texts([printable(report.why) for report in reports]),
            "attempts": Bigints([report.attempts for report in reports]),
            "addresses": Texts([printable(report.address) for report in reports]),
        }
        async with self._hint.use() as connection:
            await connection.execute(statement("report_sources"), parameters)

    async def source_addresses(self, interval_ids: Sequence[int]) -> Mapping[int, str]:
        """Read where the live owners of source partitions are reached."""
        async with self._hint.use() as connection:
            rows = await all_rows(connection, statement("source_addresses"), {"intervals": Bigints(interval_ids)})
        return {int(row[0]): str(row[1]) for row in rows}

    async def _record_backend(self, connection: Connection) -> None:
        """Record the backend of a new commit connection, and learn the state of its session.

        Other workers can then terminate it when it is frozen, and this worker can when it has lost the connection.
        """
        self._backends.append((await all_rows(connection, statement("this_backend"), {}))[0])
        del self._backends[:-LOST_BACKENDS_MAX]
        if self._worker_id is not None:
            await connection.execute(statement("record_backend"), {"worker_id": self._worker_id})
        await self._committer.runner.learn(connection)


def _ignore_progress() -> None:
    """Do nothing."""


def _channel(graph_id: int) -> str:
    return f"millpy_{graph_id}"
