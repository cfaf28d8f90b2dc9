"""`GraphDriver`: a whole graph in one process, driven by hand through the walk of a worker, over a store in memory.

Each method that moves the graph is one turn: it gives input to a source, or moves a watermark or the clock, steps all
sources and computations, commits, and repeats that until no due work is left. A test sees the graph only at rest.

What a worker has and the driver lacks: a broker, a lease, a bound on the time of a turn, the search for a value that
the database refuses, and the pause of a source with too many dead letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from millpy.errors import UsageError
from millpy.formats import Message
from millpy.graph import Graph, InjectorNode, StageNode
from millpy.graph.loader import load_graph
from millpy.hosting.host import HostedGraph
from millpy.hosting.interval_state import IntervalState
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import AdvanceWithClock
from millpy.ingest.table_rows import check_size, table_version
from millpy.limits import Limits
from millpy.model.checkpoint import DeadLetter, Entries
from millpy.model.keys import Key
from millpy.model.lookup import PUBLIC
from millpy.model.record import Records
from millpy.model.sites import OTHERS
from millpy.model.stage import UNBOUNDED
from millpy.model.time import Instant, microseconds, nearest_datetime, to_datetime
from millpy.model.timer import Timer
from millpy.operators.keyed import ComputationLogic
from millpy.store.memory.database import MemoryDatabase
from millpy.testing.clock import ManualClock
from millpy.testing.kit.contents import (
    LateRecord,
    OpenWindow,
    Pane,
    ProductionLog,
    Watermarks,
    late_records_of,
    moment,
    panes_of,
)
from millpy.testing.kit.entries import cells_of, holds_of, timers_of, windows_of
from millpy.testing.kit.state import ReadableMemory, ReadableState, Rows
from millpy.windowing.logic import WindowedLogic

START = datetime(2100, 1, 1, tzinfo=UTC)
"""The default processing time at the beginning: late enough that no record of a test is from the future."""


class GraphDriver:
    """A graph that a test drives by hand, without database, broker or worker.

    Args:
        graph: a graph, or the file that defines one (`factory.py`, `factory.py:graph`).
        now: the processing time at the beginning; by default the year 2100. A graph whose source advances its
            watermark with the clock needs one.
        limits: the bounds of the engine; by default those of a worker.
        state: where to commit; by default in memory.

    Attributes:
        loses_turns: whether each turn is lost in a crash before its commit, and made again; see `crashing`.

    Raises:
        UsageError: the file defines no graph, or the graph cannot run.

    Examples:
        >>> driver = GraphDriver("factory.py")
        >>> driver.feed("readings", [{"device": "pump", "at": "2026-11-20T08:00:00Z", "temperature": 20.5}])
        >>> driver.end()
        >>> driver.rows("temperature_1m")
    """

    def __init__(
        self,
        graph: Graph | str | Path,
        *,
        now: datetime | None = None,
        limits: Limits | None = None,
        state: ReadableState | None = None,
    ) -> None:
        self.graph = graph if isinstance(graph, Graph) else load_graph(str(graph))
        self._is_told_the_time = now is not None
        start = moment(now if now is not None else START, "now")
        self._clock = ManualClock(start)
        self._state = state or ReadableMemory(MemoryDatabase(self._clock))
        self._log = ProductionLog()
        self.loses_turns = False
        self._limits = limits or Limits()
        self._host = HostedGraph(self.graph, self._state, self._limits, start, self._observe)
        self._nodes = {node.name: node for node in self.graph.nodes}
        for each, sink in self.graph.sinks():
            sink.assume_prepared([taken.record_type for taken in each.inputs])

    # What moves the graph.

    def feed(self, source: str, records: Sequence[Any], *, partition: str | None = None) -> None:
        """Give records to a source as one bundle.

        They take the way of a real source's records: decoder, deduplication, event time, watermark. So they may become
        dead letters, duplicates or late records.

        Args:
            source: the stream that the source makes.
            records: objects of the stream's class, dicts (encoded as JSON), or JSON as bytes; or, for a source with
                a payload format, a `Message` each, with the bytes that a device sends.
            partition: the source partition; a source with several needs it.

        Raises:
            UsageError: a name is unknown, the source has ended, or a record is none of these.
        """
        node = self._source(source)
        if (messages := _messages_of(records, node)) is not None:
            self._feed_messages(node, messages, self._partition(source, partition))
            return
        payloads = [_payload(record, node) for record in _several(records)]
        place = self._partition(source, partition)
        if self._host.intervals[place].finished:
            raise UsageError(f"source {source!r} has ended", hint="feed it before end()")
        self._turn({place: SourceBatch("json", self._host.now_us, payloads=payloads)})

    def _feed_messages(self, node: InjectorNode, messages: list[Message], place: int) -> None:
        format = node.source.payload_format()
        if format is None:
            raise UsageError(f"source {node.name!r} has no payload format", hint="feed records, dicts or JSON")
        now_us = self._host.now_us
        stamped = [msgspec.structs.replace(each, arrived_at=each.arrived_at or now_us) for each in messages]
        expander = Expander(format, node.record_type, self._limits)
        found = expander.expand(stamped, records_max=2**31, bytes_max=2**31)
        describe = found.describe(lambda index: messages[index].topic)
        self._turn(
            {
                place: SourceBatch(
                    "json", now_us, found.payloads, refused=found.refused, messages=found.messages, describe=describe
                )
            }
        )

    def set_table(self, table: str, rows: Sequence[Any]) -> None:
        """Let a lookup table have these rows, as the next read of a worker would find them.

        A step waits until all of its tables have been set, as it waits in a worker for the first read.

        Args:
            table: the table's name; without a schema, in schema public.
            rows: objects of the class of its rows, dicts (encoded as JSON), or JSON as bytes, in the order of their
                key. A row that does not fit the class is left out, as in a worker.

        Raises:
            UsageError: no step reads the table, or a row is none of these.
            TableLoadError: two rows have one key, or the table is too large.
        """
        name = table if "." in table else f"{PUBLIC}.{table}"
        nodes = [node for node in self.graph.nodes if isinstance(node, StageNode)]
        known = {read.name: read for node in nodes for read in node.tables}
        read = known[_known("lookup table", name, list(known))]
        several = _several(rows, "set_table", "row")
        # One row a line: a line end of JSON is between its values.
        text = b"\n".join(_payload_of(row, read.row, f"row of {name!r}").replace(b"\n", b" ") for row in several)
        check_size(read, len(several), len(text), self._limits)
        before = self._host.tables.get(read)
        self._host.tables[read] = table_version(read, text, self._host.now_us, before)
        self._turn({})

    def advance_watermark(self, source: str, to: datetime | int, *, partition: str | None = None) -> datetime:
        """Let a source state that no record before `to` comes any more. Return its watermark afterwards.

        A watermark never moves back (I5): a statement that is behind it changes nothing. Records that come later are
        judged by it, and move it on as usual.

        Args:
            source: the stream that the source makes.
            to: an aware datetime, or µs since 1970-01-01.
            partition: the source partition; by default all.
        """
        at = moment(to, "to")
        self._turn(
            {place: SourceBatch("json", self._host.now_us, watermark=at) for place in self._places(source, partition)}
        )
        return self.watermark(source, partition)

    def advance_clock(self, by: timedelta) -> datetime:
        """Let processing time pass, in one step. Return the processing time afterwards.

        Every source is silent meanwhile and proven idle; a silence begins after the last bundle of a source, or after a
        crash. All processing-time timers that are due then fire in this turn, and see the time at its end.

        Raises:
            UsageError: `by` is negative; or a source advances its watermark with the clock, and the driver was not
                told what time it is.
        """
        if by < timedelta(0):
            raise UsageError(f"the clock cannot go back by {-by}", hint="pass a positive duration")
        if not self._is_told_the_time:
            for node in self.graph.injectors():
                if isinstance(node.idle, AdvanceWithClock):
                    raise UsageError(
                        f"source {node.name!r} advances its watermark with the clock, which is at {self.now:%Y-%m-%d}",
                        hint="pass now= with a time near that of the records",
                    )
        self._turn({})  # from here on the sources are silent
        self._host.now_us = Instant(self._host.now_us + microseconds(by))
        self._clock.advance(by.total_seconds())
        self._turn({})
        return self.now

    def end(self, source: str | None = None, *, partition: str | None = None) -> None:
        """End the input of one source or of all: their watermarks reach the end of time, and all windows close."""
        names = [node.name for node in self.graph.injectors()] if source is None else [source]
        places = [place for name in names for place in self._places(name, partition)]
        self._turn({place: SourceBatch("json", self._host.now_us, finished=True) for place in places})

    def crash(self) -> None:
        """Crash between two turns, and restart: all soft state is lost, and read again from what is committed."""
        self._host.restart()

    @contextmanager
    def crashing(self) -> Iterator[None]:
        """Crash in every turn of a block, before its commit; then restart, and make the turn again.

        The first attempt is stepped as a whole, with your code, and lost; a source gives the same input again.
        """
        before, self.loses_turns = self.loses_turns, True
        try:
            yield
        finally:
            self.loses_turns = before

    # What a test reads.

    @property
    def now(self) -> datetime:
        """The processing time."""
        return to_datetime(self._host.now_us)

    def rows(self, table: str) -> Rows:
        """Return the rows of a result table by column: of each window the newest pane, in the order of the key.

        Rows of records are in the order in which they were committed. Instants are datetimes, and nested fields dicts.
        """
        tables = [stream.table for stream in self.graph.streams() if stream.table is not None]
        return self._state.rows(_known("table", table, tables))

    def history(self, table: str) -> Rows:
        """Return the history of a result table by column: window by window in the order of the key, each in order.

        Raises:
            UsageError: the table keeps no history.
        """
        tables = [stream.table for stream in self.graph.streams() if stream.table is not None and stream.history]
        return self._state.history(_known("history", table, tables))

    def records(self, stream: str) -> list[Any]:
        """Return all records of a stream so far, as objects of its class: of a source the accepted ones."""
        return [record for _, record in self.timed_records(stream)]

    def timed_records(self, stream: str) -> list[tuple[datetime, Any]]:
        """Return all records of a stream so far, each with its event time."""
        self._known_stream(stream)
        return [
            (nearest_datetime(at), record)
            for records in self._log.records_of(stream)
            for at, record in zip(records.event_times.tolist(), records.objects(), strict=True)
        ]

    def panes(self, computation: str) -> list[Pane]:
        """Return all panes that a windowed step has emitted so far, with retractions, in order."""
        node = self._stage(computation)
        logic = node.logic
        if not isinstance(logic, WindowedLogic):
            raise UsageError(f"{computation!r} has no windows", hint=f"read records({computation!r})")
        (stream,) = node.outputs
        fields, columns = node.inputs[0].fields, logic.columns()
        return [pane for records in self._log.records_of(stream.name) for pane in panes_of(records, fields, columns)]

    def state(self, computation: str) -> dict[Key, dict[str, Any]]:
        """Return the committed cells of a `Computation`: key -> cell -> value. A cell with its default is absent."""
        node = self._stage(computation)
        if not isinstance(node.logic, ComputationLogic):
            raise UsageError(f"{computation!r} is no Computation and has no cells")
        return cells_of(self._entries(computation), node.logic.computation, node.inputs[0].key_types)

    def timers(self, computation: str) -> dict[Key, list[Timer]]:
        """Return the timers that are set, by key, in order of their times."""
        return timers_of(self._entries(computation), self._stage(computation).inputs[0].key_types)

    def holds(self, computation: str) -> dict[Key, dict[str, datetime]]:
        """Return the holds of `Context.hold`: key -> name -> time."""
        return holds_of(self._entries(computation), self._stage(computation).inputs[0].key_types)

    def open_windows(self, computation: str) -> list[OpenWindow]:
        """Return the windows that a windowed step keeps, in order of start and key; of sliding windows the slices."""
        return windows_of(self._entries(computation), self._stage(computation).inputs[0].key_types)

    def late_records(self) -> list[LateRecord]:
        """Return all records that were too late, one for each window that they missed, in order."""
        found: list[LateRecord] = []
        for rows in self._state.late_rows():
            node = self._stage(rows.computation)
            taken = next(taken for taken in node.inputs if taken.stream.name == rows.stream)
            found += late_records_of(rows, taken.record_type, taken.key_types)
        return found

    def dead_letters(self) -> list[DeadLetter]:
        """Return all dead letters, in order: `reason`, `detail`, `payload`, `traceback` and where they come from."""
        return list(self._state.dead_letters())

    def sent(self, sink: str) -> list[tuple[Any, ...]]:
        """Return what a sink was given so far; the records of a key are in order.

        Of `to_sql`, the values of the statement's places, as text for PostgreSQL; the statement does not run. Of every
        other sink (key, value) of each message, as bytes; with the topic instead of the key if each has one.

        Raises:
            UsageError: the graph has no sink of this name, or commits into a database.
        """
        if not isinstance(self._state, ReadableMemory):
            raise UsageError("what sinks were given is known in memory only", hint="read it at the other side")
        _known("sink", sink, [n.name for n in self.graph.nodes if isinstance(n, StageNode) and n.is_sink])
        return self._state.sent(sink, [interval.interval_id for interval in self._intervals(sink)])

    def watermark(self, source: str, partition: str | None = None) -> datetime:
        """Return the watermark of a source partition, or the smallest of a source's partitions.

        Before anything has arrived it is the beginning of the year 1, after the end the end of the year 9999.
        """
        places = self._places(source, partition)
        return nearest_datetime(min(self._host.intervals[place].low_watermark for place in places))

    def site_watermarks(self, source: str, partition: str | None = None) -> dict[Any, datetime]:
        """Return the watermarks of the sites of a source with `watermark_by`, in the order in which they began.

        A site is written as in JSON: UUIDs and bytes as text. The sites beyond `Limits.sites_max` share the one of
        None. A site that comes by several partitions has the least of its watermarks.
        """
        found: dict[Any, Instant] = {}
        for place in self._places(source, partition):
            intake = self._host.intervals[place].intake
            assert intake is not None
            for site, watermark in intake.site_watermarks().items():
                name = None if site == OTHERS else msgspec.json.decode(site)
                found[name] = min(watermark, found.get(name, watermark))
        return {name: nearest_datetime(watermark) for name, watermark in found.items()}

    def watermarks(self, computation: str) -> Watermarks:
        """Return the input watermark and the low watermark of a step or source."""
        intervals = self._intervals(computation)
        return Watermarks(
            nearest_datetime(min(interval.input_watermark for interval in intervals)),
            nearest_datetime(min(interval.low_watermark for interval in intervals)),
        )

    def check_accounting(self) -> None:
        """Check that every record that was fed is accounted for, once (I8).

        Raises:
            AssertionError: a count does not add up, which is a defect of millpy.
        """
        unbalanced = self._state.unbalanced()
        assert not unbalanced, unbalanced

    # Helpers.

    def _turn(self, taken: Mapping[int, SourceBatch]) -> None:
        if self.loses_turns:
            self._host.step(taken)
            self._log.drop()
            self._host.restart()
        try:
            self._host.turn(taken)
        except BaseException:
            self._log.drop()
            raise
        self._log.commit()

    def _observe(self, interval: IntervalState, productions: Mapping[str, Records]) -> None:
        del interval
        self._log.add(productions)

    def _source(self, name: str) -> InjectorNode:
        node = self._nodes.get(_known("source", name, [node.name for node in self.graph.injectors()]))
        assert isinstance(node, InjectorNode)
        return node

    def _stage(self, name: str) -> StageNode:
        node = self._nodes.get(_known("step", name, [n.name for n in self.graph.nodes if isinstance(n, StageNode)]))
        assert isinstance(node, StageNode)
        return node

    def _known_stream(self, name: str) -> None:
        sources = [node.name for node in self.graph.injectors()]
        _known("stream", name, list(dict.fromkeys([*sources, *(s.name for s in self.graph.streams())])))

    def _places(self, source: str, partition: str | None) -> list[int]:
        """Return the ids of a source's partitions, or of one of them."""
        self._source(source)
        deployed = self._host.plan.deployment.intervals_of(source)
        if partition is not None:
            _known(f"partition of {source!r}", partition, [interval.partition for interval in deployed])
        return [i.interval_id for i in deployed if partition in (None, i.partition)]

    def _partition(self, source: str, partition: str | None) -> int:
        places = self._places(source, partition)
        if len(places) > 1:
            names = [interval.partition for interval in self._host.plan.deployment.intervals_of(source)]
            raise UsageError(
                f"source {source!r} has several partitions", hint=f"pass partition=, one of: {', '.join(names)}"
            )
        return places[0]

    def _intervals(self, computation: str) -> list[IntervalState]:
        _known("step or source", computation, list(self._nodes))
        deployed = self._host.plan.deployment.intervals_of(computation)
        return [self._host.intervals[interval.interval_id] for interval in deployed]

    def _entries(self, computation: str) -> list[Entries]:
        """Return everything keyed that a step has committed."""
        self._stage(computation)
        read = self._state.read
        found = [read(interval.grant, state_rows_max=UNBOUNDED) for interval in self._intervals(computation)]
        return [entries for snapshot in found for entries in snapshot.recovered.entries]


