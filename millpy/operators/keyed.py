"""Keyed: a user's Computation as a stage, with its soft state and its steps.

A step runs every key's rows in order of arrival; timers that a row's watermark has reached fire before the row. Then it
fires the timers of all keys that are due at the watermark after all input. Keys do not see each other, so they may run
in any order. Productions are sorted by their rows; those of timers at the end of the turn follow, sorted by time.

Soft state is cells as JSON text and all timers. Values changed since the last fold stay in memory, and so do values of
keys with timers. Other values are bounded by `Limits.state_cache_bytes_max`, evicted least recently used first, and
loaded again when `missing_keys` returns their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from millpy.computation import Computation, Produced
from millpy.errors import RefusedValueError, SchemaError
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, Entries, Kind
from millpy.model.dead_letter import dead_letter_of, payload_of, unstorable_keys
from millpy.model.identity import Identity, identity_of_value
from millpy.model.keys import Key, KeyHasher, key_from_text, key_text, key_texts
from millpy.model.lookup import LookupTable
from millpy.model.stage import UNBOUNDED, Release, ResidentInterval, StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import Instant
from millpy.model.timer import without_chain
from millpy.operators.callbacks import CallbackStep, Calls, payload_of_timer
from millpy.operators.device_monitor import DeviceMonitor
from millpy.operators.event_loop import PrivateLoop
from millpy.operators.outputs import StreamOutlet, outlets_of
from millpy.operators.parking import ParkedKeys, ParkedRow, ReleasedKey, discarded, failure_of, with_released
from millpy.operators.rows import gather
from millpy.operators.state import ENTRY_BYTES, MapStore, Store, identity_of_cell, store_of
from millpy.operators.state_migration import StateFunction, StateUpgrade
from millpy.operators.timers import TimerBook


class ComputationLogic:
    """A user's Computation in a graph.

    Attributes:
        tables: the lookup tables that it reads.

    Raises:
        SchemaError: a cell's type cannot be stored.
    """

    def __init__(self, computation: Computation, *, parks: bool = False) -> None:
        if not isinstance(computation, Computation):
            raise SchemaError(f"{computation!r} is not a Computation", hint="class Spike(Computation): …; then Spike()")
        self.computation = computation
        self.parks = parks
        self._cells = computation.cells()
        self.tables: tuple[LookupTable, ...] = tuple(dict.fromkeys(computation.tables().values()))
        for name, cell in self._cells.items():
            store_of(name, cell)

    def bind(self, binding: StageBinding) -> ComputationStage:
        """Return the stage, which can open intervals."""
        return ComputationStage(self.computation, binding, parks=self.parks)

    def upgrade(self, name: str, function: StateFunction) -> StateUpgrade:
        """Return an upgrade of the stored cells of an earlier version to this one's."""
        return StateUpgrade(name, self._cells, function)

    def identity(self) -> Identity:
        """Describe the cells and what gives them their meaning. The policy for a failing record may change."""
        described: dict[str, Any] = {
            "kind": "computation",
            "cells": [(name, identity_of_cell(cell)) for name, cell in self._cells.items()],
        }
        if parameters := self.computation.parameters():
            described["parameters"] = {name: identity_of_value(value) for name, value in sorted(parameters.items())}
        return described


class ComputationStage:
    """A Computation in a deployed graph."""

    def __init__(self, computation: Computation, binding: StageBinding, *, parks: bool) -> None:
        self._computation = computation
        self._parks = parks
        self._binding = binding
        self._loop = PrivateLoop(binding.progress, binding.limits.call_s_max)

    def open(self, recovered: StoredInterval) -> KeyedInterval:
        """Build the soft state of one interval from its stored state."""
        return KeyedInterval(self._computation, self._binding, self._loop, recovered, parks=self._parks)


