"""Off-by-one canaries: the engine's own source text with one comparison, bound or sign changed.

The named checker must find each; otherwise it would miss the same mistake of a developer.
"""

from __future__ import annotations
import __future__

import asyncio
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millpy.hosting import step
from millpy.hosting.interval_state import IntervalState
from millpy.ingest.dedupe import DedupeIndex
from millpy.ingest.intake import Intake
from millpy.ingest.site_watermarks import SiteWatermarks
from millpy.model.checkpoint import Checkpoint
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.time import INSTANT_MAX, ClockReading, Instant
from millpy.operators.changes import Changes
from millpy.operators.counter_rates import CounterRates
from millpy.operators.first_seen import FirstSeen
from millpy.operators.gap_filling import GapFilling
from millpy.operators.parking import ParkedRow
from millpy.operators.pattern_matching import PatternMatching
from millpy.runtime.guarded_clock import ClockGuard
from millpy.runtime.guarded_injector import GuardedInjector
from millpy.runtime.ownership import OwnedIntervals
from millpy.runtime.skew import Skew
from millpy.runtime.turn import Turn, TurnCycle
from millpy.runtime.worker import Worker
from millpy.store.memory import commit as memory_commit
from millpy.store.memory import generations as memory_generations
from millpy.store.memory import store as memory
from millpy.store.memory.store import MemoryStore
from millpy.testing.simulation.broker import LogInjector, SimulatedInjector
from millpy.testing.simulation.canaries import Canary, ForgetsDedupeIds
from millpy.windowing import panes, session, session_assign
from millpy.windowing.aggregates.ranking import Ranking
from millpy.windowing.fixed import AlignedInterval
from millpy.windowing.fixed_state import OpenWindows
from millpy.windowing.predicate_trigger import When
from millpy.windowing.session_gaps import Gaps
from millpy.windowing.session_size import SizeBound
from millpy.windowing.site_registry import SiteRegistry
from millpy.windowing.sliding import SlicedInterval
from millpy.windowing.sliding_state import OpenSlices
from millpy.windowing.timestamp_combiner import PaneHolds
from millpy.windowing.triggered_state import TriggeredWindows
from millpy.windowing.user_windows import UserInterval
from millpy.windowing.window_function import WindowFunction


def rewritten(old: str, new: str) -> Callable[[Any], Any]:
    """Return a function that recompiles another with `old`, which must occur, replaced by `new` in its source."""

    def broken(sound: Any) -> Any:
        text = textwrap.dedent(inspect.getsource(sound))
        assert old in text, f"{sound.__qualname__} has no {old!r} any more: adapt the canary"
        made: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(text.replace(old, new), inspect.getfile(sound), "exec", flags), sound.__globals__, made)
        return made[sound.__name__]

    return broken


class _ExtraAcknowledgement(TurnCycle):
    async def _commit_when_trusted(self, turn: Turn, stepped: tuple[float, float]) -> None:
        await super()._commit_when_trusted(turn, stepped)
        for injector, token in turn.tokens:
            if isinstance(injector, GuardedInjector) and isinstance(injector.injector, SimulatedInjector):
                await injector.acknowledge(token + 1)


class AcknowledgesOneMore(Worker):
    """Acknowledges the batch after each committed one, too."""

    cycle_type = _ExtraAcknowledgement


class KeepsFulfilledRequests(MemoryStore):
    """Keeps the requests that a commit has fulfilled, so that workers receive them again."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit, and mark the fulfilled requests as requested again."""
        await super().commit(checkpoints, **options)
        for checkpoint in checkpoints if not options.get("trial") else ():
            for outcome in checkpoint.outcomes:
                self.database.requests.state_of(outcome.request.table, outcome.request.id).state = "requested"


def _reads_on(_: Any) -> Any:
    async def opened(self: LogInjector, position: bytes | None) -> None:
        self._offset = self._broker.furthest
        self._broker.readers.append(self._setup.ready)

    return opened


