"""Statements of a commit that store dead letters and late records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.model.checkpoint import Checkpoint
from millpy.store.postgres.arrays import Bigints, Booleans, Byteas, Texts
from millpy.store.postgres.requests import storable
from millpy.store.postgres.statements import statement


def append_late_records(checkpoints: Sequence[Checkpoint]) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the statement that stores the late records of a turn; none without them."""
    blocks = [(c, late) for c in checkpoints for late in c.late if len(late)]
    if not blocks:
        return []
    parameters = {
        "intervals": Bigints([c.grant.interval_id for c, late in blocks for _ in late.payloads]),
        "bundles": Bigints([c.bundle for c, late in blocks for _ in late.payloads]),
        "streams": Texts([late.stream for _, late in blocks for _ in late.payloads]),
        "computations": Texts([late.computation for _, late in blocks for _ in late.payloads]),
        "inputs": Bigints([late.input for _, late in blocks for _ in late.payloads]),
        "keys": Texts([key for _, late in blocks for key in late.keys]),
        "event_times": Bigints([at for _, late in blocks for at in late.event_times]),
        "watermarks": Bigints([at for _, late in blocks for at in late.watermarks]),
        "window_starts": Bigints([at for _, late in blocks for at in late.window_starts]),
        "window_ends": Bigints([at for _, late in blocks for at in late.window_ends]),
        "payloads": Byteas([payload for _, late in blocks for payload in late.payloads]),
        "wholes": Bigints([int(whole) for _, late in blocks for whole in late.whole or [True] * len(late)]),
        "retracts": Booleans([mark for _, late in blocks for mark in late.retracts or [False] * len(late)]),
    }
    return [(statement("append_late_records"), parameters)]


def append_dead_letters(checkpoints: Sequence[Checkpoint]) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the statement that stores the dead letters of a turn; none without them."""
    letters = [(c, letter) for c in checkpoints for letter in c.dead_letters]
    if not letters:
        return []
    parameters = {
        "intervals": Bigints([c.grant.interval_id for c, _ in letters]),
        "bundles": Bigints([c.bundle for c, _ in letters]),
        "streams": Texts([letter.stream for _, letter in letters]),
        "computations": Texts([letter.computation for _, letter in letters]),
        "inputs": Bigints([letter.input for _, letter in letters]),
        "reasons": Texts([letter.reason for _, letter in letters]),
        # These texts may quote the faulty record, which must not make the commit fail as well.
        "details": Texts([storable(letter.detail) for _, letter in letters]),
        "tracebacks": Texts([storable(letter.traceback) for _, letter in letters]),
        "positions": Texts([storable(letter.position) for _, letter in letters]),
        "keys": Texts(
            [None if letter.key is None else storable(letter.key.decode(errors="replace")) for _, letter in letters]
        ),
        "event_times": Bigints([letter.event_time for _, letter in letters]),
        "wires": Texts([storable(letter.wire) for _, letter in letters]),
        "ids": Byteas([letter.dedupe_id for _, letter in letters]),
        "payloads": Byteas([letter.payload for _, letter in letters]),
        "retracts": Booleans([letter.retracts for _, letter in letters]),
    }
    return [(statement("append_dead_letters"), parameters)]
