"""The outbox: messages that commits have stored for sinks, and how far they are delivered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Checkpoint, Grant, OutboxRows, OutboxState
from millpy.store.postgres.arrays import Bigints, Booleans, Byteas, PgArray, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import SinkReport

Command = tuple[bytes, dict[str, Any]]


def append_outbox(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    """Return the statement that appends the messages of a turn; none without messages."""
    found = [(c.grant.interval_id, c.bundle, c.outbox) for c in checkpoints if c.outbox is not None]
    if not found:
        return []
    parameters: dict[str, PgArray] = {
        "intervals": Bigints([interval for interval, _, _ in found]),
        "bundles": Bigints([bundle for _, bundle, _ in found]),
        "heads": Bigints([rows.position for _, _, rows in found]),
        "counts": Bigints([rows.records for _, _, rows in found]),
        "digests": Bigints([rows.checksum for _, _, rows in found]),
        "payloads": Byteas([rows.payload for _, _, rows in found]),
    }
    return [(statement("append_outbox"), parameters)]


async def read_state(connection: Connection, interval_id: int) -> OutboxState:
    """Read how far the outbox of an interval is filled and delivered."""
    ((head, delivered, size),) = await all_rows(connection, statement("read_outbox_state"), {"interval": interval_id})
    return OutboxState(head, delivered, size)


async def read_rows(connection: Connection, grant: Grant, position: int, bytes_max: int) -> list[OutboxRows]:
    """Read rows from a position; see `Store.read_outbox`."""
    which = {"interval": grant.interval_id, "position": position, "bytes_max": bytes_max}
    rows = await all_rows(connection, statement("read_outbox"), which)
    return [OutboxRows(at, records, bytes(payload), checksum) for at, records, checksum, payload in rows]


async def record_delivered(connection: Connection, reports: Sequence[SinkReport]) -> None:
    """Store how far outboxes are delivered, and delete those rows; see `Store.record_delivered`."""
    parameters: dict[str, PgArray] = {
        "intervals": Bigints([report.grant.interval_id for report in reports]),
        "sequencers": Bigints([report.grant.sequencer for report in reports]),
        "heads": Bigints([report.delivered for report in reports]),
        "connected": Booleans([report.connected for report in reports]),
        "since": Bigints([report.since_us for report in reports]),
        "reasons": Texts([report.why for report in reports]),
        "attempts": Bigints([report.attempts for report in reports]),
    }
    recorded = {row[0] for row in await all_rows(connection, statement("record_delivered"), parameters)}
    if stale := [r.grant.interval_id for r in reports if r.grant.interval_id not in recorded]:
        raise StaleSequencerError(f"stale grants {stale}", stale=stale)
