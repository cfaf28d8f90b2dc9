"""Short pauses: Python's collector of cycles stops every thread while it looks at all that is alive.

Over five million open windows one look takes five seconds: no heartbeat leaves meanwhile, and the lease ends. Soft
state has no cycles, and is freed by its counts. So what is alive when a look has taken long is not looked at any more.
What that costs in memory is cycles that were in use then and are given up later, which are few.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from millpy.clock import SystemClock

PAUSE_S_MAX = 0.2
OLDEST = 2
"""The generation whose collection looks at everything."""


@contextmanager
def short_pauses() -> Iterator[None]:
    """Collect garbage without stopping this process for long; afterwards as before."""
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