def _holds_nothing_there(_: Any) -> Any:
    def hold_us(self: ParkedRow) -> Instant:
        late = self.waiting.event_time <= self.waiting.watermark
        return INSTANT_MAX if late else Instant(self.waiting.event_time)

    return property(hold_us)


def _by_the_host(_: Any) -> Any:
    def read(self: ClockGuard, wall_us: Instant, monotonic_s: float) -> ClockReading:
        return ClockReading(wall_us, wall_us, wall_us, 0)

    return read


def _aged_by_the_host(_: Any) -> Any:
    def follow(self: Intake, clock: ClockReading) -> None:
        self._source.dedupe_shift_us = max(0, clock.latest_us - clock.now_us)
        self._unsure_us, self._stepped_us = clock.latest_us - clock.now_us, clock.stepped_us

    return follow


def _forgotten(_: Any) -> Any:
    return lambda self, entries: None


def _of_all_sites(watermark: Any) -> Any:
    return lambda self, place: min(watermark(self, known) for known in self._at_least)


def _by_no_other(bounds: Any) -> Any:
    return lambda self, producer, site: (INSTANT_MAX, bounds(self, producer, site)[1])


def _never_held(_: Any) -> Any:
    return lambda self: INSTANT_MAX


def _nothing(_: Any) -> Any:
    return lambda *arguments: None


def _only_the_first(take_versions: Any) -> Any:
    return lambda self: [] if self.versions else take_versions(self)


def _quiet_for_sites(follow: Any) -> Any:
    return lambda self, sites, idle, clock, quiet: follow(self, sites, idle, clock, True)


def _kept(_: Any) -> Any:
    return lambda self, accumulator, *value: accumulator


def _at_the_end(_: Any) -> Any:
    return lambda pane, end: end - 1


def _most(_: Any) -> Any:
    return lambda watermarks: max(watermarks, default=INSTANT_MAX)


def _without_holds(_: Any) -> Any:
    return lambda oldest, after: after


def _not_held(_: Any) -> Any:
    return lambda self, intervals: frozenset()


def _unfenced(_: Any) -> Any:
    return lambda database, graph: None


class SwitchesInTwoSteps(MemoryStore):
    """Switches in two steps: first takes the name from one generation, later gives it to the other."""

    async def switch(self, family: str, generation: int) -> bool:
        """Switch. Between the steps no generation has the name."""
        (current,) = (graph for graph in self.database.graphs.values() if graph.deployment.name == family)
        memory_generations.rename(self.database, current, f"{family}_{current.spec.generation}")
        await asyncio.sleep(0)
        memory_generations.rename(self.database, current, family)
        return await super().switch(family, generation)


class KeepsFirstTables(MemoryStore):
    """Looks for a graph's tables by the name that it had when it was deployed."""

    async def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Deploy the graph; return its first name."""
        found = await super().deploy(spec, on_purpose=on_purpose)
        first: dict[int, str] = vars(self.database).setdefault("first_names", {})
        return replace(found, name=first.setdefault(found.graph_id, found.name))


class KeepsPanesTwice(MemoryStore):
    """Adds the newest pane of each window of a commit to its history twice."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit; then add to the histories."""
        await super().commit(checkpoints, **options)
        written = {(checkpoint.grant.interval_id, checkpoint.bundle) for checkpoint in checkpoints}
        for entries in (e for table in self.database.tables.values() for e in table.history.values()):
            if (entries[-1]["interval_id"], entries[-1]["bundle"]) in written:
                entries.append(entries[-1])


def _edge(name: str, checker: str, needs: str, old: str, new: str, *places: tuple[Any, str], first: int = 0) -> Canary:
    """Return a canary with one replacement, made in each of the functions."""
    patches = tuple((where, function, rewritten(old, new)) for where, function in places)
    return Canary(name, checker, patches=patches, needs=needs, first=first)


