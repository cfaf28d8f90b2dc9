"""Whether folds keep the state of an interval: a folded row has the newest value up to its bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from millpy.testing.simulation.history import Name, ObservedInterval, hashable


def folds_keep_values(observed: ObservedInterval, lateness_us: int) -> Iterator[str]:
    """Yield violations of I2 by folding: a folded row has the newest value up to its bundle."""
    forget_deleted(observed, lateness_us)
    rows: dict[Name, Any] = {
        (kind.value, namespace, hashable(json.loads(key)), subkey): (json.loads(row.value), row.fire_at)
        for (kind, namespace, key, subkey), row in observed.header.keyed.items()
        if row.value is not None
    }
    for name in rows.keys() | observed.keyed.keys():
        if observed.changed[name] <= observed.header.folded_bundle and rows.get(name) != observed.keyed.get(name):
            yield f"folding {observed.interval_id} changed {name} from {observed.keyed.get(name)} to {rows.get(name)}"


def forget_deleted(observed: ObservedInterval, lateness_us: int) -> None:
    """Forget the windows that have expired, and whose rows their owner has deleted without a tombstone."""
    names = {
        (kind.value, namespace, hashable(json.loads(key)), subkey)
        for kind, namespace, key, subkey in observed.header.keyed
    }
    for name in observed.keyed.keys() - names:
        if name[0] == "window" and observed.changed[name] <= observed.header.folded_bundle:
            expires_at = min(observed.keyed[name][1], int(name[3].partition("/")[2]) + lateness_us)
            if expires_at <= observed.header.input_watermark:
                del observed.keyed[name]
