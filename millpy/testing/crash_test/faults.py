"""Carries out the faults of a plan, and measures how long the system takes to recover from each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpy.clock import Clock
from millpy.embedded import EmbeddedBroker
from millpy.errors import MillError
from millpy.testing.crash_test.databases import DatabaseServer
from millpy.testing.crash_test.observer import Watch
from millpy.testing.crash_test.options import FaultKind
from millpy.testing.crash_test.plan import NetworkFault, PlannedFault, likely_s, pause_s
from millpy.testing.crash_test.processes import WorkerProcesses
from millpy.testing.proxy import CommitFault, PostgresProxy

LOOK_EVERY_S = 0.02
PATIENCE_S = 60.0
"""A system that has not recovered after this time counts as stuck."""
MARGIN_S = 2.0
"""Feeding lasts this much longer than the faults, so that the last recovery has work to do."""
SLOWNESS_MAX = 10.0
COMMIT_S_MAX = 5.0
"""The longest wait of a fault for the next commit of a worker."""
AT_COMMIT = {
    NetworkFault.SWALLOW: CommitFault.SWALLOW,
    NetworkFault.LATE_COMMIT: CommitFault.LATE_COMMIT,
    NetworkFault.LATE_PIPELINE: CommitFault.LATE_PIPELINE,
    NetworkFault.CUT_COMMIT: CommitFault.CUT_COMMIT,
}


class StuckError(MillError):
    """The graph did not continue after a fault, or a worker ended by itself."""


@dataclass(slots=True)
class InjectedFault:
    """A fault that happened; times are monotonic seconds.

    Attributes:
        what: the description for the report.
        slot: the worker that it struck, None for all.
        owned: the number of intervals of that worker.
        fed: the number of records fed before it struck.
        over: when the fault itself ended (thawed, restarted, let through).
        recovered: when all intervals were owned again and `fed` records were committed; None if never.
    """

    number: int
    kind: FaultKind
    what: str
    at: float
    fed: int
    slot: int | None = None
    owned: int = 0
    over: float | None = None
    recovered: float | None = None
    lost_pid: int | None = None


@dataclass(frozen=True, slots=True)
class FaultTargets:
    """The parts of a running system that faults strike.

    Attributes:
        fleet: the workers.
        server: the database server.
        url: the database.
        proxies: one between each worker and the database; empty without network faults.
        broker: feeds MQTT sources; None without broker faults.
    """

    fleet: WorkerProcesses
    server: DatabaseServer
    url: str
    proxies: Sequence[PostgresProxy] = ()
    broker: EmbeddedBroker | None = None


class FaultInjector:
    """Carries out faults, one after the other.

    Args:
        targets: the parts to strike.
        watch: observes the database.
        clock: times faults and recoveries.
        lease_s: the lease of the workers.
        tick: called in every wait; raises when the run has failed.
        tell: called when a fault strikes, and when the system has recovered from it.
    """

    def __init__(
        self,
        targets: FaultTargets,
        watch: Watch,
        clock: Clock,
        *,
        lease_s: float,
        tick: Callable[[], None],
        report: Callable[[InjectedFault], None],
    ) -> None:
        self._fleet, self._server, self._url = targets.fleet, targets.server, targets.url
        self._proxies, self._broker = targets.proxies, targets.broker
        self._watch = watch
        self._clock = clock
        self._lease_s = lease_s
        self._tick = tick
        self._report = report
        self._pause = threading.Event()  # never set: its `wait` sleeps
        self._open: list[InjectedFault] = []
        self._left: Sequence[PlannedFault] = ()
        self._began = self._expected_s = 0.0
        self.struck: list[InjectedFault] = []

    def remaining_s(self) -> float:
        """Estimate how long the coming faults take, by how long the past ones took; 0 when all are over."""
        if not self.is_striking:
            return 0.0
        likely = sum(likely_s(fault, self._lease_s) for fault in self._left)
        slowness = (self._clock.monotonic() - self._began) / self._expected_s if self._expected_s else 1.0
        return likely * min(max(slowness, 1.0), SLOWNESS_MAX) + MARGIN_S

    def strike_all(self, plan: Sequence[PlannedFault]) -> None:
        """Carry out the plan; return when the system has recovered from the last fault.

        Raises:
            StuckError: the system does not recover.
        """
        self._began = self._clock.monotonic()
        for place, fault in enumerate(plan):
            self._left = plan[place:]
            self._expected_s = sum(likely_s(before, self._lease_s) for before in plan[:place])
            if not fault.at_once:
                self._await_recovery()
            self.wait(pause_s(fault, self._lease_s))
            self._strike(fault)
        self._left = ()
        self._await_recovery()

    @property
    def is_striking(self) -> bool:
        """Whether there are faults to come, or to recover from."""
        return bool(self._left or self._open)

    def wait(self, seconds: float) -> None:
        """Wait; meanwhile note recoveries and call `tick`."""
        until = self._clock.monotonic() + seconds
        while (left := until - self._clock.monotonic()) > 0:
            self._look_on(left)

    def _wait_until(self, condition: Callable[[], bool], within_s: float) -> bool:
        until = self._clock.monotonic() + within_s
        while not condition():
            if self._clock.monotonic() > until:
                return False
            self._look_on(LOOK_EVERY_S)
        return True

    def _look_on(self, seconds: float) -> None:
        self._pause.wait(min(seconds, LOOK_EVERY_S))
        self._note_recoveries()
        self._tick()

    def _await_recovery(self) -> None:
        if not self._wait_until(lambda: not self._open, PATIENCE_S):
            fault = self._open[0]
            raise StuckError(f"fault {fault.number} ({fault.what}) was not recovered from within {PATIENCE_S:.0f} s")

    def _note_recoveries(self) -> None:
        for fault in list(self._open):
            if fault.over is not None and self._watch.recovered(fault.at, fault.fed, fault.lost_pid):
                fault.recovered = self._clock.monotonic()
                self._open.remove(fault)
                self._report(fault)

    def _strike(self, fault: PlannedFault) -> None:
        strikes = {
            FaultKind.KILL: self._kill,
            FaultKind.FREEZE: self._freeze,
            FaultKind.DB: self._database,
            FaultKind.NETWORK: self._network,
            FaultKind.BROKER: self._crash_broker,
        }
        strikes[fault.kind](fault)

    def _begin(self, fault: PlannedFault, what: str, slot: int | None = None) -> InjectedFault:
        struck = InjectedFault(len(self.struck) + 1, fault.kind, what, self._clock.monotonic(), self._watch.fed, slot)
        if slot is not None:
            struck.owned = len(self._watch.owned_by(self._fleet.record(slot).pid))
        self.struck.append(struck)
        self._open.append(struck)
        self._report(struck)
        return struck

    def _victim(self, fault: PlannedFault) -> int:
        """Choose a live worker, preferably one that owns intervals."""
        self._wait_until(lambda: bool(self._fleet.alive()), PATIENCE_S)
        alive = self._fleet.alive()
        busy = [slot for slot in alive if self._watch.owned_by(self._fleet.record(slot).pid)] or alive
        return busy[int(fault.victim * len(busy))]

    def _kill(self, fault: PlannedFault) -> None:
        slot = self._victim(fault)
        struck = self._begin(fault, f"SIGKILL of worker {slot + 1}", slot)
        struck.lost_pid = self._fleet.record(slot).pid
        self._fleet.kill(slot)
        self.wait(fault.length * self._lease_s / 2)
        self._fleet.start(slot)
        struck.over = self._clock.monotonic()

    def _freeze(self, fault: PlannedFault) -> None:
        """Freeze a worker past its lease, until others own its intervals, and a little longer."""
        slot = self._victim(fault)
        struck = self._begin(fault, f"worker {slot + 1} frozen", slot)
        pid = self._fleet.record(slot).pid
        self._fleet.freeze(slot)
        if len(self._fleet.alive()) > 1:
            self._wait_until(lambda: not self._watch.owned_by(pid), 3 * self._lease_s)
        else:
            self.wait(self._lease_s)
        self.wait(fault.length * self._lease_s)
        self._fleet.thaw(slot)
        struck.over = self._clock.monotonic()

    def _network(self, fault: PlannedFault) -> None:
        assert fault.network is not None
        slot = self._victim(fault)
        proxy = self._proxies[slot]
        struck = self._begin(fault, f"{fault.network}, worker {slot + 1}", slot)
        if fault.network is NetworkFault.CUT:
            proxy.cut()
        elif fault.network is NetworkFault.STALL:
            proxy.stall(True)
            self.wait(fault.length * 2 * self._lease_s)
            proxy.stall(False)
        else:
            before, proxy.delay_s = proxy.struck, fault.length * self._lease_s
            proxy.arm(AT_COMMIT[fault.network])
            if not self._wait_until(lambda: proxy.struck > before, COMMIT_S_MAX) and proxy.take_fault() is not None:
                struck.what += " (no commit came)"
        struck.over = self._clock.monotonic()

    def _crash_broker(self, fault: PlannedFault) -> None:
        assert self._broker is not None
        struck = self._begin(fault, "SIGKILL of the MQTT broker")
        self._broker.kill()
        self.wait(fault.length * self._lease_s)
        self._broker.start()
        struck.over = self._clock.monotonic()

    def _database(self, fault: PlannedFault) -> None:
        struck = self._begin(fault, "database")
        struck.what = self._server.strike(self._url)
        try:
            self.wait(fault.length * self._lease_s)
        finally:
            self._server.restore()
        struck.over = self._clock.monotonic()
