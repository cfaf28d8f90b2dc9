"""Takes: write down what a step consumes, for a graph that archives its takes; see `model/take.py`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from millpy.hosting.interval_state import IntervalState
from millpy.hosting.plan import Plan
from millpy.hosting.routing import Delivery
from millpy.model.keys import key_text
from millpy.model.record import Records
from millpy.model.stage import StepResult, Work
from millpy.model.take import TAKE_TYPE, StepInput, Take, TakeRun
from millpy.model.time import INSTANT_MIN


class TakeWriter:
    """Makes a record of each step of a stage whose takes are archived, and passes it on with the step's productions."""

    def __init__(self, plan: Plan) -> None:
        self._names = {interval.interval_id: interval.place for interval in plan.deployment.intervals}
        self._joined = {interval.interval_id for interval in plan.deployment.intervals if interval.joined}
        self._version = plan.deployment.version

    def consumed(self, interval: IntervalState, inbound: Sequence[Delivery]) -> StepInput | None:
        """Return what a step is about to consume, before its cursors move; None if takes are not archived."""
        if interval.plan.takes is None:
            return None
        moved = [interval.cursors[producer] for producer in sorted(interval.moved)]
        before = [TakeRun(self._names[at.producer], at.seq, at.watermark) for at in moved]
        runs: list[TakeRun] = []
        producer, records, newest = -1, 0, 0
        for delivery in inbound:
            if delivery.producer != producer:
                producer, records, newest = delivery.producer, 0, 0
                runs.append(TakeRun(self._names[producer], 0, 0))
            if delivery.bundle is not None and len(delivery.bundle):
                records, newest = records + len(delivery.bundle), delivery.seq
            runs[-1] = TakeRun(self._names[producer], delivery.seq, delivery.watermark, records, newest)
        return StepInput(runs, before, self._joining(interval) if self._joined or not interval.bundle else [])

    def _joining(self, interval: IntervalState) -> list[TakeRun]:
        """Return where the interval begins to read producers that were there before it, or were added later."""
        found = []
        for producer, at in interval.cursors.items():
            name, has_moved = self._names[producer], producer in interval.moved
            if producer in self._joined and at.seq == 0:
                found.append(TakeRun(name, 0, at.watermark))
            elif producer in self._joined and has_moved:  # perhaps for the first time
                found.append(TakeRun(name, 0, INSTANT_MIN))
            elif not (interval.bundle or has_moved) and at.seq > 0:
                found.append(TakeRun(name, at.seq, at.watermark))
        return found

    def add(
        self, interval: IntervalState, consumed: StepInput | None, work: Work, result: StepResult, unarchived: str
    ) -> None:
        """Add the take of a step to its productions, if it is archived."""
        stream = interval.plan.takes
        if consumed is None or stream is None:
            return
        fired = [(key_text(key).decode(), timers) for key, timers in result.fired.items()]
        done = msgspec.structs.replace(
            consumed, panes_max=work.panes_max if result.unfinished else None, timers=fired or None
        )
        take = Take(
            interval=interval.deployed.index,
            version=self._version,
            watermark=work.watermark,
            input=msgspec.json.encode(done).decode(),
            unarchived=unarchived or ("lookup" if work.tables else ""),
        )
        result.productions[stream] = Records(TAKE_TYPE, np.array([work.now_us], np.int64), objects=[take])
        result.emitted_by_stream[stream] = 1
