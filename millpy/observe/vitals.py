"""Whether a worker process is alive, and whether it is ready.

    live    the event loop answers, and the worker's loop comes round (else: start the process again)
    ready   there is a worker with a lease that it may trust (else: nothing to worry about yet, but it does no work)

A lease is trusted while the database answers heartbeats, and a worker is there only when the database is reached, its
schema is ours and the graph is deployed; so readiness asks nobody. Asked from threads of the HTTP server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from millpy.errors import MillError
from millpy.runtime.observer import Moments
from millpy.runtime.soft_state import Owned
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker

LOOP_ANSWERS_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to a probe: well or not, and what is known besides."""

    well: bool
    detail: Mapping[str, object] = field(default_factory=dict)


class Vitals:
    """Watches one worker process; an `Observer`.

    Args:
        answers_s: how long its event loop may take to answer.
    """

    def __init__(self, *, answers_s: float = LOOP_ANSWERS_S_MAX) -> None:
        self._answers_s = answers_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._why_not = "starting"

    def waiting(self, error: MillError) -> None:
        """The database does not answer, or is not migrated."""
        self._loop = asyncio.get_running_loop()
        self._why_not = error.message

    def begun(self, worker: Worker) -> None:
        """There is a worker."""
        self._loop = asyncio.get_running_loop()
        self._worker = worker

    def ended(self) -> None:
        """It has left."""
        self._worker, self._why_not = None, "the worker has left"

    def holds(self, intervals: Mapping[int, Owned], claimed: int) -> None:
        """Ready or not does not depend on it: a worker that owns nothing stands by."""

    def committed(self, turn: Turn, at: Moments) -> None:
        """The lease says enough."""

    def failed(self, error: MillError) -> None:
        """What is failing shows when the lease ends."""
        self._why_not = error.message

    def live(self) -> Verdict:
        """Whether the process is worth keeping. Waits for its event loop."""
        worker = self._worker
        if worker is not None and worker.lease.is_stuck():
            return Verdict(False, {"reason": "the worker makes no progress"})
        if self._loop is not None and not _answers(self._loop, self._answers_s):
            return Verdict(False, {"reason": f"the event loop does not answer within {self._answers_s:g} s"})
        return Verdict(True)

    def ready(self) -> Verdict:
        """Whether it can do its work now."""
        worker = self._worker
        if worker is None:
            return Verdict(False, {"reason": self._why_not})
        known: dict[str, object] = {
            "graph": worker.plan.deployment.name,
            "worker": str(worker.worker_id),
            "intervals": len(worker.holdings.intervals),
        }
        if not worker.lease.is_trusted():
            return Verdict(False, {"reason": f"its lease has ended: {self._why_not}", **known})
        return Verdict(True, known)


def _answers(loop: asyncio.AbstractEventLoop, within_s: float) -> bool:
    answered = threading.Event()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # it is closed: the process is about to end
        return True
    return answered.wait(within_s)
