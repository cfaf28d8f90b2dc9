"""Direct reads and commits of a `MemoryDatabase`, without workers, leases, locks or lost answers.

A host of a graph (`hosting.host`) uses it as the only owner. `MemoryStore` builds on it for several workers, and models
their waits and faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant, Kind, Segment
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.stage import UNBOUNDED, StoredInterval
from millpy.model.stored_windows import ClosedKind, SpanOfEnds, StoredPane, WindowQuery, is_emitted, span_of
from millpy.model.time import INSTANT_MAX, Instant
from millpy.store.memory.database import MemoryDatabase, Transaction
from millpy.store.memory.tables import Header, entries_of, overlaid, without_closed
from millpy.store.protocol import OwnerSnapshot, PolledSegment, PollResult, SegmentQuery, check_fold


class MemoryState:
    """The committed state of graphs in a `MemoryDatabase`."""

    def __init__(self, database: MemoryDatabase | None = None) -> None:
        self.database = database if database is not None else MemoryDatabase()

    def deploy(self, spec: GraphSpec) -> Deployment:
        """Register a graph, or apply its additions to the deployed one. Return its deployment."""
        return self.database.deploy(spec)

    def claim(self, interval_ids: Sequence[int]) -> list[Grant]:
        """Raise the sequencers of intervals, which makes earlier grants stale. Return the new grants."""
        for interval_id in interval_ids:
            self.database.headers[interval_id].disown()
        return [Grant(interval_id, self.database.headers[interval_id].sequencer) for interval_id in interval_ids]

    def read(
        self,
        grant: Grant,
        *,
        state_rows_max: int,
        closed_rows_max: int = UNBOUNDED,
        closed: ClosedKind = ClosedKind.WINDOWS,
    ) -> OwnerSnapshot:
        """Read the stored data of an interval; see `Store.read` for the bounds."""
        header = self.database.headers[grant.interval_id]
        deltas = self.database.unfolded(header)
        keyed, left, unfired = header.keyed, frozenset[str](), frozenset[str]()
        fired_by = min(header.low_watermark, header.oldest_work)  # a late record opens a window behind the watermark
        if sum(name[0] is Kind.WINDOW for name in keyed) > closed_rows_max:
            keyed, left = without_closed(keyed, fired_by, closed)
            if closed in (ClosedKind.UNFIRED, ClosedKind.UNFIRED_PANES, ClosedKind.UNFIRED_SESSIONS):
                unfired = frozenset(name[3] for name in keyed if name[0] is Kind.WINDOW)
                keyed = {name: row for name, row in keyed.items() if name[0] is not Kind.WINDOW}
        newest = overlaid(keyed, deltas)
        ends, unfired_from = list[int](), INSTANT_MAX
        if closed is ClosedKind.UNFIRED_SESSIONS and (left or unfired):
            left, ends, unfired_from = frozenset(), *self._unread(header, fired_by)
            unfired = frozenset()
        elif closed is ClosedKind.SESSIONS:
            ends = [span_of(subkey)[1] for subkey in left]
        of_sessions = closed in (ClosedKind.SESSIONS, ClosedKind.UNFIRED_SESSIONS)
        may_wait = closed is ClosedKind.UNFIRED_PANES and bool(left)
        if unfired or may_wait or (of_sessions and closed_rows_max < UNBOUNDED):
            everything = overlaid(keyed, deltas, tombstones=True)
            newest |= {n: row for n, row in everything.items() if n[0] is Kind.WINDOW and row.value is None}
        state_complete = sum(name[0] is Kind.STATE for name in newest) <= state_rows_max
        entries = entries_of((n, row) for n, row in newest.items() if state_complete or n[0] is not Kind.STATE)
        recovered = StoredInterval(
            interval_id=header.interval.interval_id,
            sequencer=header.sequencer,
            bundle=header.bundle,
            folded_bundle=header.folded_bundle,
            input_watermark=header.input_watermark,
            low_watermark=header.low_watermark,
            processing_floor=header.processing_floor,
            entries=entries,
            state_complete=state_complete,
            horizon_floor=header.horizon_floor,
            closed_windows=[] if ends else sorted(left),
            unfired_windows=sorted(unfired),
            closed_ends=SpanOfEnds(min(ends), max(ends)) if ends else None,
            unfired_from=unfired_from,
            outbox=self.database.outbox_state(grant.interval_id),
        )
        unfolded_bytes = sum(delta.size for delta in deltas)
        return OwnerSnapshot(recovered, dict(header.cursors), dict(header.last_segments), unfolded_bytes)

    def _unread(self, header: Header, fired_by: Instant) -> tuple[list[int], Instant]:
        """Return the ends of folded sessions that may have fired, and that of the first other one."""
        rows = [(span_of(name[3])[1], row.value) for name, row in header.keyed.items() if name[0] is Kind.WINDOW]
        unfired = [end for end, value in rows if end > fired_by and not is_emitted(value)]
        return [end for end, _ in rows if end <= header.input_watermark], Instant(min(unfired, default=INSTANT_MAX))

    def load_state(self, grant: Grant, keys: Sequence[bytes]) -> list[Entries]:
        """Read the STATE entries of these keys."""
        header = self.database.headers[grant.interval_id]
        wanted = set(keys)
        newest = overlaid(header.keyed, self.database.unfolded(header))
        return entries_of((name, row) for name, row in newest.items() if name[0] is Kind.STATE and name[2] in wanted)

    def load_windows(self, grant: Grant, folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]) -> Entries:
        """Read folded entries of windows; see `Store.load_windows`."""
        header = self.database.headers[grant.interval_id]
        check_fold(grant, header.folded_bundle, folded_bundle)
        found = Entries(Kind.WINDOW, "")
        for name in [(Kind.WINDOW, "", key, subkey) for subkey, key in zip(subkeys, keys, strict=True)]:
            if (row := header.keyed.get(name)) is not None:
                found.add(name[2], row.key_hash, name[3], row.value, row.fire_at)
        return found

    def query_windows(self, grant: Grant, folded_bundle: int, query: WindowQuery) -> Entries:
        """Read the folded entries that a query asks for; see `Store.query_windows`."""
        header = self.database.headers[grant.interval_id]
        check_fold(grant, header.folded_bundle, folded_bundle)
        rows = ((name[2:], row) for name, row in header.keyed.items() if name[0] is Kind.WINDOW)
        return query.answer(
            StoredPane(key, row.key_hash, subkey, row.value, row.fire_at) for (key, subkey), row in rows
        )

    def load_dedupe_runs(self, grant: Grant) -> list[DedupeRun]:
        """Read the dedupe runs that have not expired, oldest first."""
        header = self.database.headers[grant.interval_id]
        runs = [stored for stored in self.database.dedupe_runs if stored.interval_id == grant.interval_id]
        return [stored.run for stored in runs if header.needs_run(stored.bundle, stored.run)]

    def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> list[PollResult]:
        """Read headers, and segments above the cursors; see `Store.poll`."""
        answers = []
        left = bytes_max
        for query in queries:
            polled = self._poll(query, left)
            left -= sum(len(s.payload) for s in polled.segments if s.payload is not None)
            answers.append(polled)
        return answers

    def commit(self, checkpoints: Sequence[Checkpoint], *, graph_version: int) -> None:
        """Commit a turn. Raises the errors of `Store.commit` and then changes nothing."""
        Transaction(self.database, checkpoints, graph_version).land()

    def _poll(self, query: SegmentQuery, bytes_left: int) -> PollResult:
        """Answer one query with whole seqs: the first however large, more as long as they fit into `bytes_left`."""
        header = self.database.headers[query.producer]
        found = [
            polled_of(stored.segment, query.consumer_index)
            for stored in self.database.segments
            if stored.interval_id == query.producer
            and stored.segment.subscription_id in query.subscription_ids
            and stored.segment.seq > query.after
        ]
        found.sort(key=lambda s: (s.seq, s.subscription_id))
        taken: list[PolledSegment] = []
        for _, group in groupby(found, key=lambda s: s.seq):
            whole = list(group)
            size = sum(len(s.payload) for s in whole if s.payload is not None)
            if taken and size > bytes_left:
                break
            taken.extend(whole)
            bytes_left -= size
        truncated = len(taken) < len(found)
        return PollResult(query, tuple(taken), header.bundle, header.low_watermark, truncated)


def polled_of(segment: Segment, consumer_index: int) -> PolledSegment:
    """Return a segment as one consumer reads it."""
    part = segment.slices[consumer_index]
    return PolledSegment(
        subscription_id=segment.subscription_id,
        seq=segment.seq,
        previous_seq=segment.previous_seq,
        watermark=segment.watermark,
        records=0 if part is None else part.records,
        payload=None if part is None else part.payload,
        checksum=0 if part is None else part.checksum,
    )
