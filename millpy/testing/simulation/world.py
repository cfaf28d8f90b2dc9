"""A world: one database, one broker, machines that come and go, and a schedule of faults.

Each step is one callback of one machine, or an advance of the clock. The faults of a step happen before it, and the
checkers run after it. When the schedule is over the faults end, and the graph must finish.
Some worlds have a second generation of the graph beside the first, and users who switch: then both must finish.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from millpy.errors import CorruptionError, CursorGapError, PaneOrderError, TransientError, WatermarkRegressedError
from millpy.hosting.failpoints import Failpoint
from millpy.limits import Limits
from millpy.model.deployment import Deployment, GraphSpec, permanent_name
from millpy.runtime.guarded_clock import UNSET_US
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryStore
from millpy.testing.clock import ManualClock, SkewedClock
from millpy.testing.simulation import faults, repairs
from millpy.testing.simulation.broker import BROKER, MORE, Broker, names_of
from millpy.testing.simulation.checkers import Evidence, Violation
from millpy.testing.simulation.deployments import ObservedDatabase
from millpy.testing.simulation.ending import finished
from millpy.testing.simulation.generation import Environment, SimulatedGeneration
from millpy.testing.simulation.graphs import SITES, TROUBLE, Shape, Trouble
from millpy.testing.simulation.history import RecordingStore
from millpy.testing.simulation.input import feed
from millpy.testing.simulation.lookup_table import put_table
from millpy.testing.simulation.loop import Lane, SimulatedLoop, SimulatedProcess
from millpy.testing.simulation.machine import Machine, Program
from millpy.testing.simulation.names import Names
from millpy.testing.simulation.other_side import SIDE, OtherSide
from millpy.testing.simulation.schedule import Schedule, ScheduledFault

STEPS_MAX = 40_000
LEASE_S = 0.8
PACE_S = 0.06
"""One step in ten takes up to this time, so that a lease is some hundred steps of a busy world."""
SILENCE_STEPS = 200
"""If the clock may move the watermark, publishers pause after this many steps, for as many."""
PATIENCE_S = 120.0
"""The simulated time in which a graph must finish after the last fault."""
CLOCKED_START_US = 1_800_000_000_000_000
"""Where the clocks start if they step far. It is after `UNSET_US`, so guards trust the hosts' clocks as witnesses."""
FOLLOWED_US = 2_000_000
WITNESSED_US = 4_500_000
"""Two clocks that differ by this much may agree, by a followed step and drift."""
RELEASED_STEPS = 50
"""At the end parked keys are released after each of this many steps."""
COMMANDS = ("switch", "change")
"""What users do when a machine reaches a point."""
INVARIANT_OF = {PaneOrderError: "I7", WatermarkRegressedError: "I5", CursorGapError: "I3"}


