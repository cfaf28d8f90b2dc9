"""What the broken stores have in common: checkpoints that name another grant and bundle than their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import psycopg

from millpy.model.checkpoint import Checkpoint, Grant, ResultRows
from millpy.model.time import Instant


def headers(interval_ids: Sequence[int]) -> dict[int, tuple[int, int, int, int]]:
    """Return interval -> sequencer, bundle, input and low watermark, as stored now."""
    url = sys.argv[sys.argv.index("--database") + 1]
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT interval_id, sequencer, bundle, input_watermark, low_watermark FROM mill.intervals"
            " WHERE interval_id = ANY (%s)",
            [list(interval_ids)],
        ).fetchall()
    return {row[0]: row[1:] for row in rows}


def forged(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints as their intervals' present owners would commit them next: the fence lets them through."""
    stored = headers([checkpoint.grant.interval_id for checkpoint in checkpoints])
    changed = []
    for checkpoint in checkpoints:
        interval_id = checkpoint.grant.interval_id
        sequencer, bundle, input_watermark, low_watermark = stored[interval_id]
        segments = [replace(s, seq=bundle + 1, previous_seq=min(s.previous_seq, bundle)) for s in checkpoint.segments]
        changed.append(
            replace(
                checkpoint,
                grant=Grant(interval_id, sequencer),
                bundle=bundle + 1,
                segments=segments,
                input_watermark=Instant(max(checkpoint.input_watermark, input_watermark)),
                low_watermark=Instant(max(checkpoint.low_watermark, low_watermark)),
            )
        )
    return changed


def without_tripwires(checkpoints: Sequence[Checkpoint]) -> None:
    """Drop the parts that the database itself would refuse (I3, I7), so that the checks see the others."""
    for checkpoint in checkpoints:
        checkpoint.cursors = ()
        checkpoint.results = [rows for rows in checkpoint.results if not _windowed(rows)]


def _windowed(rows: ResultRows) -> bool:
    timings = rows.columns[-2]  # of a windowed table: pane_index, pane_timing, late_count
    return any(str(timing) in ("on_time", "late") for timing in list(timings[:1]))
