"""The settable bounds of a worker. Bounds that need no setting are constants of the modules that obey them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path

RECORD_BYTES_MAX = 1_000_000
"""Bytes of a payload; a larger one is dead-lettered."""
NAME_BYTES_MAX = 63
"""PostgreSQL cuts longer names."""
KEY_BYTES_MAX = 1_024
"""Bytes of a key as JSON text, and of a timer's name: a database index holds them with room to spare."""
KEY_INTERVALS_DEFAULT = 4
"""Key intervals of a computation, if the graph does not say; as many workers can share it."""
KEY_INTERVALS_MAX = 10_000
"""The most key intervals of a computation: a deployment stores each of them, and a worker may own all."""
CALL_RECORDS_MAX = 1_000_000
"""Records that one call of a `Computation` or `flat_map` may make: one without end must not fill the memory."""
RING_SLOTS = 16
"""Slots of a ring, which holds segments or dedupe ids and frees a slot as a whole."""


@cache
def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its container's if smaller."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found.append(int(Path(path).read_text()))
    return min(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one worker; the constructor asserts their relations. Suffixes are units: `_s` is seconds.

    Memory. Multiply what is per source or per interval by the number that the worker owns:

        record_bytes_max, message_records_max      one record; the records of one message (and four times
                                                   record_bytes_max is the most bytes of a message, with a format)
        bundle_records_max, bundle_bytes_max       input of one turn, per source; records also per consumer of segments
        replay_records_max                         requested replays that wait, per interval
        segment_poll_bytes_max                     one poll for segments, of all consumers together
        turn_panes_max, turn_timers_max            output of one turn, per interval
        open_windows_bytes_max                     open windows of the graph, in equal parts per windowed interval
        closed_windows_bytes_max                   those that have fired and may leave memory, shared in the same way
        unfired_windows_bytes_max                  others that may leave memory; at most 2/3 of open_windows_bytes_max
        sites_max                                  sites with a watermark of their own, per source partition
        join_bytes_max                             buffered records of joins, in equal parts per interval of a join
        join_key_bytes_max                         those of one key, in one join
        lookup_rows_max, lookup_bytes_max          rows of a lookup table, and their bytes as JSON, per table
        state_cache_bytes_max                      cached state, per interval
        state_preload_rows_max                     state that a takeover reads at once, per interval
        parked_records_max, parked_bytes_max       records of stopped keys, per interval
        open_timers_max                            timers and holds that are set, per interval
        absent_files_max                           files remembered as read that no longer exist, per source
        archive_bytes_min                          a bundle that goes to an archive of the same worker in memory, at
                                                   least; also the records that wait until they become a file early

    Time:

        lease_ttl_s, statement_s, step_s_max       a lease; a statement on the server; the target for a step
        watchdog_s, drain_grace_s                  a worker without progress; a worker that has to stop
        progress_every_s, poll_s_min, poll_s_max   periods of commits without data and of polls
        retry_s_min, retry_s_max                   back-off after a failure
        clock_step_s, clock_agree_s, clock_settle_s    steps of the database's clock (runtime/guarded_clock.py)

    Attempts: `record_attempts_max` calls for a failing record; `poison_records_max` refused records found in one turn.

    The database:

        backlog_records_high, backlog_bytes_high   segments not yet consumed, per graph; sources wait above. The records
                                                   that only archives wait for do not count, their bytes do
        fold_bytes, fold_every_s                   deltas not folded, per worker; a fold begins above
        unfolded_bytes_max                         the same; the worker takes no input above
        epoch_s, epoch_bytes                       age and size at which a ring begins its next slot
        dead_letter_records_max, dead_letter_bytes_max     stored a day, per interval and cause; the rest is counted

        outbox_records_max, outbox_bytes_max       messages not yet delivered, per interval of a sink; it takes no input
                                                   above, until they are half of that
        refused_records_max, refused_bytes_max     messages that the other side of a sink refuses, and those that wait
                                                   behind them, per interval; others are not sent above

    Retention: `dead_letter_kept_s` of dead letters and late records, `settled_kept_s` of those replayed or discarded,
    `events_kept_s` of events, `absent_files_kept_s` of the files above.
    """

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
    closed_windows_bytes_max: int = 80_000_000
    unfired_windows_bytes_max: int = 2**62
    sites_max: int = 1_000
    join_bytes_max: int = field(default_factory=lambda: memory_bytes() // 4)
    join_key_bytes_max: int = 16_000_000
    lookup_rows_max: int = 1_000_000
    lookup_bytes_max: int = 100_000_000
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
    dead_letter_records_max: int = 10_000
    dead_letter_bytes_max: int = 64_000_000
    dead_letter_kept_s: float = 30 * 86_400.0
    events_kept_s: float = 30 * 86_400.0
    parked_records_max: int = 100_000
    parked_bytes_max: int = 64_000_000
    open_timers_max: int = 1_000_000
    drain_grace_s: float = 10.0
    watchdog_s: float = 60.0
    retry_s_min: float = 0.05
    retry_s_max: float = 5.0
    segment_poll_bytes_max: int = 32_000_000
    archive_bytes_min: int = 1_000_000
    outbox_records_max: int = 1_000_000
    outbox_bytes_max: int = 64_000_000
    refused_records_max: int = 10_000
    refused_bytes_max: int = 16_000_000
    clock_step_s: float = 2.0
    clock_agree_s: float = 60.0
    clock_settle_s: float = 3_600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            given = getattr(self, name)
            assert 0 <= given < inf, f"{name} must be a number from 0, not {given}"
        assert self.lease_ttl_s >= 0.5, f"a lease of {self.lease_ttl_s} s is shorter than 0.5 s"
        assert self.statement_s > 0, "statement_s must be above 0"
        assert self.bundle_records_max > 0, "a bundle must hold a record"
        assert self.record_bytes_max > 0, "record_bytes_max must be above 0"
        assert self.bundle_bytes_max >= self.record_bytes_max, "a legal record must fit in a bundle"
        assert self.message_records_max > 0, "a message must hold a record"
        assert self.step_s_max > 0, "step_s_max must be above 0"
        assert self.turn_panes_max > 0, "a turn must hold a pane"
        assert self.turn_timers_max > 0, "a turn must hold a timer"
        assert 0 < self.poll_s_min <= self.poll_s_max, "poll_s_min must be above 0 and at most poll_s_max"
        assert self.fold_bytes <= self.unfolded_bytes_max, "fold_bytes must be at most unfolded_bytes_max"
        assert self.open_windows_bytes_max > 0, "open_windows_bytes_max must be above 0"
        assert self.closed_windows_bytes_max > 0, "closed_windows_bytes_max must be above 0"
        assert self.unfired_windows_bytes_max > 0, "unfired_windows_bytes_max must be above 0"
        assert self.sites_max > 0, "sites_max must be above 0"
        assert self.join_bytes_max > 0, "join_bytes_max must be above 0"
        assert self.join_key_bytes_max > 0, "join_key_bytes_max must be above 0"
        assert self.lookup_rows_max > 0, "lookup_rows_max must be above 0"
        assert 0 < self.lookup_bytes_max <= 500_000_000, "lookup_bytes_max must be above 0 and at most 500,000,000"
        assert self.record_attempts_max >= 1, "record_attempts_max must be at least 1"
        assert self.outbox_records_max > 0, "an outbox must hold a message"
        assert self.outbox_bytes_max > 0, "outbox_bytes_max must be above 0"
        assert self.refused_records_max > 0, "refused_records_max must be above 0"
        assert self.refused_bytes_max > 0, "refused_bytes_max must be above 0"
        assert self.archive_bytes_min > 0, "archive_bytes_min must be above 0"
        assert self.clock_step_s > 0, "clock_step_s must be above 0"
        assert 0 <= self.clock_agree_s <= self.clock_settle_s, "clock_agree_s must be at most clock_settle_s"

    @property
    def unfired_bytes_max(self) -> int:
        """Bytes of unfired windows beyond which they leave memory, if they may. Input waits at half as much again."""
        return min(self.unfired_windows_bytes_max, self.open_windows_bytes_max * 2 // 3)

    @property
    def message_bytes_max(self) -> int:
        """The most bytes of one message of a payload format, and of the records that it becomes."""
        return min(self.bundle_bytes_max, 4 * self.record_bytes_max)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: a fifth of the lease, so that four may be lost before it ends."""
        return self.lease_ttl_s / 5

    @property
    def call_s_max(self) -> float:
        """Seconds that one call of user code may take before it counts as one that never returns."""
        return self.watchdog_s * 2

    @property
    def lease_margin_s(self) -> float:
        """Seconds before the server's deadline at which a worker stops trusting its lease."""
        return self.lease_ttl_s / 5

    @property
    def claim_every_s(self) -> float:
        """Seconds between a worker's searches for intervals without a live owner."""
        return min(0.5, self.lease_ttl_s / 10)

    @property
    def edge_call_s_max(self) -> float:
        """Seconds after which a call of a source is given up, and one of a sink reported: before the watchdog acts."""
        return self.watchdog_s / 2

    def retry_pause_s(self, failures: int, most_s: float) -> float:
        """Seconds to wait after a number of failures in a row: it doubles with each, up to `most_s`."""
        return min(most_s, self.retry_s_min * 2.0 ** min(failures, 32))

    @property
    def backlog_records_low(self) -> int:
        """Backlog in records below which a source that waits for its consumers reads again."""
        return self.backlog_records_high // 2

    @property
    def backlog_bytes_low(self) -> int:
        """Backlog in bytes below which a source that waits for its consumers reads again."""
        return self.backlog_bytes_high // 2
