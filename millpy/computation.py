"""Computation: what a user writes at the MillWheel level, and the context it is given.

A `Computation` object is shared by all keys and may be called from any worker: whatever belongs to a key lives in
cells, declared as class attributes and reached through the context. A call's effects (cells, timers, holds,
productions) commit together with the record that caused them, once, or not at all (I2).

    class Spike(Computation):
        usual = Value(Usual)

        def process_record(self, context: Context, record: Reading) -> None:
            usual = context[Spike.usual]          # of this key; change it in place or set it
            context.produce(Alert(...))
            context.set_timer("quiet", at=context.event_time + minutes(5))

When a call raises, all that it did is undone and it is tried again, then its record is quarantined with the traceback.
So a call may run more than once: what it does outside its context is not exactly-once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from datetime import datetime
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from millpy.errors import RefusedValueError, TimerError, UsageError
from millpy.limits import KEY_BYTES_MAX
from millpy.model.due_timers import DueTimers
from millpy.model.keys import Key
from millpy.model.time import EPOCH, INSTANT_MIN, YEARS_HI, YEARS_LO, Instant, instant, to_datetime
from millpy.model.timer import TimeDomain, Timer, TimerId

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()
NO_DEFAULT: Any = object()


class Cell(Generic[T]):
    """One named piece of state of every key; its attribute's name is the name it is stored by."""

    in_place = False
    """Whether an assignment changes a live view rather than replaces a value."""

    def shape(self) -> Any:
        """The type that is stored."""
        raise NotImplementedError


class Value(Cell[T]):
    """One value a key.

    Without a stored value it reads as `default`; without one, as `type_()` when a Struct can be made without
    arguments, else as None. A value set back to its default takes no space.

    Args:
        type_: what msgspec can encode as JSON: numbers, text, Struct classes, lists, dicts, datetime.
        default: what a new key starts from; copied for each key.
    """

    def __init__(self, type_: type[T], default: T = NO_DEFAULT) -> None:
        self.type = type_
        self.default = default

    def shape(self) -> Any:
        """The type that is stored."""
        return self.type


class ListCell(Cell[list[T]]):
    """A list a key, stored whole: for short ones."""

    def __init__(self, type_: type[T]) -> None:
        self.type = type_

    def shape(self) -> Any:
        """The type that is stored."""
        return list[self.type]  # type: ignore[name-defined]


class MapCell(Cell[MutableMapping[K, V]]):
    """A dictionary a key, stored by entry: a large one costs only for the entries that are touched.

    Iteration goes by the entries' JSON text, whatever the order in which they were set.
    """

    in_place = True

    def __init__(self, key_type: type[K], value_type: type[V]) -> None:
        self.key_type = key_type
        self.value_type = value_type

    def shape(self) -> Any:
        """The type that is stored."""
        return dict[self.key_type, self.value_type]  # type: ignore[name-defined]


class Computation:
    """User logic, invoked per key, in one writer per key interval. Both callbacks may be `async def`.

    Attributes:
        immediate: callbacks only compute: they do not block, run no event loop, and keep nothing that belongs to one
            thread (a connection to SQLite does). A handful of records is then stepped without a hop to the thread
            for steps, which saves a few milliseconds of latency. By default they always run in that one thread.
    """

    immediate: ClassVar[bool] = False

    def process_record(self, context: Context, record: Any) -> Awaitable[None] | None:
        """Take one record; `context.key` is its key."""
        raise NotImplementedError(f"{type(self).__name__} defines no process_record")

    def process_timer(self, context: Context, timer: Timer) -> Awaitable[None] | None:
        """Take one timer that is due."""
        raise NotImplementedError(f"{type(self).__name__} sets timers and defines no process_timer")

    @classmethod
    def cells(cls) -> dict[str, Cell[Any]]:
        """The cells that the class and its bases declare, by name, in order of declaration."""
        found: dict[str, Cell[Any]] = {}
        for base in reversed(cls.__mro__):
            found.update({name: cell for name, cell in vars(base).items() if isinstance(cell, Cell)})
        return found


class CellSource(Protocol):
    """Where the context finds the value of a cell."""

    def load(self, key: Key) -> Any:
        """The key's value: a fresh object, or a view of its entries."""
        ...

    def blank(self, key: Key) -> Any:
        """What the key's value becomes when it is deleted."""
        ...


