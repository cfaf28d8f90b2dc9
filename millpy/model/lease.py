"""The renewal of a lease: what the worker reports with it, and what the database answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """What a worker has used lately; None where that is not known.

    Attributes:
        memory_bytes: resident memory of the process.
        turn_p50_s, turn_p99_s: median and 99th percentile of its turns of the last minute, in seconds.
        commit_p50_s, commit_p99_s: those of its commits.
    """

    memory_bytes: int | None = None
    turn_p50_s: float | None = None
    turn_p99_s: float | None = None
    commit_p50_s: float | None = None
    commit_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease that was renewed.

    Attributes:
        drain_requested: whether an operator has requested that the worker drains.
    """

    drain_requested: bool = False
