"""`AfterPercentile`: fires when an estimated share of a window's records has come, ahead of the watermark.

Each key interval counts how far its records lie behind the newest of them (the sketch of `ingest/disorder.py`), and has
a percentile watermark of its own: the largest event time so far minus the lag that the percentile covers. It depends
on the order of the records alone, and the sketch is in the commit, so that it survives crashes and takeovers; headers
and segments do not carry it. An event time after the processing time of its turn counts as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from millpy.errors import GraphError
from millpy.ingest.disorder import NO_KEY, Disorder, DisorderSettings
from millpy.ingest.settings import PERCENTILE_MAX
from millpy.model.checkpoint import Entries, Kind
from millpy.model.identity import Identity
from millpy.model.record import Instants
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.windowing.triggers import FiringMoment, State, Trigger

LARGEST = "percentile"
"""The namespace of the entry with the largest event time."""
_UNLEARNED_US = INSTANT_MAX // 2


@dataclass(frozen=True, slots=True, repr=False)
class AfterPercentile(Trigger):
    """Once, when a share of the window's records has come, as their disorder lets expect: `AfterPercentile(0.99)`.

    The key interval learns how far records lie behind the newest one. The trigger is ready when the newest record is as
    far past the window's end as that share of the records was behind at most; until 1,024 records have been seen, and
    ten beyond the percentile, it is not. It is an estimate: `AfterWatermark(early=AfterPercentile(0.99))` shows it, and
    the pane on time has the rest.

    State: [0].

    Raises:
        GraphError: the percentile is not above 0 and up to 0.9999.
    """

    percentile: float

    def __post_init__(self) -> None:
        if not isinstance(self.percentile, float) or not 0 < self.percentile <= PERCENTILE_MAX:
            raise GraphError(
                f"the percentile must be a number above 0 and up to {PERCENTILE_MAX}, not {self.percentile!r}",
                hint="for example AfterPercentile(0.99)",
            )

    def identity(self) -> Identity:
        """Describe the trigger: a change of it is a change of the window."""
        return {"kind": "after_percentile", "percentile": self.percentile}

    @property
    def percentiles(self) -> frozenset[float]:
        """The percentile."""
        return frozenset([self.percentile])

    @property
    def may_finish(self) -> bool:
        """Whether the trigger can be finished: it fires once."""
        return True

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Begin anew, unless it was finished in all sessions."""
        return [int(all(state[0] for state in states))]

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Tell whether the percentile watermark has reached the end of the window."""
        return moment.expected

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Finish."""
        self._restart(state, finished=True)


class PercentileWatermark:
    """The percentile watermark of a key interval.

    Attributes:
        reached: the windows that end by it have the share of their records.
    """

    def __init__(self, percentile: float, recovered: Sequence[Entries]) -> None:
        settings = DisorderSettings(percentile=percentile, max_disorder_us=_UNLEARNED_US)
        self._disorder = Disorder(settings, recovered)
        self._largest = INSTANT_MIN
        for entries in recovered:
            if entries.kind is Kind.POSITION and entries.namespace == LARGEST:
                largest, reached = msgspec.json.decode(entries.values[0] or b"", type=tuple[int, int])
                self._largest, self.reached = Instant(largest), Instant(reached)
                return
        self.reached = INSTANT_MIN

    def learn(self, event_times: Instants, now_us: Instant) -> tuple[Entries, ...]:
        """Count the records of a turn, in order of arrival. Return what has changed, to be committed."""
        times = np.minimum(event_times, now_us)
        before = np.maximum.accumulate(np.concatenate([[self._largest], times]))
        before[0] = max(int(before[0]), int(times[0]))  # nothing is behind the first record
        watermarks, _ = self._disorder.take(before, times, self.reached, INSTANT_MIN)
        self._largest, self.reached = Instant(int(before[-1])), Instant(int(watermarks[-1]))
        value = msgspec.json.encode((self._largest, self.reached))
        position = Entries(Kind.POSITION, LARGEST, [NO_KEY], [0], [""], [value], [INSTANT_MAX])
        return (*self._disorder.entries(), position)