class KeyedInterval(ResidentInterval):
    """The soft state of one key interval under one sequencer; values leave memory when they are rows."""

    def __init__(
        self,
        computation: Computation,
        binding: StageBinding,
        loop: PrivateLoop,
        recovered: StoredInterval,
        *,
        parks: bool,
    ) -> None:
        self._binding = binding
        self._key_types = binding.inputs[0].key_types
        self._stores: dict[str, Store] = {name: store_of(name, cell) for name, cell in computation.cells().items()}
        self._book = TimerBook()
        self._outlets = outlets_of(binding)
        by_cell = {cell: self._stores[name] for name, cell in computation.cells().items()}
        self._monitor = computation if isinstance(computation, DeviceMonitor) else None
        counted = {} if self._monitor is None else self._monitor.gauges
        self.gauges = {n: store for n, cell in counted.items() if isinstance(store := by_cell[cell], MapStore)}
        self._calls = Calls(computation, binding, by_cell, self._outlets, self._book, loop, parks=parks)
        self._only_computes = computation.immediate and not self._calls.awaits
        self._hasher = KeyHasher()
        self._complete = recovered.state_complete
        """Whether every stored value is in memory. Else `_known` has the keys in memory, and `_idle` those of them that
        may leave, least recently used first. A key that may not leave is removed from it when its turn comes, and
        returns with its next step or fold: so a turn does not look at all keys."""
        self._known: set[Key] = set()
        self._idle: dict[Key, None] = {}
        self._unfolded: dict[Key, int] = {}
        self._parking = ParkedKeys(binding.inputs)
        self._absorb_parked([entries for entries in recovered.entries if entries.kind is Kind.PARKED])
        for entries in recovered.entries:
            if entries.kind is Kind.TIMER:
                self._absorb_timers(entries)
            elif entries.kind is Kind.STATE and self._complete:
                self._absorb_state(entries)
        self._unloaded: set[Key] = set() if self._complete else {*self._book.by_key, *self._parking.keys}
        """Keys with timers or parked records whose values are not in memory; later ones get these in a step."""

    @property
    def immediate(self) -> bool:
        """Whether a step neither loads state nor waits, as the user's class declares."""
        return self._only_computes and self._complete

    def missing_keys(self, bundles: Sequence[Bundle]) -> Sequence[bytes]:
        """Return the keys whose state has to be loaded: those with records, timers or parked records."""
        if self._complete:
            return ()
        known, wanted = self._known, dict.fromkeys(self._unloaded)
        for bundle in bundles:
            wanted.update({key: None for key in bundle.keys.keys if key not in known})
        return [key_text(key) for key in wanted]

    def load_state(self, keys: Sequence[bytes], entries: Sequence[Entries]) -> None:
        """Load the stored state of `keys`, except of keys in memory, whose state is newer."""
        found = {key_from_text(text, self._key_types): None for text in keys}
        fresh = {key for key in found if key not in self._known}
        for part in entries:
            if part.kind is Kind.STATE:
                self._absorb_state(part, fresh)
        self._known |= fresh
        self._idle.update(dict.fromkeys(key for key in found if key in fresh))
        self._unloaded.difference_update(found)

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the soft state and return what has to be committed for it."""
        rows, before = gather(work), self._sizes()
        released = self._release(work.releases)
        if released:
            rows = with_released(rows, [self._rows_of(key, parked) for key, parked in released])
        step = CallbackStep(work, rows, rows.keys, rows.hashes)
        texts = key_texts(rows.keys)
        for key, parked in released:
            self._account_released(step, key, parked)
        if len(rows):
            left_out = self._refuse_keys(step, texts) | self._wait(step)
            jobs = rows.by_key()
            self._calls.take_rows(step, (job for job in jobs if job[0] not in left_out) if left_out else jobs)
            self._park_stopped(step)
        due, are_all = self._due_codes(step, texts)
        if due:
            self._calls.fire_due(step, due)
            self._park_stopped(step)
        step.cut |= not are_all
        delta = self._take_delta(work.bundle, step, texts)
        result = StepResult(
            delta=tuple(delta),
            dead_letters=step.letters,
            dead_lettered_by_input=step.dead_lettered,
            consumed_by_input=step.consumed(),
            fired=step.timers if step.cut else {},
            unfinished=step.cut,
        )
        self._emit(result, step, due)
        result.gauges = {name: size - before[name] for name, size in self._sizes().items()}
        self._evict(step)
        return result

    def _sizes(self) -> dict[str, int]:
        """Return the number of entries in memory of each cell that a gauge counts."""
        return {name: store.size() for name, store in self.gauges.items()}

    def oldest_work(self) -> Instant:
        """Return the smallest time at which a timer, hold or parked record keeps the low watermark back."""
        return min(self._book.oldest_hold(), self._parking.oldest_hold())

    def next_due(self) -> tuple[Instant, Instant]:
        """Return (event time, processing time) of the next timers."""
        return self._book.next_due()

    def on_folded(self, bundle: int) -> None:
        """Allow the eviction of values last changed at or before `bundle`, which are rows now."""
        folded = [key for key, changed in self._unfolded.items() if changed <= bundle]
        for key in folded:
            del self._unfolded[key]
        if not self._complete:
            self._idle.update(dict.fromkeys(folded))

    def _absorb_timers(self, entries: Entries) -> None:
        for text, name, value, at_us in zip(
            entries.keys, entries.subkeys, entries.values, entries.fire_ats, strict=True
        ):
            if value is not None:
                self._book.absorb(key_from_text(text, self._key_types), entries.namespace, name, at_us, value)

    def _absorb_state(self, entries: Entries, fresh: set[Key] | None = None) -> None:
        store = self._stores.get(entries.namespace)
        if store is None:
            return  # a cell that this version no longer has
        for text, subkey, value in zip(entries.keys, entries.subkeys, entries.values, strict=True):
            key = key_from_text(text, self._key_types)
            if value is not None and (fresh is None or key in fresh):
                store.absorb(key, subkey, value)

    def _absorb_parked(self, stored: Sequence[Entries]) -> None:
        self._parking.recover(
            (key_from_text(text, self._key_types), entries.namespace, subkey, value)
            for entries in stored
            for text, subkey, value in zip(entries.keys, entries.subkeys, entries.values, strict=True)
            if value is not None
        )
        for key in self._parking.keys:
            self._book.stop(key)

    def _release(self, releases: Sequence[Release]) -> list[tuple[Key, ReleasedKey]]:
        """Take out the keys that requests release; ignore a request for a parking other than the present one."""
        released = []
        for request in releases:
            key = key_from_text(request.key, self._key_types)
            parked = self._parking.keys.get(key)
            if parked is not None and parked.failure.ticket == request.ticket:
                self._parking.release(key)
                self._book.resume(key)
                released.append((key, ReleasedKey(parked, request.discard)))
        return released

    def _rows_of(self, key: Key, released: ReleasedKey) -> tuple[Key, int, list[tuple[ParkedRow, Any]]]:
        """Return (key, hash, the rows to run with their records) of a released key."""
        rows = [(row, self._parking.record_of(row)) for row in released.rows]
        return key, int(self._hasher.hashes([key])[0]), rows

    def _account_released(self, step: CallbackStep, key: Key, released: ReleasedKey) -> None:
        """Dead-letter the record or timer at which a released key stopped, if the operator discards it.

        A timer that the key stopped at may be one too many of a chain, which the code of this version may not make.
        """
        failure, computation = released.parked.failure, self._binding.computation
        head = released.discarded
        if head is not None:
            step.dead_lettered[head.input] = step.dead_lettered.get(head.input, 0) + 1
            payload = payload_of(self._parking.record_of(head))
            letter = discarded(failure, payload, key, computation)
            stream, waiting = self._binding.inputs[head.input].stream, head.waiting
            letter = replace(letter, stream=stream, input=head.input, retracts=waiting.retracts)
            step.letters.append(replace(letter, event_time=waiting.event_time))
        elif failure.timer is not None:
            timers = {timer_id: without_chain(timer) for timer_id, timer in self._book.by_key.get(key, {}).items()}
            timer = timers.pop(failure.timer, None) if released.discards else None
            if timer is not None:
                letter = discarded(failure, payload_of_timer(timer), key, computation)
                step.letters.append(replace(letter, event_time=timer.event_time_us))
            self._book.replace(key, step.keys.index(key), timers)

    def _wait(self, step: CallbackStep) -> set[int]:
        """Park the records of parked keys; return the codes of these keys."""
        if not self._parking.keys:
            return set()
        waiting = {code for code, key in enumerate(step.keys) if key in self._parking}
        for code in waiting:
            for row in step.rows.rows_of(code):
                self._wait_one(step, code, row)
        return waiting

    def _wait_one(self, step: CallbackStep, code: int, row: int) -> bool:
        """Park a record; return False when it cannot be stored and is dead-lettered."""
        rows, key = step.rows, step.keys[code]
        origin = rows.input_of(row)
        try:
            parking, limits = self._parking, self._binding.limits
            if parking.records >= limits.parked_records_max or parking.bytes >= limits.parked_bytes_max:
                raise RefusedValueError(f"{parking.records} records, {parking.bytes} bytes of parked keys already wait")
            self._parking.wait(key, rows, row, step.work.bundle)
            return True
        except RefusedValueError as error:
            step.dead_lettered[origin] = step.dead_lettered.get(origin, 0) + 1
            letter = dead_letter_of(
                error,
                payload_of(rows.objects[row]),
                stream=self._binding.inputs[origin].stream,
                computation=self._binding.computation,
                event_time=rows.times[row],
                key=key_text(key),
                input=origin,
                retracts=rows.is_retraction(row),
            )
            step.letters.append(letter)
            return False

    def _park_stopped(self, step: CallbackStep) -> None:
        """Park the keys that have stopped in this turn, with their remaining rows."""
        stopped, step.stopped = step.stopped, {}
        for code, stop in stopped.items():
            key = step.keys[code]
            self._parking.park(key, failure_of(stop, step.work))
            self._book.stop(key)
            for row in stop.rows:
                if not self._wait_one(step, code, row) and row == stop.item:
                    self._parking.lose(key)

    def _refuse_keys(self, step: CallbackStep, texts: Sequence[bytes]) -> set[int]:
        """Dead-letter records whose key cannot be stored; return the codes of these keys."""
        refused = unstorable_keys(texts)
        for code, problem in refused.items():
            for row in step.rows.rows_of(code):
                origin = step.rows.input_of(row)
                step.dead_lettered[origin] = step.dead_lettered.get(origin, 0) + 1
                step.letters.append(
                    DeadLetter(
                        reason="key",
                        detail=problem,
                        payload=payload_of(step.rows.objects[row]),
                        stream=self._binding.inputs[origin].stream,
                        computation=self._binding.computation,
                        event_time=step.rows.times[row],
                        input=origin,
                        retracts=step.rows.is_retraction(row),
                    )
                )
        return set(refused)

    def _due_codes(self, step: CallbackStep, texts: list[bytes]) -> tuple[list[int], bool]:
        """Return the codes of keys with due timers, in due order, as many as may fire, and whether these are all.

        Keys without rows in this turn get codes.
        """
        work = step.work
        timers_max = UNBOUNDED if work.fires is not None else work.timers_max + 1  # with the one that is too many
        keys, are_all = self._book.due_keys(work.watermark, work.now_us, timers_max)
        if not self._complete:
            keys = [key for key in keys if key in self._known]
        if not keys:
            return [], are_all
        code_of = {key: code for code, key in enumerate(step.keys)} if step.keys else {}
        for key in keys:
            if key not in code_of:
                code_of[key] = len(step.keys)
                step.keys.append(key)
                step.hashes.extend(self._hasher.hashes([key]).tolist())
                texts.append(key_text(key))
        return [code_of[key] for key in keys], are_all

    def _take_delta(self, bundle: int, step: CallbackStep, texts: Sequence[bytes]) -> list[Entries]:
        delta = []
        for store in self._stores.values():
            self._unfolded.update({step.keys[code]: bundle for code in store.changed})
            entries = store.take_entries(texts, step.hashes)
            if entries is not None:
                delta.append(entries)
        delta += self._book.take_entries(texts, step.hashes)
        return delta + self._parking.take_entries(step.keys, texts, step.hashes)

    def _emit(self, result: StepResult, step: CallbackStep, due: Sequence[int]) -> None:
        """Emit the productions of rows in row order, then those of timers by time."""
        step.produced.sort(key=itemgetter(0))
        fired = [production for code in due for production in step.fired.get(code, ())]
        fired.sort(key=itemgetter(1))
        by_outlet: dict[Any, tuple[list[Any], list[Instant]]] = {}
        production: Produced
        for production in (*step.produced, *fired):
            _, time, outlet, record = production
            records, times = by_outlet.setdefault(outlet, ([], []))
            records.append(record)
            times.append(time)
        for outlet, made in step.made.items():
            assert isinstance(outlet, StreamOutlet), outlet
            result.emitted_by_stream[outlet.stream] = made
            if outlet.table_id is not None:
                result.emitted_by_table[outlet.table_id] = made
        for outlet, (records, times) in by_outlet.items():
            assert isinstance(outlet, StreamOutlet), outlet
            if self._monitor is not None:
                result.notices = self._monitor.notices(records)
            productions, rows = outlet.gather(records, times)
            if productions is not None:
                result.productions[outlet.stream] = productions
            if rows is not None:
                result.results.append(rows)

    def _evict(self, step: CallbackStep) -> None:
        """If the cache is full, evict stored values, least recently used first, down to three quarters of the limit."""
        limit, used = self._binding.limits.state_cache_bytes_max, self._cached_bytes()
        if self._complete:
            if used <= limit:
                return
            self._complete = False
            self._idle = dict.fromkeys(key for store in self._stores.values() for key in store.keys())
            self._idle.update(dict.fromkeys(self._unfolded))  # rows still have the values that these have lost
            self._known = set(self._idle)
            self._unloaded = {key for key in (*self._book.by_key, *self._parking.keys) if key not in self._known}
        for key in step.keys:
            self._known.add(key)
            self._idle.pop(key, None)
            self._idle[key] = None
        if used <= limit:
            return
        kept = set(step.keys)
        for key in list(self._idle):
            if key in kept or self._cached_bytes() <= limit * 3 // 4:
                break
            del self._idle[key]
            if key not in self._unfolded and key not in self._book.by_key and key not in self._parking:
                for store in self._stores.values():
                    store.evict(key)
                self._known.remove(key)

    def _cached_bytes(self) -> int:
        return sum(store.bytes for store in self._stores.values()) + len(self._known) * ENTRY_BYTES
