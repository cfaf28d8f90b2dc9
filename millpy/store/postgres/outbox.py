"""The outbox: messages that commits have stored for sinks, how far they are delivered, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Checkpoint, Grant, OutboxRows, OutboxState, RefusedMessage
from millpy.store.postgres.arrays import Bigints, Booleans, Byteas, PgArray, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.requests import storable
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


async def read_state(connection: Connection, grant: Grant) -> OutboxState:
    """Read how far the outbox of an interval is filled and delivered, as no earlier owner changes it any more."""
    of_interval: dict[str, Any] = {"interval": grant.interval_id}
    await all_rows(connection, statement("hold_outbox"), of_interval | {"sequencer": grant.sequencer})
    ((head, delivered, size),) = await all_rows(connection, statement("read_outbox_state"), of_interval)
    refused = [
        RefusedMessage(
            OutboxRows(at, 1, bytes(payload), checksum), key.encode(), bytes(record), attempts, since, why, parked
        )
        for at, checksum, payload, key, record, attempts, since, why, parked in await all_rows(
            connection, statement("read_refused"), of_interval
        )
    ]
    return OutboxState(head, delivered, size, refused)


async def read_rows(connection: Connection, grant: Grant, position: int, bytes_max: int) -> list[OutboxRows]:
    """Read rows from a position; see `Store.read_outbox`."""
    which = {"interval": grant.interval_id, "position": position, "bytes_max": bytes_max}
    rows = await all_rows(connection, statement("read_outbox"), which)
    return [OutboxRows(at, records, bytes(payload), checksum) for at, records, checksum, payload in rows]


async def record_delivered(connection: Connection, reports: Sequence[SinkReport]) -> None:
    """Store how far outboxes are delivered and what is refused; see `Store.record_delivered`."""
    refused = [(report.grant.interval_id, found) for report in reports for found in report.refused]
    accepted = [(report.grant.interval_id, position) for report in reports for position in report.accepted]
    parameters: dict[str, PgArray] = {
        "intervals": Bigints([report.grant.interval_id for report in reports]),
        "sequencers": Bigints([report.grant.sequencer for report in reports]),
        "heads": Bigints([report.delivered for report in reports]),
        "connected": Booleans([report.connected for report in reports]),
        "since": Bigints([report.since_us for report in reports]),
        # These texts may quote what the other side says, which must not make the statement fail.
        "reasons": Texts([storable(report.why) for report in reports]),
        "attempts": Bigints([report.attempts for report in reports]),
        "refused_in": Bigints([interval for interval, _ in refused]),
        "positions": Bigints([found.position for _, found in refused]),
        "keys": Texts([storable(found.key.decode(errors="replace")) for _, found in refused]),
        "tries": Bigints([found.attempts for _, found in refused]),
        "refused_since": Bigints([found.since_us for _, found in refused]),
        "whys": Texts([storable(found.why) for _, found in refused]),
        "parked": Booleans([found.parked for _, found in refused]),
        "records": Byteas([found.record for _, found in refused]),
        "checksums": Bigints([found.message.checksum for _, found in refused]),
        "payloads": Byteas([found.message.payload for _, found in refused]),
        "accepted_in": Bigints([interval for interval, _ in accepted]),
        "accepted": Bigints([position for _, position in accepted]),
    }
    recorded = {row[0] for row in await all_rows(connection, statement("record_delivered"), parameters)}
    if stale := [r.grant.interval_id for r in reports if r.grant.interval_id not in recorded]:
        raise StaleSequencerError(f"stale grants {stale}", stale=stale)


def settle_refused(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    """Return the statements that settle refused messages of a turn; an empty list if it settles none."""
    settled = [(c.grant.interval_id, c.settlement) for c in checkpoints if c.settlement is not None]
    letters = [(interval, position) for interval, settlement in settled for position in settlement.letters]
    released = [(interval, key) for interval, settlement in settled for key in settlement.released]
    commands: list[Command] = []
    if letters:
        parameters: dict[str, PgArray] = {
            "intervals": Bigints([interval for interval, _ in letters]),
            "positions": Bigints([position for _, position in letters]),
        }
        commands.append((statement("settle_refused"), parameters))
    if released:
        parameters = {
            "intervals": Bigints([interval for interval, _ in released]),
            "keys": Texts([storable(key.decode(errors="replace")) for _, key in released]),
        }
        commands.append((statement("release_refused"), parameters))
    return commands
