"""PostgresStore: `Store` on PostgreSQL, which is the only authority.

Lanes (see `connection.py`): commit, poll (and state on demand), admin (ownership and reading after a claim), fold,
hint and listen. Each is one connection, used by one task at a time; the commit lane is the backend that the worker
records, so that others can end its frozen transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any
from uuid import UUID

import msgspec
import psycopg

from millpy.clock import fresh_identity
from millpy.errors import NotMigratedError
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant
from millpy.model.deployment import Deployment, GraphSpec, Upgrade
from millpy.model.time import Instant
from millpy.model.versions import Change
from millpy.store.postgres import deploy as deploying
from millpy.store.postgres import folding, ownership, polling, reading, requests, retention
from millpy.store.postgres import generations as generating
from millpy.store.postgres.arrays import Bigints, Jsonbs, Texts
from millpy.store.postgres.commit import Committer
from millpy.store.postgres.connection import Connection, ConnectionSettings, Lane, Outages, all_rows
from millpy.store.postgres.errors import is_queue_full, translate
from millpy.store.postgres.results import ResultTable
from millpy.store.postgres.statements import statement
from millpy.store.protocol import (
    Asked,
    Backlog,
    CommitProbe,
    Event,
    Opened,
    Ownership,
    Polled,
    SourceState,
    Want,
    WorkerInfo,
)
from millpy.store.revision import HEAD, newer_than_we_are

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
        """Take where it is; `progressed` is called while something moves that a turn or a takeover waits for."""
        if settings is None:
            settings = ConnectionSettings.under(limits or Limits())
        self._identity = fresh_identity().hex
        self._queue_full = False
        self._progressed = progressed or _nobody
        self._worker_id: UUID | None = None
        self._backends: list[ownership.Backend] = []
        self._tables: dict[int, ResultTable] = {}
        self._states = reading.StateReader()
        outages = self._outages = Outages()
        self._commit = Lane(
            url, "commit", settings, prepare=self._record_backend, outages=outages, progressed=progressed, soft=True
        )
        self._poll = Lane(url, "poll", settings, outages=outages, progressed=progressed, soft=True)
        self._admin = Lane(url, "admin", settings, outages=outages)
        self._fold = Lane(url, "fold", settings, long=True, outages=outages)
        self._hint = Lane(url, "hint", settings, durable=False, outages=outages)
        self._listen = Lane(url, "listen", settings, listens=True, outages=outages)
        self._listening: Connection | None = None
        self._committer = Committer(self._commit, self._tables)

    async def __aenter__(self) -> PostgresStore:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises NotMigratedError when the database is not migrated to this version."""
        try:
            async with self._admin.use_raw() as connection:
                revision = (await all_rows(connection, statement("read_revision"), {}))[0][0]
        except psycopg.errors.UndefinedTable as error:
            raise NotMigratedError("the database is not migrated", hint="run `millpy migrate`") from error
        except psycopg.Error as error:
            raise translate(error) from error
        if revision > HEAD:
            raise newer_than_we_are(revision)
        if revision != HEAD:
            message = f"the database has revision {revision}, and {HEAD} is needed"
            raise NotMigratedError(message, hint="run `millpy migrate`")

    async def close(self) -> None:
        """Give all connections back."""
        for lane in (self._commit, self._poll, self._admin, self._fold, self._hint, self._listen):
            await lane.close()

    async def deploy(
        self,
        spec: GraphSpec,
        *,
        on_purpose: bool = False,
        upgrades: Mapping[str, Upgrade] | None = None,
        back: bool = False,
    ) -> Deployment:
        """Register the graph, find it deployed, or bring its additions in; `upgrades` migrate state, by computation;
        `back` takes away what the deployed graph has more.
        """
        async with self._fold.use() as connection:
            deployment = await deploying.deploy(connection, spec, on_purpose=on_purpose, upgrades=upgrades, back=back)
        for table in spec.tables:
            self._tables[deployment.table_ids[table.name]] = ResultTable.of(deployment.name, table)
        return deployment

    async def compare(
        self, spec: GraphSpec, *, upgrades: Mapping[str, Upgrade] | None = None, back: bool = False
    ) -> tuple[int, Sequence[Change]] | None:
        """The version that is deployed, and what deploying would change; None when the graph is new."""
        async with self._admin.use() as connection:
            return await deploying.compare(connection, spec, upgrades=upgrades, back=back)

    async def generations(self, family: str) -> list[generating.Generation]:
        """All generations of a graph, the oldest first."""
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
    ) -> generating.Switched | None:
        """Make a generation the current one; see `generations.switch`. `dry_run`: do it, and roll it back."""
        async with self._fold.use() as connection, connection.transaction(force_rollback=dry_run):
            await connection.execute(statement("act_as_owner"))
            await deploying.check_rights(
                connection, f"graph {family!r} is not switched", f"switch {family} {generation}"
            )
            return await generating.switch(connection, family, generation, behind_us_max=behind_us_max, rights=rights)

    async def drop(self, name: str, *, dry_run: bool = False) -> generating.Remains:
        """Forget a graph, or one generation of it; see `generations.drop`. `dry_run`: do it, and roll it back."""
        async with self._fold.use() as connection, connection.transaction(force_rollback=dry_run):
            await connection.execute(statement("act_as_owner"))
            await deploying.check_rights(connection, f"graph {name!r} is not dropped", f"drop {name}")
            return await generating.drop(connection, name)

    async def register(self, worker: WorkerInfo, ttl_s: float) -> None:
        """Announce a worker; it owns nothing yet."""
        async with self._admin.use() as connection:
            await self._outages.read_anew(connection)
            await ownership.register(connection, worker, ttl_s)
        self._worker_id = worker.worker_id
        async with self._commit.use() as connection:
            await connection.execute(statement("record_backend"), {"worker_id": worker.worker_id})

    async def heartbeat(self, worker_id: UUID, ttl_s: float) -> bool:
        """Renew the lease; False when it had expired. A worker's thread uses `Heart` instead."""
        async with self._hint.use() as connection:
            cursor = await connection.execute(statement("renew_lease"), {"worker_id": worker_id, "ttl_s": ttl_s})
            return cursor.rowcount == 1

    async def unregister(self, worker_id: UUID) -> None:
        """Forget a worker that has released everything."""
        async with self._admin.use() as connection:
            await connection.execute(statement("forget_worker"), {"worker_id": worker_id})

    async def ownership(self, graph_id: int) -> Ownership:
        """Who lives, who owns what."""
        async with self._admin.use() as connection:
            return await ownership.read_ownership(connection, graph_id)

    async def claim(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Take those of the intervals that no live worker owns."""
        if not interval_ids:
            return []
        async with self._admin.use() as connection:
            return await ownership.claim(connection, worker_id, interval_ids)

    async def release(self, worker_id: UUID, grants: Sequence[Grant]) -> None:
        """Give intervals up."""
        if grants:
            async with self._admin.use() as connection:
                await ownership.release(connection, worker_id, grants)

    async def take_over_from_self(self, worker_id: UUID, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Raise the sequencers of the grants that are still ours; waits for a commit in flight."""
        self._states.forget()
        if not grants:
            return []
        async with self._admin.use() as connection:
            await self._outages.read_anew(connection)
            return await ownership.take_over_from_self(connection, worker_id, grants, self._backends)

    async def read(self, grants: Sequence[Grant], *, state_rows_max: int) -> Sequence[Opened]:
        """Everything an owner needs."""
        if not grants:
            return []
        async with self._admin.use() as connection:
            return await reading.read(connection, grants, state_rows_max, self._progressed)

    async def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """STATE entries of these keys."""
        if not keys:
            return []
        async with self._poll.use() as connection:
            return await self._states.load(connection, grant, keys)

    async def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Runs of this source partition within the horizon, oldest first."""
        async with self._admin.use() as connection:
            return await reading.load_dedupe_runs(connection, grant, self._progressed)

    async def poll(self, wants: Sequence[Want], bytes_max: int) -> Sequence[Polled]:
        """Headers and segments above the cursors."""
        if not wants:
            return []
        async with self._poll.use() as connection:
            return await polling.poll(connection, wants, bytes_max)

    async def asked(self, interval_ids: Sequence[int], *, records_max: int, bytes_max: int) -> Asked:
        """What people ask of these intervals."""
        async with self._admin.use() as connection:
            return await requests.read(connection, interval_ids, records_max, bytes_max)

    async def forget_old(
        self, *, now_us: Instant, set_aside_kept_s: float, settled_kept_s: float, events_kept_s: float
    ) -> int:
        """Remove what is beyond its time; see `Store.forget_old`."""
        async with self._fold.use() as connection:
            return await retention.forget_old(connection, now_us, set_aside_kept_s, settled_kept_s, events_kept_s)

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitProbe | None = None,
        trial: bool = False,
    ) -> None:
        """Commit a turn in one transaction, fenced by all its grants."""
        await self._committer.commit(checkpoints, graph_version, inside, trial)

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Bring this interval's deltas into rows."""
        async with self._fold.use() as connection:
            return await folding.fold(connection, grant, bytes_max, progressed or _nobody)

    async def backlog(self, graph_id: int) -> dict[str, Backlog]:
        """Pending records and bytes per producing computation."""
        async with self._admin.use() as connection:
            rows = await all_rows(connection, statement("read_backlog"), {"graph_id": graph_id})
        return {name: Backlog(records, size) for name, records, size in rows}

    async def compare_sources(self, graph_id: int, own: Sequence[SourceState]) -> Sequence[SourceState]:
        """Say which of one's own sources are quiet; all sources of the graph as they stand."""
        stated: dict[str, Any] = {
            "intervals": Bigints([state.interval_id for state in own]),
            "quiets": Bigints([int(state.quiet) for state in own]),
        }
        async with self._admin.use() as connection:
            await connection.execute(statement("state_sources"), stated)
            rows = await all_rows(connection, statement("read_sources"), {"graph_id": graph_id})
        return [SourceState(interval_id, Instant(watermark), quiet) for interval_id, watermark, quiet in rows]

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Begin new epochs where due and free slots; returns slots freed."""
        async with self._fold.use() as connection:
            freed = await retention.turn_rings(connection, epoch_s=epoch_s, epoch_bytes=epoch_bytes)
        self._committer.forget_slots()
        return freed

    async def finished(self, graph_id: int) -> bool:
        """Whether every interval of the graph has reached the end, and has nothing more to do."""
        async with self._admin.use() as connection:
            ((reached,),) = await all_rows(connection, statement("read_finished"), {"graph_id": graph_id})
        return reached and not any(pending.records for pending in (await self.backlog(graph_id)).values())

    async def now_us(self) -> Instant:
        """The server's clock."""
        async with self._hint.use() as connection:
            return Instant((await all_rows(connection, statement("server_now"), {}))[0][0])

    async def notify(self, graph_id: int) -> None:
        """Hint to others that there is something to read. Where the server's queue is full they find it by polling."""
        async with self._hint.use() as connection:
            try:
                await connection.execute(statement("hint"), {"channel": _channel(graph_id), "sender": self._identity})
            except psycopg.Error as error:
                if not is_queue_full(error):
                    raise
                await connection.execute(statement("read_queue_usage"))
                if not self._queue_full:
                    log.warning("no hints to other workers until a transaction ends, they poll: %s", error)
                self._queue_full = True
            else:
                self._queue_full = False

    async def wait_hint(self, graph_id: int, timeout_s: float) -> bool:
        """Wait for a hint from others; False on time-out."""
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
        """Write events for people."""
        if events:
            parameters: dict[str, Any] = {
                "graph_id": graph_id,
                "kinds": Texts([event.kind for event in events]),
                "details": Jsonbs([msgspec.json.encode(event.detail) for event in events]),
            }
            async with self._hint.use() as connection:
                await connection.execute(statement("append_events"), parameters)

    async def _record_backend(self, connection: Connection) -> None:
        """A new commit connection: others must be able to end it, and we the ones before it."""
        self._backends.append((await all_rows(connection, statement("this_backend"), {}))[0])
        del self._backends[:-LOST_BACKENDS_MAX]
        if self._worker_id is not None:
            await connection.execute(statement("record_backend"), {"worker_id": self._worker_id})


def _nobody() -> None:
    """Nobody waits for progress."""


def _channel(graph_id: int) -> str:
    return f"millpy_{graph_id}"
