"""What people ask of running workers: rows that they mark, and what a commit says became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.model.checkpoint import Checkpoint, Request
from millpy.model.stage import Release
from millpy.store.postgres.arrays import Bigints, Byteas, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import Asked

Command = tuple[bytes, dict[str, Any]]


async def read(connection: Connection, interval_ids: Sequence[int], rows_max: int, bytes_max: int) -> Asked:
    """What is asked of these intervals; see `Store.asked`."""
    of_intervals = {"intervals": Bigints(list(interval_ids))}
    limits = {"rows_max": rows_max, "bytes_max": bytes_max}
    rows = await all_rows(connection, statement("read_requests"), of_intervals | limits)
    paused = await all_rows(connection, statement("read_pauses"), of_intervals)
    releases = await all_rows(connection, statement("read_releases"), of_intervals | {"rows_max": rows_max})
    return Asked(
        tuple(Request(*row) for row in rows),
        frozenset(row[0] for row in paused),
        tuple(
            Release(id_, interval_id, key.encode(), ticket, gives_up)
            for id_, interval_id, key, ticket, gives_up in releases
        ),
    )


def settling(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    """Statements that say what became of the requests in a turn."""
    settled = [(c, s) for c in checkpoints for s in c.settled]
    commands: list[Command] = []
    if letters := [(c, s) for c, s in settled if s.request.pile == "dead_letters"]:
        again = [s.letter for _, s in letters]
        parameters = _places(letters) | {
            "reasons": Texts([None if letter is None else letter.reason for letter in again]),
            "details": Texts([None if letter is None else storable(letter.detail) for letter in again]),
            "tracebacks": Texts([None if letter is None else storable(letter.traceback) for letter in again]),
            "event_times": Bigints([None if letter is None else letter.event_time for letter in again]),
            "ids": Byteas([None if letter is None else letter.dedupe_id for letter in again]),
        }
        commands.append((statement("settle_dead_letters"), parameters))
    if late := [(c, s) for c, s in settled if s.request.pile == "late_records"]:
        parameters = _places(late) | {"watermarks": Bigints([s.watermark for _, s in late])}
        commands.append((statement("settle_late_records"), parameters))
    if releases := [id_ for c in checkpoints for id_ in c.release_ids]:
        commands.append((statement("forget_releases"), {"release_ids": Bigints(releases)}))
    return commands


def _places(settled: Sequence[tuple[Checkpoint, Any]]) -> dict[str, Any]:
    return {
        "letters": Bigints([s.request.id for _, s in settled]),
        "intervals": Bigints([c.grant.interval_id for c, _ in settled]),
        "bundles": Bigints([c.bundle for c, _ in settled]),
    }


def pausing(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    """The statement that lets sources stand still."""
    paused = [(c, c.pause) for c in checkpoints if c.pause is not None]
    if not paused:
        return []
    parameters: dict[str, Any] = {
        "intervals": Bigints([c.grant.interval_id for c, _ in paused]),
        "bundles": Bigints([c.bundle for c, _ in paused]),
        "reasons": Texts([storable(pause.reason) for _, pause in paused]),
    }
    return [(statement("append_pauses"), parameters)]


def storable(text: str) -> str:
    """Words that may quote the record that is at fault, and must not become a second fault."""
    return text.replace("\x00", "\ufffd").encode(errors="replace").decode()
