"""Short pauses of garbage collection: Python's cycle collector stops every thread while it scans all live objects.

With five million open windows a scan takes five seconds; no heartbeat leaves meanwhile, and the lease ends. Soft state
has no cycles; reference counts free it. So after a long scan all live objects are excluded from further scans
(`gc.freeze`). The cost in memory is the few cycles that were alive then and become garbage later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from millpy.clock import SystemClock

PAUSE_S_MAX = 0.2
OLDEST = 2
"""The generation whose collection scans all objects."""


@contextmanager
def short_pauses() -> Iterator[None]:
    """Freeze all live objects after each collection of more than PAUSE_S_MAX; unfreeze them at the end."""
    clock = SystemClock()
    started = clock.monotonic()

    def watch(phase: str, collection: dict[str, int]) -> None:
        nonlocal started
        if collection["generation"] != OLDEST:
            return
        if phase == "start":
            started = clock.monotonic()
        elif clock.monotonic() - started > PAUSE_S_MAX:
            gc.freeze()

    gc.callbacks.append(watch)
    try:
        yield
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