@dataclass(slots=True)
class RunOutcome:
    """The findings of a run.

    Attributes:
        faults: kind -> the number of faults that took effect.
        points: point -> the number of machines that died or froze there.
        trace: one line an event; two runs of one schedule have equal traces.
    """

    schedule: Schedule
    steps: int = 0
    commits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class World:
    """One run of a schedule.

    Args:
        schedule: what happens in the run.
        path: the path of the file, if that is the source.
        store_type, worker_type: the engine of the machines; canaries give broken ones.
    """

    def __init__(
        self,
        schedule: Schedule,
        path: Path,
        store_type: type[MemoryStore] = MemoryStore,
        worker_type: type[Worker] = Worker,
    ) -> None:
        self.schedule = schedule
        self.rng = random.Random(~schedule.seed)
        self.clock = ManualClock(CLOCKED_START_US) if schedule.clocks else ManualClock()
        self.server = SkewedClock(self.clock)
        self.loop = SimulatedLoop(self.clock, self.rng)
        self.database = ObservedDatabase(self.server, self.check, self._changed)
        numbers = (1, 2) if schedule.second is not None else (1,)
        self.brokers = {
            generation: {
                name: Broker(self.rng, schedule.shape.feed == "log") for name in names_of(schedule.shape.partitions)
            }
            for generation in numbers
        }
        self.more = Broker(self.rng, schedule.shape.feed == "log")
        self.trouble = Trouble()
        self.other_side = OtherSide(random.Random(f"other side of {schedule.seed}"))
        self.machines: list[Machine] = []
        self._machine_of: dict[SimulatedProcess, Machine] = {}
        self.requested: set[int] = set()
        self.rewritten: list[tuple[str, tuple[Any, ...]]] = []
        self.armed: list[tuple[Failpoint, str, float]] = []
        self.outcome = RunOutcome(schedule)
        self.limits = limits(schedule)
        self.step = 0
        self.trace: list[str] = []
        self._count = 0
        self._worker_type = worker_type
        self.store_type = store_type
        self._store_type: type[RecordingStore] = type("Store", (RecordingStore, store_type), {})
        shape = schedule.shape
        self.feed = feed(
            self.rng,
            schedule.records,
            self.clock.now_us(),
            shape,
            ahead=schedule.ahead,
        )
        self.content = 0  # of the table of the lookup
        if schedule.seed % 4:  # else the table is made later, and its step waits
            put_table(self.database, 0, SITES)
        self._published = 0
        if shape.feed == "file":
            path.write_bytes(b"".join(payload + b"\n" for payload in self.feed.payloads))
        self._environment = Environment(self.database, path, self.feed, Names(self.database), self.trace)
        self.generations: dict[int, SimulatedGeneration] = {}
        self.commands: dict[SimulatedProcess, asyncio.Task[Any]] = {}
        self._last = max((fault.step for fault in schedule.faults), default=0) + 60
        self._healed_at: float | None = None
        self._ahead_us = self._behind_us = self._sure_us = 0
        self._stepped_at = 0.0
        self._far_since: dict[int, float] = {}
        self._far_us = 0

    def _begin(self, generation: int, shape: Shape, workers: int) -> None:
        """Deploy a generation, and start its machines."""
        simulated = SimulatedGeneration(self._environment, generation, shape, workers, self.brokers[generation])
        self.generations[generation] = simulated
        evidence = simulated.evidence
        evidence.ahead, evidence.clocked = self.schedule.ahead, self.schedule.clocks
        evidence.quiet_at = dict.fromkeys(evidence.sources, self.clock.monotonic())  # until more is known
        self._set_times(evidence)
        for _ in range(workers):
            self.spawn(simulated)

    def run(self) -> RunOutcome:
        """Run to the end, or to the first violation."""
        return copy_context().run(self._run)

    def _run(self) -> RunOutcome:
        BROKER.set(
            {permanent_name(name, n): broker for n, named in self.brokers.items() for name, broker in named.items()}
            | {permanent_name(MORE, 1): self.more}
        )
        TROUBLE.set(self.trouble)
        SIDE.set(self.other_side)
        with self.loop.running():
            self._begin(1, self.schedule.shape, self.schedule.workers)
            coming = list(self.schedule.faults)
            while not self.outcome.violations:
                self._before_step(coming)
                lane = self.loop.turn()
                self.check(lane)
                if self._is_over():
                    for simulated in self.generations.values():
                        self.outcome.violations.extend(finished(simulated.evidence))
                    break
                self.step += 1
        self.outcome.steps = self.step
        self.outcome.commits = sum(header.bundle for header in self.database.headers.values())
        self.outcome.trace = self.trace
        return self.outcome

    def _before_step(self, coming: list[ScheduledFault]) -> None:
        if self.rng.random() < 0.1:
            self.clock.advance(self.rng.random() * PACE_S)
        second = self.schedule.second
        if second is not None and 2 not in self.generations and second.step <= self.step:
            self.say("generation 2 is deployed")
            self._begin(2, replace(self.schedule.shape, lateness_us=second.lateness_us), second.workers)
        while coming and coming[0].step <= self.step:
            fault = coming.pop(0)
            self.check()  # up to the present commits
            if faults.inject(self, fault):
                self.count_fault(fault.kind)
        self._believe()  # a worker may read a clock in the step in which the clock steps
        self._publish()
        for simulated in self.generations.values():
            while simulated.spawn_at and simulated.spawn_at[0] <= self.step:
                simulated.spawn_at.pop(0)
                machines = simulated.machines(self.machines)
                if len(machines) < simulated.workers or not simulated.is_covered(self.machines):
                    self.spawn(simulated)
        if self.step >= self._last and self._healed_at is None and not coming:
            faults.heal(self)
            put_table(self.database, self.content, SITES)
            self._healed_at = self.clock.monotonic()
            for broker in self.sessions():
                broker.end()
        if self._healed_at is not None and self.step % RELEASED_STEPS == 0:
            self.database.faults.land_lost_commits()  # a fault that was in progress when the faults ended
            faults.release_all(self)
            self.check()  # up to the present commits
            repairs.repair_at_the_end(self)

    def _publish(self) -> None:
        """Publish the readings that are due at this step, in bursts."""
        payloads = self.feed.payloads
        shape = self.schedule.shape
        if shape.feed == "file" or self._published >= len(payloads):
            return
        due = len(payloads) * self.step // max(1, self._last - 20)
        last = self.step >= self._last - 20
        silent = shape.idle and self.step // SILENCE_STEPS % 2 == 1
        if due > self._published and (last or (self.step % 16 == 0 and not silent)):
            for number, partition in enumerate(names_of(shape.partitions)):
                burst = [place for place in range(self._published, due) if self.feed.partitions[place] == number]
                if burst:
                    now_us = self.generations[1].evidence.latest_us
                    stamped = [self.feed.stamped(payloads[place], now_us) for place in burst]
                    for sessions in self.brokers.values():
                        sessions[partition].publish(stamped)
                    self.more.publish([self.feed.more[payload] for payload in stamped if payload in self.feed.more])
            self._published = min(due, len(payloads))

    def check(self, lane: Lane | None = None) -> None:
        """Run the checkers on everything since the last call."""
        self._believe()
        before = len(self.trace)
        for simulated in self.generations.values():
            self._set_times(simulated.evidence)
            if violations := simulated.evidence.check():
                self.outcome.violations.extend(violations)
        if len(self.generations) > 1:
            self.outcome.violations.extend(Violation("names", what) for what in self._environment.names.check())
        for line in range(before, len(self.trace)):
            who = "nobody" if lane is None else lane.name
            self.trace[line] = f"{self.step} {self.clock.monotonic():.6f} {who} {self.trace[line]}"
        if lane is not None:
            if lane.process in self.commands:
                self._check_command(lane.process)
            machine = self._machine_of.get(lane.process)
            if machine is not None and (lane.process.dead or (machine.ended is not None and machine.ended.done())):
                self.ended(machine)

    def _set_times(self, evidence: Evidence) -> None:
        """Tell the checkers the time, and which times workers may believe."""
        evidence.latest_us = self.clock.now_us() + self._sure_us
        evidence.arrived_us = self.clock.now_us() + self._ahead_us
        evidence.earliest_us = self.clock.now_us() + self._behind_us
        evidence.now_s = self.clock.monotonic()
        workers = [machine.worker for machine in self.machines if machine.process.frozen]
        evidence.frozen_at |= {worker.context.worker_id: evidence.now_s for worker in workers if worker is not None}

    def _believe(self) -> None:
        """Update which times workers may believe: that of a far step only once it lasts or a host's clock agrees."""
        off_us = self._off_us(self.server.now_us())
        if self.schedule.clocks:
            for machine in self.machines:
                if machine.worker is None or machine.worker.context.clock._guard._base_us is None:
                    self._believe_at_start(machine.clock.now_us(), off_us)
        if abs(self._far_us) > FOLLOWED_US:
            lasted_s = self.clock.monotonic() - self._stepped_at
            settled = lasted_s > 0.8 * self.limits.clock_settle_s
            walls = [self._off_us(machine.clock.now_us()) for machine in self.machines]
            if not settled and not any(abs(wall - off_us) < WITNESSED_US for wall in walls):
                self._creep(off_us)
                return
        self._ahead_us, self._behind_us = max(self._ahead_us, off_us), min(self._behind_us, off_us)
        self._sure_us = max(self._sure_us, off_us)

    def _creep(self, off_us: int) -> None:
        """Follow small changes of a clock that has stepped far, because a worker that started after the step does."""
        if abs(off_us - self._ahead_us) < FOLLOWED_US:
            self._ahead_us = max(self._ahead_us, off_us)
        if abs(off_us - self._sure_us) < FOLLOWED_US:
            self._sure_us = max(self._sure_us, off_us)
        if abs(off_us - self._behind_us) < FOLLOWED_US:
            self._behind_us = min(self._behind_us, off_us)

    def _believe_at_start(self, wall_us: int, off_us: int) -> None:
        """Let a starting worker believe the server's time, or doubt it if its host's clock is set and behind."""
        least = off_us if wall_us < UNSET_US else min(off_us, self._off_us(wall_us))
        self._ahead_us, self._behind_us = max(self._ahead_us, off_us), min(self._behind_us, least)
        self._sure_us = max(self._sure_us, least)

    def _off_us(self, shown_us: int) -> int:
        """Return how far a clock is ahead of the true time."""
        return shown_us - self.clock.now_us()

    def step_server(self, seconds: float) -> None:
        """Step the server's clock.

        A far step lasts on through one that is followed, and through one that is undone: a worker may see neither.
        """
        self.server.jump(seconds)
        step_us = round(seconds * 1e6)
        self._far_us += step_us
        if abs(step_us) > FOLLOWED_US:
            self._stepped_at = self._far_since.setdefault(self._far_us, self.clock.monotonic())

    def ended(self, machine: Machine) -> None:
        """Remove a machine that has died or left; report an error, and schedule another machine."""
        self.machines.remove(machine)
        del self._machine_of[machine.process]
        if not machine.process.dead:
            assert machine.ended is not None
            error = None if machine.ended.cancelled() else machine.ended.exception()
            self.say(f"{machine.name} ended: {error!r}")
            if error is not None and not isinstance(error, TransientError):
                name = next((n for kind, n in INVARIANT_OF.items() if isinstance(error, kind)), "engine")
                if isinstance(error, CorruptionError) and name == "engine":
                    name = "I2"
                self.outcome.violations.append(Violation(name, f"{machine.name} stopped: {error!r}"))
                self.error = error
            self.loop.reap(machine.process)
        simulated = self.generations[machine.generation]
        # What was requested between the last look of a worker and its end, an operator starts another one for.
        if not simulated.has_finished() or self.database.requests.any_of([*self.database.headers]):
            simulated.spawn_at.append(self.step + 3 + int(self.rng.random() * 40))
            simulated.spawn_at.sort()

    def _changed(self, spec: GraphSpec, deployment: Deployment, reset: Collection[str]) -> None:
        """Let everybody know that a graph was changed in place."""
        what = "; ".join([*deployment.changes, *(f"{name} begins anew" for name in reset)])
        self.say(f"version {deployment.version} is deployed: {what}")
        self.count_fault("reset" if reset else "changed")
        simulated = next(s for s in self.generations.values() if s.generation == spec.generation)
        simulated.change(spec, self.more)
        if not simulated.is_covered(self.machines):
            simulated.spawn_at.insert(0, self.step)

    def run_command(self, work: Callable[[], Coroutine[Any, Any, None]]) -> SimulatedProcess:
        """Run a user's command in its own process."""
        self._count += 1
        process = SimulatedProcess(f"command{self._count}")
        process.patient = True
        self.commands[process] = self.loop.start(process, process.main, work)
        return process

    def end_command(self, process: SimulatedProcess) -> None:
        """End a user's process, if it still runs."""
        if self.commands.pop(process, None) is not None:
            process.doomed = True
            self.loop.reap(process)

    def _check_command(self, process: SimulatedProcess) -> None:
        """Check how a user's process ended, if it has; a TransientError is no violation."""
        task = self.commands[process]
        if not task.done():
            return
        del self.commands[process]
        if (error := task.exception()) is not None and not isinstance(error, TransientError):
            self.outcome.violations.append(Violation("engine", f"{process.main.name} failed: {error!r}"))
        self.loop.reap(process)

    def _is_over(self) -> bool:
        awaited = self.commands or (self.schedule.second is not None and 2 not in self.generations)
        if not self.machines and not awaited and all(each.has_finished() for each in self.generations.values()):
            return True
        assert awaited or self.loop.processes or any(simulated.spawn_at for simulated in self.generations.values())
        waited = 0.0 if self._healed_at is None else self.clock.monotonic() - self._healed_at
        if self.step >= STEPS_MAX or waited > PATIENCE_S:
            what = f"not finished {waited:.0f} s after the last fault, at step {self.step}"
            self.outcome.violations.append(Violation("liveness", what))
        return False

    # The interface of faults.

    @property
    def is_healed(self) -> bool:
        """Whether the faults are over."""
        return self._healed_at is not None

    def sessions(self) -> list[Broker]:
        """Return the sessions of all generations at all brokers."""
        return [*(broker for named in self.brokers.values() for broker in named.values()), self.more]

    def spawn(self, simulated: SimulatedGeneration) -> None:
        """Start a machine."""
        self._count += 1
        clock = SkewedClock(self.clock, 1 + (self.rng.random() - 0.5) * 0.01, int((self.rng.random() - 0.5) * 4e6))

        def connect() -> RecordingStore:
            store = self._store_type(self.database)
            store.history = simulated.history
            store.worker = UUID(int=self.rng.getrandbits(128), version=4)
            return store

        only: tuple[str, ...] = ()
        if self.schedule.placed and simulated.workers > 1:
            names = simulated.computations
            held = {name for machine in simulated.machines(self.machines) for name in machine.only}
            only = ("readings", *names[3:]) if "readings" not in held else tuple(names[1:])
            only = only if len(names) > 1 else ()
        program = Program(lambda: simulated.graph, simulated.generation, self._worker_type, only)
        machine = Machine(f"w{self._count}", program, self.limits, clock, connect, self.rng, self._reached)
        self.machines.append(machine)
        self._machine_of[machine.process] = machine
        self.say(f"{machine.name} starts")
        machine.ended = self.loop.start(machine.process, machine.process.main, machine.live)

    def say(self, what: str) -> None:
        """Write a line of the trace."""
        self.trace.append(what)

    def count_fault(self, kind: str) -> None:
        """Count a fault that took effect."""
        self.outcome.faults[kind] += 1

    def _reached(self, machine: Machine, point: Failpoint) -> str | None:
        if self.rewritten and point is Failpoint.BEFORE_COMMIT:
            repairs.correct_meanwhile(self, machine)
        for place, (wanted, action, size) in enumerate(self.armed):
            if wanted is point and not machine.process.doomed:
                del self.armed[place]
                self.count_fault(f"{action}_at")
                self.say(f"{machine.name}: {action} at {point.value}")
                if action == "switch":
                    faults.switch(self, size * 97 % 1, size)
                if action == "change":
                    faults.change(self, size * 97 % 1, size)
                if action == "freeze" or (action in COMMANDS and size < 0.6):
                    faults.freeze(self, machine, size)
                if action not in COMMANDS:
                    self.outcome.points[point.value] += 1
                return action
        return None


def limits(schedule: Schedule) -> Limits:
    """Return limits under which all background work is due often."""
    few = 600 if schedule.few_cells else 256_000_000
    return Limits(
        lease_ttl_s=LEASE_S,
        bundle_records_max=schedule.bundle_records,
        sites_max=schedule.shape.sites_max,
        progress_every_s=0.15,
        poll_s_min=0.01,
        poll_s_max=0.25,
        fold_every_s=0.8,
        state_cache_bytes_max=few,
        closed_windows_bytes_max=1 if schedule.few_cells else 256_000_000,
        unfired_windows_bytes_max=1 if schedule.few_cells else 256_000_000,
        state_preload_rows_max=2 if schedule.few_cells else 50_000,
        epoch_s=0.8,
        retry_s_min=0.02,
        retry_s_max=0.5,
        drain_grace_s=1.0,
        clock_agree_s=1.0 if schedule.clocks else 60.0,
        clock_settle_s=4.0 if schedule.clocks else 3_600.0,
    )
