"""The checks and changes of one commit in a `MemoryDatabase`, without waits.

`check_fence` corresponds to `mill.hold_grants`, and `check` to the constraints of the schema. `apply` cannot fail, so a
turn is stored as a whole or not at all (I2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from millpy.errors import (
    CorruptionError,
    CursorGapError,
    GraphVersionError,
    PaneOrderError,
    PoisonError,
    RequestWithdrawnError,
    StaleSequencerError,
    WatermarkRegressedError,
)
from millpy.model.checkpoint import NOTICE_NAMES_MAX, Checkpoint, Notice, RefusedMessage, ResultRows, Settlement
from millpy.model.delta import encode_document
from millpy.model.time import INSTANT_MIN, Instant
from millpy.store.memory.tables import Header, Row, StoredDelta, StoredRun, StoredSegment, StoredTable, column_values
from millpy.store.protocol import Event

if TYPE_CHECKING:
    from millpy.store.memory.database import MemoryDatabase

NOTICE_S = 60
"""Seconds in which notices of one kind and interval are one event."""

StagedRows = dict[tuple[int, tuple[Any, ...]], Row]


def check_fence(database: MemoryDatabase, checkpoints: Sequence[Checkpoint], graph_version: int) -> None:
    """Compare id, sequencer and bundle number of every checkpoint with its header (I2).

    Raises:
        StaleSequencerError: some of them differ; the error names all of these.
        GraphVersionError: another version of the graph is deployed.
    """
    stale = []
    for checkpoint in checkpoints:
        header = database.headers.get(checkpoint.grant.interval_id)
        running = None if header is None else database.graphs[header.graph_id].deployment.version
        if header is None or (running == graph_version and not expects(header, checkpoint)):
            stale.append(checkpoint.grant.interval_id)
        elif running != graph_version:
            raise GraphVersionError(
                f"version {running} of the graph is deployed, but this commit is of version {graph_version}",
                hint="restart the worker with the deployed version of the graph",
            )
    if stale:
        raise StaleSequencerError(f"stale grants for intervals {stale}", stale=stale)


def expects(header: Header, checkpoint: Checkpoint) -> bool:
    """Tell whether the checkpoint is the next one of its interval's current sequencer."""
    return header.sequencer == checkpoint.grant.sequencer and header.bundle == checkpoint.bundle - 1


def check(database: MemoryDatabase, checkpoints: Sequence[Checkpoint]) -> StagedRows:
    """Refuse what the schema would refuse. Return the result rows to store, by table and primary key."""
    staged: StagedRows = {}
    written = {c.grant.interval_id: c.bundle for c in checkpoints}
    for checkpoint in checkpoints:
        header = database.headers[checkpoint.grant.interval_id]
        _check_watermarks(header, checkpoint)
        _check_positions(database, header, checkpoint, written)
        database.requests.check(checkpoint)
        _check_outbox(database, checkpoint)
        for rows in checkpoint.results:
            _stage_rows(database.tables[rows.table_id], checkpoint, rows, staged)
    return staged


def apply(
    database: MemoryDatabase, checkpoints: Sequence[Checkpoint], documents: Sequence[bytes | None], staged: StagedRows
) -> None:
    """Apply all changes of the checkpoints. `documents` are their deltas, None where nothing changed."""
    now_us = database.clock.now_us()
    for checkpoint in checkpoints:
        database.requests.expect(checkpoint)  # before late records, of which some may be expected
    for checkpoint, document in zip(checkpoints, documents, strict=True):
        header = database.headers[checkpoint.grant.interval_id]
        header.bundle = checkpoint.bundle
        header.input_watermark = checkpoint.input_watermark
        header.low_watermark = checkpoint.low_watermark
        header.oldest_work = checkpoint.oldest_work
        if checkpoint.processing_floor > INSTANT_MIN:  # an injector has no floor
            header.processing_floor = checkpoint.processing_floor
        if document is not None:
            database.deltas.append(StoredDelta(checkpoint.grant.interval_id, checkpoint.bundle, document))
        _append(database, header, checkpoint)
        for cursor in checkpoint.cursors:  # behind the late records, of which some may be expected
            header.cursors[cursor.producer] = (cursor.seq, cursor.watermark)
        for rows in checkpoint.deleted:
            table = database.tables[rows.table_id]
            for name in zip(*map(column_values, rows.columns), strict=True):
                _retract(table, name, checkpoint.grant.interval_id, checkpoint.bundle, now_us)
                table.rows.pop(name, None)
    for (table_id, key), row in staged.items():
        table = database.tables[table_id]
        if table.spec.history:
            if table.spec.retracts:
                _retract(table, key, row["interval_id"], row["bundle"], now_us)
            own = table.history.setdefault(key, [])
            if own and row["pane_index"] == 0:  # the window had vanished, and comes back
                panes = own[-1]["pane_index"] + 1
                own[:] = [{**pane, "pane_index": pane["pane_index"] - panes} for pane in own]
            own.append({**row, "emitted_at": now_us, "is_retraction": False})
        table.rows[key] = row


