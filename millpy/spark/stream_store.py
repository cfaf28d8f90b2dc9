"""The database of a streaming query, in which it is the only worker of its graph's generation.

While Spark computes a generation, workers that start wait, and cannot claim any of it, whether the driver is alive or
not. A driver that starts registers under the name of its query, which ends all earlier grants: what an earlier driver
still sends is refused by the database. `give_to_workers` ends that, once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

from millpy.errors import TransientError, UsageError
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, Grant
from millpy.model.deployment import Deployment
from millpy.model.stage import StoredInterval
from millpy.spark.job import HostedPlan
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import WorkerInfo

T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE_S = 15.0
"""How long the intervals stay a driver's when it is dead; another query must not take them."""
HEARTBEAT_S = LEASE_S / 5
FOLD_BYTES = 64 << 20


class StreamStore:
    """The connections of one driver; they live in the loop of a thread.

    Attributes:
        deployment: the graph as workers run it, with its own sources and with archives.
        grants: interval -> its grant; of all intervals of the deployment.
        ids: interval of the hosted plan -> the same interval of the deployment.
    """

    deployment: Deployment

    def __init__(self, url: str, worker_id: UUID, hosted: HostedPlan) -> None:
        self._hosted = hosted
        self._worker_id = worker_id
        self._store = PostgresStore(url, limits=Limits(lease_ttl_s=LEASE_S))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="millpy-stream-store", daemon=True)
        self._thread.start()
        self._beating: Future[None] | None = None
        self.grants: dict[int, Grant] = {}
        self.ids: dict[int, int] = {}

    def open(self) -> bool:
        """Deploy the graph. Return False if workers compute it already because it was handed over to them.

        Raises:
            TransientError: the database cannot be reached.
        """
        self.run(self._store.open())
        self.deployment = self.run(self._store.deploy(self._hosted.live_graph.spec()))
        ids = {(interval.computation, interval.index): interval.interval_id for interval in self.deployment.intervals}
        self.ids = {
            interval.interval_id: ids[interval.computation, interval.index]
            for interval in self._hosted.plan.deployment.intervals
        }
        return self.run(self._store.read_engine(self.deployment.graph_id)) == "spark"

    def own(self) -> None:
        """Take all intervals, from workers that have not begun as well.

        Raises:
            UsageError: workers or another query compute this generation.
            TransientError: the database cannot be reached.
        """
        known = self.deployment
        if self.run(self._store.read_engine(known.graph_id)) == "workers":
            self.run(self._store.give_to_spark(known))
        info = WorkerInfo(
            self._worker_id, known.graph_id, known.version, host=socket.gethostname(), pid=os.getpid(), engine="spark"
        )
        self.run(self._store.register(info, LEASE_S))
        grants = self.run(self._store.claim(self._worker_id, [interval.interval_id for interval in known.intervals]))
        if len(grants) < len(known.intervals):
            self.run(self._store.release(self._worker_id, grants))
            raise UsageError(
                f"another query writes the tables of {known.name}",
                hint="stop it, or give the graph another generation=",
            )
        self.grants = {grant.interval_id: grant for grant in grants}
        self._beating = asyncio.run_coroutine_threadsafe(self._beat(), self._loop)

    def is_begun(self) -> bool:
        """Tell whether anything of the generation is committed."""
        return self.run(self._store.is_begun(self.deployment.graph_id))

    def read(self) -> list[StoredInterval]:
        """Read what is stored of all intervals, without cells."""
        snapshots = self.run(self._store.read(list(self.grants.values()), state_rows_max=0))
        return [snapshot.recovered for snapshot in snapshots]

    def commit(self, checkpoints: list[Checkpoint]) -> None:
        """Commit a turn.

        Raises:
            StaleSequencerError: another driver has taken the intervals.
            PoisonError: the database refuses a value.
        """
        self.run(self._store.commit(checkpoints, graph_version=self.deployment.version))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call of the store to its end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def fold(self, interval_id: int) -> None:
        """Fold the deltas of an interval into rows, so that its next owner need not."""
        self.run(self._store.fold(self.grants[interval_id], bytes_max=FOLD_BYTES))

    def give_to_workers(self) -> None:
        """Let workers compute the generation from here.

        Raises:
            StaleSequencerError: another driver has taken intervals.
        """
        self.run(self._store.give_to_workers(self.deployment, list(self.grants.values())))

    async def _beat(self) -> None:
        while True:
            with suppress(TransientError):  # the next commit tells whether the intervals are lost
                if not await self._store.heartbeat(self._worker_id, LEASE_S):
                    log.warning("the stream's lease in the database has expired; another query may take its intervals")
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await asyncio.Event().wait()

    def close(self) -> None:
        """Disconnect. The intervals stay the query's until another one takes them."""
        if self._beating is not None:
            self._beating.cancel()
        self.run(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
