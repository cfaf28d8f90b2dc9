"""Open sessions whose trigger decides pane by pane: the counterpart of `triggered_state.py` for sessions.

A session that grows becomes another one, which begins at pane 0, and whose trigger knows what those of its parts knew
(`Trigger.merged`). Alarms and holds follow from the state of the trigger, and are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key
from millpy.model.stage import UNBOUNDED
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.accumulation import PaneMerger
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.firing import Alarms, PaneTriggers, firing_of
from millpy.windowing.pane_codec import DuePane, OpenPane
from millpy.windowing.session_state import OpenSession, OpenSessions, UnexpiredSessions
from millpy.windowing.window_memory import FIRING_BYTES

SpanName: TypeAlias = tuple[int, int, Key]
"""Start, end and key of an open window."""


class TriggeredSessions(OpenSessions):
    """The open sessions of one key interval.

    Attributes:
        alarms: when panes are due without a record.
    """

    def __init__(
        self, accumulators: AccumulatorSet, merger: PaneMerger, allowed_lateness_us: int, triggers: PaneTriggers
    ) -> None:
        super().__init__(accumulators, merger, allowed_lateness_us)
        self._triggers = triggers
        self.weights.each += FIRING_BYTES
        self.alarms: Alarms[SpanName] = Alarms()
        self._alarmed: dict[SpanName, OpenSession] = {}
        self._unfired = _UnpassedSessions()
        self._unclosed = UnexpiredSessions()
        self._holding = _HoldingSessions()

    def _add_to_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        firing = firing_of(new)
        self._triggers.add(pane, firing.since, firing.late)

    def _join_triggers(self, pane: OpenPane, olds: Sequence[OpenPane], end: int) -> None:
        self._triggers.join(pane, olds, Instant(end))

    def _take_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        known, firing = firing_of(pane), firing_of(new)
        firing.timing, firing.before = known.timing, known.before
        pane.firing = firing

    def _queue(self, session: OpenSession) -> None:
        live = self.weights.panes
        firing = firing_of(session.pane)
        if not firing.passed:
            self._unfired.add(session.end, session.name(), session, live=live)
        for queue in (self._unexpired, self._unclosed):
            queue.add(session.end + self._allowed_us, session.name(), session, live=live)
        if firing.holds:
            self._holding.add(session.end, session.name(), session, live=live)
        self._set_alarm(session, self._triggers.alarm_of(session.pane))

    def _set_alarm(self, session: OpenSession, at: Instant) -> None:
        name = session.start, session.end, session.key
        self.alarms.set(name, at)
        if at == INSTANT_MAX:
            self._alarmed.pop(name, None)
        else:
            self._alarmed[name] = session

    def due(self, latest_end: Instant, panes_max: int = UNBOUNDED) -> list[DuePane]:
        """Return the panes to emit at a watermark: of those that have changed, and of up to `panes_max` others."""
        asked = dict(self._touched)
        most = panes_max + len(asked)
        asked.update((self._alarmed[name], None) for name in self.alarms.due(self._triggers.now_us, panes_max))
        for queue in (self._unfired, self._unclosed):
            while len(asked) < most and (session := queue.first(latest_end)) is not None:
                queue.pop()
                if queue is self._unfired or firing_of(session.pane).since:
                    asked[session] = None
        found: list[DuePane] = []
        for session in asked:
            pane, end = session.pane, session.end
            firing = firing_of(pane)
            held = firing.holds
            if self._triggers.ask(pane, ended=end <= latest_end, over=end + self._allowed_us <= latest_end):
                found.append(session.due())
            if firing.holds and not held:
                self._holding.add(end, session.name(), session, live=self.weights.panes)
            self._set_alarm(session, self._triggers.alarm_of(pane))
        self._touched.update(asked)
        return found

    def _is_done(self, session: OpenSession) -> bool:
        firing = firing_of(session.pane)
        return firing.passed and not firing.since

    def _remove(self, session: OpenSession) -> None:
        super()._remove(session)
        self._set_alarm(session, INSTANT_MAX)

    def oldest_end(self) -> Instant:
        """Return the end of the oldest session that holds the low watermark; INSTANT_MAX without one."""
        return min(self.next_end(), self._holding.next_due())


class _UnpassedSessions(DueQueue[OpenSession]):
    __slots__ = ()

    def is_current(self, key: Key | None, item: OpenSession) -> bool:
        """Tell whether the trigger of the session has not been asked since the session has reached its end."""
        return item.alive and not firing_of(item.pane).passed


class _HoldingSessions(DueQueue[OpenSession]):
    __slots__ = ()

    def is_current(self, key: Key | None, item: OpenSession) -> bool:
        """Tell whether the session has records that were on time, and that no pane has."""
        return item.alive and firing_of(item.pane).holds
