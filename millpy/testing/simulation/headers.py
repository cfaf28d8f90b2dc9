"""Checks of headers, which hold at every moment and through every deployment."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.testing.simulation.history import ObservedInterval, RunHistory


def one_owner(history: RunHistory) -> Iterator[str]:
    """Yield violations of I1: at most one live sequencer per interval."""
    for observed in history.by_interval.values():
        header = observed.header
        if header.sequencer < observed.sequencer:
            yield f"the sequencer of {observed.interval_id} fell from {observed.sequencer} to {header.sequencer}"
        if header.owner != observed.owner and header.sequencer == observed.sequencer:
            yield f"interval {observed.interval_id} changed hands under sequencer {header.sequencer}"
    for interval_id, sequencer, one, other in history.granted_twice:
        yield f"sequencer {sequencer} of interval {interval_id} was granted to {one} and to {other}"


def watermarks_never_regress(history: RunHistory) -> Iterator[str]:
    """Yield violations of I5: a published watermark never regresses, in any write."""
    for observed in history.by_interval.values():
        header = observed.header
        for name, before, now in (
            ("low", observed.low_watermark, header.low_watermark),
            ("input", observed.input_watermark, header.input_watermark),
        ):
            if now < before:
                yield f"the {name} watermark of interval {observed.interval_id} went back from {before} to {now}"


def cursors_stay(history: RunHistory) -> Iterator[str]:
    """Yield violations of I3 by a deployment: consumers continue where they are."""
    for observed in history.by_interval.values():
        for producer, cursor in observed.cursors.items():
            now = observed.header.cursors[producer]
            if now != cursor:
                yield f"a deployment moved the cursor of {observed.interval_id} on {producer} from {cursor} to {now}"


def joins_in_time(history: RunHistory, source: ObservedInterval) -> Iterator[str]:
    """Yield violations of I5 by a deployment: a new source begins at the watermark of those that read it."""
    for reader in history.by_interval.values():
        if source.interval_id in reader.header.cursors and reader.input_watermark > source.low_watermark:
            yield f"{source.interval_id} joins {reader.interval_id} at {source.low_watermark}, behind its watermark"
