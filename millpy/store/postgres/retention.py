"""Retention: turning the rings, emptying slots that are no longer needed, and deleting old rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import psycopg

from millpy.model.time import Instant
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.history import TRIM, HistoryTable
from millpy.store.postgres.results import ResultTable
from millpy.store.postgres.statements import statement

log = logging.getLogger(__name__)
DROP_EVERY_US = 60_000_000
"""How long a worker waits until it looks again for expired partitions of a result table."""
DROPPED_AT_ONCE = 16
"""The most partitions that one call of `mill.drop_partitions` drops."""
RINGS = ("segments", "deltas", "dedupe_runs")
FREE_LOCK_MS = 20
"""How long writers and readers may queue behind an attempt to empty a slot."""
FORGET_ROWS = 1_000
"""Rows of each table per transaction. Operators do not wait for these rows; a commit waits for at most this many."""
TRIM_ROWS = 10_000
"""Panes and retractions of each history per transaction, whose earlier rows are deleted. No commit waits for them, but
folding does."""


async def turn_rings(connection: Connection, *, epoch_s: float, epoch_bytes: int) -> int:
    """Start new epochs where they are due, and empty slots where possible; see `Store.turn_rings`."""
    for ring in RINGS:
        due = {"ring": ring, "epoch_s": float(epoch_s), "epoch_bytes": epoch_bytes}
        await connection.execute(statement("turn_ring"), due)
    freed = 0
    for ring, slot in await all_rows(connection, statement("find_unneeded_slots"), {}):
        freed += await _free(connection, ring, slot)
    return freed


async def forget_old(
    connection: Connection, now_us: Instant, dead_letter_kept_s: float, settled_kept_s: float, events_kept_s: float
) -> int:
    """Delete at most FORGET_ROWS old rows of each table; see `Store.forget_old`."""
    times = {"now_us": now_us, "settled_kept_s": settled_kept_s, "rows_max": FORGET_ROWS}
    gone = 0
    for forgetting, kept_s in (
        (statement("forget_dead_letters"), dead_letter_kept_s),
        (statement("forget_events"), events_kept_s),
        (statement("forget_corrections"), events_kept_s),
    ):
        try:
            gone += int((await all_rows(connection, forgetting, {**times, "kept_s": kept_s}))[0][0])
        except psycopg.errors.DeadlockDetected:
            continue  # another worker locks the counters in another order: the next pass tries again
    return gone


async def trim_histories(connection: Connection, histories: Mapping[int, HistoryTable]) -> int:
    """Delete what TRIM_ROWS rows of each history have replaced that is kept for a limited time.

    Returns:
        The number of deleted rows; one for a history whose next rows have replaced none, if there are further ones.
    """
    gone = 0
    for table_id, history in histories.items():
        if history.spec.history_kept_s is None:
            continue
        parameters = {
            "table_id": table_id,
            "kept_s": history.spec.history_kept_s,
            "rows_max": TRIM_ROWS,
            "since": history.trimmed_to,
        }
        try:
            found = await all_rows(connection, TRIM, parameters)
        except (psycopg.errors.UndefinedTable, psycopg.errors.DeadlockDetected):
            continue  # its history was dropped or moves with its generation; or another worker trims it
        if not found:
            continue  # the table was dropped
        ((deleted, finished, history.trimmed_to),) = found
        gone += deleted or not finished
    return gone


async def drop_partitions(connection: Connection, tables: Mapping[int, ResultTable], now_us: Instant) -> int:
    """Drop the partitions of result tables that are older than the retention; return their number.

    Each table is looked at once in DROP_EVERY_US. What cannot be dropped is said once for each reason.
    """
    gone = 0
    for table_id, table in tables.items():
        if table.time_place is None or now_us < table.next_drop_us:
            continue
        table.next_drop_us = Instant(now_us + DROP_EVERY_US)
        ((dropped, kept_because),) = await all_rows(connection, statement("drop_partitions"), {"table_id": table_id})
        if dropped == DROPPED_AT_ONCE:
            table.next_drop_us = now_us
        if kept_because and kept_because == table.kept_because != table.kept_said:
            log.warning("cannot drop expired rows of %s, and tries again: %s", table.relation, kept_because)
            table.kept_said = kept_because
        table.kept_because = kept_because
        gone += dropped
    return gone


async def _free(connection: Connection, ring: str, slot: int) -> bool:
    try:
        async with connection.transaction():
            await connection.execute(b"SELECT set_config('lock_timeout', %s, true)", [f"{FREE_LOCK_MS}ms"])
            return bool((await all_rows(connection, statement("free_slot"), {"ring": ring, "slot": slot}))[0][0])
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
        return False  # busy: the next pass tries again
