"""The windowed step alone: one key interval, without source, walk or store.

It makes the watermark of a source partition itself, by the rule in `docs/testing.md` and not by the engine's code: the
largest event time so far minus `max_disorder`, or a later time that was stated. Its state is read back from what its
deltas say, so a crash is one of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millpy.errors import PaneOrderError, UsageError
from millpy.graph import StageNode
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, Entries
from millpy.model.delta import decode_document, encode_document
from millpy.model.keys import KeyHasher, key_text
from millpy.model.record import Records
from millpy.model.sites import SiteProgress
from millpy.model.stage import InputBundle, StageBinding, StageInterval, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, instant, to_datetime
from millpy.model.watermark import low_watermark
from millpy.store.memory.tables import EntryName, KeyedRow, column_values, entries_of
from millpy.testing.kit.contents import LateRecord, Pane, late_records_of, panes_of
from millpy.testing.kit.state import Rows
from millpy.testing.transcripts.definition import STEP, Definition
from millpy.windowing.logic import WindowedLogic

TABLE = 1


class NotApplicableError(UsageError):
    """A transcript needs what its subject does not have."""


@dataclass(slots=True)
class PartitionModel:
    """A source partition: the largest event time so far, and its watermark."""

    producer: int
    largest: int = INSTANT_MIN
    watermark: int = INSTANT_MIN
    bundles: int = 0
    sites: dict[str, PartitionModel] = field(default_factory=dict)
    stated: int = INSTANT_MIN

    def watermark_before(self, site: str, at: int, disorder_us: int) -> int:
        """Return the watermark of a site before a record at `at`, and move the site on."""
        model = self.sites.setdefault(site, PartitionModel(self.producer, watermark=self.stated))
        before = model.watermark
        model.largest = max(model.largest, at)
        model.watermark = max(model.watermark, model.largest - disorder_us)
        return before

    def progress(self, records: Sequence[Any]) -> SiteProgress:
        """Return what a bundle of these records says of their sites."""
        names = sorted({record.key for record in records})
        return SiteProgress(self.stated, None, {key_text(name).decode(): self.sites[name].watermark for name in names})


@dataclass(slots=True)
class CommittedStep:
    """What the step has committed.

    Attributes:
        entries: the keyed entries.
        rows: the rows of the result table by their key.
    """

    bundle: int
    watermark: Instant
    low: Instant
    entries: dict[EntryName, KeyedRow]
    rows: dict[tuple[Any, ...], dict[str, Any]]


class StageSubject:
    """The windowed step of a transcript.

    Args:
        definition: what the transcript computes.
        columns: whether every bundle is grouped as columns, however small; by default the size decides.
    """

    def __init__(self, definition: Definition, *, columns: bool = False) -> None:
        graph = definition.graph("transcript")
        node = next(node for node in graph.nodes if isinstance(node, StageNode))
        assert isinstance(node.logic, WindowedLogic)
        logic = replace(node.logic, few_records_max=-1) if columns else node.logic
        (self._input,) = node.input_specs()
        (output,) = node.outputs
        (self._table,) = graph.spec().tables
        binding = StageBinding(
            STEP, (self._input,), {STEP: output.record_type}, {STEP: TABLE}, frozenset([STEP]), Limits()
        )
        self._stage = logic.bind(binding)
        self._columns = logic.columns()
        self._by_site = bool(self._input.site)
        self._disorder_us = definition.event_time.max_disorder_us
        self._tolerance_us = definition.event_time.future_tolerance_us
        self._now = definition.clock
        self._partitions = {
            name: PartitionModel(producer) for producer, name in enumerate(definition.partitions, start=1)
        }
        self._stored = CommittedStep(0, INSTANT_MIN, INSTANT_MIN, {}, {})
        self._hasher = KeyHasher()
        self._loses_turns = False
        self._panes: list[Pane] = []
        self._late: list[LateRecord] = []
        self._dead_letters: list[DeadLetter] = []
        self._interval = self._open()

    def feed(self, records: Sequence[Any], partition: str | None) -> None:
        """Give records to a source partition as one bundle."""
        source = self._partitions[partition] if partition else next(iter(self._partitions.values()))
        times = [instant(record.at) for record in records]
        if any(at > self._now + self._tolerance_us for at in times):
            raise NotApplicableError("a record from the future")
        if self._by_site:
            self._turn([self._of_sites(source, records, times)])
            return
        watermarks = []
        for at in times:
            watermarks.append(source.watermark)
            source.largest = max(source.largest, min(at, self._now))
            source.watermark = max(source.watermark, source.largest - self._disorder_us)
        bundle = self._bundle(source, self._records(records, times, watermarks))
        others = (other.watermark for other in self._partitions.values() if other is not source)
        cap = Instant(min(others, default=INSTANT_MAX))
        self._turn([InputBundle(bundle, cap)] if records else [])

    def _of_sites(self, source: PartitionModel, records: Sequence[Any], times: Sequence[int]) -> InputBundle:
        """Return records of a source partition with a watermark for each key, and how far the sites are behind them."""
        watermarks = [
            source.watermark_before(record.key, min(at, self._now), self._disorder_us)
            for record, at in zip(records, times, strict=True)
        ]
        least = min((site.watermark for site in source.sites.values()), default=source.stated)
        source.watermark = max(source.watermark, least)
        made = self._records(records, times, watermarks)
        made.sites = source.progress(records)
        return InputBundle(self._bundle(source, made), INSTANT_MAX)

    def _records(self, records: Sequence[Any], times: Sequence[int], watermarks: Sequence[int]) -> Records:
        return Records(
            self._input.record_type,
            np.array(times, np.int64),
            watermarks=np.array(watermarks, np.int64),
            objects=list(records),
        )

    def _bundle(self, source: PartitionModel, made: Records) -> Bundle:
        """Return records as the next bundle of a source partition."""
        source.bundles += 1
        keys = made.keys(self._input.key_fields, self._hasher)
        return Bundle(0, source.producer, source.bundles, Instant(source.watermark), made, keys)

    def advance_watermark(self, at: Instant, partition: str | None) -> None:
        """Let source partitions state that nothing before `at` comes any more."""
        told = []
        for name, source in self._partitions.items():
            if partition not in (None, name):
                continue
            source.watermark = max(source.watermark, at)
            if self._by_site:
                source.stated = max(source.stated, at)
                for site in source.sites.values():
                    site.watermark = max(site.watermark, source.stated)
                told.append(self._of_sites(source, [], []))
        self._turn(told)

    def advance_clock(self, by_us: int) -> None:
        """Let processing time pass."""
        self._now = Instant(self._now + by_us)
        self._turn([])

    def end(self, partition: str | None) -> None:
        """End the input."""
        self.advance_watermark(INSTANT_MAX, partition)

    def crash(self) -> None:
        """Drop all soft state, and read what is committed."""
        self._interval = self._open()

    def lose_turns(self, loses: bool) -> None:
        """Set whether each turn is stepped, lost in a crash, and made again."""
        self._loses_turns = loses

    def panes(self) -> Sequence[Pane]:
        """Return all panes so far."""
        return self._panes

    def late_records(self) -> Sequence[LateRecord]:
        """Return all late records so far."""
        return self._late

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return all dead letters so far."""
        return self._dead_letters

    def table(self) -> Rows:
        """Return the rows of the result table."""
        found = []
        for _, row in sorted(self._stored.rows.items()):
            times = {name: to_datetime(Instant(row[name])) for name in ("window_start", "window_end")}
            found.append(row | times)
        return found

    def watermarks(self) -> tuple[Instant, Instant, Instant]:
        """Return (watermark of the source, input watermark, low watermark)."""
        return self._source_watermark(), self._stored.watermark, self._stored.low

    def unbalanced(self) -> Sequence[str]:
        """Return nothing: the step alone has no accounts."""
        return ()

    def close(self) -> None:
        """Forget the run."""

    def _source_watermark(self) -> Instant:
        return Instant(min(source.watermark for source in self._partitions.values()))

    def _open(self) -> StageInterval:
        stored = self._stored
        return self._stage.open(
            StoredInterval(
                1,
                1,
                bundle=stored.bundle,
                input_watermark=stored.watermark,
                low_watermark=stored.low,
                entries=entries_of(stored.entries.items()),
            )
        )

    def _turn(self, arrived: list[InputBundle]) -> None:
        if self._loses_turns:
            self._step(arrived)
            self.crash()
        self._commit(self._step(arrived))

    def _step(self, arrived: list[InputBundle]) -> StepResult:
        stored = self._stored
        work = Work(stored.bundle + 1, arrived, stored.watermark, self._source_watermark(), self._now)
        return self._interval.step(work)

    def _commit(self, result: StepResult) -> None:
        assert not result.unfinished, "a step without bounds leaves nothing undone"
        stored = self._stored
        stored.bundle += 1
        stored.watermark = self._source_watermark()
        stored.low = max(stored.low, low_watermark(self._interval.oldest_work(), stored.watermark))
        for entries in decode_document(encode_document(result.delta)):
            self._store(entries)
        self._store_rows(result)
        for rows in result.late:
            self._late += late_records_of(rows, self._input.record_type, self._input.key_types)
        self._dead_letters += result.dead_letters
        if STEP in result.productions:
            self._panes += panes_of(result.productions[STEP], self._input.key_fields, self._columns)

    def _store(self, entries: Entries) -> None:
        columns = (entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats)
        for key, hashed, subkey, value, fire_at in zip(*columns, strict=True):
            name = (entries.kind, entries.namespace, key, subkey)
            if value is None:
                self._stored.entries.pop(name, None)
            else:
                self._stored.entries[name] = KeyedRow(hashed, value, fire_at, self._stored.bundle)

    def _store_rows(self, result: StepResult) -> None:
        """Store result rows as a database does; refuse a pane that does not follow the stored one (I7)."""
        rows = self._stored.rows
        for deleted in result.deleted:
            for name in zip(*map(column_values, deleted.columns), strict=True):
                rows.pop(name, None)
        names = [column.name for column in self._table.columns()]
        for part in result.results:
            for values in zip(*map(column_values, part.columns), strict=True):
                row = dict(zip(names, values, strict=True))
                key = (row["key"], row["window_start"], row["window_end"])
                before = rows[key]["pane_index"] if key in rows else -1
                if row["pane_index"] != before + 1:
                    raise PaneOrderError(f"pane {row['pane_index']} of {key} does not follow pane {before}")
                rows[key] = row
