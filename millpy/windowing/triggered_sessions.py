"""Open sessions whose trigger decides pane by pane: the counterpart of `triggered_state.py` for sessions.

A session that grows becomes another one, which begins at pane 0, and whose trigger knows what those of its parts knew
(`Trigger.merged`). Alarms and holds follow from the state of the trigger, and are not stored.

A session whose trigger is finished is closed, as in Beam: it merges with no other, and a record that would make the
same session again is dropped. A record that makes another one opens it, although it may overlap the closed one. Closed
sessions are kept, without accumulators, until they expire; they count against the bound on open windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from millpy.model.checkpoint import Entries
from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key
from millpy.model.stage import UNBOUNDED
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.accumulation import PaneMerger
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.firing import Alarms, PaneTriggers, firing_of, needs_only_records
from millpy.windowing.pane_codec import DuePane, OpenPane
from millpy.windowing.session_state import OpenSession, OpenSessions, UnexpiredSessions
from millpy.windowing.window_memory import FIRING_BYTES

SpanName: TypeAlias = tuple[int, int, Key]
"""Start, end and key of an open window."""


class TriggeredSessions(OpenSessions):
    """The open sessions of one key interval.

    Attributes:
        closed: (key, start, end) -> session, of those whose trigger is finished; they are not in `by_key`.
        alarms: when panes are due without a record.
    """

    def __init__(
        self, accumulators: AccumulatorSet, merger: PaneMerger, allowed_lateness_us: int, triggers: PaneTriggers
    ) -> None:
        super().__init__(accumulators, merger, allowed_lateness_us)
        self._triggers = triggers
        self.weights.each += FIRING_BYTES
        self.closed: dict[tuple[Key, int, int], OpenSession] = {}
        self.alarms: Alarms[SpanName] = Alarms()
        self._alarmed: dict[SpanName, OpenSession] = {}
        self._unfired = _UnpassedSessions()
        self._unclosed = UnexpiredSessions()
        self._unexpected = _UnexpectedSessions()
        self._holding = _HoldingSessions()

    def _add_to_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        firing = firing_of(new)
        self._triggers.add(pane, firing.since, firing.late)

    def _join_triggers(self, pane: OpenPane, olds: Sequence[OpenPane], end: int) -> None:
        self._triggers.join(pane, olds, Instant(end))

    def has_left(self, pane: OpenPane) -> bool:
        """Tell whether a session that has fired needs nothing more but late records."""
        return needs_only_records(pane)

    def is_here(self, key: Key, start: int, end: int) -> bool:
        """Tell whether a session is in memory."""
        return (key, start, end) in self.closed or super().is_here(key, start, end)

    def _queues(self) -> tuple[DueQueue[OpenSession], ...]:
        return *super()._queues(), self._unclosed, self._unexpected, self._holding

    def _add(self, session: OpenSession) -> None:
        super()._add(session)
        if firing_of(session.pane).trigger[0]:
            self._close(session)

    def _close(self, session: OpenSession) -> None:
        self._unlink(session)
        self.closed[session.key, session.start, session.end] = session

    def _is_closed(self, session: OpenSession) -> bool:
        return self.closed.get((session.key, session.start, session.end)) is session

    def has_ended(self, pane: OpenPane) -> bool:
        """Tell whether a session has fired at its end, so that its row may be that of one that has left memory."""
        return firing_of(pane).passed

    def _take_trigger(self, pane: OpenPane, new: OpenPane) -> None:
        known, firing = firing_of(pane), firing_of(new)
        firing.timing, firing.before, firing.on_time_index = known.timing, known.before, known.on_time_index
        pane.firing = firing

    def _queue(self, session: OpenSession) -> None:
        live = self.weights.panes
        firing = firing_of(session.pane)
        if not firing.passed:
            self._unfired.add(session.end, session.name(), session, live=live)
        for queue in (self._unexpired, self._unclosed):
            queue.add(session.end + self.allowed_us, session.name(), session, live=live)
        if self._triggers.by_percentile and not firing.expected:
            self._unexpected.add(session.end, session.name(), session, live=live)
        if firing.holds:
            self._holding.add(session.end, session.name(), session, live=live)
        if not firing.trigger[0]:
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
                if queue is self._unfired or self._triggers.waits_for_the_end(firing_of(session.pane)):
                    asked[session] = None
        while len(asked) < most and (session := self._unexpected.first(self._triggers.expected_end)) is not None:
            self._unexpected.pop()
            asked[session] = None
        found: list[DuePane] = []
        for session in asked:
            pane, end = session.pane, session.end
            firing = firing_of(pane)
            held = firing.holds
            if self._triggers.ask(session.due(), ended=end <= latest_end, over=end + self.allowed_us <= latest_end):
                found.append(session.due())
            self._triggers.note_waiting(pane)
            if firing.holds and not held:
                self._holding.add(end, session.name(), session, live=self.weights.panes)
            if not self._is_closed(session):  # another session may have its start
                self._set_alarm(session, self._triggers.alarm_of(pane))
                if firing.trigger[0]:
                    self._close(session)
        self._touched.update(asked)
        return found

    def is_expected(self) -> bool:
        """Tell whether the percentile watermark has reached a session that has to be asked."""
        return self._unexpected.next_due() <= self._triggers.expected_end

    def _is_done(self, session: OpenSession) -> bool:
        firing = firing_of(session.pane)
        return firing.passed and not self._triggers.waits_for_the_end(firing)

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int = UNBOUNDED) -> Entries | None:
        """Expire up to `panes_max` sessions, and return the changes of this bundle as entries; None without any."""
        for session in self._touched if self.closed else ():
            if self._is_closed(session):
                session.pane.values, session.pane.kept = [], None
        return super().take_entries(watermark, bundle, panes_max)

    def _remove(self, session: OpenSession) -> None:
        if not self._is_closed(session):
            self._set_alarm(session, INSTANT_MAX)
        super()._remove(session)

    def _unlink(self, session: OpenSession) -> None:
        if self._is_closed(session):
            del self.closed[session.key, session.start, session.end]
        else:
            super()._unlink(session)

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


class _UnexpectedSessions(DueQueue[OpenSession]):
    __slots__ = ()

    def is_current(self, key: Key | None, item: OpenSession) -> bool:
        """Tell whether the trigger has not been asked since the percentile watermark has reached the session's end."""
        return item.alive and not firing_of(item.pane).expected
