"""The per-key tools of a keyed stream: patterns, changes, rates of counters, grids, in event-time order.

Each tool is a `Computation` behind a step that puts the records of a key in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from millpy.graph.names import checked_name
from millpy.graph.nodes import StageNode
from millpy.graph.refusals import refuse_repeated_panes, refuse_several_ways
from millpy.graph.silence import silent_after
from millpy.limits import KEY_INTERVALS_DEFAULT
from millpy.model.lookup import LookupTable
from millpy.model.record import RecordType
from millpy.operators.changes import Changes
from millpy.operators.counter_rates import CounterRates
from millpy.operators.event_time_order import EventTimeOrderLogic
from millpy.operators.gap_filling import GapFilling, Method
from millpy.operators.keyed_output import key_columns
from millpy.operators.pattern import AfterMatch, Pattern
from millpy.operators.pattern_matching import PARTIALS_DEFAULT, PatternMatching

if TYPE_CHECKING:
    from millpy.computation import Computation
    from millpy.graph.streams import KeyedStream, Stream


class PerKeyTools:
    """The methods of a keyed stream that take the records of each key in event-time order.

    A tool waits until the watermark has passed a record; a record that is late then goes to the late records. Each
    makes two steps, of which the first, `NAME_in_order`, puts the records in order; tools that share the stream of one
    `in_order` share that step.
    """

    __slots__ = ()

    def in_order(self, *, name: str, intervals: int = KEY_INTERVALS_DEFAULT) -> KeyedStream:
        """Put the records of each key in event-time order; those of one time stay in order of arrival.

        A record passes when the watermark has passed it. A late one goes to the late records. A retraction takes its
        record back if that has not passed yet, and otherwise is a late record.

        Args:
            name: the step's name.
            intervals: number of key intervals, the unit of ownership.

        Returns:
            The stream in order, with the same key.

        Raises:
            GraphError: the name is invalid, panes of the stream repeat, or records that may be retracted come by
                several ways.
        """
        keyed = cast("KeyedStream", self)
        checked_name(name, "step")
        for route in keyed.stream.routes:
            refuse_repeated_panes(route.stream, "put in order")
        inputs = keyed.inputs()
        refuse_several_ways(name, inputs)
        record_type = keyed.stream.record_type
        logic = EventTimeOrderLogic(record_type, len(inputs), takes_retractions=any(taken.retracts for taken in inputs))
        return keyed.stream.add_step(StageNode(name, inputs, logic, intervals), record_type).key_by(*keyed.fields)

    def match(
        self,
        pattern: Pattern,
        *,
        name: str,
        after_match: AfterMatch = "past_last",
        partials_max: int = PARTIALS_DEFAULT,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Find records of each key that follow each other as a pattern says.

        A match has the fields of the key, for each step the record that it took, and `STEP_at`, that record's event
        time; nothing for a `then_not`. Its event time is that of its last record, or the end of the time in which a
        record was absent.

        Args:
            pattern: the steps: `Pattern("door", …).then("alarm", …, within=minutes(5)).unless("reset", …)`.
            name: the step's name.
            after_match: "past_last": the next match begins after the last record of this one. "to_next": every record
                that the first step takes may begin a match.
            partials_max: maximum of matches of a key that have begun, at most 1,000; a record that would begin
                one more becomes a dead letter.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: the pattern has one step, a step has the name of a key field, or as for `in_order`.
        """
        tool = PatternMatching(
            self._record_type, pattern, self._key(), after_match=after_match, partials_max=partials_max
        )
        return self._run(tool, tool.output, name, intervals)

    def changes(
        self,
        field: str,
        *,
        name: str,
        by: float = 0,
        by_ratio: float | None = None,
        max_silence: timedelta | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Pass only records whose value differs from that of the last record that has passed, of each key.

        The first record of a key passes. None differs from every value. A record with NaN or an infinity becomes a dead
        letter.

        Args:
            field: the field that is compared: a number, text or a bool.
            name: the step's name.
            by: how much a number must differ; it must be more than this. 0 for any change.
            by_ratio: the same as a part of the last value: 0.05 for more than 5 %.
            max_silence: a record also passes if the last one that has passed is this much or more before it.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: a parameter does not fit the field, or as for `in_order`.
            SchemaError: there is no such field.
        """
        tool = Changes(self._record_type, field, by=by, by_ratio=by_ratio, max_silence=max_silence)
        return self._run(tool, self._record_type.struct, name, intervals)

    def rates(
        self,
        field: str,
        *,
        name: str,
        wraps_at: int | None = None,
        max_gap: timedelta | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Compute how fast a counter rises, between successive readings of each key.

        A record has the fields of the key, `since` and `at`, the event times of both readings, `increase`,
        `per_second`, and `reset`: whether the counter began again at 0. Its event time is that of the later reading.
        The first reading of a key gives no record. A reading that is negative, not finite, or not below `wraps_at`
        becomes a dead letter.

        Args:
            field: the counter, a number. Readings where it is None are ignored.
            name: the step's name.
            wraps_at: where the counter continues at 0, such as 2**32. A fall is a wrap if the counter then has risen by
                at most half of this, and a reset otherwise.
            max_gap: the time between readings beyond which there is no rate.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: a parameter does not fit the field, a key field has a name of the result, or as for `in_order`.
            SchemaError: there is no such field.
        """
        tool = CounterRates(self._record_type, field, self._key(), wraps_at=wraps_at, max_gap=max_gap)
        return self._run(tool, tool.output, name, intervals)

    def fill_gaps(
        self,
        *fields: str,
        every: timedelta,
        limit: timedelta,
        name: str,
        method: Method = "previous",
        offset: timedelta = timedelta(0),
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Make one record for each step of a grid, of each key.

        A record has the fields of the key, `at`, the grid point, which is also its event time, the given fields, and
        `filled`: whether the key has no record in the step that ends there.

        Args:
            fields: the fields whose values as of the grid point are in the record.
            every: the length of a step.
            limit: how long after its last record a gap is filled, at most 100,000 steps. After that a key is silent
                until its next record.
            name: the step's name.
            method: what a filled step has. "previous": the values of the last record. "linear": values between those
                of the records on both sides, if these are at most `limit` apart; a point then waits for the next
                record, and holds the watermark for at most `limit`. "null": None.
            offset: where the grid begins, from the epoch.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: a parameter is out of bounds or does not fit a field, a key field has a name of the result, or
                as for `in_order`.
            SchemaError: there is no such field.
        """
        tool = GapFilling(
            self._record_type, fields, self._key(), every=every, limit=limit, method=method, offset=offset
        )
        return self._run(tool, tool.output, name, intervals)

    def silent_after(
        self,
        after: timedelta,
        *,
        name: str,
        devices: Sequence[Any] | LookupTable | None = None,
        intervals: int = KEY_INTERVALS_DEFAULT,
    ) -> Stream:
        """Tell when a key, such as a device, falls silent, and when it is back.

        A record has the fields of the key, `silent`, `since`, the event time of the last record before, or None if
        there was none, and `at`, when the silence counted as one, or ended; that is its event time, too. Time in which
        the feed as a whole was away counts for no device: the record that ends such a gap is more than half of `after`
        later than any before it. With `AdvanceWithClock`, devices also fall silent when no record arrives at all; while
        the source is not connected, none does.

        Args:
            after: the time without a record after which a device is silent. Choose at least three times the interval
                of the slowest device.
            name: the name of the last of its five steps, and the beginning of the others' names.
            devices: keys that are expected from the first record of the feed on, also if they never send one: a list of
                values (tuples, for a key of several fields), or a LookupTable with that key. May change at any time.
            intervals: number of key intervals, the unit of ownership.

        Raises:
            GraphError: the stream does not come straight from a source, its source has `watermark_by`, a parameter is
                invalid, or as for `in_order`.
        """
        return silent_after(cast("KeyedStream", self), after, name=name, devices=devices, intervals=intervals)

    @property
    def _record_type(self) -> RecordType:
        return cast("KeyedStream", self).stream.record_type

    def _key(self) -> Mapping[str, type]:
        """Return the columns of the key."""
        keyed = cast("KeyedStream", self)
        return key_columns(keyed.fields, keyed.key_types)

    def _run(self, tool: Computation, output: Any, name: str, intervals: int) -> Stream:
        """Run a tool on the stream in order."""
        checked_name(name, "step")
        RecordType(output)  # an output that cannot be a stream must leave the graph as it is
        ordered = cast("KeyedStream", self)
        if not _is_in_order(ordered):
            ordered = self.in_order(name=f"{name}_in_order", intervals=intervals)
        made: Stream = ordered.process(tool, name=name, output=output, intervals=intervals)
        return made


def _is_in_order(keyed: KeyedStream) -> bool:
    """Tell whether a stream is the output of `in_order`, with the same key and nothing between."""
    if len(keyed.stream.routes) > 1:
        return False
    (route,) = keyed.stream.routes
    producer = route.stream.producer
    if not isinstance(producer, StageNode) or not isinstance(producer.logic, EventTimeOrderLogic):
        return False
    return not route.operators and producer.inputs[0].fields == keyed.fields
