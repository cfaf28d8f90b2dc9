"""User code with keyed state: `Computation`, its state cells, and the `Context` that each call receives.

All keys share one `Computation` object, and any worker may call it. State that belongs to a key therefore lives in
cells, which are class attributes and are read through the context. The effects of a call (cells, timers, holds,
productions) commit once, together with the record that caused them, or not at all (I2).

    class Spike(Computation):
        usual = Value(Usual)

        def process_record(self, context: Context, record: Reading) -> None:
            usual = context[Spike.usual]          # of this key; change it in place or set it
            context.produce(Alert(...))
            context.set_timer("quiet", at=context.event_time + minutes(5))

When a call raises, its effects are undone and it is retried; after the last attempt its record is dead-lettered with
the traceback. A call may therefore run more than once, and side effects outside its context are not exactly-once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from datetime import datetime
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from millpy.errors import GraphError, RefusedValueError, TimerError, UsageError
from millpy.limits import CALL_RECORDS_MAX, KEY_BYTES_MAX
from millpy.model.arguments import check_function
from millpy.model.due_timers import DueTimers
from millpy.model.keys import Key
from millpy.model.lookup import LookupTable, TableRows, Tables
from millpy.model.time import EPOCH, INSTANT_MAX, INSTANT_MIN, YEARS_HI, YEARS_LO, Instant, instant, to_datetime
from millpy.model.timer import TimeDomain, Timer, TimerId

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()
NO_DEFAULT: Any = object()


class Cell(Generic[T]):
    """A named piece of state that every key has, stored under the name of its class attribute."""

    in_place = False
    """Whether an assignment changes a live view instead of replacing a value."""

    def stored_type(self) -> Any:
        """Return the type of a key's value, which describes the cell in a deployed graph and decodes what is stored."""
        raise NotImplementedError


class Value(Cell[T]):
    """One value per key.

    A key without a stored value reads as `default`. Without a default it reads as `type_()` if `type_` is a Struct
    that needs no arguments, and as None otherwise. A value set back to its default takes no space.

    Args:
        type_: a type that msgspec can encode as JSON: numbers, text, Struct classes, lists, dicts, datetime.
        default: the value of a new key; copied for each key.
    """

    def __init__(self, type_: type[T], default: T = NO_DEFAULT) -> None:
        self.type = type_
        self.default = default

    def stored_type(self) -> Any:
        """Return the type of the value."""
        return self.type


class ListCell(Cell[list[T]]):
    """One list per key, for short lists: it is stored as a whole."""

    def __init__(self, type_: type[T]) -> None:
        self.type = type_

    def stored_type(self) -> Any:
        """Return the type of the list."""
        return list[self.type]  # type: ignore[name-defined]


class MapCell(Cell[MutableMapping[K, V]]):
    """One dictionary per key, stored entry by entry: a call pays only for the entries that it touches.

    Iteration follows the JSON text of the entries, not the order in which they were set.
    """

    in_place = True

    def __init__(self, key_type: type[K], value_type: type[V]) -> None:
        self.key_type = key_type
        self.value_type = value_type

    def stored_type(self) -> Any:
        """Return the type of the map as a dict, though its entries are stored one by one."""
        return dict[self.key_type, self.value_type]  # type: ignore[name-defined]


class Computation:
    """User logic, called per key; each key interval has one writer. Both callbacks may be `async def`.

    Attributes:
        immediate: whether the callbacks only compute: they do not block, do not run an event loop, and hold nothing
            that is bound to a thread (an SQLite connection is). The worker then steps a handful of records without
            switching to the thread for steps, which saves a few milliseconds of latency. By default callbacks always
            run in that one thread.
        handles_retractions: whether `process_record` subtracts a record where `context.retracts` is true. Without it, a
            stream whose records may be retracted cannot be an input.
    """

    immediate: ClassVar[bool] = False
    handles_retractions: ClassVar[bool] = False

    def check(self) -> None:
        """Raise GraphError for a class without `process_record`, or with callbacks that could not run."""
        hint = "def process_record(self, context, record): ..."
        if type(self).process_record is Computation.process_record:
            raise GraphError(f"{type(self).__name__} defines no process_record", hint=hint)
        check_function("process", self.process_record, hint, takes=2, awaits=True)
        check_function("process", self.process_timer, hint.replace("record", "timer"), takes=2, awaits=True)

    def process_record(self, context: Context, record: Any) -> Awaitable[None] | None:
        """Process one record, whose key is `context.key`."""
        raise NotImplementedError(f"{type(self).__name__} defines no process_record")

    def process_timer(self, context: Context, timer: Timer) -> Awaitable[None] | None:
        """Process one timer that is due."""
        raise NotImplementedError(f"{type(self).__name__} sets timers but defines no process_timer")

    def cells(self) -> dict[str, Cell[Any]]:
        """Return the cells by name, in order of declaration: of the bases, of the class, then of the object itself.

        A class that works for records of any type makes its cells in `__init__`, where it knows the type.
        """
        found: dict[str, Cell[Any]] = {}
        for base in reversed(type(self).__mro__):
            found.update({name: cell for name, cell in vars(base).items() if isinstance(cell, Cell)})
        return found | {name: cell for name, cell in vars(self).items() if isinstance(cell, Cell)}

    def parameters(self) -> Mapping[str, Any]:
        """Return what gives the stored cells their meaning beside their types; by default nothing.

        A graph with other parameters cannot be deployed over stored state. Values are data, functions (described by
        their names), or objects with an `identity()`.
        """
        return {}

    @classmethod
    def tables(cls) -> dict[str, LookupTable]:
        """Return the lookup tables of the class and its bases by the name of their attribute."""
        found: dict[str, LookupTable] = {}
        for base in reversed(cls.__mro__):
            found.update({name: table for name, table in vars(base).items() if isinstance(table, LookupTable)})
        return found


