"""One run of the graph, from the first record to the last window, with faults or without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from millpy.clock import Clock
from millpy.embedded import EmbeddedBroker
from millpy.errors import SourceUnavailableError
from millpy.graph import Graph
from millpy.testing.crash_test.broker import Publisher, broker_in_memory, injectors_over_broker, without_saving
from millpy.testing.crash_test.compare import Results
from millpy.testing.crash_test.database import Database, url_through_proxy
from millpy.testing.crash_test.databases import DatabaseServer, proxied_address
from millpy.testing.crash_test.faults import FaultInjector, FaultTargets, InjectedFault, StuckError
from millpy.testing.crash_test.feeder import Feeder, write_whole_feed
from millpy.testing.crash_test.inputs import PreparedInput
from millpy.testing.crash_test.observer import Sample, Takeover, Watch
from millpy.testing.crash_test.options import FaultKind
from millpy.testing.crash_test.plan import PlannedFault
from millpy.testing.crash_test.processes import ProcessRecord, WorkerProcesses
from millpy.testing.proxy import PostgresProxy

WORKER = "millpy.testing.crash_test.worker"
LOOK_EVERY_S = 0.05
IDLE_S_MAX = 90.0
"""A graph that commits nothing for this time, and has not finished, counts as stuck."""
UNBOUNDED = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """How a trial runs.

    Attributes:
        name: the name of its database and directory.
        limits: environment variables of the workers that set limits.
        over_s: the seconds over which to feed the input evenly; 0 for all at once.
        plan: the faults; none for a reference.
        rate_max: the most records a second.
        unique: the share of records that are not duplicates, if some go through a broker; None if all go by feed.
    """

    name: str
    workers: int
    lease_s: float
    limits: Mapping[str, str] = field(default_factory=dict)
    over_s: float = 0.0
    plan: Sequence[PlannedFault] = ()
    rate_max: float = UNBOUNDED
    unique: float | None = None


@dataclass(slots=True)
class TrialOutcome:
    """The results and observations of a trial. Times are monotonic seconds.

    Attributes:
        stuck: why it did not finish; empty if it did.
    """

    started: float
    ended: float
    fed: int
    results: Results
    processes: list[ProcessRecord]
    samples: list[Sample]
    takeovers: list[Takeover]
    registered: dict[int, float]
    events: list[tuple[str, int]]
    struck: list[InjectedFault]
    stuck: str = ""

    @property
    def seconds(self) -> float:
        """The time from the first record to the end."""
        return self.ended - self.started


@dataclass(slots=True)
class TrialProgress:
    """The progress of a running trial, for the display."""

    name: str
    total: int
    faults: int
    fed: int = 0
    committed: int = 0
    struck: int = 0
    recovered: int = 0
    alive: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphUnderTest:
    """The graph that trials run, and its input.

    Attributes:
        location: the file of the graph.
        prepared: the input of each source.
    """

    location: str
    graph: Graph
    prepared: Sequence[PreparedInput]


class Trial:
    """One run of a graph.

    Args:
        tested: the graph and its input.
        setting: how to run it.
        server: the database server.
        directory: where the trial makes its own directory.
        clock: times the run.
        show: called often with the progress.
        tell: called when a fault strikes, and when the system has recovered from it.
    """

    def __init__(
        self,
        tested: GraphUnderTest,
        setting: TrialSettings,
        server: DatabaseServer,
        directory: Path,
        clock: Clock,
        *,
        show: Callable[[TrialProgress], None],
        report: Callable[[InjectedFault], None],
    ) -> None:
        self._graph, self._prepared, self._setting = tested.graph, tested.prepared, setting
        self._server, self._clock, self._show = server, clock, show
        self._directory = directory / setting.name
        self._directory.mkdir()
        self._feed = self._directory / "feed"
        self._url = server.prepare(setting.name)
        self._pause = threading.Event()  # never set: its `wait` sleeps
        self._progress = TrialProgress(setting.name, sum(source.total for source in tested.prepared), len(setting.plan))
        environment = {"MILLPY_LEASE_S": str(setting.lease_s), **setting.limits}
        self._stack = ExitStack()
        proxies: list[PostgresProxy] = []
        urls = [self._url] * setting.workers
        if any(fault.kind is FaultKind.NETWORK for fault in setting.plan):
            address = proxied_address(self._url)
            proxies = [self._stack.enter_context(PostgresProxy(*address)) for _ in urls]
            urls = [url_through_proxy(self._url, proxy.port) for proxy in proxies]
        self._fleet = WorkerProcesses(
            [WORKER, tested.location, str(self._feed)], urls, environment, self._directory, clock
        )
        self._watch = Watch(self._url, clock, unique=setting.unique)
        self._broker: EmbeddedBroker | None = None
        if setting.unique is not None:
            self._broker = self._stack.enter_context(broker_in_memory())
        self._injector = FaultInjector(
            FaultTargets(self._fleet, server, self._url, proxies, self._broker),
            self._watch,
            clock,
            lease_s=setting.lease_s,
            tick=self._look,
            report=report,
        )
        self._feeder: Feeder | None = None
        self._publishers: dict[str, Publisher] = {}

    def run(self) -> TrialOutcome:
        """Run the trial until it finishes or is stuck."""
        setting, clock = self._setting, self._clock
        self._prepare_feed()
        self._watch.start()
        stuck, started = "", clock.monotonic()
        try:
            for slot in self._fleet.slots:
                self._fleet.start(slot)
            self._wait_until(self._all_owned)
            for publisher in self._publishers.values():
                publisher.await_subscribers()
            started = clock.monotonic()
            if self._feeder is not None:
                self._feeder.start()
            self._injector.strike_all(setting.plan)
            if self._broker is not None:
                self._stack.enter_context(without_saving(self._broker))
            self._wait_until(self._fleet.finished)
        except (StuckError, SourceUnavailableError) as error:
            stuck = error.message
        finally:
            ended = clock.monotonic()
            if self._feeder is not None:
                self._feeder.stop()
            self._fleet.stop()
            self._watch.stop()
            self._stack.close()
        return self._outcome(started, ended, stuck)

    def _prepare_feed(self) -> None:
        setting, clock = self._setting, self._clock
        if not setting.plan and not setting.over_s:
            write_whole_feed(self._prepared, self._feed)
            self._watch.fed = self._progress.total
            return
        injector = self._injector
        remaining = (lambda _: injector.remaining_s()) if setting.plan else (lambda since: setting.over_s - since)
        self._publishers = self._publishers_of(self._broker) if self._broker is not None else {}
        self._feeder = Feeder(
            self._prepared,
            self._feed,
            clock,
            remaining_s=remaining,
            rate_max=setting.rate_max,
            outlets=self._publishers,
        )

    def _publishers_of(self, broker: EmbeddedBroker) -> dict[str, Publisher]:
        inputs = {source.stream: source for source in self._prepared}
        return {
            node.name: Publisher(inputs[node.name], node, self._feed / node.name, broker, self._pause)
            for node in injectors_over_broker(self._graph)
        }

    def _outcome(self, started: float, ended: float, stuck: str) -> TrialOutcome:
        with Database(self._url) as database:
            results, events = database.results(self._graph.name), database.events()
        watch, fleet = self._watch, self._fleet
        return TrialOutcome(
            started=started,
            ended=ended,
            fed=watch.fed,
            results=results,
            processes=fleet.records,
            samples=watch.samples,
            takeovers=watch.takeovers,
            registered=watch.registered,
            events=events,
            struck=self._injector.struck,
            stuck=stuck,
        )

    def _all_owned(self) -> bool:
        found = self._watch.snapshot
        return found is not None and all(interval.live or interval.finished for interval in found.intervals)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._pause.wait(LOOK_EVERY_S)
            self._look()

    def _look(self) -> None:
        """Report progress, and end a run that has failed.

        Raises:
            StuckError: a worker has ended by itself, or nothing is committed any more.
        """
        fleet, watch, progress, clock = self._fleet, self._watch, self._progress, self._clock
        if self._feeder is not None:
            watch.fed = self._feeder.fed
            if self._feeder.failure is not None:
                raise StuckError(f"the input cannot be fed: {self._feeder.failure.message}")
        progress.fed = watch.fed
        progress.committed = watch.committed
        progress.struck = len(self._injector.struck)
        progress.recovered = sum(fault.recovered is not None for fault in self._injector.struck)
        progress.alive = tuple(fleet.alive())
        self._show(progress)
        for slot, status in fleet.failed().items():
            raise StuckError(f"worker {slot + 1} ended with status {status}: {fleet.last_output(slot)}")
        fed_all = progress.fed == progress.total
        if fed_all and not self._injector.is_striking and clock.monotonic() - watch.moved > IDLE_S_MAX:
            raise StuckError(f"nothing was committed for {IDLE_S_MAX:.0f} s, and the graph has not finished")