def _retract(table: StoredTable, key: tuple[Any, ...], interval_id: int, bundle: int, now_us: Instant) -> None:
    """Add a retraction of the newest pane of a window to the history, unless it is taken back already."""
    own = table.history.get(key)
    if own and not own[-1]["is_retraction"]:
        committed = {"interval_id": interval_id, "bundle": bundle, "emitted_at": now_us, "is_retraction": True}
        own.append({**own[-1], **committed})


def document_of(checkpoint: Checkpoint) -> bytes | None:
    """Return the delta document of a checkpoint; None when nothing changed."""
    return encode_document(checkpoint.delta) if any(len(entries) for entries in checkpoint.delta) else None


def _check_watermarks(header: Header, checkpoint: Checkpoint) -> None:
    for name, stored, given in (
        ("low watermark", header.low_watermark, checkpoint.low_watermark),
        ("input watermark", header.input_watermark, checkpoint.input_watermark),
    ):
        if given < stored:
            raise WatermarkRegressedError(
                f"{name} of interval {header.interval.interval_id} would move back from {stored} to {given}"
            )


def _check_positions(database: MemoryDatabase, header: Header, checkpoint: Checkpoint, written: dict[int, int]) -> None:
    """Check that cursors move forward to existing bundles, and that segments follow each other (I3)."""
    for cursor in checkpoint.cursors:
        stored, _ = header.cursors[cursor.producer]
        head = written.get(cursor.producer, database.headers[cursor.producer].bundle)
        if not stored <= cursor.seq <= head:
            raise CursorGapError(
                f"cursor of interval {header.interval.interval_id} on {cursor.producer} would move from {stored} "
                f"to {cursor.seq}; the producer is at {head}"
            )
    for segment in checkpoint.segments:
        last = header.last_segments[segment.subscription_id]
        if segment.seq != checkpoint.bundle or segment.previous_seq != last:
            raise CursorGapError(
                f"segment {segment.previous_seq} -> {segment.seq} of subscription {segment.subscription_id} does not "
                f"follow {last} in bundle {checkpoint.bundle}"
            )


def _check_outbox(database: MemoryDatabase, checkpoint: Checkpoint) -> None:
    """Check that the messages of a sink follow those before them."""
    if checkpoint.outbox is not None:
        head = database.outbox_state(checkpoint.grant.interval_id).head
        if checkpoint.outbox.position != head:
            raise CursorGapError(f"messages at position {checkpoint.outbox.position} of an outbox that is at {head}")
    if checkpoint.settlement is not None:
        refused = database.refused_messages.get(checkpoint.grant.interval_id, {})
        if gone := [position for position in checkpoint.settlement.letters if position not in refused]:
            raise RequestWithdrawnError(f"messages {gone} are refused no longer")


def _stage_rows(table: StoredTable, checkpoint: Checkpoint, rows: ResultRows, staged: StagedRows) -> None:
    names = [column.name for column in table.spec.columns()]
    columns = [column_values(column) for column in rows.columns]
    assert len(columns) == len(names), (table.spec.name, len(columns), names)
    windowed = table.spec.kind == "windowed"
    deleted = (part for part in checkpoint.deleted if part.table_id == table.table_id)
    gone = {name for part in deleted for name in zip(*map(column_values, part.columns), strict=True)}
    for values in zip(*columns, strict=True):
        row: Row = dict(zip(names, values, strict=True))
        row["interval_id"], row["bundle"] = checkpoint.grant.interval_id, checkpoint.bundle
        _check_poison(table, row)
        if windowed:
            key = (*(row[c.name] for c in table.spec.keys), row["window_start"], row["window_end"])
        else:
            key = (row["interval_id"], row["bundle"], row["ordinal"])
        place = (table.table_id, key)
        stored = staged.get(place, None if key in gone else table.rows.get(key))
        _check_order(table, stored, row, first=rows.first)
        staged[place] = row


