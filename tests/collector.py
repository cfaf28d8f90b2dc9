"""Python's collector of cycles in a process of tests: it passes over what was there before the first test.

That is a million objects, of eight thousand tests and of all modules; a scan of them takes half a second, and each
worker that a test runs in this process scans twice.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

freeze, unfreeze = gc.freeze, gc.unfreeze


def freeze_for_good() -> None:
    """Freeze all objects. A worker that ends thaws none of them, and one that begins freezes no more."""
    gc.collect()
    freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """Let the collector freeze as it would, and begin with nothing frozen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", freeze)
        patch.setattr(gc, "unfreeze", unfreeze)
        unfreeze()
        yield
        unfreeze()
    gc.collect()
    freeze()
