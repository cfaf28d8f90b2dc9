"""Calls: run a user's callbacks key by key, so that each key's effects are applied as a whole or not at all.

The usual way is optimistic: all of a key's rows (with the timers due between them) run on fresh objects, which are
encoded and decoded after each row, so that bundling cannot change a result (I9); at the end the key's cells are applied
together. If a call raises, everything of that key is forgotten and the key runs again *carefully*: its state is applied
after each row, and a row that raises is undone alone and tried again. After `Limits.record_attempts_max` failures the
row is dead-lettered and the key continues; under the policy "park", the key stops there (see parking.py). Other keys
are not affected.

`async def` callbacks run on a private event loop: keys concurrently, rows of one key in order. Without a loop the same
coroutine is driven by hand, since it never suspends; only the plain loop over rows is written twice, for speed.
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
from millpy.model.dead_letter import dead_letter_of, payload_of
from millpy.model.due_timers import DueTimers
from millpy.model.keys import Key, key_text
from millpy.model.stage import StageBinding, Work
from millpy.model.step_progress import UNRETURNED_MAX, Call, StepAbandonment, is_user_error
from millpy.model.time import Instant
from millpy.model.timer import Timer
from millpy.operators.event_loop import PrivateLoop
from millpy.operators.rows import RowColumns
from millpy.operators.state import Store
from millpy.operators.timers import TimerBook

CONCURRENT_KEYS_MAX = 256
"""Keys of one interval that may be inside `async def` callbacks at a time."""
TIMER_CHAIN_MAX = 1_000
"""Longest chain of timers that each set the next one at a time that is already due; a longer chain raises."""

NONE: frozenset[bytes] = frozenset()

Job = tuple[int, Sequence[int]]
Failures = dict[int | Timer, tuple[int, BaseException]]


@dataclass(slots=True)
class CallbackStep:
    """One step in progress: its input, and the effects of its calls other than cells and timers.

    Attributes:
        keys, hashes: keys and hashes by code; those of the rows first, then keys that only have due timers.
        produced: productions of the rows, and of timers between them.
        fired: code -> productions of the timers that fired at the end.
        letters: the records, timers and keys that became dead letters.
        dead_lettered: input index -> number of dead-lettered records.
        applied: rows whose effects are in this step, in any order.
        made: outlet -> number of applied productions.
        stopped: code -> where the key stopped, under the policy "park".
        timers, fired_count: number of timers that fired at the end, by key and in total.
        cut: whether the budget for timers is used up; the remaining timers are due in the next turn.
    """

    work: Work
    rows: RowColumns
    keys: list[Key]
    hashes: list[int]
    produced: list[Produced] = field(default_factory=list)
    fired: dict[int, list[Produced]] = field(default_factory=dict)
    letters: list[DeadLetter] = field(default_factory=list)
    dead_lettered: dict[int, int] = field(default_factory=dict)
    applied: list[int] = field(default_factory=list)
    made: dict[Outlet, int] = field(default_factory=dict)
    stopped: dict[int, StoppedKey] = field(default_factory=dict)
    timers: Counter[Key] = field(default_factory=Counter)
    fired_count: int = 0
    cut: bool = False

    def is_full(self, key: Key) -> bool:
        """Tell whether a key's timers must wait for the next turn; at least one timer fires in each turn."""
        work, timers = self.work, self.timers
        if work.fires is not None:
            full = timers[key] >= work.fires.get(key, 0)
        else:
            full = self.fired_count > 0 and (self.fired_count >= work.timers_max or work.overdue())
        self.cut |= full
        return full

    def may_fire(self) -> bool:
        """Tell whether the timers of another key may fire."""
        return not self.cut or self.work.fires is not None

    def count_timer(self, key: Key) -> None:
        """Count a timer of a key that fires at the end of the turn."""
        self.timers[key] += 1
        self.fired_count += 1

    def forget_timers(self, key: Key) -> None:
        """Reset the count of a key, because its timers fire again."""
        self.fired_count -= self.timers.pop(key, 0)

    def consumed(self) -> dict[int, int]:
        """Return input index -> number of applied records (I8)."""
        if self.rows.inputs is None:
            return {self.rows.input: len(self.applied)}
        return dict(Counter(map(self.rows.inputs.__getitem__, self.applied)))


@dataclass(frozen=True, slots=True)
class StoppedKey:
    """The record or timer at which a key stopped, its error, and the key's rows from there on."""

    item: int | Timer
    error: BaseException
    rows: Sequence[int]