def _check_poison(table: StoredTable, row: Row) -> None:
    """Refuse values as the database does: SQLSTATE class 22, and class 23 on the user's constraints."""
    for name, value in row.items():
        if isinstance(value, str) and "\x00" in value:
            raise PoisonError(f"column {name} cannot hold NUL", table=table.spec.name, sqlstate="22021")
    for name, accepts in table.constraints.items():
        if not accepts(row):
            raise PoisonError(f"a row violates constraint {name}", table=table.spec.name, sqlstate="23514")


def _check_order(table: StoredTable, stored: Row | None, row: Row, *, first: bool) -> None:
    """Check that a pane follows the stored pane. An absent row is accepted, because users delete old rows (I7)."""
    if stored is None:
        return
    if table.spec.kind == "records":
        raise CorruptionError(f"a row of {table.spec.name} is stored twice: {row}")
    if first or row["pane_index"] != stored["pane_index"] + 1:
        if stored["interval_id"] != row["interval_id"] or not 1 <= stored["bundle"] <= row["bundle"]:
            raise PoisonError(f"another row has the key of {row}", table=table.spec.name, sqlstate="MW009")
        raise PaneOrderError(
            f"pane {row['pane_index']} of {table.spec.name} does not follow pane {stored['pane_index']}: {row}"
        )


def _append(database: MemoryDatabase, header: Header, checkpoint: Checkpoint) -> None:
    interval_id = checkpoint.grant.interval_id
    for segment in checkpoint.segments:
        database.segments.append(StoredSegment(interval_id, segment))
        header.last_segments[segment.subscription_id] = segment.seq
    if checkpoint.dedupe_run is not None:
        header.dedupe_clock = Instant(max(header.dedupe_clock, checkpoint.dedupe_run.clock))
        if checkpoint.dedupe_run.whole:
            header.dedupe_whole = checkpoint.bundle
        database.dedupe_runs.append(StoredRun(interval_id, checkpoint.bundle, checkpoint.dedupe_run))
    for letter in checkpoint.dead_letters:
        database.dead_letters.append((interval_id, checkpoint.bundle, letter))
    for part in checkpoint.statements:
        database.statements.setdefault((header.graph_id, part.sink), []).extend(part.rows)
    if checkpoint.outbox is not None:
        database.outbox.setdefault(interval_id, []).append(checkpoint.outbox)
    if checkpoint.settlement is not None:
        _settle(database.refused_messages.setdefault(interval_id, {}), checkpoint.settlement)
    for notice in checkpoint.notices:
        _tell(database, header, notice)
    database.requests.apply(checkpoint)
    for late in checkpoint.late:
        database.late_records.append((interval_id, checkpoint.bundle, late))
        database.requests.append_late(interval_id, checkpoint.bundle, late)


def _settle(refused: dict[int, RefusedMessage], settlement: Settlement) -> None:
    """Delete the messages that become dead letters, and let released keys be sent again."""
    for position in settlement.letters:
        del refused[position]
    for position, found in refused.items():
        if found.parked and found.key in settlement.released:
            refused[position] = replace(found, parked=False, attempts=0, why="")


def _tell(database: MemoryDatabase, header: Header, notice: Notice) -> None:
    """Add a notice to the event of its kind and interval that has begun within a minute, or to a new one."""
    place, now_us = (header.interval.interval_id, notice.kind), database.clock.now_us()
    event, began_us = database.noticed.get(place, (None, INSTANT_MIN))
    if event is None or now_us - began_us >= NOTICE_S * 1_000_000:
        known: dict[str, object] = {"computation": header.interval.computation, "interval": place[0]}
        event = Event(notice.kind, {**known, "count": 0, "names": ()})
        database.events.append((header.graph_id, event))
        database.noticed[place] = (event, now_us)
    count, names = event.detail["count"], event.detail["names"]
    assert isinstance(count, int)
    assert isinstance(names, tuple)
    event.detail["count"] = count + notice.count
    event.detail["names"] = tuple(dict.fromkeys((*names, *notice.names)))[:NOTICE_NAMES_MAX]
