"""Drives one stage without a runtime or a store: bundles in, effects out, restarts from what its deltas say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DedupeRun, Entries, Kind
from millpy.model.delta import decode_document, encode_document
from millpy.model.horizons import HorizonChange
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.stage import (
    UNBOUNDED,
    InputBundle,
    InputSpec,
    Release,
    StageBinding,
    StageInterval,
    StageLogic,
    StepResult,
    StoredInterval,
    Work,
)
from millpy.model.stored_windows import WAITS, ClosedKind, SpanOfEnds, StoredPane, WindowQuery, is_emitted, span_of
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.operators.deduplicate import DeduplicateLogic
from millpy.store.memory.tables import column_values
from millpy.windowing.logic import WindowedLogic

SOURCE = 7

Stored = dict[tuple[Kind, str, bytes, str], tuple[bytes, int, int]]


class StageDriver:
    """Drives one interval of one computation behind one source.

    `stored` is what a database would have: (kind, namespace, key, subkey) -> (value, hash, fire_at); `folded` what it
    has as rows; `loadable` the state that a load on demand is sure to see. After a fold every closed window may leave
    memory.
    """

    def __init__(
        self,
        logic: StageLogic,
        record: type[msgspec.Struct],
        *,
        key: tuple[str, ...] = ("key",),
        outputs: dict[str, RecordType] | None = None,
        tables: dict[str, int] | None = None,
        source_fed: bool = True,
        max_disorder: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.type = RecordType(record)
        self.key = key
        outputs = outputs or {}
        self.binding = StageBinding(
            "subject",
            (InputSpec("input", self.type, key, self.type.key_types(key), source_fed),),
            outputs,
            tables or {},
            frozenset(outputs),
            limits or Limits(closed_windows_bytes_max=1, unfired_windows_bytes_max=1),
        )
        self.stage = logic.bind(self.binding)
        self.source_fed = source_fed
        self.max_disorder = max_disorder
        self.hasher = KeyHasher()
        self.stored: Stored = {}
        self.folded: Stored = {}
        self.deleted_in: dict[tuple[Kind, str, bytes, str], int] = {}
        self.loadable: Stored = {}
        self.folded_bundle = 0
        self.loaded = 0
        self._before = (dict(self.folded), 0)
        self.bundle = 0
        self.watermark = self.low_watermark = self.horizon_floor = INSTANT_MIN
        self.oldest = INSTANT_MAX
        self.largest: int | None = None
        self.now_us = 0
        self.panes_max = self.timers_max = UNBOUNDED
        self.state_complete = True
        self.interval = self.stage.open(StoredInterval(1, 1))
        self.runs: list[DedupeRun] = []
        self.results: list[StepResult] = []

    def records(
        self, rows: Sequence[tuple[Any, int]], *, columns: bool = False, retracts: Sequence[bool] | None = None
    ) -> Records:
        """Rows of (object, event time), with the watermark before each; `retracts` says which are retractions."""
        watermarks = []
        for _, at in rows:
            watermarks.append(INSTANT_MIN if self.largest is None else self.largest - self.max_disorder)
            self.largest = at if self.largest is None else max(self.largest, at)
        return Records(
            self.type,
            np.array([at for _, at in rows], np.int64),
            watermarks=np.array(watermarks, np.int64) if self.source_fed else None,
            retracts=None if retracts is None else np.array(retracts, np.bool_),
            objects=None if columns else [o for o, _ in rows],
            batch=self.type.batch_of([o for o, _ in rows]) if columns else None,
        )

    def feed(
        self,
        rows: Sequence[tuple[Any, int]],
        *,
        watermark: int | None = None,
        cap: int = INSTANT_MAX,
        now_us: int | None = None,
        columns: bool = False,
        releases: Sequence[Release] = (),
        retracts: Sequence[bool] | None = None,
    ) -> StepResult:
        """Step one bundle; the watermark after it is that of the source, unless it is given."""
        before = self.watermark
        arrived = []
        if rows:
            records = self.records(rows, columns=columns, retracts=retracts)
            reached = INSTANT_MIN if self.largest is None else Instant(self.largest - self.max_disorder)
            self.watermark = max(before, min(reached, Instant(cap)))
            bundle = Bundle(0, SOURCE, self.bundle + 1, reached, records, records.keys(self.key, self.hasher))
            arrived.append(InputBundle(bundle, Instant(cap)))
        if watermark is not None:
            self.watermark = max(self.watermark, Instant(watermark))
        self.now_us = max(self.now_us, now_us or 0)
        missing = self.interval.missing_keys([a.bundle for a in arrived])
        if missing:
            self.interval.load_state(missing, self.entries({Kind.STATE}, set(missing), self.loadable))
        self.bundle += 1
        work = Work(self.bundle, arrived, before, self.watermark, Instant(self.now_us), releases, self.panes_max)
        work.timers_max = self.timers_max
        work.load_windows, work.query_windows = self.load_windows, self.query_windows
        result = self.interval.step(work)
        self.oldest = self.interval.oldest_work()
        if not result.unfinished:
            self.low_watermark = max(self.low_watermark, min(self.oldest, self.watermark))
        self.commit(result)
        self.results.append(result)
        return result

    def finish(self) -> StepResult:
        """End the source, and run turns until none leaves work undone."""
        result = self.feed([], watermark=INSTANT_MAX)
        while result.unfinished:
            result = self.feed([])
        return result

    def commit(self, result: StepResult) -> None:
        self._before = (dict(self.stored), self.bundle - 1)
        if result.dedupe_run is not None:
            self.runs.append(result.dedupe_run)
        for entries in decode_document(encode_document(result.delta)):
            columns = zip(
                entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats, strict=True
            )
            seen = set()
            for key, hashed, subkey, value, fire_at in columns:
                assert (key, subkey) not in seen, "an entry twice in one delta"
                seen.add((key, subkey))
                name = (entries.kind, entries.namespace, key, subkey)
                if value is None:
                    self.stored.pop(name, None)
                    self.deleted_in[name] = self.bundle
                else:
                    self.deleted_in.pop(name, None)
                    self.stored[name] = (value, hashed, fire_at)

    def fold(self, *, behind: bool = False) -> None:
        """Turn all changes into rows, or all but the last bundle's; let closed windows leave memory."""
        folded = self._before if behind else (dict(self.stored), self.bundle)
        if folded[1] >= self.folded_bundle:
            self.folded, self.folded_bundle = folded
        self.loadable = self.folded
        self.interval.on_folded(self.folded_bundle)
        self.delete_expired()

    def delete_expired(self) -> None:
        """Delete the rows of stored windows that have expired in committed bundles, as a store does."""
        gone = {subkey for subkey, bundle in self.interval.expired_windows() if bundle <= self.bundle}
        for rows in (self.stored, self.folded):
            for name in [name for name in rows if name[0] is Kind.WINDOW and name[3] in gone]:
                del rows[name]
        self.interval.on_windows_deleted(self.bundle)

    def load_windows(self, folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]) -> Entries:
        """Read rows of windows, as a store does."""
        assert folded_bundle <= self.folded_bundle
        assert not getattr(self.interval, "immediate", False)
        found = Entries(Kind.WINDOW, "")
        wanted = set(zip(keys, subkeys, strict=True))
        for (kind, _, key, subkey), (value, hashed, fire_at) in self.folded.items():
            if kind is Kind.WINDOW and (key, subkey) in wanted:
                found.add(key, hashed, subkey, value, fire_at)
        self.loaded += len(found)
        return found

    def query_windows(self, folded_bundle: int, query: WindowQuery) -> Entries:
        """Read the rows that a query asks for, as a store does."""
        assert folded_bundle <= self.folded_bundle
        assert not getattr(self.interval, "immediate", False)
        rows = [(name[2:], row) for name, row in self.folded.items() if name[0] is Kind.WINDOW]
        found = query.answer(
            StoredPane(key, hashed, subkey, value, fire_at) for (key, subkey), (value, hashed, fire_at) in rows
        )
        self.loaded += sum(value is not None for value in found.values)
        return found

    def recovered(self, kinds: Iterable[Kind], *, state_complete: bool = True) -> StoredInterval:
        """Return what a new owner reads: closed windows stay in the store if nothing has changed since the fold."""
        rows = {name for name in self.folded if name[0] is Kind.WINDOW}
        rows_max = getattr(self.stage, "closed_rows_max", UNBOUNDED)
        if len(rows) <= rows_max:
            rows = set()
        everything_left = rows
        rows = {name for name in rows if int(name[3].partition("/")[2]) <= min(self.low_watermark, self.oldest)}
        unfired_kinds = (ClosedKind.UNFIRED, ClosedKind.UNFIRED_PANES)
        waiting = b"no value" if self.stage_kind() in (ClosedKind.WINDOWS, *unfired_kinds) else WAITS
        rows = {name for name in rows if waiting not in self.folded[name][0]}
        sessions = self.stage_kind() is ClosedKind.UNFIRED_SESSIONS
        unfired = everything_left - rows if sessions or self.stage_kind() in unfired_kinds else set()
        unread = [span_of(name[3])[1] for name in unfired if sessions and not is_emitted(self.folded[name][0])]
        rows |= unfired
        everything = self.stored
        self.stored = {n: row for n, row in everything.items() if n not in rows or self.folded[n] != row}
        entries, self.stored = self.entries(kinds), everything
        ends = [span_of(name[3])[1] for name in rows] if sessions or self.stage_kind() is ClosedKind.SESSIONS else []
        ends = [end for end in ends if end <= self.watermark]
        deleted = [name for name, bundle in self.deleted_in.items() if bundle > self.folded_bundle]
        may_leave = rows_max < UNBOUNDED and (sessions or self.stage_kind() is ClosedKind.SESSIONS)
        may_wait = self.stage_kind() is ClosedKind.UNFIRED_PANES and bool(rows)
        if (may_leave or unfired or may_wait) and deleted:
            gone = Entries(Kind.WINDOW, "")
            for kind, _, key, subkey in deleted:
                if kind is Kind.WINDOW:
                    gone.add(key, 0, subkey, None)
            entries.append(gone)
        return StoredInterval(
            1,
            2,
            bundle=self.bundle,
            folded_bundle=self.folded_bundle,
            input_watermark=self.watermark,
            low_watermark=self.low_watermark,
            entries=entries,
            state_complete=state_complete,
            dedupe_runs=self.live_runs(),
            horizon_floor=self.horizon_floor,
            closed_windows=[] if ends else sorted({name[3] for name in rows - unfired}),
            unfired_windows=[] if sessions else sorted({name[3] for name in unfired}),
            unfired_from=Instant(min(unread, default=INSTANT_MAX)),
            closed_ends=SpanOfEnds(min(ends), max(ends)) if ends else None,
        )

    def stage_kind(self) -> ClosedKind:
        """The kind of the stage's windows for a new owner."""
        return getattr(self.stage, "closed_kind", ClosedKind.WINDOWS)

    def entries(
        self, kinds: Iterable[Kind], keys: set[bytes] | None = None, stored: Stored | None = None
    ) -> list[Entries]:
        """Return the stored entries in an order unrelated to that of writing."""
        found: dict[tuple[Kind, str], Entries] = {}
        chosen = self.stored if stored is None else stored
        for (kind, namespace, key, subkey), (value, hashed, fire_at) in sorted(chosen.items()):
            if kind in kinds and (keys is None or key in keys):
                part = found.setdefault((kind, namespace), Entries(kind, namespace))
                part.add(key, hashed, subkey, value, fire_at)
        return list(found.values())

    def restart(self, *, state_complete: bool = True) -> None:
        """What another worker would have after a takeover."""
        self.loadable = dict(self.stored)
        kinds = set(Kind) if state_complete else set(Kind) - {Kind.STATE}
        oldest, due, lags = self.interval.oldest_work(), self.interval.next_due(), has_unread(self.interval)
        self.interval = self.stage.open(self.recovered(kinds, state_complete=state_complete))
        may_lag = lags or has_unread(self.interval)
        assert self.interval.oldest_work() == oldest or may_lag
        assert self.interval.next_due() == due or self.folded_bundle

    def deploy(self, logic: StageLogic, outputs: dict[str, RecordType]) -> None:
        """Continue from the stored state with another logic."""
        self.binding = replace(self.binding, outputs=outputs)
        self.stage = logic.bind(self.binding)
        self.restart()

    def change_lateness(self, logic: WindowedLogic, before_us: int) -> None:
        """Continue from the stored state with the same windows of another lateness, as a deployment lets them."""
        self.horizon_floor = max(self.horizon_floor, Instant(self.watermark - before_us))
        self.stage = logic.bind(self.binding)
        self.interval = self.stage.open(self.recovered(Kind))

    def change_within(self, logic: DeduplicateLogic, change: HorizonChange) -> None:
        """Continue from the stored ids with another horizon of duplicates, as a deployment lets them."""
        self.horizon_floor = max(self.horizon_floor, Instant(self.watermark - change.floor_us))
        longer = max(change.longer_us, 0)
        self.runs = [replace(run, expires_at=Instant(run.expires_at + longer)) for run in self.live_runs()]
        self.stage = logic.bind(self.binding)
        self.interval = self.stage.open(self.recovered(Kind))

    def lose(self, rows: Sequence[tuple[Any, int]], *, columns: bool = False) -> None:
        """Step a bundle whose commit fails: soft state is thrown away and read again."""
        kept = (dict(self.stored), self.bundle, self.watermark, self.largest, list(self.results))
        reached = (self.low_watermark, self.oldest)
        deleted_in = dict(self.deleted_in)
        self.feed(rows, columns=columns)
        self.stored, self.bundle, self.watermark, self.largest, self.results = kept
        self.low_watermark, self.oldest = reached
        self.deleted_in = deleted_in
        self.interval = self.stage.open(self.recovered(Kind))

    def parked(self) -> dict[bytes, int]:
        """Return key -> ticket of every parked key."""
        return {
            key: msgspec.json.decode(value)["ticket"]
            for (kind, namespace, key, _), (value, _, _) in self.stored.items()
            if kind is Kind.PARKED and namespace == "key"
        }

    def release(self, rows: Sequence[tuple[Any, int]] = (), *, discard: bool = False) -> StepResult:
        """Let all parked keys go on, in a step that also takes these rows."""
        tickets = self.parked().items()
        return self.feed(
            rows, releases=[Release(n, 1, key, ticket, discard) for n, (key, ticket) in enumerate(tickets)]
        )

    def live_runs(self) -> list[DedupeRun]:
        """Return the runs that a store would still have."""
        clock = max((run.clock for run in self.runs), default=INSTANT_MIN)
        return [run for run in self.runs if run.expires_at >= clock]

    def produced(self, stream: str) -> list[tuple[Any, int]]:
        """All productions so far with their times."""
        found: list[tuple[Any, int]] = []
        for result in self.results:
            if stream in result.productions:
                records = result.productions[stream]
                found.extend(zip(records.objects(), records.event_times.tolist(), strict=True))
        return found

    def deleted(self, result: StepResult) -> list[tuple[Any, ...]]:
        """Key, start and end of the result rows that a step deletes."""
        return [row for part in result.deleted for row in zip(*map(column_values, part.columns), strict=True)]

    def check_ended(self) -> None:
        """After the end, nothing is stored but counters, held back or due."""
        self.delete_expired()
        assert not {name for name in self.stored if name[0] is not Kind.COUNTER}
        assert self.interval.oldest_work() == INSTANT_MAX
        assert self.interval.next_due() == (INSTANT_MAX, INSTANT_MAX)


def apply_rows(table: dict[Any, tuple[int, int]], result: StepResult) -> None:
    """Change a table (key, start, end) -> (n, total) as a step does; a row is the first one of its window or not."""
    for deleted in result.deleted:
        for name in zip(*map(column_values, deleted.columns), strict=True):
            del table[name]
    for part in result.results:
        for key, start, end, n, total, *_ in zip(*map(column_values, part.columns), strict=True):
            assert ((key, start, end) in table) != part.first
            table[key, start, end] = n, total


def timedelta_us(us: int) -> timedelta:
    """Microseconds."""
    return timedelta(microseconds=us)


def has_unread(interval: StageInterval) -> bool:
    """Tell whether an interval has windows that hold the low watermark until it has looked into the store for panes."""
    spilled = getattr(getattr(interval, "_open", None), "spilled", None)
    return bool(getattr(spilled, "unread", ())) or getattr(spilled, "unfired_from", INSTANT_MAX) < INSTANT_MAX
