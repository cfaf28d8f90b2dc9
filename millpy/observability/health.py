"""Liveness and readiness of a worker process.

    live    the event loop answers, and the worker makes progress; if not, restart the process
    ready   there is a worker that may trust its lease; if not, it does no work, but may recover

A lease is trusted while the database answers heartbeats, and a worker exists only when the database is reachable and
migrated and the graph is deployed, so readiness queries nothing. A source without a connection is a detail: another
process could not connect either. Threads of the HTTP server call these checks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from millpy.errors import MillError
from millpy.model.time import describe
from millpy.runtime.observer import TurnTimes
from millpy.runtime.owned_interval import OwnedInterval
from millpy.runtime.source_health import SourcePart
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker

LOOP_ANSWERS_S_MAX = 5.0
PARTITIONS_MAX = 10
"""How many source partitions without a connection are described."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The answer to a probe: whether the process is well, with details."""

    well: bool
    detail: Mapping[str, object] = field(default_factory=dict)


class HealthMonitor:
    """Watches one worker process; an `Observer`.

    Args:
        answers_s: the seconds that its event loop may take to answer.
    """

    def __init__(self, *, answers_s: float = LOOP_ANSWERS_S_MAX) -> None:
        self._answers_s = answers_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._why_not = "starting"

    def waiting(self, error: MillError) -> None:
        """Note why there is no worker: the database does not answer, or is not migrated."""
        self._loop = asyncio.get_running_loop()
        self._why_not = error.message

    def begun(self, worker: Worker) -> None:
        """Watch this worker from now on."""
        self._loop = asyncio.get_running_loop()
        self._worker = worker

    def ended(self) -> None:
        """Note that the worker has left."""
        self._worker, self._why_not = None, "the worker has left"

    def holds(self, intervals: Mapping[int, OwnedInterval], claimed: int) -> None:
        """Do nothing: a worker without intervals stands by, and is ready."""

    def committed(self, turn: Turn, at: TurnTimes) -> None:
        """Do nothing: the lease shows whether the worker makes progress."""

    def failed(self, error: MillError) -> None:
        """Note the error, which is shown once the lease has ended."""
        self._why_not = error.message

    def live(self) -> HealthCheck:
        """Tell whether the process should keep running. Wait for its event loop to answer."""
        worker = self._worker
        if worker is not None and worker.context.lease.is_stuck():
            return HealthCheck(False, {"reason": "the worker makes no progress"})
        if self._loop is not None and not _answers(self._loop, self._answers_s):
            return HealthCheck(False, {"reason": f"the event loop does not answer within {self._answers_s:g} s"})
        return HealthCheck(True)

    def ready(self) -> HealthCheck:
        """Tell whether the worker can do its work now."""
        worker = self._worker
        if worker is None:
            return HealthCheck(False, {"reason": self._why_not})
        known: dict[str, object] = {
            "graph": worker.context.plan.deployment.name,
            "worker": str(worker.context.worker_id),
            "intervals": len(worker.owned.intervals),
        }
        if away := worker.context.sources.disconnected():
            known["disconnected"] = [_described(part) for part in away[:PARTITIONS_MAX]]
            known["disconnected_partitions"] = len(away)
        if not worker.context.lease.is_trusted():
            database = worker.context.sources.database
            why = self._why_not if database.answers else database.why
            return HealthCheck(False, {"reason": f"its lease has ended: {why}", **known})
        return HealthCheck(True, known)


def _described(part: SourcePart) -> dict[str, object]:
    connection = part.connection
    return {
        "stream": part.stream,
        "partition": part.partition,
        "since": describe(connection.since_us),
        "why": connection.why,
        "attempts": connection.attempts,
    }


def _answers(loop: asyncio.AbstractEventLoop, within_s: float) -> bool:
    """Tell whether an event loop runs a callback within this time."""
    answered = threading.Event()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # the loop is closed: the process is about to end
        return True
    return answered.wait(within_s)