class Calls:
    """The calls of one computation for the keys of one interval."""

    def __init__(
        self,
        computation: Computation,
        binding: StageBinding,
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
        # A record is shared with other consumers and must be unchanged when it is tried again, parked or dead-lettered.
        self._clones = [spec.record_type.cloner() for spec in binding.inputs]
        self._stores = stores
        self._outlets = outlets
        self._only_outlet = outlets.get(None)
        self._book = book
        self._loop = loop
        self._progress = binding.progress
        self._context = self._fresh_context()

    def take_rows(self, step: CallbackStep, jobs: Iterable[Job]) -> None:
        """Call for rows, key by key, and for the timers that become due between them; a job is (code, its rows)."""
        if self.awaits:
            self._loop.run(self._run_concurrently(step, jobs, final=False))
        else:
            self._run_plain(step, jobs)

    def fire_due(self, step: CallbackStep, codes: Sequence[int]) -> None:
        """Fire the timers of these keys (by code) that are due at the end of the turn."""
        jobs: list[Job] = [(code, ()) for code in codes]
        if self.awaits:
            self._loop.run(self._run_concurrently(step, jobs, final=True))
            return
        self._context.now_us, self._context.tables = step.work.now_us, step.work.tables
        self._progress.current_call = partial(self._in_hand, step, self._context)
        for job in jobs:
            if step.may_fire():
                _drive(self._run_key(self._context, step, job, final=True))

    def _fresh_context(self) -> Context:
        timers_max = self._binding.limits.open_timers_max
        return Context(self._stores, self._outlets, self._book.by_key, lambda: len(self._book) < timers_max)

    def _run_plain(self, step: CallbackStep, jobs: Iterable[Job]) -> None:
        """Run rows of keys without timers: the hot loop, which does not await and does little bookkeeping."""
        rows, context, timed, process = step.rows, self._context, self._book.by_key, self._process_record
        progress, run, suspects = self._progress, self._progress.run, self._suspects()
        progress.current_call = partial(self._in_hand, step, context)
        objects, times, watermarks, inputs = rows.objects, rows.times, rows.watermarks, rows.inputs
        context.retracts, retracts = False, rows.retracts
        keys, finish, applied = step.keys, self._finish, step.applied
        context.now_us, context.tables = step.work.now_us, step.work.tables
        context.stream = stream = self._streams[rows.input]
        clone = self._clones[rows.input]
        for job in jobs:
            code, mine = job
            context.key = key = keys[code]
            if (timed and key in timed) or (suspects and key_text(key) in suspects):
                _drive(self._run_key(context, step, job, final=False))
                context.stream = stream
                continue
            left = len(mine)
            try:
                for row in mine:
                    context._row = row
                    context.event_time_us = times[row]
                    context.input_watermark_us = watermarks[row]
                    if retracts is not None:
                        context.retracts = retracts[row]
                    if inputs is not None:
                        context.stream, clone = self._streams[inputs[row]], self._clones[inputs[row]]
                    record = objects[row]
                    process(context, record if clone is None else clone(record))
                    progress.units += 1
                    if progress.run != run:
                        raise StepAbandonment
                    if context._timers is not None:
                        self._reencode(context)
                        # Its timers may be due before its next row: continue on the path that checks.
                        done = mine.index(row) + 1
                        _drive(self._run_on(context, step, (code, mine[done:]), False, None))
                        applied += mine[:done]
                        context.stream = stream
                        break
                    left -= 1
                    if left:
                        self._reencode(context)
                else:
                    finish(context, step, code, False)
                    applied += mine
            except BaseException as error:  # user code: dead-lettered, see the module docstring
                self._check_is_user_error(error, run)
                _drive(self._run_carefully(context, step, job, False, error))
                context.stream = stream

    async def _run_concurrently(self, step: CallbackStep, jobs: Iterable[Job], *, final: bool) -> None:
        waiting: Iterator[Job] = iter(jobs)
        in_hand: dict[asyncio.Task[Any] | None, tuple[Context, Job]] = {}

        def call_in_hand() -> Call | None:
            found = in_hand.get(self._loop.task_in_hand())
            return None if found is None else self._in_hand(step, found[0])

        async def run_some() -> None:
            context, task = self._fresh_context(), asyncio.current_task()
            context.now_us, context.tables = step.work.now_us, step.work.tables
            with suppress(StepAbandonment):  # the caller checks, too
                for job in waiting:
                    in_hand[task] = (context, job)
                    await self._run_key(context, step, job, final=final)

        self._progress.current_call = call_in_hand
        tasks = [asyncio.ensure_future(run_some()) for _ in range(min(CONCURRENT_KEYS_MAX, len(step.keys)))]
        while tasks:
            ended, _ = await asyncio.wait(tasks)
            tasks = []
            for task in ended:
                error = task.exception()
                if error is None:
                    continue
                if not isinstance(error, RuntimeError) or task not in in_hand:
                    raise error
                # GeneratorExit has closed a task of the callback and ours with it.
                context, job = in_hand[task]
                await self._run_carefully(context, step, job, final, error)
                tasks.append(asyncio.ensure_future(run_some()))

    async def _run_key(self, context: Context, step: CallbackStep, job: Job, *, final: bool) -> None:
        context.key = step.keys[job[0]]
        run = self._progress.run
        failures = self._hopeless(step, context.key, job) if self._progress.unreturned else None
        try:
            await self._run_on(context, step, job, final, failures)
        except BaseException as error:  # user code: dead-lettered, see the module docstring
            self._check_is_user_error(error, run)
            step.forget_timers(context.key)
            await self._run_carefully(context, step, job, final, error)

    def _check_is_user_error(self, error: BaseException, run: int) -> None:
        """Re-raise an error that no call of this step has raised: one of ours, or the end of an abandoned step."""
        if not is_user_error(error) or self._progress.run != run:
            raise error
        self._progress.units += 1

    async def _run_carefully(
        self, context: Context, step: CallbackStep, job: Job, final: bool, error: BaseException
    ) -> None:
        """Run a key again from the start, applying its state after each row, because it raised `error`."""
        failed: Timer | int = context._row if context._firing is None else context._firing
        failures: Failures = {failed: (1, error)}
        context._reset()
        await self._run_on(context, step, job, final, failures)

    async def _run_on(
        self, context: Context, step: CallbackStep, job: Job, final: bool, failures: Failures | None
    ) -> None:
        """Run rows and the timers due between them, from the context's present state; carefully if given `failures`."""
        code, mine = job
        place = 0
        applied = []
        try:
            for row in mine:
                context._row = row
                if context._pending():
                    await self._fire(context, step, code, step.rows.watermarks[row], None, failures)
                if await self._take(context, step, code, row, step.rows.watermarks[row], failures):
                    applied.append(row)
                place += 1
            if final:
                context._row = len(step.rows)
                await self._fire(context, step, code, step.work.watermark, step.work.now_us, failures)
        except _StopKey as stop:
            step.stopped[code] = StoppedKey(stop.item, stop.error, mine[place:])
        self._finish(context, step, code, final)
        step.applied += applied
        context._firing = None
        context._late = None
        context._due = None
        context._undo = None

    async def _fire(
        self,
        context: Context,
        step: CallbackStep,
        code: int,
        watermark: Instant,
        now_us: Instant | None,
        failures: Failures | None,
    ) -> None:
        """Fire the key's due timers in order, including those that they set, until the turn is full."""
        if context._due is None:
            context._due = DueTimers(context._pending())
        while (timer := context._due.next_to_fire(context._pending(), watermark, now_us)) is not None:
            if now_us is not None:
                if step.is_full(context.key):
                    return
                step.count_timer(context.key)
            context._chain = timer.chain or (0, timer.at_us)
            if context._chain[0] < TIMER_CHAIN_MAX:
                await self._take(context, step, code, timer, watermark, failures)
                continue
            error = TimerError(f"timer {timer.name!r} is set again and again at a time that is already due")
            if failures is None:
                context._firing = timer
                raise error
            self._dead_letter(context, step, timer, error)

    async def _take(
        self,
        context: Context,
        step: CallbackStep,
        code: int,
        item: int | Timer,
        watermark: Instant,
        failures: Failures | None,
    ) -> bool:
        """Call for a row or timer, and return True. If given `failures`, undo a call that raises and try again.

        After the last attempt dead-letter it and return False; under the policy "park" raise `_StopKey` instead.
        """
        if failures is None:
            await self._call(context, step, item, watermark)
            self._reencode(context)
            return True
        context._undo = []
        produced = len(context._produced)
        count, error = failures.get(item, (0, None))
        run = self._progress.run
        while count < self._binding.limits.record_attempts_max:
            try:
                await self._call(context, step, item, watermark, apart=True)
                self._take_cells(context, code)
                return True
            except BaseException as raised:  # user code: dead-lettered, see the module docstring
                self._check_is_user_error(raised, run)
                count, error = count + 1, raised
                context._values.clear()
                del context._produced[produced:]
                context._undo_timers()
        assert error is not None, item
        self._dead_letter(context, step, item, error)
        return False

    async def _call(
        self, context: Context, step: CallbackStep, item: int | Timer, watermark: Instant, *, apart: bool = False
    ) -> None:
        """Call the user's method for a row or timer; if `apart`, await it in a separate task."""
        context.input_watermark_us = watermark
        context._produced_before = len(context._produced)
        run = self._progress.run
        if isinstance(item, Timer):
            context._firing = item
            context._late = not item.holds
            context._discard(item.id)
            context.event_time_us = item.event_time_us
            context.stream, context.retracts = "", False
            result = self._process_timer(context, item)
        else:
            context._firing = None
            context._late = None
            context.event_time_us = step.rows.times[item]
            context.retracts = step.rows.is_retraction(item)
            origin = step.rows.input_of(item)
            context.stream, clone = self._streams[origin], self._clones[origin]
            record = step.rows.objects[item]
            result = self._process_record(context, record if clone is None else clone(record))
        if result is not None and self.awaits:
            if apart:
                await self._loop.wait_apart(asyncio.ensure_future(result))
            else:
                await self._loop.wait(result)
        self._progress.count_unit(run)

    def _reencode(self, context: Context) -> None:
        """Encode and decode the accessed cells, so that the next call sees what another worker would read."""
        values = context._values
        for cell, value in values.items():
            values[cell] = self._stores[cell].reencode(value)

    def _take_cells(self, context: Context, code: int) -> None:
        """Encode all accessed cells, then apply them."""
        values, stores, key = context._values, self._stores, context.key
        if len(values) == 1:
            for cell, value in values.items():
                stores[cell].take(key, code, value)
        else:
            changes = [(stores[cell], stores[cell].changes(key, value)) for cell, value in values.items()]
            for store, change in changes:
                store.apply(key, code, change)  # type: ignore[arg-type]
        values.clear()

    def _finish(self, context: Context, step: CallbackStep, code: int, final: bool) -> None:
        """Apply all effects of a key's run."""
        if context._values:
            self._take_cells(context, code)
        if context._produced:
            self._note_made(step, context._produced)
            if final:
                step.fired[code] = context._produced[:]
            else:
                step.produced += context._produced
            context._produced.clear()
        if context._timers is not None:
            self._book.replace(context.key, code, context._timers)
            context._timers = None

    def _note_made(self, step: CallbackStep, produced: Sequence[Produced]) -> None:
        """Count productions by outlet (I8)."""
        if self._only_outlet is not None:
            step.made[self._only_outlet] = step.made.get(self._only_outlet, 0) + len(produced)
            return
        for _, _, outlet, _ in produced:
            step.made[outlet] = step.made.get(outlet, 0) + 1

    # -- calls that do not return ---------------------------------------------------------------------------------

    def _in_hand(self, step: CallbackStep, context: Context) -> Call | None:
        """Return the call that a context is making."""
        item: int | Timer = context._row if context._firing is None else context._firing
        if isinstance(item, int) and item >= len(step.rows):
            return None
        return self._call_of(step, context.key, item)

    def _call_of(self, step: CallbackStep, key: Key, item: int | Timer) -> Call:
        if isinstance(item, Timer):
            return self._binding.computation, (key_text(key), *item.id, item.at_us)
        return self._binding.computation, (key_text(key), step.rows.times[item], payload_of(step.rows.objects[item]))

    def _suspects(self) -> frozenset[bytes]:
        """Return the keys (JSON text) with a call that did not return before; nearly always empty."""
        unreturned = self._progress.unreturned
        return frozenset(call[0] for of, call in unreturned if of == self._binding.computation) if unreturned else NONE

    def _hopeless(self, step: CallbackStep, key: Key, job: Job) -> Failures | None:
        """Return failures for those of a key's rows and timers that must not be called again; None without any."""
        if key_text(key) not in self._suspects():
            return None
        items: list[int | Timer] = [*job[1], *self._book.by_key.get(key, {}).values()]
        limits = self._binding.limits
        error = CallTimeoutError(f"the call did not return within {limits.call_s_max:g} s, {UNRETURNED_MAX} times")
        found: Failures = {
            item: (limits.record_attempts_max, error)
            for item in items
            if self._progress.is_hopeless(self._call_of(step, key, item))
        }
        return found or None

    def _dead_letter(self, context: Context, step: CallbackStep, item: int | Timer, error: BaseException) -> None:
        """Dead-letter a row or timer; under the policy "park" raise `_StopKey`."""
        if self._parks:
            raise _StopKey(item, error)
        if isinstance(item, Timer):
            context._discard(item.id)
            origin, stream, event_time, payload = 0, "", item.event_time_us, payload_of_timer(item)
            retracts = False
        else:
            origin = step.rows.input_of(item)
            step.dead_lettered[origin] = step.dead_lettered.get(origin, 0) + 1
            stream, event_time = self._streams[origin], step.rows.times[item]
            payload, retracts = payload_of(step.rows.objects[item]), step.rows.is_retraction(item)
        step.letters.append(
            dead_letter_of(
                error,
                payload,
                stream=stream,
                computation=self._binding.computation,
                event_time=event_time,
                key=key_text(context.key),
                input=origin,
                retracts=retracts,
            )
        )


class _StopKey(BaseException):
    """Ends the calls of a key that stops; not an Exception, so that user code does not catch it."""

    def __init__(self, item: int | Timer, error: BaseException) -> None:
        self.item = item
        self.error = error


def payload_of_timer(timer: Timer) -> bytes:
    """Encode a timer as the payload of a dead letter."""
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
