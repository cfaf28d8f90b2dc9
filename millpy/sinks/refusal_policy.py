"""RefusalPolicy: when a sink stops trying to deliver a message that the other side refuses, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from millpy.errors import GraphError

Outcome = Literal["dead_letter", "park"]
ATTEMPTS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class RefusalPolicy:
    """When to stop trying to deliver a message that the other side refuses, and what becomes of it.

    Meanwhile the messages of other keys are delivered, and those of its key wait. It is given up after a number of
    attempts or a time, whichever comes first, or at the first attempt if the other side says that it never takes it.

    Attributes:
        attempts: the attempts before it is given up; None for any number.
        after: the time since the first attempt before it is given up; None for any time.
        then: "dead_letter": it becomes a dead letter, and those of its key that wait are delivered. "park": it and
            those of its key wait until an operator releases the key, or discards the message.
    """

    attempts: int | None = None
    after: timedelta | None = None
    then: Outcome = "dead_letter"

    def __post_init__(self) -> None:
        attempts, after = self.attempts, self.after
        if attempts is not None and (type(attempts) is not int or not 1 <= attempts <= ATTEMPTS_MAX):
            raise GraphError(f"attempts={attempts!r} is no number of attempts", hint="use a whole number of at least 1")
        if after is not None and (not isinstance(after, timedelta) or after < timedelta(0)):
            raise GraphError(f"after={after!r} is no time", hint="for example after=hours(1)")
        if self.then not in get_args(Outcome):
            raise GraphError(f"unknown then={self.then!r}", hint='use then="dead_letter" or then="park"')

    def is_exhausted(self, attempts: int, waited_us: int) -> bool:
        """Tell whether a message is to be given up after some attempts and µs since the first."""
        if self.attempts is not None and attempts >= self.attempts:
            return True
        return self.after is not None and waited_us >= self.after // timedelta(microseconds=1)
