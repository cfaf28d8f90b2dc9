"""Operators' requests to running workers: reading them, and recording their outcomes in a commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpy.model.checkpoint import Checkpoint, Request
from millpy.model.stage import Release
from millpy.store.postgres import corrections
from millpy.store.postgres.arrays import Bigints, Byteas, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.results import ResultTable
from millpy.store.postgres.statements import statement
from millpy.store.protocol import PendingRequests

Command = tuple[bytes, dict[str, Any]]


async def read(
    connection: Connection,
    interval_ids: Sequence[int],
    rows_max: int,
    bytes_max: int,
    tables: Mapping[int, ResultTable],
) -> PendingRequests:
    """Read the requests for these intervals; see `Store.read_requests`."""
    of_intervals = {"intervals": Bigints(list(interval_ids))}
    limits = {"rows_max": rows_max, "bytes_max": bytes_max}
    rows = await all_rows(connection, statement("read_requests"), of_intervals | limits)
    paused = await all_rows(connection, statement("read_pauses"), of_intervals)
    releases = await all_rows(connection, statement("read_releases"), of_intervals | {"rows_max": rows_max})
    found = [Request(*row) for row in rows]
    past = {request.id for request in found if request.table == "late_records" and request.into_window}
    requests = await corrections.with_windows(connection, found, past, tables)
    return PendingRequests(
        tuple(requests),
        frozenset(row[0] for row in paused),
        tuple(
            Release(id_, interval_id, key.encode(), ticket, discards)
            for id_, interval_id, key, ticket, discards in releases
        ),
    )


def record_outcomes(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    """Return the statements that record the outcomes of a turn's requests."""
    outcomes = [(c, s) for c in checkpoints for s in c.outcomes]
    commands: list[Command] = []
    if letters := [(c, s) for c, s in outcomes if s.request.table == "dead_letters"]:
        again = [s.dead_letter for _, s in letters]
        parameters = _places(letters) | {
            "reasons": Texts([None if letter is None else letter.reason for letter in again]),
            "details": Texts([None if letter is None else storable(letter.detail) for letter in again]),
            "tracebacks": Texts([None if letter is None else storable(letter.traceback) for letter in again]),
            "event_times": Bigints([None if letter is None else letter.event_time for letter in again]),
            "ids": Byteas([None if letter is None else letter.dedupe_id for letter in again]),
        }
        commands.append((statement("settle_dead_letters"), parameters))
    if late := [(c, s) for c, s in outcomes if s.request.table == "late_records"]:
        parameters = _places(late) | {
            "watermarks": Bigints([s.watermark for _, s in late]),
            "details": Texts([storable(s.detail) for _, s in late]),
        }
        commands.append((statement("settle_late_records"), parameters))
    if releases := [id_ for c in checkpoints for id_ in c.release_ids]:
        commands.append((statement("forget_releases"), {"release_ids": Bigints(releases)}))
    return commands


def _places(outcomes: Sequence[tuple[Checkpoint, Any]]) -> dict[str, Any]:
    return {
        "letters": Bigints([s.request.id for _, s in outcomes]),
        "intervals": Bigints([c.grant.interval_id for c, _ in outcomes]),
        "bundles": Bigints([c.bundle for c, _ in outcomes]),
    }


def record_expected(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    """Return the statement that leaves word of records for late windows; an empty list if there are none."""
    expected = [record for c in checkpoints for record in c.expected]
    if not expected:
        return []
    parameters: dict[str, Any] = {
        "letters": Bigints([record.dead_letter_id for record in expected]),
        "computations": Texts([record.computation for record in expected]),
        "inputs": Bigints([record.input for record in expected]),
        "event_times": Bigints([record.event_time for record in expected]),
        "payloads": Byteas([record.payload for record in expected]),
        "bundles": Bigints([c.bundle for c in checkpoints for _ in c.expected]),
    }
    return [(statement("append_expected_records"), parameters)]


def record_pauses(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    """Return the statement that pauses the sources of a turn; an empty list if it pauses none."""
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
    """Replace the characters that PostgreSQL cannot store: NUL and lone surrogates.

    The text may quote a faulty record, and must not make the commit fail as well.
    """
    return text.replace("\x00", "\ufffd").encode(errors="replace").decode()
