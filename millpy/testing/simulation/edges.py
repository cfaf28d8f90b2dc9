"""Canaries that are one off: the engine's own text with one comparison, bound or sign changed.

Each is found by a named checker, or that checker would not see the mistake either if somebody made it.
"""

from __future__ import annotations
import __future__

import asyncio
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millpy.injectors.dedupe import DedupeIndex
from millpy.injectors.intake import Intake
from millpy.model.checkpoint import Checkpoint
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.first_seen import FirstSeen
from millpy.model.time import INSTANT_MAX, ClockReading, Instant
from millpy.runtime import steps
from millpy.runtime.guarded_clock import ClockGuard
from millpy.runtime.holdings import Holdings
from millpy.runtime.parking import ParkedRow
from millpy.runtime.skew import Skew
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker
from millpy.store import memory, memory_generations
from millpy.store.memory import MemoryStore
from millpy.testing.simulation.broker import LogInjector, SimulatedInjector
from millpy.testing.simulation.canaries import BROKEN, Canary
from millpy.windowing import session_merge, sessions
from millpy.windowing.aligned import AlignedInterval
from millpy.windowing.open_slices import OpenSlices
from millpy.windowing.open_windows import OpenWindows
from millpy.windowing.sliced import SlicedInterval


def rewritten(old: str, new: str) -> Callable[[Any], Any]:
    """What makes a broken function of a sound one: the same text, but for this; it must be there."""

    def broken(sound: Any) -> Any:
        text = textwrap.dedent(inspect.getsource(sound))
        assert old in text, f"{sound.__qualname__} does not say {old!r} any more: mend the canary"
        made: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(text.replace(old, new), inspect.getfile(sound), "exec", flags), sound.__globals__, made)
        return made[sound.__name__]

    return broken


class AcknowledgesOneMore(Worker):
    """Acknowledges the batch behind those that are committed, too."""

    async def _commit(self, turn: Turn, stepped: tuple[float, float]) -> None:
        await super()._commit(turn, stepped)
        for injector, token in turn.tokens:
            if isinstance(injector, SimulatedInjector):
                await injector.acknowledge(token + 1)


class ForgetsWhatIsSettled(MemoryStore):
    """Keeps the requests that a commit has settled, so that they are taken again."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Commit, and ask again."""
        await super().commit(checkpoints, **options)
        for checkpoint in checkpoints if not options.get("trial") else ():
            for settled in checkpoint.settled:
                self.database.requests.standing(settled.request.pile, settled.request.id).state = "requested"


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


def _most(_: Any) -> Any:
    return lambda watermarks: max(watermarks, default=INSTANT_MAX)


def _without_holds(_: Any) -> Any:
    return lambda oldest, after: after


def _not_held(_: Any) -> Any:
    return lambda self, intervals: frozenset()


def _unfenced(_: Any) -> Any:
    return lambda database, graph: None


class SwitchesInTwoSteps(MemoryStore):
    """Gives the name away, and a moment later to the other."""

    async def switch(self, family: str, generation: int) -> bool:
        """Switch; in between nobody has the name."""
        (current,) = (graph for graph in self.database.graphs.values() if graph.deployment.name == family)
        memory_generations.rename(self.database, current, f"{family}_{current.spec.generation}")
        await asyncio.sleep(0)
        memory_generations.rename(self.database, current, family)
        return await super().switch(family, generation)