class Outlet(Protocol):
    """An output stream of the computation."""

    def admitted(self, record: Any) -> Any:
        """The record as it will be carried: checked, and no longer shared with the caller."""
        ...


Produced = tuple[int, Instant, Outlet, Any]


class Context:
    """What a call may see and do, for the key and the time of its record or timer.

    One object serves many calls: do not keep it. Times come as aware datetimes, and as µs with the suffix `_us`.

    Attributes:
        key: the record's key; a tuple if there are several key fields.
        event_time_us: when the record happened, or the timer's event time.
        stream: name of the stream that the record came on; "" in `process_timer`.
        input_watermark_us: what lateness and event timers go by.
        now_us: processing time; never runs backwards.
    """

    __slots__ = (
        "_chain",
        "_chains",
        "_due",
        "_firing",
        "_late",
        "_may_open",
        "_outlets",
        "_produced",
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
        "stream",
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
        self._timers: dict[TimerId, Timer] | None = None
        self._firing: Timer | None = None
        # Of what a firing timer sets at a time that is due already: how many such stand behind it, and the latest time.
        self._chain: tuple[int, Instant] = (0, INSTANT_MIN)
        self._chains: dict[TimerId, tuple[int, Instant]] = {}
        self._due: DueTimers | None = None
        self._undo: list[tuple[TimerId, Timer | None]] | None = None
        self._late: bool | None = None
        self._row = 0
        self.key: Any = None
        self.stream = ""
        self.event_time_us = self.now_us = Instant(0)
        self.input_watermark_us = INSTANT_MIN

    @property
    def event_time(self) -> datetime:
        """When the record happened, or the timer's event time."""
        return to_datetime(self.event_time_us)

    @property
    def late(self) -> bool:
        """Whether the record's event time is below the watermark; for a timer, whether it holds nothing back."""
        return self.event_time_us < self.input_watermark_us if self._late is None else self._late

    @property
    def input_watermark(self) -> datetime:
        """What lateness and event timers go by, within the years that a datetime has."""
        return to_datetime(Instant(min(max(self.input_watermark_us, YEARS_LO), YEARS_HI)))

    @property
    def now(self) -> datetime:
        """Processing time; never runs backwards."""
        return to_datetime(self.now_us)

    def __getitem__(self, cell: Cell[T]) -> T:
        """The key's value: change it in place, or set it."""
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
        """Back to the default; for a map, to no entries."""
        self._values[cell] = self._store(cell).blank(self.key)

    def produce(self, record: Any, to: str | None = None, at: datetime | int | None = None) -> None:
        """Emit a record.

        Args:
            record: of the output stream's type; copied, so it may be changed afterwards.
            to: the output stream, when there are several.
            at: its event time, if it is to be later than the record's or timer's.

        Raises:
            TimerError: `at` is before the time of the record or timer.
            RefusedValueError: a value that cannot be stored, or not of the stream's type.
        """
        time = self.event_time_us
        if at is not None:
            named = _instant(at)
            if named < time:
                raise TimerError(
                    f"a production at {at} is older than its cause at {self.event_time}", hint="name a later time"
                )
            time = named
        outlet = self._outlets.get(to)
        if outlet is None:
            names = ", ".join(sorted(name for name in self._outlets if name is not None)) or "none"
            raise UsageError(f"no output stream {to!r}", hint=f"the output streams are: {names}")
        self._produced.append((self._row, time, outlet, outlet.admitted(record)))

    def set_timer(
        self,
        name: str,
        *,
        at: datetime | int,
        processing: bool = False,
        event_time: datetime | int | None = None,
        hold: bool = True,
    ) -> None:
        """Wake this key at a time; set again under the same name, the timer moves.

        An event timer fires once the input watermark has reached it (at once, if it has); a processing timer goes by
        the clock. Until then it holds the low watermark at its event time.

        Args:
            name: what another `set_timer` or `delete_timer` refers to.
            at: when to fire.
            processing: whether `at` is meant by the clock.
            event_time: of what the timer will produce; by default `at`, for a processing timer that of this record.
            hold: False lets the low watermark pass: what the timer produces may be late. So it is anyway for a
                processing timer that a late record sets.

        Raises:
            TimerError: an event time before that of its cause, or after `at`.
        """
        at_us = _instant(at)
        if event_time is not None:
            time = _instant(event_time)
            if time < self.event_time_us or (time > at_us and not processing):
                raise TimerError(
                    f"timer {name!r} cannot have event time {event_time}", hint="between cause and fire time"
                )
        else:
            time = self.event_time_us if processing else at_us
        holds = hold and not (processing and self.late)
        self._set(Timer(name, "processing" if processing else "event", at_us, time, holds))

    def delete_timer(self, name: str, *, processing: bool | None = None) -> None:
        """Forget a timer: it never fires (I6). Without `processing`, those of both domains; one not set is ignored."""
        if processing is not True:
            self._discard(("event", name))
        if processing is not False:
            self._discard(("processing", name))

    def hold(self, name: str, at: datetime | int) -> None:
        """Keep the low watermark of the outputs from passing `at` until `release`; held again, it moves."""
        at_us = _instant(at)
        self._set(Timer(name, "hold", at_us, at_us))

    def release(self, name: str) -> None:
        """Let the low watermark go; a hold that does not exist is ignored."""
        self._discard(("hold", name))

    def timer(self, name: str, *, processing: bool = False) -> Timer | None:
        """The timer of that name, if it is set."""
        domain: TimeDomain = "processing" if processing else "event"
        return self._pending().get((domain, name))

    def _store(self, cell: Cell[Any]) -> CellSource:
        store = self._stores.get(cell)
        if store is None:
            raise UsageError(f"{cell!r} is not a cell of this computation", hint="cells are class attributes")
        return store

    def _pending(self) -> Mapping[TimerId, Timer]:
        return self._timers if self._timers is not None else self._timers_of.get(self.key, {})

    def _set(self, timer: Timer) -> None:
        if not timer.name or not isinstance(timer.name, str):
            raise TimerError(f"{timer.name!r} is no name for a timer", hint="a name is text that is not empty")
        if "\x00" in timer.name or not timer.name.isprintable():
            raise RefusedValueError(f"{timer.name!r} cannot be stored as a timer's name")
        if len(timer.name.encode()) > KEY_BYTES_MAX:
            raise RefusedValueError(f"the name of timer {timer.name[:40]!r}… has more than {KEY_BYTES_MAX:,} bytes")
        if timer.id not in self._pending() and not self._may_open():
            raise RefusedValueError(
                f"no room for timer {timer.name!r}: its key interval has as many as MILLPY_OPEN_TIMERS_MAX allows"
            )
        if self._timers is None:
            self._timers = dict(self._timers_of.get(self.key, {}))
        if self._undo is not None:
            self._undo.append((timer.id, self._timers.get(timer.id)))
        self._timers[timer.id] = timer
        if self._due is not None:
            self._due.add(timer)
        behind, latest = self._chain
        if self._firing is not None and timer.at_us <= latest:
            self._chains[timer.id] = (behind + 1, latest)
        elif self._chains:
            self._chains.pop(timer.id, None)

    def _discard(self, timer_id: TimerId) -> None:
        if timer_id in self._pending():
            if self._timers is None:
                self._timers = dict(self._timers_of[self.key])
            if self._undo is not None:
                self._undo.append((timer_id, self._timers[timer_id]))
            del self._timers[timer_id]

    def _undo_timers(self) -> None:
        """Take back what was set and deleted since `_undo` was emptied."""
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
        """Forget all effects of the key in hand."""
        self._values.clear()
        self._produced.clear()
        self._timers = None
        self._firing = None
        self._late = None
        self._due = None
        self._undo = None
        self._chains.clear()


def _instant(at: datetime | int) -> Instant:
    """The time that a user named.

    Raises:
        TimerError: a naive datetime, or no time of the years 1 to 9999.
    """
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise TimerError(f"naive datetime {at!r} names no instant", hint="give it a time zone")
        return instant(at)
    if isinstance(at, bool) or not isinstance(at, int):
        raise TimerError(f"{at!r} is not a time", hint=f"an aware datetime, or whole µs since {EPOCH:%Y-%m-%d}")
    if not YEARS_LO <= at <= YEARS_HI:
        raise TimerError(f"{at} µs is outside of the years 1 to 9999", hint="is it in ns?")
    return Instant(at)