BOTH = "generations"
SETUP = (OwnedIntervals, "_setup")
WINDOWS_ROWS = (AlignedInterval, "_take_rows")
MEETS = "bisect_right(live, at, key=END), bisect_left(live, at + gap_us, key=START)"
TOUCHES = "bisect_left(live, at, key=END), bisect_right(live, at + gap_us, key=START)"
LATE, LATER = "ends_of(starts) <= (", "ends_of(starts) < ("
TIMES = ".assign(rows.records.event_times"
ENDS, ENDED = ".end_of(start)) <= latest_end", ".end_of(start)) < latest_end"
WITHIN, NEARER = "<= self._within_us", "< self._within_us"
FILLS = "found.end = min(found.end, max(found.last, watermark) + 1)"
CAP = "cap = min(others, default=INSTANT_MAX)"
RANGE, LATER_RANGE = "range(window, window", "range(window + self._every_us, window"

EDGES = (
    _edge("accepts a record at the very end of lateness", "I9", "fixed", LATE, LATER, WINDOWS_ROWS, first=8),
    _edge("includes the end of a window", "I9", "fixed", TIMES + ")", TIMES + " - 1)", WINDOWS_ROWS, first=6),
    _edge("keeps a window open at its very end", "I9", "fixed", ENDS, ENDED, (OpenWindows, "due"), first=8),
    _edge(
        *("joins sessions that only touch", "I9", "session", MEETS, TOUCHES),
        *((session_assign, "replay"), (session, "replay")),
    ),
    _edge(
        "omits the first slice of a window",
        "I9",
        "sliding",
        RANGE,
        LATER_RANGE,
        (SlicedInterval, "_slices_of"),
        first=129,
    ),
    _edge(
        "fires a sliding window too late",
        "I9",
        "sliding",
        "_size_us + 1, every",
        "_size_us, every",
        (OpenSlices, "firing"),
        first=10,
    ),
    _edge(
        "forgets an id at the edge of the horizon",
        "I4",
        "short_horizon",
        WITHIN,
        NEARER,
        (DedupeIndex, "check"),
        first=70,
    ),
    _edge("lets a reading through at the edge", "I9", "unique", WITHIN, NEARER, (FirstSeen, "_near"), first=46),
    _edge(
        "judges by one partition alone",
        "I9",
        "partitions",
        CAP,
        "cap = INSTANT_MAX",
        (step.Steps, "_arrivals"),
        first=17,
    ),
    Canary("follows the fastest producer", "I5", patches=((step, "input_watermark", _most),), needs="partitions"),
    Canary("ignores holds", "I5", patches=((step, "low_watermark", _without_holds),), first=12),
    Canary("acknowledges one batch too many", "acknowledgement", worker_type=AcknowledgesOneMore, needs="topic"),
    Canary("continues a log where any reader stopped", "I8", patches=((LogInjector, "open", _reads_on),), needs="log"),
    Canary("replays a record twice", "I9", KeepsFulfilledRequests, needs="rejects"),
    Canary(
        "ignores the hold of a parked record",
        "I5",
        patches=((ParkedRow, "hold_us", _holds_nothing_there),),
        needs="parks",
        first=845,
    ),
    _edge(
        "believes every step of a clock", "clocks", "clocks", "> self._step_us:", "> 2**62:", (ClockGuard, "observe")
    ),
    Canary(
        "uses the host's time as arrival time",
        "clocks",
        patches=((ClockGuard, "read", _by_the_host),),
        needs="clocks",
    ),
    Canary(
        "ages ids by the host's time",
        "clocks",
        patches=((Intake, "_follow", _aged_by_the_host),),
        needs="clocks",
        first=10,
    ),
    Canary("switches without a fence", "versions", patches=((memory_generations, "fence", _unfenced),), needs=BOTH),
    Canary("writes to its first tables after a switch", "tables", KeepsFirstTables, needs=BOTH, first=41),
    _edge("fences one generation", "versions", BOTH, "in (before, after)", "in (after,)", (memory, "switch")),
    Canary("switches in two steps", "names", SwitchesInTwoSteps, needs=BOTH),
    _edge("shares one session", "acknowledgement", BOTH, "generation=self._plan.generation", "generation=1", SETUP),
    Canary(
        "forgets how far sites were", "I9", patches=((SiteRegistry, "_absorb", _forgotten),), needs="sites", first=36
    ),
    Canary(
        "lets the clock overtake the backlog of a site",
        "I5",
        patches=((Intake, "_follow_clock", _quiet_for_sites),),
        needs="idle_sites",
        first=88,
    ),
    Canary("lets all sites wait for one", "I9", patches=((SiteRegistry, "_watermark", _of_all_sites),), needs="sites"),
    Canary(
        "judges a site by one partition",
        "I9",
        patches=((SiteRegistry, "bounds", _by_no_other),),
        needs="far_sites",
        first=494,
    ),
    _edge(
        *("has one site beyond the bound", "I9", "shared_sites"),
        *("and places <= 0", "and places < 0", (SiteWatermarks, "_by_place")),
        first=60,
    ),
    _edge(
        *("joins windows of a function that only touch", "I9", "user_visits"),
        *("other[0] < end and", "other[0] <= end and", (WindowFunction, "merge")),
    ),
    _edge(
        *("forgets the second window of a record", "I9", "phased"),
        *("ends <= self._over_by", "ends - 200_000 <= self._over_by", (UserInterval, "_take")),
    ),
    _edge("keeps the gap of a full session", "I9", "full", FILLS, "pass", (SizeBound, "replay"), first=66),
    _edge(
        *("cuts a session behind its length", "I9", "full"),
        *("self._length_us - records", "self._length_us + 1 - records", (Gaps, "of_rows")),
        first=82,
    ),
    _edge(
        *("opens a closed window", "I9", "counted"),
        *("self.closed.setdefault(start, set()).add(key)", "pass", (TriggeredWindows, "_follow")),
    ),
    _edge("asks no predicate", "I9", "enough", "state[1] = _UNKNOWN", "pass", (When, "add")),
    Canary("lets no step wait for a pane", "I9", patches=((PaneHolds, "oldest", _never_held),), needs="earliest"),
    Canary(
        "gives each pane the end of its window",
        "I9",
        patches=((panes, "time_of", _at_the_end),),
        needs="latest",
    ),
    _edge(
        *("passes no record at the end of a silence", "I9", "changes"),
        *(">= self._silence_us", "> self._silence_us", (Changes, "process_record")),
        first=26,
    ),
    _edge(
        "takes half a wrap for a reset",
        "I9",
        "rates",
        "<= self.wraps_at",
        "< self.wraps_at",
        (CounterRates, "increase"),
        first=171,
    ),
    _edge("ends a match at its last moment", "I9", "absences", "< at)", "<= at)", (PatternMatching, "_end_before")),
    _edge(
        *("fills a point that may still change", "I9", "grid"),
        *("min(passed - 1, over)", "min(passed, over)", (GapFilling, "_emit_tail")),
        first=12,
    ),
    Canary("forgets the newest records in order", "I9", ForgetsDedupeIds, needs="absences"),
    Canary(
        "keeps a rank that is taken back", "oracle", patches=((Ranking, "subtract", _kept),), needs="topped", first=105
    ),
    Canary("keeps what has merged", "I9", patches=((memory_commit, "_retract", _nothing),), needs="merged_histories"),
    Canary("keeps a pane twice", "I9", KeepsPanesTwice, needs="histories"),
    Canary(
        "names the first version of a table",
        "I9",
        patches=((IntervalState, "take_versions", _only_the_first),),
        needs="looked_up",
    ),
    Canary("ignores the skew", "skew", patches=((Skew, "held_back", _not_held),), needs="skew"),
)
