"""Keyed: a user's Computation as a stage. Its soft state, and the steps that move it.

A step runs every key's rows in order of arrival (timers that a row's watermark has reached fire before it), then, at
the watermark after all that arrived, what has become due for any key. Keys do not see each other, so they may run in
any order; productions are put back into the order of the rows, those of timers at the end by time.

Soft state is cells as JSON text and all timers. Values changed since the last fold stay in memory, as do those of keys
with timers; the rest is bounded by `Limits.state_cache_bytes_max`, oldest first, and loaded again when `missing` asks.
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
from millpy.model.deployment import Meaning
from millpy.model.keys import Key, KeyHasher, key_from_text, key_text, key_texts
from millpy.model.quarantine import dead_letter_of, payload_of, unstorable_keys
from millpy.model.stage import Binding, Recovered, Release, StepResult, Work
from millpy.model.time import Instant
from millpy.runtime.calls import Calls, Turn, payload_of_timer
from millpy.runtime.cells import ENTRY_BYTES, Store, meaning_of, store_of
from millpy.runtime.outlets import StreamOutlet, outlets_of
from millpy.runtime.parking import ParkedRow, Parking, Released, discarded, failure_of, with_released
from millpy.runtime.private_loop import PrivateLoop
from millpy.runtime.rows import gather
from millpy.runtime.timers import TimerBook
from millpy.runtime.upgrades import StateFunction, StateUpgrade


class ComputationLogic:
    """A user's Computation, as a graph holds it.

    Raises:
        SchemaError: a cell's type cannot be stored.
    """

    def __init__(self, computation: Computation, *, parks: bool = False) -> None:
        if not isinstance(computation, Computation):
            raise SchemaError(f"{computation!r} is not a Computation", hint="class Spike(Computation): …; then Spike()")
        self.computation = computation
        self.parks = parks
        self._cells = computation.cells()
        for name, cell in self._cells.items():
            store_of(name, cell)

    def bind(self, binding: Binding) -> ComputationStage:
        """The stage, ready to open intervals."""
        return ComputationStage(self.computation, binding, parks=self.parks)

    def upgrade(self, name: str, function: StateFunction) -> StateUpgrade:
        """From the stored cells of an earlier version to those of this one."""
        return StateUpgrade(name, self._cells, function)

    def meaning(self) -> Meaning:
        """The cells and their types. What becomes of a failing record may change at any time."""
        return meaning_of(self._cells)


class ComputationStage:
    """A Computation in a deployed graph."""

    def __init__(self, computation: Computation, binding: Binding, *, parks: bool) -> None:
        self._computation = computation
        self._parks = parks
        self._binding = binding
        self._loop = PrivateLoop(binding.progress, binding.limits.call_s_max)

    def open(self, recovered: Recovered) -> KeyedInterval:
        """Build the soft state of one interval from what is stored."""
        return KeyedInterval(self._computation, self._binding, self._loop, recovered, parks=self._parks)


class KeyedInterval:
    """Soft state of one key interval under one sequencer."""

    def __init__(
        self,
        computation: Computation,
        binding: Binding,
        loop: PrivateLoop,
        recovered: Recovered,
        *,
        parks: bool,
    ) -> None:
        self._binding = binding
        self._key_types = binding.inputs[0].key_types
        self._stores: dict[str, Store] = {name: store_of(name, cell) for name, cell in computation.cells().items()}
        self._book = TimerBook()
        self._outlets = outlets_of(binding)
        by_cell = {cell: self._stores[name] for name, cell in computation.cells().items()}
        self._calls = Calls(computation, binding, by_cell, self._outlets, self._book, loop, parks=parks)
        self._only_computes = computation.immediate and not self._calls.awaits
        self._hasher = KeyHasher()
        self._complete = recovered.state_complete
        """Whether every stored value is in memory. Until then `_known` says which keys are, least recent first."""
        self._known: dict[Key, None] = {}
        self._unfolded: dict[Key, int] = {}
        self._parking = Parking(binding.inputs)
        self._absorb_parked([entries for entries in recovered.entries if entries.kind is Kind.PARKED])
        for entries in recovered.entries:
            if entries.kind is Kind.TIMER:
                self._absorb_timers(entries)
            elif entries.kind is Kind.STATE and self._complete:
                self._absorb_state(entries)

    @property
    def immediate(self) -> bool:
        """Whether a step neither loads state nor waits for anything, by the word of the user's class."""
        return self._only_computes and self._complete

    def missing(self, bundles: Sequence[Bundle]) -> Sequence[bytes]:
        """Keys whose state has to be loaded: those that have records, and those that have timers."""
        if self._complete:
            return ()
        known = self._known
        wanted = {key: None for key in (*self._book.by_key, *self._parking.keys) if key not in known}
        for bundle in bundles:
            wanted.update({key: None for key in bundle.keys.keys if key not in known})
        return [key_text(key) for key in wanted]

    def absorb(self, keys: Sequence[bytes], entries: Sequence[Entries]) -> None:
        """Take what the store holds of `keys`; what is in memory already is newer and stays."""
        found = {key_from_text(text, self._key_types): None for text in keys}
        fresh = {key for key in found if key not in self._known}
        for part in entries:
            if part.kind is Kind.STATE:
                self._absorb_state(part, fresh)
        self._known.update(dict.fromkeys(key for key in found if key in fresh))

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the soft state and say what has to be committed for it."""
        rows = gather(work)
        released = self._release(work.releases)
        if released:
            rows = with_released(rows, [self._rows_of(key, parked) for key, parked in released])
        turn = Turn(work, rows, rows.keys, rows.hashes)
        texts = key_texts(rows.keys)
        for key, parked in released:
            self._account_released(turn, key, parked)
        if len(rows):
            left_out = self._refuse_keys(turn, texts) | self._wait(turn)
            jobs = rows.by_key()
            self._calls.take_rows(turn, (job for job in jobs if job[0] not in left_out) if left_out else jobs)
            self._park_stopped(turn)
        due = self._due_codes(turn, texts)
        if due:
            self._calls.fire_due(turn, due)
            self._park_stopped(turn)
        delta = self._take_delta(work.bundle, turn, texts)
        result = StepResult(
            delta=tuple(delta),
            dead_letters=turn.letters,
            quarantined_by_input=turn.quarantined,
            consumed_by_input=turn.consumed(),
            fired=turn.timers if turn.cut else {},
            unfinished=turn.cut,
        )
        self._emit(result, turn, due)
        self._evict(turn)
        return result

    def oldest_work(self) -> Instant:
        """Smallest time at which a timer, hold or parked record keeps the low watermark back."""
        return min(self._book.oldest_hold(), self._parking.oldest_hold())

    def next_due(self) -> tuple[Instant, Instant]:
        """(event time, processing time) of the next timers."""
        return self._book.next_due()

    def folded(self, bundle: int) -> None:
        """Values last changed at or before `bundle` are rows now, and may leave."""
        self._unfolded = {key: changed for key, changed in self._unfolded.items() if changed > bundle}

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

    def _release(self, releases: Sequence[Release]) -> list[tuple[Key, Released]]:
        """Take the keys out that requests let go on; a request for another parking than the present one is none."""
        released = []
        for request in releases:
            key = key_from_text(request.key, self._key_types)
            parked = self._parking.keys.get(key)
            if parked is not None and parked.failure.ticket == request.ticket:
                self._parking.release(key)
                self._book.go_on(key)
                released.append((key, Released(parked, request.discard)))
        return released

    def _rows_of(self, key: Key, released: Released) -> tuple[Key, int, list[tuple[ParkedRow, Any]]]:
        """What of a released key runs again."""
        rows = [(row, self._parking.record_of(row)) for row in released.rows]
        return key, int(self._hasher.hashes([key])[0]), rows

    def _account_released(self, turn: Turn, key: Key, released: Released) -> None:
        """Set aside what a released key stopped at, if a person wants that."""
        failure, computation = released.parked.failure, self._binding.computation
        head = released.discarded
        if head is not None:
            turn.quarantined[head.input] = turn.quarantined.get(head.input, 0) + 1
            payload = payload_of(self._parking.record_of(head))
            letter = discarded(failure, payload, key, computation)
            stream, at = self._binding.inputs[head.input].stream, head.waiting.event_time
            turn.letters.append(replace(letter, stream=stream, event_time=at, input=head.input))
        elif released.discards and failure.timer is not None:
            timers = dict(self._book.by_key.get(key, {}))
            timer = timers.pop(failure.timer, None)
            if timer is not None:
                self._book.replace(key, turn.keys.index(key), timers)
                letter = discarded(failure, payload_of_timer(timer), key, computation)
                turn.letters.append(replace(letter, event_time=timer.event_time_us))

    def _wait(self, turn: Turn) -> set[int]:
        """Let records of parked keys wait; returns the codes of these keys."""
        if not self._parking.keys:
            return set()
        waiting = {code for code, key in enumerate(turn.keys) if key in self._parking}
        for code in waiting:
            for row in turn.rows.of(code):
                self._wait_one(turn, code, row)
        return waiting

    def _wait_one(self, turn: Turn, code: int, row: int) -> bool:
        """Let a record wait; False when it cannot be stored and is set aside."""
        rows, key = turn.rows, turn.keys[code]
        origin = rows.input_of(row)
        try:
            parking, limits = self._parking, self._binding.limits
            if parking.records >= limits.parked_records_max or parking.bytes >= limits.parked_bytes_max:
                raise RefusedValueError(f"{parking.records} records of parked keys wait already, {parking.bytes} bytes")
            self._parking.wait(key, rows, row, turn.work.bundle)
            return True
        except RefusedValueError as error:
            turn.quarantined[origin] = turn.quarantined.get(origin, 0) + 1
            letter = dead_letter_of(
                error,
                payload_of(rows.objects[row]),
                stream=self._binding.inputs[origin].stream,
                computation=self._binding.computation,
                event_time=rows.times[row],
                key=key_text(key),
                input=origin,
            )
            turn.letters.append(letter)
            return False

    def _park_stopped(self, turn: Turn) -> None:
        """Park the keys that have stopped in this turn, with their rows from there on."""
        stopped, turn.stopped = turn.stopped, {}
        for code, stop in stopped.items():
            key = turn.keys[code]
            self._parking.park(key, failure_of(stop, turn.work))
            self._book.stop(key)
            for row in stop.rows:
                if not self._wait_one(turn, code, row) and row == stop.item:
                    self._parking.lose(key)

    def _refuse_keys(self, turn: Turn, texts: Sequence[bytes]) -> set[int]:
        """Set aside records whose key cannot be stored."""
        refused = unstorable_keys(texts)
        for code, problem in refused.items():
            for row in turn.rows.of(code):
                origin = turn.rows.input_of(row)
                turn.quarantined[origin] = turn.quarantined.get(origin, 0) + 1
                turn.letters.append(
                    DeadLetter(
                        reason="key",
                        detail=problem,
                        payload=payload_of(turn.rows.objects[row]),
                        stream=self._binding.inputs[origin].stream,
                        computation=self._binding.computation,
                        event_time=turn.rows.times[row],
                        input=origin,
                    )
                )
        return set(refused)

    def _due_codes(self, turn: Turn, texts: list[bytes]) -> list[int]:
        """Codes of the keys with due timers, in due order; keys without rows in this turn get codes here."""
        keys = self._book.due_keys(turn.work.watermark, turn.work.now_us)
        if not self._complete:
            keys = [key for key in keys if key in self._known]
        if not keys:
            return []
        code_of = {key: code for code, key in enumerate(turn.keys)} if turn.keys else {}
        for key in keys:
            if key not in code_of:
                code_of[key] = len(turn.keys)
                turn.keys.append(key)
                turn.hashes.extend(self._hasher.hashes([key]).tolist())
                texts.append(key_text(key))
        return [code_of[key] for key in keys]

    def _take_delta(self, bundle: int, turn: Turn, texts: Sequence[bytes]) -> list[Entries]:
        delta = []
        for store in self._stores.values():
            self._unfolded.update({turn.keys[code]: bundle for code in store.changed})
            entries = store.take_entries(texts, turn.hashes)
            if entries is not None:
                delta.append(entries)
        delta += self._book.take_entries(texts, turn.hashes)
        return delta + self._parking.take_entries(turn.keys, texts, turn.hashes)

    def _emit(self, result: StepResult, turn: Turn, due: Sequence[int]) -> None:
        """Productions by the order of their rows; then those of timers, by time."""
        turn.produced.sort(key=itemgetter(0))
        fired = [production for code in due for production in turn.fired.get(code, ())]
        fired.sort(key=itemgetter(1))
        by_outlet: dict[Any, tuple[list[Any], list[Instant]]] = {}
        production: Produced
        for production in (*turn.produced, *fired):
            _, time, outlet, record = production
            records, times = by_outlet.setdefault(outlet, ([], []))
            records.append(record)
            times.append(time)
        for outlet, made in turn.made.items():
            assert isinstance(outlet, StreamOutlet), outlet
            result.emitted_by_stream[outlet.stream] = made
            if outlet.table_id is not None:
                result.emitted_by_table[outlet.table_id] = made
        for outlet, (records, times) in by_outlet.items():
            assert isinstance(outlet, StreamOutlet), outlet
            productions, rows = outlet.gather(records, times)
            if productions is not None:
                result.productions[outlet.stream] = productions
            if rows is not None:
                result.results.append(rows)

    def _evict(self, turn: Turn) -> None:
        """Forget values that are stored, the least recently used first, until the rest fits again."""
        limit = self._binding.limits.state_cache_bytes_max
        used = sum(store.bytes for store in self._stores.values()) + len(self._known) * ENTRY_BYTES
        if used <= limit // 2 and self._complete:
            return
        if not self._complete:
            for key in turn.keys:
                self._known.pop(key, None)
                self._known[key] = None
        if used <= limit:
            return
        if self._complete:
            self._known = dict.fromkeys(key for store in self._stores.values() for key in store.keys())
            self._complete = False
        kept = set(turn.keys)
        for key in list(self._known):
            if sum(store.bytes for store in self._stores.values()) + len(self._known) * ENTRY_BYTES <= limit * 3 // 4:
                break
            if key in self._unfolded or key in self._book.by_key or key in kept or key in self._parking:
                continue
            for store in self._stores.values():
                store.evict(key)
            del self._known[key]
