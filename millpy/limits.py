"""Every bound, with its unit, in one place (design: settings and their defaults)."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

RECORD_BYTES_MAX = 1_000_000
KEY_BYTES_MAX = 1_024
"""Of a key as JSON text, and of a timer's name: what an index of the database holds with room to spare."""
KEY_INTERVALS_DEFAULT = 4
RING_SLOTS = 16


@cache
def memory_bytes() -> int:
    """What this process may use: the machine's memory, or its container's."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found.append(int(Path(path).read_text()))
    return min(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one worker. Frozen; relations are asserted when it is made."""

    lease_ttl_s: float = 5.0
    statement_s: float = 60.0
    bundle_records_max: int = 65_536
    bundle_bytes_max: int = 16_000_000
    step_s_max: float = 2.0
    turn_panes_max: int = 100_000
    turn_timers_max: int = 100_000
    record_bytes_max: int = RECORD_BYTES_MAX
    message_records_max: int = 10_000
    absent_files_max: int = 100_000
    absent_files_kept_s: float = 30 * 86_400.0
    progress_every_s: float = 0.1
    poll_s_min: float = 0.002
    poll_s_max: float = 0.1
    fold_bytes: int = 32_000_000
    fold_every_s: float = 10.0
    unfolded_bytes_max: int = 256_000_000
    open_windows_bytes_max: int = field(default_factory=lambda: memory_bytes() // 2)
    state_cache_bytes_max: int = 256_000_000
    state_preload_rows_max: int = 50_000
    epoch_s: float = 60.0
    epoch_bytes: int = 256_000_000
    backlog_records_high: int = 500_000
    backlog_bytes_high: int = 256_000_000
    record_attempts_max: int = 3
    poison_records_max: int = 1_000
    replay_records_max: int = 1_000
    settled_kept_s: float = 7 * 86_400.0
    set_aside_records_max: int = 10_000
    set_aside_bytes_max: int = 64_000_000
    set_aside_kept_s: float = 30 * 86_400.0
    events_kept_s: float = 30 * 86_400.0
    parked_records_max: int = 100_000
    parked_bytes_max: int = 64_000_000
    open_timers_max: int = 1_000_000
    drain_grace_s: float = 10.0
    watchdog_s: float = 60.0
    retry_s_min: float = 0.05
    retry_s_max: float = 5.0
    segment_poll_bytes_max: int = 32_000_000
    clock_step_s: float = 2.0
    clock_agree_s: float = 60.0
    clock_settle_s: float = 3_600.0

    def __post_init__(self) -> None:
        assert self.lease_ttl_s >= 0.5, f"a lease of {self.lease_ttl_s} s is shorter than 0.5 s"
        assert self.statement_s > 0, "a statement needs time"
        assert self.bundle_records_max > 0, "a bundle must hold a record"
        assert self.bundle_bytes_max >= self.record_bytes_max, "a legal record must fit in a bundle"
        assert self.message_records_max > 0, "a message must hold a record"
        assert self.step_s_max > 0, "step_s_max must be above 0"
        assert self.turn_panes_max > 0, "a turn must hold a pane"
        assert self.turn_timers_max > 0, "a turn must hold a timer"
        assert 0 < self.poll_s_min <= self.poll_s_max, "poll_s_min must be above 0 and at most poll_s_max"
        assert self.fold_bytes <= self.unfolded_bytes_max, "fold_bytes must be at most unfolded_bytes_max"
        assert self.open_windows_bytes_max > 0, "open windows need room"
        assert self.record_attempts_max >= 1, "a record needs an attempt"
        assert self.clock_step_s > 0, "clock_step_s must be above 0"
        assert 0 <= self.clock_agree_s <= self.clock_settle_s, "clock_agree_s must be at most clock_settle_s"

    @property
    def heartbeat_s(self) -> float:
        """A fifth of the lease: four may be lost before it ends."""
        return self.lease_ttl_s / 5

    @property
    def call_s_max(self) -> float:
        """How long one call of user code may take; longer, it is taken for one that never returns."""
        return self.watchdog_s * 2

    @property
    def lease_margin_s(self) -> float:
        """How long before the server's deadline a worker stops believing in itself."""
        return self.lease_ttl_s / 5

    @property
    def claim_every_s(self) -> float:
        """How often a worker looks for intervals without a live owner."""
        return min(0.5, self.lease_ttl_s / 10)

    @property
    def backlog_records_low(self) -> int:
        """Below this an injector reads again."""
        return self.backlog_records_high // 2

    @property
    def backlog_bytes_low(self) -> int:
        """Below this an injector reads again."""
        return self.backlog_bytes_high // 2
