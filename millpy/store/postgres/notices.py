"""The notices that a commit stores as events; the statement says which of them share an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpy.model.checkpoint import Checkpoint
from millpy.store.postgres.arrays import Bigints, Jsonbs, Texts
from millpy.store.postgres.requests import storable
from millpy.store.postgres.statements import statement


def record_notices(checkpoints: Sequence[Checkpoint]) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the statement that stores the notices of a turn; none without notices."""
    noticed = [(c.grant.interval_id, notice) for c in checkpoints for notice in c.notices]
    if not noticed:
        return []
    parameters = {
        "intervals": Bigints([interval for interval, _ in noticed]),
        "kinds": Texts([notice.kind for _, notice in noticed]),
        "counts": Bigints([notice.count for _, notice in noticed]),
        "names": Jsonbs([msgspec.json.encode([storable(name) for name in notice.names]) for _, notice in noticed]),
    }
    return [(statement("append_notices"), parameters)]
