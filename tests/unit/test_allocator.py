"""The allocator of a worker's Arrow data."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from millpy.process.worker_process import use_system_allocator


@pytest.fixture
def other_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = pa.default_memory_pool()
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    pa.set_memory_pool(pa.mimalloc_memory_pool())
    yield
    pa.set_memory_pool(before)


@pytest.mark.usefixtures("other_pool")
def test_worker_allocates_by_the_system() -> None:
    use_system_allocator()

    assert pa.default_memory_pool().backend_name == "system"


@pytest.mark.usefixtures("other_pool")
def test_allocator_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "mimalloc")

    use_system_allocator()

    assert pa.default_memory_pool().backend_name == "mimalloc"