def _known(what: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise UsageError(f"the graph has no {what} {name!r}", hint=f"it has: {', '.join(names) or 'none'}")
    return name


def _several(records: Sequence[Any], call: str = "feed", of: str = "record") -> list[Any]:
    if isinstance(records, str | bytes | dict | msgspec.Struct) or not isinstance(records, Iterable):
        raise UsageError(f"{call} takes a list of {of}s", hint=f"for one {of}, pass [{of}]")
    return list(records)


def _messages_of(records: Sequence[Any], node: InjectorNode) -> list[Message] | None:
    """Return the messages, or None for records. Raises UsageError for a mixture of both."""
    listed = _several(records)
    found = [record for record in listed if isinstance(record, Message)]
    if found and len(found) < len(listed):
        raise UsageError(f"messages and records for {node.name!r} at once", hint="feed them one after the other")
    return found or None


def _payload(record: Any, node: InjectorNode) -> bytes:
    return _payload_of(record, node.record_type.struct, f"record of {node.name!r}")


def _payload_of(record: Any, struct: type[msgspec.Struct], what: str) -> bytes:
    if isinstance(record, bytes):
        return record
    if isinstance(record, dict | struct):
        return msgspec.json.encode(record)
    raise UsageError(f"{record!r} is no {what}", hint=f"feed objects of {struct.__name__}, dicts, or JSON as bytes")
