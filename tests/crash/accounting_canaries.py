"""Places where the engine could lose or double a record, broken on purpose; the account has to see each of them (I8).

A canary wraps one function of the engine. What passes through it loses its last record, or has it twice; the function
itself, and with it whatever it counts, is as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np

from millpy.hosting import routing
from millpy.hosting import step as steps
from millpy.hosting.step import Steps
from millpy.ingest.decode import Decoder, DecodeResult
from millpy.ingest.dedupe import DedupeIndex
from millpy.ingest.intake import Intake
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import Records
from millpy.operators import deduplicate, keyed
from millpy.operators.callbacks import Calls
from millpy.operators.first_seen import FirstSeen
from millpy.operators.map import FlatMap, Map
from millpy.operators.outputs import StreamOutlet
from millpy.operators.stateless import Branch, Filter
from millpy.runtime import gather
from millpy.sources.files.reader import FileReader
from millpy.sources.files.source import FileInjector
from millpy.store.postgres.store import PostgresStore
from millpy.windowing import operator as interval
from millpy.windowing.fixed import AlignedInterval
from millpy.windowing.fixed_state import OpenWindows
from millpy.windowing.operator import JoinedRows
from millpy.windowing.panes import Emission
from millpy.windowing.session import SessionInterval
from millpy.windowing.sliding import SlicedInterval
from millpy.windowing.sliding_state import OpenSlices

Part = Any
Change = Callable[[Part], Part]


def less(part: Part) -> Part:
    """Without its last."""
    return _picked(part, lambda count: range(count - 1))


def more(part: Part) -> Part:
    """With its last twice."""
    return _picked(part, lambda count: [*range(count), count - 1])


def but_the_first(mask: Part) -> Part:
    """A mask without its first row."""
    return mask & (np.arange(len(mask)) > 0)


def without_one(segments: Part) -> Part:
    """The first segment has nothing in it."""
    return (*(replace(segment, payload=None) for segment in segments[:1]), *segments[1:])


def with_one_twice(segments: Part) -> Part:
    """The first segment is there twice."""
    return (*segments[:1], *segments)


def _picked(part: Part, choose: Callable[[int], Any]) -> Part:
    if isinstance(part, DecodeResult):
        rows = _picked(part.rows, choose)
        batch, objects = (None if p is None else _picked(p, choose) for p in (part.batch, part.objects))
        return replace(part, rows=rows, batch=batch, objects=objects)
    if isinstance(part, bytes):
        return b"".join(_picked(part.splitlines(keepends=True), choose))
    if not len(part):
        return part
    rows = np.array(choose(len(part)), np.int64)
    if isinstance(part, Records | JoinedRows):
        return part.take(rows)
    if hasattr(part, "num_rows"):
        return part.take(rows)
    if isinstance(part, np.ndarray):
        return part[rows]
    if isinstance(part, dict):
        names = list(part)
        return {names[row]: part[names[row]] for row in rows.tolist()}
    return type(part)(part[row] for row in rows.tolist())


def answers(*path: str | int) -> Callable[[Change], Callable[[Any], Any]]:
    """Break the result of a function: all of it, or one member (of a tuple by number, of an object by name)."""

    def broken(change: Change) -> Callable[[Any], Any]:
        def around(sound: Any) -> Any:
            if inspect.iscoroutinefunction(sound):

                @wraps(sound)
                async def later(*arguments: Any, **more: Any) -> Any:
                    return _changed(await sound(*arguments, **more), path, change)

                return later

            @wraps(sound)
            def now(*arguments: Any, **more: Any) -> Any:
                return _changed(sound(*arguments, **more), path, change)

            return now

        return around

    return broken


def takes(*places: int) -> Callable[[Change], Callable[[Any], Any]]:
    """Breaks arguments, all alike."""

    def broken(change: Change) -> Callable[[Any], Any]:
        def around(sound: Any) -> Any:
            @wraps(sound)
            def now(*arguments: Any, **more: Any) -> Any:
                given = list(arguments)
                for place in places:
                    given[place] = change(given[place])
                return sound(*given, **more)

            return now

        return around

    return broken


def _changed(found: Any, path: tuple[str | int, ...], change: Change) -> Any:
    if found is None:
        return None
    if not path:
        return change(found)
    at = path[0]
    if at == "*":
        return type(found)(_changed(each, path[1:], change) for each in found)
    if isinstance(at, int):
        return tuple(_changed(each, path[1:], change) if n == at else each for n, each in enumerate(found))
    inner = _changed(getattr(found, at), path[1:], change)
    try:
        setattr(found, at, inner)
    except AttributeError:
        return replace(found, **{at: inner})
    return found


def _jobs(change: Change) -> Callable[[Any], Any]:
    """A record less, or more, per key and bundle."""

    def around(sound: Any) -> Any:
        @wraps(sound)
        def now(self: Any, turn: Any, jobs: Any) -> Any:
            return sound(self, turn, [(code, change(mine)) for code, mine in jobs])

        return now

    return around


def _flipped(change: Change) -> Callable[[Any], Any]:
    """Returns the opposite verdict for the last record that this change concerns."""
    wanted = change is more

    def around(sound: Any) -> Any:
        @wraps(sound)
        def now(*arguments: Any) -> Any:
            mask, run = sound(*arguments)
            there = np.flatnonzero(mask == wanted)
            if len(there):
                mask[there[-1]] = not wanted
            return mask, run

        return now

    return around


def _flipped_back(change: Change) -> Callable[[Any], Any]:
    """The same for a function that decides which records are accepted."""
    return _flipped(less if change is more else more)


def _whole_batches(change: Change) -> Callable[[Any], Any]:
    """Lose the first batch of a source before the turn, or repeat it in the next turn."""
    first: dict[Any, SourceBatch] = {}
    again: list[bool] = []

    def around(sound: Any) -> Any:
        @wraps(sound)
        async def now(intervals: Any, *arguments: Any) -> Any:
            owned = first and first.keys() <= intervals.keys()  # the other worker has other intervals
            if owned and change is more and not again:
                again.append(True)
                return dict(first), frozenset()
            taken, quiet = await sound(intervals, *arguments)
            if taken and not first:
                first.update(taken)
                if change is less:
                    return {}, quiet
            return taken, quiet

        return now

    return around


@dataclass(frozen=True, slots=True)
class Canary:
    """A broken place.

    Attributes:
        graph: which of the graphs passes it.
        finds: what the account of that graph has to show as not balanced: a stream's source, "stream>consumer" or
            "=table".
        owner, name: the function.
        broken: what breaks it, by a change.
        changes: less, more, or both.
        bundle: records in a bundle; few and many go different ways.
    """

    what: str
    graph: str
    finds: str
    owner: Any
    name: str
    broken: Callable[[Change], Callable[[Any], Any]]
    changes: tuple[Change, ...] = (less, more)
    bundle: int = 200


FEW = 20
SOURCE, WINDOWS, TABLE = "readings", "readings>fixed", "=fixed"

CANARIES = [
    Canary("decoder", "fixed", SOURCE, Decoder, "decode", answers()),
    Canary("decoder", "fixed", SOURCE, Decoder, "decode", answers(), bundle=FEW),
    Canary("what the source hands over", "fixed", SOURCE, FileInjector, "take", answers("block")),
    Canary("a piece of a file", "fixed", SOURCE, FileReader, "read", answers("block")),
    Canary("whole batches", "fixed", SOURCE, gather, "take", _whole_batches, bundle=FEW),
    Canary("dedupe", "fixed", SOURCE, DedupeIndex, "check", _flipped),
    Canary("dedupe", "fixed", SOURCE, DedupeIndex, "check", _flipped, bundle=FEW),
    Canary("event times", "fixed", SOURCE, Intake, "_event_times", answers(1), (but_the_first,)),
    Canary("accepted records", "fixed", WINDOWS, Steps, "_admitted", answers(0)),
    Canary("routing", "fixed", WINDOWS, routing.Router, "_through", answers("*")),
    Canary("routing", "fixed", WINDOWS, routing.Router, "_through", answers("*"), bundle=FEW),
    Canary("a segment written", "fixed", WINDOWS, routing, "encode_slice", takes(0)),
    Canary("a segment read", "fixed", WINDOWS, steps, "decode_slice", answers()),
    Canary("a poll", "fixed", WINDOWS, PostgresStore, "poll", answers("*", "segments"), (without_one, with_one_twice)),
    Canary("arrivals", "fixed", WINDOWS, Steps, "_arrivals", answers(0)),
    Canary("windows", "fixed", WINDOWS, AlignedInterval, "_take_rows", takes(2)),
    Canary("windows", "fixed", WINDOWS, AlignedInterval, "_take_rows", takes(2), bundle=FEW),
    Canary("windows, merging", "fixed", WINDOWS, AlignedInterval, "_merge", takes(2, 3, 4, 5)),
    Canary("windows, opening", "fixed", WINDOWS, OpenWindows, "open", takes(2), (less,)),
    Canary("windows that hop", "hopping", "readings>hopping", AlignedInterval, "_take_rows", takes(2)),
    Canary("windows that hop, entries", "hopping", "readings>hopping", AlignedInterval, "_take_many", takes(3, 4)),
    Canary("windows that hop", "hopping", "readings>hopping", AlignedInterval, "_take_few", takes(2, 3), bundle=FEW),
    Canary("sliding windows", "sliding", "readings>sliding", SlicedInterval, "_take_rows", takes(2)),
    Canary("sliding windows", "sliding", "readings>sliding", SlicedInterval, "_take_rows", takes(2), bundle=FEW),
    Canary("sliding windows, slices", "sliding", "readings>sliding", OpenSlices, "add", takes(2, 3, 4), (less,)),
    Canary("sessions", "sessions", "readings>sessions", SessionInterval, "_take_rows", takes(2)),
    Canary("sessions", "sessions", "readings>sessions", SessionInterval, "_take_rows", takes(2), bundle=FEW),
    Canary("two inputs", "joined", "readings>joined", AlignedInterval, "_take_rows", takes(2)),
    Canary("computation", "computed", "readings>totals", Calls, "take_rows", _jobs),
    Canary("computation", "computed", "readings>totals", keyed, "gather", answers("order"), (less,)),
    Canary("computation with timers", "timed", "readings>timed", Calls, "take_rows", _jobs),
    Canary("computation of two inputs", "both", "readings>both", Calls, "take_rows", _jobs),
    Canary("deduplicate", "unique", "readings>unique", deduplicate.DeduplicateInterval, "_without_late", answers()),
    Canary("deduplicate, what it lets in", "unique", "unique>after", FirstSeen, "check", _flipped_back),
    Canary("deduplicate, what it emits", "unique", "unique>after", deduplicate.DeduplicateInterval, "_emit", takes(2)),
    Canary("panes", "fixed", TABLE, Emission, "add_direct", takes(4), (less,)),
    Canary("panes of open windows", "fixed", TABLE, Emission, "add_open", takes(1), (less,)),
    Canary("panes of open windows", "fixed", TABLE, Emission, "add_open", takes(1), (less,), FEW),
    Canary("panes as rows", "fixed", TABLE, interval, "result_rows", answers(), (less,), FEW),
    Canary("panes as records", "chained", "fixed>after", interval, "records_in_order", answers()),
    Canary("windows that are due", "fixed", TABLE, OpenWindows, "due", answers(), (less,)),
    Canary("windows that are due", "fixed", TABLE, OpenWindows, "due", answers(), (less,), FEW),
    Canary("sliding panes", "sliding", "=sliding", Emission, "add_direct", takes(4), (less,)),
    Canary("productions", "computed", "totals>after", StreamOutlet, "gather", takes(1, 2)),
    Canary("productions to a table", "computed", "=totals", StreamOutlet, "gather", takes(1, 2)),
    Canary("filter", "filtered", "readings>after", Filter, "apply", answers("records")),
    Canary("filter, columns", "filtered columns", "readings>after", Filter, "apply", answers("records")),
    Canary("map", "mapped", "readings>after", Map, "apply", answers("records")),
    Canary("flat map", "flat", "readings>after", FlatMap, "apply", answers("records")),
    Canary("flat map, columns", "flat columns", "readings>after", FlatMap, "apply", answers("records")),
    Canary("split", "split", "readings>even", Branch, "apply", answers("records")),
]  # fmt: skip
