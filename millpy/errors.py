"""Every error of millpy in one tree. The branch tells what the caller should do.

    MillError
    ├── UsageError            fix the program        GraphError · SchemaError · TimerError · BrokenFileError
    │   │                                            · SlowQueryError
    │   └── ConfigError          NotMigratedError · RightsError
    ├── OwnershipError        drop work, re-acquire  LeaseExpiredError · StaleSequencerError
    ├── TransientError        back off, then retry   StoreUnavailableError · SourceUnavailableError
    │   │                                            · SinkUnavailableError · MessagesRefusedError
    │   │                                            · RequestWithdrawnError · TableSwitchedError · StepStuckError
    │   │                                            · ResultTableError · ArchiveUnavailableError
    │   │                                            · OtherEngineError · TableLoadError
    │   └── CommitUnknownError   retry after taking over one's own intervals, which settles the commit
    ├── RecordError           dead-letter the record RefusedValueError · CallTimeoutError · PoisonError
    ├── GraphVersionError     stop the process: another version of the graph runs
    │   └── GraphReplacedError   start it again, with the file as it is by then
    └── CorruptionError       stop the worker        SegmentChecksumError · CursorGapError
                                                     · WatermarkRegressedError · PaneOrderError

Attributes carry the data. Messages are lower case, without a full stop; `hint` says what an operator can do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class MillError(Exception):
    """The root of the tree.

    Attributes:
        message: what is wrong, with the value.
        hint: one sentence that says what to do, or "".
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # Python prints a note below an uncaught error


class UsageError(MillError):
    """The program, the graph or a setting is wrong and has to be fixed."""


class GraphError(UsageError):
    """A graph cannot run: for example, a step has no name, a field does not exist, or a name is taken."""


class SlowQueryError(UsageError):
    """A query took longer than its limit, and was cancelled."""


class SchemaError(UsageError):
    """A record type or column is one that millpy cannot carry."""


class ConfigError(UsageError):
    """A setting is missing, invalid, or contradicts another."""


class NotMigratedError(ConfigError):
    """The database lacks the tables of millpy, or has those of another version."""


class RightsError(ConfigError):
    """The login, or the role under which a query runs, may not do this in the database."""


class BrokenFileError(UsageError):
    """A source file is truncated, corrupt, or not the file that was being read."""


class TimerError(UsageError):
    """A timer or production has a time that is not allowed, such as one before its cause."""


class OwnershipError(MillError):
    """This worker may have lost intervals: drop all soft state and take over those that are still its own.

    Attributes:
        stale: the lost intervals, where known.
    """

    def __init__(self, message: str, *, stale: Sequence[int] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stale = tuple(stale)


class LeaseExpiredError(OwnershipError):
    """The lease has expired, or was not renewed in time. No commit was refused."""


class StaleSequencerError(OwnershipError):
    """Another worker has taken over the intervals in `stale`: the fence refused a commit (SQLSTATE MW001), a poll
    showed bundles that this worker has not made, or the table of owners names the other one.
    """


class TransientError(MillError):
    """A temporary failure: retry after a delay.

    The call that raised it has committed nothing, unless it is a CommitUnknownError.
    """


class StoreUnavailableError(TransientError):
    """The database cannot be reached or refuses work (disk full, too many connections)."""


class SourceUnavailableError(TransientError):
    """The broker or file cannot be reached."""


class SinkUnavailableError(TransientError):
    """The other side of a sink cannot be reached, or takes no messages now: connect and send again.

    Attributes:
        retry_after_s: seconds after which the other side wants to be asked again, if it says so.
    """

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class MessagesRefusedError(TransientError):
    """The other side of a sink refuses some messages of a `send`: send those again later, or give them up.

    Attributes:
        reasons: the place of each message of the `send` that the other side does not have -> why. That is a message
            that it refuses, or one behind a refused message of its key.
        final: the places of those that it will never take, such as a message that is too large.
        untried: the places of those that were not sent, because others failed. They come again, as if they were
            refused, but that is no attempt for a `RefusalPolicy`.
        retry_after_s: seconds after which the other side wants to be asked again, if it says so.
    """

    def __init__(
        self,
        reasons: Mapping[int, str],
        *,
        final: Collection[int] = (),
        untried: Collection[int] = (),
        retry_after_s: float | None = None,
    ) -> None:
        first = min(reasons, default=0)
        super().__init__(f"{len(reasons):,} messages are refused, the first one because {reasons.get(first, '')!r}")
        self.reasons = dict(reasons)
        self.final = frozenset(final)
        self.untried = frozenset(untried)
        self.retry_after_s = retry_after_s


class RequestWithdrawnError(TransientError):
    """A record to be replayed was discarded meanwhile (SQLSTATE MW007): step without it."""


class TableSwitchedError(TransientError):
    """A name refers to another table since a read of it began, because generations were switched: read again."""


class StepStuckError(TransientError):
    """A step made no progress for too long: abandon it and hand all intervals over to other workers."""


class ResultTableError(TransientError):
    """A result table is not as deployed (dropped, altered, rights revoked): retry until an operator restores it.

    Attributes:
        table: the table, or the sink whose statement cannot run.
    """

    def __init__(self, message: str, *, table: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.table = table


class ArchiveUnavailableError(TransientError):
    """The archive's directory cannot be written (disk full, rights revoked): retry until an operator restores it."""


class OtherEngineError(TransientError):
    """Spark computes this generation: a worker waits until it is handed over."""


class TableLoadError(TransientError):
    """A lookup table cannot be read now: it is missing, altered, too large or too slow, or rights are missing."""


class CommitUnknownError(TransientError):
    """The connection was lost around COMMIT: the turn is committed, is not, or still may be."""


class RecordError(MillError):
    """One record is at fault: dead-letter it and continue."""


class RefusedValueError(RecordError):
    """A value that JSON or PostgreSQL cannot hold (NaN, infinity, NUL in text)."""


class CallTimeoutError(RecordError):
    """A call to user code did not return within `Limits.call_s_max`."""


class PoisonError(RecordError):
    """The database refused a value of this turn: for its type, or by a constraint, trigger or row of the user's.

    Attributes:
        too_large: whether the cause may be the size of the turn instead of one value.
        table: the table that refused the value, if known.
        sqlstate: the database's error code, if known.
    """

    def __init__(
        self, message: str, *, table: str = "", sqlstate: str = "", hint: str = "", too_large: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.too_large = too_large
        self.table = table
        self.sqlstate = sqlstate


class GraphVersionError(MillError):
    """Another version of this graph is deployed: stop the process."""


class GraphReplacedError(GraphVersionError):
    """Another version was deployed while a worker ran, and its own graph no longer fits."""


class CorruptionError(MillError):
    """An invariant is broken: stop, keep everything, and call an operator."""


class SegmentChecksumError(CorruptionError):
    """A stored slice does not match the checksum that was written with it."""


class CursorGapError(CorruptionError):
    """A segment names a predecessor that its consumer has not consumed (I3)."""


class WatermarkRegressedError(CorruptionError):
    """A watermark would regress (I5, SQLSTATE MW005)."""


class PaneOrderError(CorruptionError):
    """A pane does not follow the stored pane (I7, SQLSTATE MW004)."""