class KeepsItsPlace(MemoryStore):
    """Looks for the tables of a graph where they were when it was deployed."""

    async def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Deploy, or find it; by its first name."""
        found = await super().deploy(spec, on_purpose=on_purpose)
        first: dict[int, str] = vars(self.database).setdefault("first_names", {})
        return replace(found, name=first.setdefault(found.graph_id, found.name))


def _edge(name: str, checker: str, needs: str, old: str, new: str, *places: tuple[Any, str]) -> Canary:
    """A canary that says one thing otherwise, in one function or several."""
    patches = tuple((where, function, rewritten(old, new)) for where, function in places)
    return Canary(name, checker, patches=patches, needs=needs)


BOTH = "generations"
SETUP = (Holdings, "_setup")
WINDOWS_ROWS = (AlignedInterval, "_take_rows")
MEETS, TOUCHES = "at < session.end and session.start < at", "at <= session.end and session.start <= at"
LATE, LATER = "starts + (self._size_us + self._allowed_us)", "starts + (self._size_us + self._allowed_us + 1)"
TIMES = ".assign(rows.records.event_times"
ENDS, ENDED = "+ size_us <= watermark", "+ size_us < watermark"
WITHIN, NEARER = "<= self._within_us", "< self._within_us"
CAP = "cap = min(others, default=INSTANT_MAX)"
RANGE, LATER_RANGE = "range(window, window", "range(window + self._every_us, window"

EDGES = (
    _edge("counts a record in that is late by nothing", "I9", "fixed", LATE, LATER, WINDOWS_ROWS),
    _edge("takes the end of a window into it", "I9", "fixed", TIMES + ")", TIMES + " - 1)", WINDOWS_ROWS),
    _edge("keeps a window open at its very end", "I9", "fixed", ENDS, ENDED, (OpenWindows, "due")),
    _edge(
        *("joins sessions that only touch", "I9", "session", MEETS, TOUCHES),
        *((session_merge, "replay"), (sessions, "replay")),
    ),
    _edge("leaves a slide's first slice out", "I9", "sliding", RANGE, LATER_RANGE, (SlicedInterval, "_slices_of")),
    _edge("fires a slide too late", "I9", "sliding", "_size_us + 1, every", "_size_us, every", (OpenSlices, "firing")),
    _edge("forgets an id at the edge of the horizon", "I4", "short_horizon", WITHIN, NEARER, (DedupeIndex, "check")),
    _edge("lets a reading through at the edge", "I9", "unique", WITHIN, NEARER, (FirstSeen, "_near")),
    _edge("judges by one partition alone", "I9", "partitions", CAP, "cap = INSTANT_MAX", (steps.Steps, "_arrivals")),
    Canary("follows the fastest producer", "I5", patches=((steps, "input_watermark", _most),), needs="partitions"),
    Canary("ignores holds", "I5", patches=((steps, "low_watermark", _without_holds),)),
    Canary("acknowledges one batch too many", "acknowledgement", worker_type=AcknowledgesOneMore, needs="topic"),
    Canary("reads a log on from where it was read", "I8", patches=((LogInjector, "open", _reads_on),), needs="log"),
    Canary("replays a record twice", "I9", ForgetsWhatIsSettled, needs="sets_aside"),
    Canary(
        "lets a parked record at the watermark hold nothing",
        "I5",
        patches=((ParkedRow, "hold_us", _holds_nothing_there),),
        needs="parks",
    ),
    _edge(
        "believes every step of a clock", "clocks", "clocks", "> self._step_us:", "> 2**62:", (ClockGuard, "observe")
    ),
    Canary(
        "takes the host's time for that of arrival",
        "clocks",
        patches=((ClockGuard, "read", _by_the_host),),
        needs="clocks",
    ),
    Canary("ages ids by the host's time", "clocks", patches=((Intake, "_follow", _aged_by_the_host),), needs="clocks"),
    Canary("switches without a fence", "versions", patches=((memory_generations, "fence", _unfenced),), needs=BOTH),
    Canary("keeps its place after a switch", "tables", KeepsItsPlace, needs=BOTH),
    _edge("fences one generation", "versions", BOTH, "in (before, after)", "in (after,)", (memory, "switch")),
    Canary("switches in two steps", "names", SwitchesInTwoSteps, needs=BOTH),
    _edge(
        "has one session for both", "acknowledgement", BOTH, "generation=self._plan.generation", "generation=1", SETUP
    ),
    Canary("reads on whatever the skew", "skew", patches=((Skew, "held_back", _not_held),), needs="skew"),
)

CANARIES = (*BROKEN, *EDGES)
