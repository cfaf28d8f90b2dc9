from __future__ import annotations

from collections.abc import Iterator

import pytest

from millpy.ingest import disorder


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """A disorder bound is learned from a few records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disorder, "BLOCK", 8)
        patch.setattr(disorder, "BEYOND_MIN", 1)
        yield
