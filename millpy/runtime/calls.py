"""Calls: runs a user's callbacks, key by key, so that each key's effects are taken as a whole or not at all.

The usual way is optimistic: all of a key's rows (with the timers due between them) run on objects of their own, which
pass through their encoding after each row, so that bundling does not show (I9); at the end its cells are taken
together. If anything raises, everything of that key is forgotten and it runs again *carefully*: its state is taken
after each row, a row that raises is undone alone and tried again, and after `Limits.record_attempts_max` failures it
is quarantined and the key goes on; or, under the policy "park", the key stops there (see parking.py). Other keys never
notice.

`async def` callbacks run on a private event loop: keys concurrently, rows of one key in order. The way without a loop
is the same coroutine, driven by hand, since it never suspends; only the plain loop over rows is written twice, for
speed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from millpy.computation import Cell, Computation, Context, Outlet, Produced
from millpy.errors import CallTimeoutError, TimerError
from millpy.model.checkpoint import DeadLetter
from millpy.model.due_timers import DueTimers
from millpy.model.keys import Key, key_text
from millpy.model.quarantine import dead_letter_of, payload_of
from millpy.model.stage import Binding, Work
from millpy.model.step_progress import UNRETURNED_MAX, Call, StepAbandoned, is_users
from millpy.model.time import Instant
from millpy.model.timer import Timer, TimerId
from millpy.runtime.cells import Store
from millpy.runtime.private_loop import PrivateLoop
from millpy.runtime.rows import Rows
from millpy.runtime.timers import TimerBook

CONCURRENT_KEYS_MAX = 256
"""So many keys of one interval may be inside `async def` callbacks at a time."""
TIMER_CHAIN_MAX = 1_000
"""A timer that is set by one that fires, at a time that is due already, may have so many such before it."""

NONE: frozenset[bytes] = frozenset()

Job = tuple[int, Sequence[int]]
Failures = dict[int | Timer, tuple[int, BaseException]]


@dataclass(slots=True)
class Turn:
    """One step as it goes: what came in, and what the calls did beside cells and timers.

    Attributes:
        keys, hashes: by code; those of the rows first, then keys that only have due timers.
        fired: code -> productions of the timers that fired at the end.
        quarantined: input index -> records.
        applied: rows of which the effects were taken; in any order.
        made: outlet -> productions that were taken.
        stopped: code -> where the key stopped, under the policy "park".
        timers, fired_count: how many have fired at the end, by key and in all.
        cut: whether that is all that this turn may hold; what is left is due in the next.
    """

    work: Work
    rows: Rows
    keys: list[Key]
    hashes: list[int]
    produced: list[Produced] = field(default_factory=list)
    fired: dict[int, list[Produced]] = field(default_factory=dict)
    letters: list[DeadLetter] = field(default_factory=list)
    quarantined: dict[int, int] = field(default_factory=dict)
    applied: list[int] = field(default_factory=list)
    made: dict[Outlet, int] = field(default_factory=dict)
    stopped: dict[int, Stopped] = field(default_factory=dict)
    timers: Counter[Key] = field(default_factory=Counter)
    fired_count: int = 0
    cut: bool = False

    def is_full(self, key: Key) -> bool:
        """Whether no more timers of a key may fire at the end of this turn; of one key at least one may."""
        work, timers = self.work, self.timers
        if work.fires is not None:
            full = timers[key] >= work.fires.get(key, 0)
        else:
            full = self.fired_count > 0 and (self.fired_count >= work.timers_max or work.overdue())
        self.cut |= full
        return full

    def may_fire(self) -> bool:
        """Whether the next key is to be asked for its timers."""
        return not self.cut or self.work.fires is not None

    def count_timer(self, key: Key) -> None:
        """One of a key's timers fires at the end."""
        self.timers[key] += 1
        self.fired_count += 1

    def forget_timers(self, key: Key) -> None:
        """A key's timers fire again."""
        self.fired_count -= self.timers.pop(key, 0)

    def consumed(self) -> dict[int, int]:
        """Input -> records that were applied (I8)."""
        if self.rows.inputs is None:
            return {self.rows.input: len(self.applied)}
        return dict(Counter(map(self.rows.inputs.__getitem__, self.applied)))


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a key did not survive, and its rows from there on."""

    item: int | Timer
    error: BaseException
    rows: Sequence[int]


class Calls:
    """Calls of one computation for the keys of one interval."""

    def __init__(
        self,
        computation: Computation,
        binding: Binding,
        stores: Mapping[Cell[Any], Store],
        outlets: Mapping[str | None, Outlet],
        book: TimerBook,
        loop: PrivateLoop,
        *,
        parks: bool,
    ) -> None:
        self._parks = parks
        self._process_record = computation.process_record
        self._process_timer = computation.process_timer
        self.awaits = inspect.iscoroutinefunction(self._process_record) or inspect.iscoroutinefunction(
            self._process_timer
        )
        self._binding = binding
        self._streams = [spec.stream for spec in binding.inputs]
        # A record is shared with other consumers, and is as it came when its call is made again, parked or set aside.
        self._clones = [spec.record_type.clone() for spec in binding.inputs]
        self._stores = stores
        self._outlets = outlets
        self._only_outlet = outlets.get(None)
        self._book = book
        self._loop = loop
        self._progress = binding.progress
        self._chains: dict[Key, dict[TimerId, tuple[int, Instant]]] = {}
        self._context = self._fresh_context()

    def take_rows(self, turn: Turn, jobs: Iterable[Job]) -> None:
        """Run rows key by key, and the timers that become due between them."""
        if self.awaits:
            self._loop.run(self._run_concurrently(turn, jobs, final=False))
        else:
            self._run_plain(turn, jobs)

    def fire_due(self, turn: Turn, codes: Sequence[int]) -> None:
        """Fire what is due at the end of the turn."""
        jobs: list[Job] = [(code, ()) for code in codes]
        if self.awaits:
            self._loop.run(self._run_concurrently(turn, jobs, final=True))
            return
        self._context.now_us = turn.work.now_us
        self._progress.in_hand = partial(self._in_hand, turn, self._context)
        for job in jobs:
            if turn.may_fire():
                _drive(self._run_key(self._context, turn, job, final=True))

    def _fresh_context(self) -> Context:
        timers_max = self._binding.limits.open_timers_max
        return Context(self._stores, self._outlets, self._book.by_key, lambda: len(self._book) < timers_max)

    def _run_plain(self, turn: Turn, jobs: Iterable[Job]) -> None:
        """The hot loop: rows of keys without timers, no awaiting, no bookkeeping but for the context's fields."""
        rows, context, timed, process = turn.rows, self._context, self._book.by_key, self._process_record
        progress, run, suspects = self._progress, self._progress.run, self._suspects()
        progress.in_hand = partial(self._in_hand, turn, context)
        objects, times, watermarks, inputs = rows.objects, rows.times, rows.watermarks, rows.inputs
        keys, finish, applied = turn.keys, self._finish, turn.applied
        context.now_us = turn.work.now_us
        context.stream = stream = self._streams[rows.input]
        clone = self._clones[rows.input]
        for job in jobs:
            code, mine = job
            context.key = key = keys[code]
            if (timed and key in timed) or (suspects and key_text(key) in suspects):
                _drive(self._run_key(context, turn, job, final=False))
                context.stream = stream
                continue
            left = len(mine)
            try:
                for row in mine:
                    context._row = row
                    context.event_time_us = times[row]
                    context.input_watermark_us = watermarks[row]
                    if inputs is not None:
                        context.stream, clone = self._streams[inputs[row]], self._clones[inputs[row]]
                    record = objects[row]
                    process(context, record if clone is None else clone(record))
                    progress.units += 1
                    if progress.run != run:
                        raise StepAbandoned
                    if context._timers is not None:
                        self._settle(context)
                        # Its timers may be due before its next row: go on the way that looks.
                        done = mine.index(row) + 1
                        _drive(self._run_on(context, turn, (code, mine[done:]), False, None))
                        applied += mine[:done]
                        context.stream = stream
                        break
                    left -= 1
                    if left:
                        self._settle(context)
                else:
                    finish(context, turn, code, False)
                    applied += mine
            except BaseException as error:  # user code: quarantined, see the module
                self._check_is_users(error, run)
                _drive(self._run_carefully(context, turn, job, False, error))
                context.stream = stream

    async def _run_concurrently(self, turn: Turn, jobs: Iterable[Job], *, final: bool) -> None:
        waiting: Iterator[Job] = iter(jobs)
        in_hand: dict[asyncio.Task[Any] | None, tuple[Context, Job]] = {}

        def call_in_hand() -> Call | None:
            found = in_hand.get(self._loop.task_in_hand())
            return None if found is None else self._in_hand(turn, found[0])

        async def run_some() -> None:
            context, task = self._fresh_context(), asyncio.current_task()
            context.now_us = turn.work.now_us
            with suppress(StepAbandoned):  # whoever runs the step looks, too
                for job in waiting:
                    in_hand[task] = (context, job)
                    await self._run_key(context, turn, job, final=final)

        self._progress.in_hand = call_in_hand
        tasks = [asyncio.ensure_future(run_some()) for _ in range(min(CONCURRENT_KEYS_MAX, len(turn.keys)))]
        while tasks:
            ended, _ = await asyncio.wait(tasks)
            tasks = []
            for task in ended:
                error = task.exception()
                if error is None:
                    continue
                if not isinstance(error, RuntimeError) or task not in in_hand:
                    raise error
                # A task of the callback's was closed by GeneratorExit, and took ours along.
                context, job = in_hand[task]
                await self._run_carefully(context, turn, job, final, error)
                tasks.append(asyncio.ensure_future(run_some()))

    async def _run_key(self, context: Context, turn: Turn, job: Job, *, final: bool) -> None:
        context.key = turn.keys[job[0]]
        run = self._progress.run
        failures = self._hopeless(turn, context.key, job) if self._progress.unreturned else None
        try:
            await self._run_on(context, turn, job, final, failures)
        except BaseException as error:  # user code: quarantined, see the module
            self._check_is_users(error, run)
            turn.forget_timers(context.key)
            await self._run_carefully(context, turn, job, final, error)

    def _check_is_users(self, error: BaseException, run: int) -> None:
        """Let pass what no call of this step has raised: an error of ours, or the end of a step that was given up."""
        if not is_users(error) or self._progress.run != run:
            raise error
        self._progress.units += 1

    async def _run_carefully(self, context: Context, turn: Turn, job: Job, final: bool, error: BaseException) -> None:
        """Run a key from the start, with its state taken after each row, because it raised `error`."""
        failed: Timer | int = context._row if context._firing is None else context._firing
        failures: Failures = {failed: (1, error)}
        context._reset()
        await self._run_on(context, turn, job, final, failures)

    async def _run_on(self, context: Context, turn: Turn, job: Job, final: bool, failures: Failures | None) -> None:
        """Rows with due timers in between, from what the context has so far; carefully when given `failures`."""
        code, mine = job
        place = 0
        applied = []
        try:
            for row in mine:
                context._row = row
                if context._pending():
                    await self._fire(context, turn, code, turn.rows.watermarks[row], None, failures)
                if await self._take(context, turn, code, row, turn.rows.watermarks[row], failures):
                    applied.append(row)
                place += 1
            if final:
                context._row = len(turn.rows)
                await self._fire(context, turn, code, turn.work.watermark, turn.work.now_us, failures)
        except _StopKey as stop:
            turn.stopped[code] = Stopped(stop.item, stop.error, mine[place:])
        self._finish(context, turn, code, final)
        turn.applied += applied
        context._firing = None
        context._late = None
        context._due = None
        context._undo = None
        context._chains.clear()

    async def _fire(
        self,
        context: Context,
        turn: Turn,
        code: int,
        watermark: Instant,
        now_us: Instant | None,
        failures: Failures | None,
    ) -> None:
        """Fire the key's due timers in order, those that they set included."""
        if context._due is None:
            context._due = DueTimers(context._pending())
        if now_us is not None:
            context._chains.update(self._chains.get(context.key, {}))
        while (timer := context._due.next(context._pending(), watermark, now_us)) is not None:
            if now_us is not None:
                if turn.is_full(context.key):
                    if context._chains:
                        self._chains[context.key] = dict(context._chains)
                    return
                turn.count_timer(context.key)
            context._chain = context._chains.pop(timer.id, (0, timer.at_us))
            if context._chain[0] < TIMER_CHAIN_MAX:
                await self._take(context, turn, code, timer, watermark, failures)
                continue
            error = TimerError(f"timer {timer.name!r} is set again and again at a time that is due already")
            if failures is None:
                context._firing = timer
                raise error
            self._quarantine(context, turn, timer, error)
        if now_us is not None:
            self._chains.pop(context.key, None)

    async def _take(
        self,
        context: Context,
        turn: Turn,
        code: int,
        item: int | Timer,
        watermark: Instant,
        failures: Failures | None,
    ) -> bool:
        """Call for a row or timer; carefully: undo, try again, at last quarantine, which is False."""
        if failures is None:
            await self._call(context, turn, item, watermark)
            self._settle(context)
            return True
        context._undo = []
        produced = len(context._produced)
        count, error = failures.get(item, (0, None))
        run = self._progress.run
        while count < self._binding.limits.record_attempts_max:
            try:
                await self._call(context, turn, item, watermark, apart=True)
                self._take_cells(context, code)
                return True
            except BaseException as raised:  # user code: quarantined, see the module
                self._check_is_users(raised, run)
                count, error = count + 1, raised
                context._values.clear()
                del context._produced[produced:]
                context._undo_timers()
        assert error is not None, item
        self._quarantine(context, turn, item, error)
        return False

    async def _call(
        self, context: Context, turn: Turn, item: int | Timer, watermark: Instant, *, apart: bool = False
    ) -> None:
        context.input_watermark_us = watermark
        run = self._progress.run
        if isinstance(item, Timer):
            context._firing = item
            context._late = not item.holds
            context._discard(item.id)
            context.event_time_us = item.event_time_us
            context.stream = ""
            result = self._process_timer(context, item)
        else:
            context._firing = None
            context._late = None
            context.event_time_us = turn.rows.times[item]
            origin = turn.rows.input_of(item)
            context.stream, clone = self._streams[origin], self._clones[origin]
            record = turn.rows.objects[item]
            result = self._process_record(context, record if clone is None else clone(record))
        if result is not None and self.awaits:
            if apart:
                await self._loop.wait_apart(asyncio.ensure_future(result))
            else:
                await self._loop.wait(result)
        self._progress.done(run)

    def _settle(self, context: Context) -> None:
        """Pass what was touched through its encoding: the next call sees what another worker would read."""
        values = context._values
        for cell, value in values.items():
            values[cell] = self._stores[cell].settled(value)

    def _take_cells(self, context: Context, code: int) -> None:
        """Encode what was touched, all of it, then take it."""
        values, stores, key = context._values, self._stores, context.key
        if len(values) == 1:
            for cell, value in values.items():
                stores[cell].take(key, code, value)
        else:
            changes = [(stores[cell], stores[cell].changes(key, value)) for cell, value in values.items()]
            for store, change in changes:
                store.apply(key, code, change)  # type: ignore[arg-type]
        values.clear()

    def _finish(self, context: Context, turn: Turn, code: int, final: bool) -> None:
        """Take all effects of a key's run."""
        if context._values:
            self._take_cells(context, code)
        if context._produced:
            self._note_made(turn, context._produced)
            if final:
                turn.fired[code] = context._produced[:]
            else:
                turn.produced += context._produced
            context._produced.clear()
        if context._timers is not None:
            self._book.replace(context.key, code, context._timers)
            context._timers = None

    def _note_made(self, turn: Turn, produced: Sequence[Produced]) -> None:
        """Count what is produced, by outlet (I8)."""
        if self._only_outlet is not None:
            turn.made[self._only_outlet] = turn.made.get(self._only_outlet, 0) + len(produced)
            return
        for _, _, outlet, _ in produced:
            turn.made[outlet] = turn.made.get(outlet, 0) + 1

    # -- calls that do not return ---------------------------------------------------------------------------------

    def _in_hand(self, turn: Turn, context: Context) -> Call | None:
        """Which call a context is making."""
        item: int | Timer = context._row if context._firing is None else context._firing
        if isinstance(item, int) and item >= len(turn.rows):
            return None
        return self._call_of(turn, context.key, item)

    def _call_of(self, turn: Turn, key: Key, item: int | Timer) -> Call:
        if isinstance(item, Timer):
            return self._binding.computation, (key_text(key), *item.id, item.at_us)
        return self._binding.computation, (key_text(key), turn.rows.times[item], payload_of(turn.rows.objects[item]))

    def _suspects(self) -> frozenset[bytes]:
        """Keys (JSON text) with a call that has not returned before; nearly always none."""
        unreturned = self._progress.unreturned
        return frozenset(call[0] for of, call in unreturned if of == self._binding.computation) if unreturned else NONE

    def _hopeless(self, turn: Turn, key: Key, job: Job) -> Failures | None:
        """What of a key's rows and timers is not to be called any more; None for nothing."""
        if key_text(key) not in self._suspects():
            return None
        items: list[int | Timer] = [*job[1], *self._book.by_key.get(key, {}).values()]
        limits = self._binding.limits
        error = CallTimeoutError(f"the call has not returned within {limits.call_s_max:g} s, {UNRETURNED_MAX} times")
        found: Failures = {
            item: (limits.record_attempts_max, error)
            for item in items
            if self._progress.is_hopeless(self._call_of(turn, key, item))
        }
        return found or None

    def _quarantine(self, context: Context, turn: Turn, item: int | Timer, error: BaseException) -> None:
        if self._parks:
            raise _StopKey(item, error)
        if isinstance(item, Timer):
            context._discard(item.id)
            origin, stream, event_time, payload = 0, "", item.event_time_us, payload_of_timer(item)
        else:
            origin = turn.rows.input_of(item)
            turn.quarantined[origin] = turn.quarantined.get(origin, 0) + 1
            stream, event_time = self._streams[origin], turn.rows.times[item]
            payload = payload_of(turn.rows.objects[item])
        turn.letters.append(
            dead_letter_of(
                error,
                payload,
                stream=stream,
                computation=self._binding.computation,
                event_time=event_time,
                key=key_text(context.key),
                input=origin,
            )
        )


class _StopKey(BaseException):
    """Leaves the calls of a key that stops; not an Exception, so that no user code catches it."""

    def __init__(self, item: int | Timer, error: BaseException) -> None:
        self.item = item
        self.error = error


def payload_of_timer(timer: Timer) -> bytes:
    """A timer as the payload of a dead letter."""
    return msgspec.json.encode(
        {"timer": timer.name, "domain": timer.domain, "at": timer.at_us, "event_time": timer.event_time_us}
    )


def _drive(calls: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends."""
    try:
        calls.send(None)
    except StopIteration:
        return
    raise AssertionError("a callback that is not async def has awaited")
