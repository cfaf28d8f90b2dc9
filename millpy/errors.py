"""Every error of millpy, in one tree; the branch says what the caller does.

    MillError
    ├── UsageError            fix the program        GraphError · SchemaError · ConfigError · TimerError
    │                                                · BrokenFileError · NotMigratedError
    ├── OwnershipError        drop work, re-acquire  LeaseExpiredError · StaleSequencerError
    ├── TransientError        retry with backoff     StoreUnavailableError · SourceUnavailableError
    │   │                                            · RequestWithdrawnError · TableSwitchedError · StepStuckError
    │   │                                            · ResultTableError
    │   └── CommitUnknownError   take over from yourself, then read
    ├── RecordError           quarantine the record  UndecodableRecordError · OversizeRecordError · RefusedValueError
    │                                                · CallTimeoutError
    ├── ComputationError      user code raised       original as __cause__
    ├── GraphVersionError     stop: another version of the graph runs
    └── CorruptionError       stop the worker        SegmentChecksumError · CursorGapError
                                                     · WatermarkRegressedError · PaneOrderError

Data is in attributes; messages are lower case, without a full stop; `hint` says what an operator can do.
"""

from __future__ import annotations

from collections.abc import Sequence


class MillError(Exception):
    """The root. `hint` is one sentence on what to do, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # in a program of one's own, Python prints it below the error


class UsageError(MillError):
    """The program, the graph or a setting is wrong: fix it."""


class GraphError(UsageError):
    """A graph that cannot run: a cycle, an unnamed step, a field that does not exist."""


class SchemaError(UsageError):
    """A record type or column that millpy cannot carry."""


class ConfigError(UsageError):
    """A setting that is missing or contradicts another."""


class NotMigratedError(ConfigError):
    """The database has no tables of millpy, or those of another version."""


class BrokenFileError(UsageError):
    """A source file that is cut, corrupt, or not the one that was being read."""


class TimerError(UsageError):
    """A timer or production with a time it may not have."""


class OwnershipError(MillError):
    """Somebody else owns these intervals: drop the work and acquire them again."""

    def __init__(self, message: str, *, stale: Sequence[int] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stale = tuple(stale)


class LeaseExpiredError(OwnershipError):
    """The worker may not trust its own lease any more."""


class StaleSequencerError(OwnershipError):
    """The fence refused the commit (SQLSTATE MW001); `stale` names the intervals."""


class TransientError(MillError):
    """Try again after a while; nothing was committed."""


class StoreUnavailableError(TransientError):
    """The database cannot be reached or refuses work (disk full, too many connections)."""


class SourceUnavailableError(TransientError):
    """The broker or file cannot be reached."""


class RequestWithdrawnError(TransientError):
    """A record that was to be taken again has been discarded meanwhile (SQLSTATE MW007): step without it."""


class TableSwitchedError(TransientError):
    """The name of a table that is being read means another one by now: read it again, from its beginning."""


class StepStuckError(TransientError):
    """A step has not moved for too long: it is given up, and taken again smaller."""


class ResultTableError(TransientError):
    """A result table is not as it was deployed (dropped, altered, rights revoked): wait until a person restores it."""


class CommitUnknownError(TransientError):
    """The connection was lost around COMMIT: it may have happened, or may happen later."""


class RecordError(MillError):
    """One record is at fault: set it aside and go on."""


class UndecodableRecordError(RecordError):
    """The payload is not a record of the stream's type."""


class OversizeRecordError(RecordError):
    """The payload is larger than `Limits.record_bytes_max`."""


class RefusedValueError(RecordError):
    """A value that JSON or PostgreSQL cannot hold (NaN, infinity, NUL in text)."""


class CallTimeoutError(RecordError):
    """A call of user code did not return within `Limits.call_s_max`."""


class PoisonError(RecordError):
    """The database refused a value of this turn: its type, or a constraint, trigger or row of the user's.

    `too_large`: perhaps no value, but that there are so many.
    """

    def __init__(
        self, message: str, *, table: str = "", sqlstate: str = "", hint: str = "", too_large: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.too_large = too_large
        self.table = table
        self.sqlstate = sqlstate


class ComputationError(MillError):
    """User code raised; the original is `__cause__`."""

    def __init__(self, message: str, *, computation: str, key: object = None) -> None:
        super().__init__(message)
        self.computation = computation
        self.key = key


class GraphVersionError(MillError):
    """Another version of this graph is deployed; this process must stop."""


class CorruptionError(MillError):
    """An invariant is broken: stop, keep everything, call a person."""


class SegmentChecksumError(CorruptionError):
    """A stored slice does not have the checksum it was written with."""


class CursorGapError(CorruptionError):
    """A segment names a predecessor that this consumer has not consumed (I3)."""


class WatermarkRegressedError(CorruptionError):
    """A low watermark would move back (I5, SQLSTATE MW005)."""


class PaneOrderError(CorruptionError):
    """A pane does not follow the pane that is stored (I7, SQLSTATE MW004)."""
