"""The objects that the parts of one worker share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

from millpy.clock import Clock
from millpy.hosting.failpoints import Failpoints
from millpy.hosting.plan import Plan
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.runtime.archive_pace import ArchivePace
from millpy.runtime.events import EventQueue
from millpy.runtime.guarded_clock import GuardedClock
from millpy.runtime.lease import HeartbeatSender, HeartbeatThread, Lease
from millpy.runtime.lookups import Lookups
from millpy.runtime.observer import Observer, Observers
from millpy.runtime.outbox_drains import OutboxDrains
from millpy.runtime.refused_results import RefusedResults
from millpy.runtime.source_growth import SourceGrowth
from millpy.runtime.source_health import SourceHealth
from millpy.runtime.step_thread import StepThread
from millpy.runtime.turn_budget import TurnBudget
from millpy.runtime.turn_latencies import TurnLatencies
from millpy.store.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The store, plan, limits, clocks and signals that all parts of one worker use.

    Attributes:
        host_clock: the machine's clock; only `clock` reads it.
        only: names of the computations to run; all when empty.
        start: time at which a source without a position begins.
        database: the URL of the database, for sources that read there; empty without one.
        archive_every_s: seconds between two polls of archives that keep up.
        growth: the partitions that feeds have gained.
        clock: the database's time, guarded against steps.
        wake: set when there may be something to do, so that a waiting worker looks.
        budget: bounds of the next turn.
        archive_pace: when the archives take input.
        lookups: the lookup tables, which background tasks read.
        drains: what delivers the messages of sinks.
        sources: the connections of the sources, and whether the database answers.
        thread: the thread for steps that are not quick.
        events: events that wait to be stored for operators.
        refused_results: the result table that the worker waits for, if any.
        latencies: the durations of the turns of the last minute.
    """

    store: Store
    plan: Plan
    worker_id: UUID
    limits: Limits
    host_clock: Clock
    failpoints: Failpoints
    lease: Lease
    rng: random.Random
    only: Sequence[str] = ()
    start: Instant | None = None
    database: str = field(default="", repr=False)
    archive_every_s: float = 0.0
    observer: Observer = field(default_factory=Observers)
    growth: SourceGrowth = field(default_factory=SourceGrowth)
    clock: GuardedClock = field(init=False)
    wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    budget: TurnBudget = field(init=False)
    archive_pace: ArchivePace = field(init=False)
    lookups: Lookups = field(init=False)
    drains: OutboxDrains = field(init=False)
    sources: SourceHealth = field(init=False)
    thread: StepThread = field(init=False, default_factory=StepThread)
    events: EventQueue = field(init=False)
    refused_results: RefusedResults = field(init=False)
    latencies: TurnLatencies = field(init=False, default_factory=TurnLatencies)

    def __post_init__(self) -> None:
        events = EventQueue(self.store, self.graph_id, self.worker_id)
        made = {
            "events": events,
            "clock": GuardedClock(self.host_clock, self.store.now_us, self.limits, events.add_of_worker),
            "budget": TurnBudget(self.limits),
            "archive_pace": ArchivePace(self.plan, self.limits, self.archive_every_s),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)
        tables = (self.store, self.plan, self.worker_id, self.limits, self.clock, events, self.only, self.wake.set)
        object.__setattr__(self, "lookups", Lookups(*tables))
        parts = (self.store, self.plan, self.limits, self.clock, self.rng, self.lease, events, self.wake)
        object.__setattr__(self, "drains", OutboxDrains(*parts))
        health = SourceHealth(self.store, self.worker_id, self.clock, self.host_clock, events)
        object.__setattr__(self, "sources", health)
        tell, table_ids = events.add_of_worker, self.plan.deployment.table_ids
        refused = RefusedResults(table_ids, self.limits, self.clock, self.rng, tell)
        object.__setattr__(self, "refused_results", refused)

    @property
    def graph_id(self) -> int:
        """The id of the deployed graph."""
        return self.plan.deployment.graph_id

    def heartbeats(self, sender: HeartbeatSender) -> HeartbeatThread:
        """Return the thread of this worker's heartbeats, which also watch whether the database answers."""
        usage = partial(self.latencies.usage, self.host_clock.monotonic)
        health = self.sources.database
        return HeartbeatThread(sender, self.worker_id, self.lease, self.limits, self.host_clock, health, usage)
