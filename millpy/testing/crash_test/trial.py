"""Trial: one run of the graph from the first record to the last window, with faults or without."""

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
from millpy.injectors.mqtt import Mqtt
from millpy.testing.crash_test.broker import Publisher, broker_in_memory, without_saving
from millpy.testing.crash_test.compare import Results
from millpy.testing.crash_test.database import Database, through
from millpy.testing.crash_test.faults import Striker, Struck, StuckError
from millpy.testing.crash_test.feeder import Feeder, lay_out
from millpy.testing.crash_test.fleet import Fleet, Life
from millpy.testing.crash_test.inputs import Prepared, injectors
from millpy.testing.crash_test.options import FaultKind
from millpy.testing.crash_test.place import Place, proxied_address
from millpy.testing.crash_test.plan import PlannedFault
from millpy.testing.crash_test.watch import Sample, Takeover, Watch
from millpy.testing.crash_test.worker import EXIT_UNAVAILABLE
from millpy.testing.proxy import PostgresProxy

WORKER = "millpy.testing.crash_test.worker"
LOOK_EVERY_S = 0.05
IDLE_S_MAX = 90.0
"""When nothing was committed for so long and the graph is not finished, it never will be."""
FREE = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a trial runs.

    Attributes:
        name: of its database and directory.
        limits: environment of the workers: bounds that differ from run to run.
        over_s: feed the input evenly over so long; 0 for all at once.
        plan: the faults; none for a reference.
        rate_max: records a second at most.
        unique: the share of records that are no duplicates, when some go over a broker; None when all go by tape.
    """

    name: str
    workers: int
    lease_s: float
    limits: Mapping[str, str] = field(default_factory=dict)
    over_s: float = 0.0
    plan: Sequence[PlannedFault] = ()
    rate_max: float = FREE
    unique: float | None = None


@dataclass(slots=True)
class Outcome:
    """What a trial has left and what was seen. Times are monotonic seconds.

    Attributes:
        stuck: why it did not come to its end; empty when it did.
    """

    started: float
    ended: float
    fed: int
    results: Results
    lives: list[Life]
    samples: list[Sample]
    takeovers: list[Takeover]
    registered: dict[int, float]
    events: list[tuple[str, int]]
    struck: list[Struck]
    stuck: str = ""

    @property
    def seconds(self) -> float:
        """From the first record to the end."""
        return self.ended - self.started


@dataclass(slots=True)
class Progress:
    """What the display shows of a running trial."""

    name: str
    total: int
    faults: int
    fed: int = 0
    committed: int = 0
    struck: int = 0
    recovered: int = 0
    alive: tuple[int, ...] = ()


class Trial:
    """One run.

    Args:
        location: of the graph.
        show: called often with how far it is.
        tell: called with every fault, as it strikes and as it is recovered from.
    """

    def __init__(
        self,
        location: str,
        graph: Graph,
        prepared: Sequence[Prepared],
        setting: Setting,
        place: Place,
        directory: Path,
        clock: Clock,
        *,
        show: Callable[[Progress], None],
        tell: Callable[[Struck], None],
    ) -> None:
        self._graph, self._prepared, self._setting = graph, prepared, setting
        self._place, self._clock, self._show = place, clock, show
        self._directory = directory / setting.name
        self._directory.mkdir()
        self._feed = self._directory / "feed"
        self._url = place.fresh(setting.name)
        self._pause = threading.Event()  # never set: waits
        self._progress = Progress(setting.name, sum(source.total for source in prepared), len(setting.plan))
        environment = {"MILLPY_LEASE_S": str(setting.lease_s), **setting.limits}
        self._stack = ExitStack()
        proxies: list[PostgresProxy] = []
        urls = [self._url] * setting.workers
        if any(fault.kind is FaultKind.NETWORK for fault in setting.plan):
            address = proxied_address(self._url)
            proxies = [self._stack.enter_context(PostgresProxy(*address)) for _ in urls]
            urls = [through(self._url, proxy.port) for proxy in proxies]
        self._fleet = Fleet([WORKER, location, str(self._feed)], urls, environment, self._directory, clock)
        self._watch = Watch(self._url, clock, unique=setting.unique)
        self._broker: EmbeddedBroker | None = None
        if setting.unique is not None:
            self._broker = self._stack.enter_context(broker_in_memory())
        self._striker = Striker(
            self._fleet,
            self._watch,
            place,
            self._url,
            proxies,
            self._broker,
            clock,
            lease_s=setting.lease_s,
            tick=self._look,
            tell=tell,
        )
        self._feeder: Feeder | None = None
        self._publishers: dict[str, Publisher] = {}

    def run(self) -> Outcome:
        """Run it to its end, or until it is stuck."""
        setting, clock = self._setting, self._clock
        self._lay_feed()
        self._watch.start()
        stuck, started = "", clock.monotonic()
        try:
            for slot in self._fleet.slots:
                self._fleet.start(slot)
            self._wait_until(self._all_owned)
            for publisher in self._publishers.values():
                publisher.greet()
            started = clock.monotonic()
            if self._feeder is not None:
                self._feeder.start()
            self._striker.strike_all(setting.plan)
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

    def _lay_feed(self) -> None:
        setting, clock = self._setting, self._clock
        if not setting.plan and not setting.over_s:
            lay_out(self._prepared, self._feed)
            self._watch.fed = self._progress.total
            return
        striker = self._striker
        remaining = (lambda _: striker.remaining_s()) if setting.plan else (lambda since: setting.over_s - since)
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
            for node in injectors(self._graph)
            if isinstance(node.source, Mqtt)
        }

    def _outcome(self, started: float, ended: float, stuck: str) -> Outcome:
        with Database(self._url) as database:
            results, events = database.results(self._graph.name), database.events()
        watch, fleet = self._watch, self._fleet
        return Outcome(
            started=started,
            ended=ended,
            fed=watch.fed,
            results=results,
            lives=fleet.lives,
            samples=watch.samples,
            takeovers=watch.takeovers,
            registered=watch.registered,
            events=events,
            struck=self._striker.struck,
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
        """Pass on what is seen; a run that has gone wrong ends here.

        Raises:
            StuckError: a worker has ended by itself, or nothing moves any more.
        """
        fleet, watch, progress, clock = self._fleet, self._watch, self._progress, self._clock
        if self._feeder is not None:
            watch.fed = self._feeder.fed
            if self._feeder.failure is not None:
                raise StuckError(f"the input cannot be fed: {self._feeder.failure.message}")
        progress.fed = watch.fed
        progress.committed = watch.committed
        progress.struck = len(self._striker.struck)
        progress.recovered = sum(fault.recovered is not None for fault in self._striker.struck)
        progress.alive = tuple(fleet.alive())
        self._show(progress)
        for slot, status in fleet.failed().items():
            # One that starts while the database is away ends; who runs workers has something that starts another.
            if status != EXIT_UNAVAILABLE or fleet.life(slot).pid in watch.registered:
                raise StuckError(f"worker {slot + 1} ended with status {status}: {fleet.last_words(slot)}")
            fleet.start(slot)
        fed_all = progress.fed == progress.total
        if fed_all and not self._striker.is_striking and clock.monotonic() - watch.moved > IDLE_S_MAX:
            raise StuckError(f"nothing was committed for {IDLE_S_MAX:.0f} s, and the graph has not finished")