class CellSource(Protocol):
    """The stored values of one cell, by key."""

    def load(self, key: Key) -> Any:
        """Return the key's value: a new object, or a view of its entries."""
        ...

    def blank(self, key: Key) -> Any:
        """Return the value of a key that has nothing stored: the default, or an empty list or map."""
        ...


class Outlet(Protocol):
    """An output stream of the computation, as the context writes to it."""

    def checked_copy(self, record: Any) -> Any:
        """Return a copy of the record, which the caller cannot change.

        Raises:
            RefusedValueError: the record is not of the stream's type, or cannot be stored.
        """
        ...


Produced = tuple[int, Instant, Outlet, Any]
"""(row of the record that caused it, event time, output stream, record)."""


class Context:
    """State, timers and outputs of one call, for the key and the time of its record or timer.

    One object serves many calls: do not keep it. Each time is available as an aware datetime, and in µs under a name
    that ends in `_us`.

    Attributes:
        key: the record's key; a tuple if there are several key fields.
        event_time_us: event time of the record or timer.
        retracts: whether the record is a retraction: an equal record came before, and counts no longer. Only a class
            that declares `handles_retractions` sees one.
        stream: name of the record's stream; "" in `process_timer`.
        input_watermark_us: watermark that decides lateness and fires event timers.
        now_us: processing time; never runs backwards.
        tables: the versions of the class's lookup tables in this turn; `table` reads them.
    """

    __slots__ = (
        "_chain",
        "_due",
        "_firing",
        "_late",
        "_may_open",
        "_outlets",
        "_produced",
        "_produced_before",
        "_row",
        "_stores",
        "_timers",
        "_timers_of",
        "_undo",
        "_values",
        "event_time_us",
        "input_watermark_us",
        "key",
        "now_us",
        "retracts",
        "stream",
        "tables",
    )

    def __init__(
        self,
        stores: Mapping[Cell[Any], CellSource],
        outlets: Mapping[str | None, Outlet],
        timers_of: Mapping[Key, Mapping[TimerId, Timer]],
        may_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self._stores = stores
        self._outlets = outlets
        self._timers_of = timers_of
        self._may_open = may_open
        self._values: dict[Cell[Any], Any] = {}
        self._produced: list[Produced] = []
        self._produced_before = 0
        self._timers: dict[TimerId, Timer] | None = None
        self._firing: Timer | None = None
        self._chain: tuple[int, Instant] = (0, INSTANT_MIN)  # of the timer that fires: see `Timer.chain`
        self._due: DueTimers | None = None
        self._undo: list[tuple[TimerId, Timer | None]] | None = None
        self._late: bool | None = None
        self._row = 0
        self.key: Any = None
        self.stream = ""
        self.retracts = False
        self.tables: Tables = {}
        self.event_time_us = self.now_us = Instant(0)
        self.input_watermark_us = INSTANT_MIN

    @property
    def event_time(self) -> datetime:
        """Event time of the record or timer."""
        return to_datetime(self.event_time_us)

    @property
    def late(self) -> bool:
        """Whether the record is below the watermark; for a timer, whether it does not hold the watermark back."""
        return self.event_time_us < self.input_watermark_us if self._late is None else self._late

    @property
    def input_watermark(self) -> datetime:
        """Watermark that decides lateness and fires event timers, clamped to the range of a datetime."""
        return to_datetime(Instant(min(max(self.input_watermark_us, YEARS_LO), YEARS_HI)))

    @property
    def now(self) -> datetime:
        """Processing time; never runs backwards."""
        return to_datetime(self.now_us)

    def __getitem__(self, cell: Cell[T]) -> T:
        """Return the key's value. A change in place is stored like an assignment."""
        value = self._values.get(cell, _ABSENT)
        if value is _ABSENT:
            value = self._values[cell] = self._store(cell).load(self.key)
        return value  # type: ignore[no-any-return]

    def __setitem__(self, cell: Cell[T], value: T) -> None:
        """Replace the key's value; for a map, all its entries."""
        self._store(cell)
        if cell.in_place:
            entries = cast("Mapping[Any, Any]", value)
            taken = dict(entries)
            view = cast("MutableMapping[Any, Any]", self[cell])
            view.clear()
            view.update(taken)
        else:
            self._values[cell] = value

    def __delitem__(self, cell: Cell[Any]) -> None:
        """Reset the key's value to its default; empty a map."""
        self._values[cell] = self._store(cell).blank(self.key)

    def table(self, table: LookupTable) -> TableRows:
        """Return the rows of a lookup table by key, the same for all calls of the turn.

        `context.table(Alarms.rules)` is a mapping that cannot be changed; its `values()` are objects of the table's
        class, in the order of their keys.

        Raises:
            UsageError: the table is no attribute of the class.
        """
        version = self.tables.get(table)
        if version is None:
            raise UsageError(f"{table!r} is no table of this class", hint="make it an attribute of the Computation")
        return version.by_key

    def produce(self, record: Any, to: str | None = None, at: datetime | int | None = None) -> None:
        """Emit a record.

        Args:
            record: a record of the output stream's type; copied, so the caller may change it afterwards.
            to: name of the output stream, if there are several.
            at: event time of the record. Default: that of the record or timer of this call. An earlier one is accepted
                while a hold or timer of the key keeps the low watermark from passing it.

        Raises:
            TimerError: `at` is before the event time of this call, and no hold or timer of the key is before it.
            RefusedValueError: a value cannot be stored, or is not of the stream's type; or a call produces more than a
                million records.
        """
        time = self.event_time_us
        if at is not None:
            named = _instant(at)
            if named < time and named < self._held_until():
                raise TimerError(
                    f"cannot produce a record at {at}: its cause is later, at {self.event_time}",
                    hint="pass at= no earlier than the event time of this call, or than a hold of its key",
                )
            time = named
        outlet = self._outlets.get(to)
        if outlet is None:
            names = ", ".join(sorted(name for name in self._outlets if name is not None)) or "none"
            raise UsageError(f"unknown output stream {to!r}", hint=f"the output streams are: {names}")
        if len(self._produced) - self._produced_before >= CALL_RECORDS_MAX:
            raise RefusedValueError(f"a call produces more than {CALL_RECORDS_MAX:,} records")
        self._produced.append((self._row, time, outlet, outlet.checked_copy(record)))

    def set_timer(
        self,
        name: str,
        *,
        at: datetime | int,
        processing: bool = False,
        event_time: datetime | int | None = None,
        hold: bool = True,
    ) -> None:
        """Wake this key at a time. Setting a timer again under the same name moves it.

        An event timer fires once the input watermark has reached `at`, immediately if it already has; a
        processing timer fires when the clock reaches `at`. Until it fires, a timer holds the low watermark at
        its event time.

        Args:
            name: name by which `set_timer` and `delete_timer` refer to the timer.
            at: time at which the timer fires. What a timer before the time of its record produces may be late.
            processing: whether `at` is processing time instead of event time.
            event_time: event time of the records that the timer produces. Default: `at`, or the event time of this
                record for a processing timer.
            hold: whether the timer holds the low watermark. Without a hold its productions may be late. A processing
                timer that a late record sets never holds.

        Raises:
            TimerError: `event_time` is before that of its cause and of all holds of the key, or after `at`; or the
                name is empty.
            RefusedValueError: the name cannot be stored, or the interval has MILLPY_OPEN_TIMERS_MAX timers.
        """
        at_us = _instant(at)
        if event_time is not None:
            time = _instant(event_time)
            early = time < self.event_time_us and time < self._held_until()
            if early or (time > at_us and not processing):
                raise TimerError(
                    f"timer {name!r} cannot have event time {event_time}: the call is at {self.event_time}, at= {at}",
                    hint="choose a time between the two; for a processing timer, none before that of the call",
                )
        else:
            time = self.event_time_us if processing else at_us
        holds = hold and not (processing and self.late)
        domain: TimeDomain = "processing" if processing else "event"
        self._set(Timer(name, domain, at_us, time, holds, self._chain_of(domain, at_us)))

    def delete_timer(self, name: str, *, processing: bool | None = None) -> None:
        """Delete a timer: it never fires (I6). A timer that is not set is ignored.

        Args:
            name: name of the timer.
            processing: whether to delete the processing timer or the event timer. Default: both.
        """
        if processing is not True:
            self._discard(("event", name))
        if processing is not False:
            self._discard(("processing", name))

    def hold(self, name: str, at: datetime | int) -> None:
        """Keep the low watermark of the outputs from passing `at` until this key calls `release(name)`.

        A second call with the name moves the hold.

        Args:
            name: name of the hold, per key.
            at: a datetime with a time zone, or µs since the epoch.

        Raises:
            TimerError: `at` is no such time, or the name is empty.
            RefusedValueError: the name cannot be stored, or the interval has MILLPY_OPEN_TIMERS_MAX timers.
        """
        at_us = _instant(at)
        self._set(Timer(name, "hold", at_us, at_us))

    def release(self, name: str) -> None:
        """Release a hold of the low watermark. A hold that does not exist is ignored."""
        self._discard(("hold", name))

    def timer(self, name: str, *, processing: bool = False) -> Timer | None:
        """Return the timer of that name, or None if it is not set."""
        domain: TimeDomain = "processing" if processing else "event"
        return self._pending().get((domain, name))

    def _chain_of(self, domain: TimeDomain, at_us: Instant) -> tuple[int, Instant] | None:
        """Return the chain of a timer that is set now, if a timer sets it at a time that is already due."""
        if self._firing is None:
            return None
        behind, latest = self._chain
        if domain == self._firing.domain:  # the watermark may be past `latest`: how far depends on turns
            return (behind + 1, latest) if at_us <= latest else None
        reached = self.now_us if domain == "processing" else self.input_watermark_us
        return (behind + 1, at_us) if at_us <= reached else None

    def _store(self, cell: Cell[Any]) -> CellSource:
        store = self._stores.get(cell)
        if store is None:
            raise UsageError(
                f"this {type(cell).__name__} is not a cell of the computation", hint="declare cells as class attributes"
            )
        return store

    def _held_until(self) -> Instant:
        """Return the time up to which the key's timers and holds let the low watermark pass; INSTANT_MAX without any.

        The low watermark that was published last is not past it, so what is produced at it is not late.
        """
        return min((timer.event_time_us for timer in self._pending().values() if timer.holds), default=INSTANT_MAX)

    def _pending(self) -> Mapping[TimerId, Timer]:
        return self._timers if self._timers is not None else self._timers_of.get(self.key, {})

    def _set(self, timer: Timer) -> None:
        if not timer.name or not isinstance(timer.name, str):
            raise TimerError(f"invalid timer name {timer.name!r}", hint="use text that is not empty")
        if "\x00" in timer.name or not timer.name.isprintable():
            raise RefusedValueError(f"{timer.name!r} cannot be stored as a timer's name")
        if len(timer.name.encode()) > KEY_BYTES_MAX:
            raise RefusedValueError(f"the name of timer {timer.name[:40]!r}… is longer than {KEY_BYTES_MAX:,} bytes")
        if timer.id not in self._pending() and not self._may_open():
            raise RefusedValueError(
                f"cannot set timer {timer.name!r}: its key interval has reached MILLPY_OPEN_TIMERS_MAX"
            )
        if self._timers is None:
            self._timers = dict(self._timers_of.get(self.key, {}))
        if self._undo is not None:
            self._undo.append((timer.id, self._timers.get(timer.id)))
        self._timers[timer.id] = timer
        if self._due is not None:
            self._due.add(timer)

    def _discard(self, timer_id: TimerId) -> None:
        if timer_id in self._pending():
            if self._timers is None:
                self._timers = dict(self._timers_of[self.key])
            if self._undo is not None:
                self._undo.append((timer_id, self._timers[timer_id]))
            del self._timers[timer_id]

    def _undo_timers(self) -> None:
        """Restore the timers to where they were when `_undo` was last empty."""
        assert self._undo is not None
        for timer_id, before in reversed(self._undo):
            assert self._timers is not None
            if before is None:
                del self._timers[timer_id]
            else:
                self._timers[timer_id] = before
                if self._due is not None:
                    self._due.add(before)
        self._undo.clear()

    def _reset(self) -> None:
        """Discard the effects of all calls for the current key."""
        self._values.clear()
        self._produced.clear()
        self._timers = None
        self._firing = None
        self._late = None
        self._due = None
        self._undo = None


def _instant(at: datetime | int) -> Instant:
    """Return a user's time as an Instant.

    Raises:
        TimerError: the datetime is naive, or the time is outside the years 1 to 9999.
    """
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise TimerError(f"datetime {at!r} has no time zone", hint="pass an aware datetime")
        return instant(at)
    if isinstance(at, bool) or not isinstance(at, int):
        raise TimerError(f"{at!r} is not a time", hint=f"pass an aware datetime, or whole µs since {EPOCH:%Y-%m-%d}")
    if not YEARS_LO <= at <= YEARS_HI:
        raise TimerError(f"{at} µs is outside the years 1 to 9999", hint="pass µs, not ns")
    return Instant(at)
