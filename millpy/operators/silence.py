"""Device silence: which devices have sent nothing for a time, and when they are back, by event time.

A device is silent when `after` has passed since its last record *while its feed was alive*. If the feed as a whole was
away (a broker or a link was down), nobody can tell which devices were silent, so that time counts for none of them:

    last record |-- alive --|######## common gap ########|-- alive --|  silent: both alive parts together are `after`

Four steps compute it, each a function of the order of input (I9):

    NAME_in_order         puts the records of each device in event-time order
    NAME_watch            per device: its first record, `after` without a record, its next record
    NAME_gaps             behind the source, in columns: the records that end a common gap; see `FeedGaps`
    NAME_items_in_order   puts what the two have found in event-time order, in BUCKETS buckets of devices
    NAME                  per bucket: counts common gaps out, knows the devices that are expected, and tells

A common gap is defined by the watermark. While a source is not connected its watermark stands: no device falls silent.
The record that ends the gap finds the watermark from before it, and moves it by more than half of `after` beyond the
disorder bound. A gap carries the event time at which it began, so it is sorted before every silence that it may excuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

import msgspec
import numpy as np
import xxhash

from millpy.computation import Computation, Context, MapCell, Value
from millpy.errors import GraphError
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Notice
from millpy.model.dead_letter import unstorable_keys
from millpy.model.identity import Identity
from millpy.model.keys import Key, key_from_text, key_text
from millpy.model.lookup import LookupTable
from millpy.model.record import Records, RecordType
from millpy.model.stage import ResidentInterval, StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MIN, Instant, check_positive, microseconds, to_datetime
from millpy.model.timer import Timer
from millpy.operators.device_monitor import DeviceMonitor, notice
from millpy.operators.keyed_output import key_values, output_type
from millpy.operators.outputs import outlets_of

BUCKETS = 16
"""Parts of the devices; each of them gets every common gap."""
GAPS_MAX = 100
"""Common gaps that a bucket remembers; with more of them, the silences that are pending are counted up to now."""
DEVICES_MAX = 100_000
"""The most devices of a list; a table may have as many as any lookup table."""
GAP, BEGIN, TICK, SILENT, HEARD = range(5)
_TIMER = "silent"


class SilenceItem(msgspec.Struct, frozen=True):
    """What the first steps find: of a bucket a gap, the first record or a tick; of a device a silence or a record.

    `since` is the last time before it, `at` the time itself, in µs since the epoch.
    """

    bucket: int
    kind: int
    key: str
    since: int
    at: int


ITEM_TYPE = RecordType(SilenceItem)


def bucket_of(key: str) -> int:
    """Return the bucket of a device."""
    return int(xxhash.xxh3_64_intdigest(key.encode()) % BUCKETS)


class FeedGaps:
    """The step behind a source that finds its common gaps, its begin and ticks; it keeps nothing.

    Args:
        after: the time after which a device is silent: a gap is longer than half of it. A tick comes once in it, which
            lets the devices that are expected be looked up.
        max_disorder: the disorder bound of the source.
    """

    immediate = True

    def __init__(self, after: timedelta, max_disorder: timedelta | None) -> None:
        self.after_us = microseconds(after)
        self.bound_us = 0 if max_disorder is None else microseconds(max_disorder)

    def bind(self, binding: StageBinding) -> FeedGapsStage:
        """Return the stage, which can open intervals."""
        return FeedGapsStage(self, binding)

    def identity(self) -> Identity:
        """Describe the step. It keeps nothing."""
        return {"kind": "feed_gaps"}

    def found(self, records: Records) -> list[tuple[int, Instant, SilenceItem]]:
        """Return (row, event time, item for bucket 0) of what the records of a source show."""
        assert records.watermarks is not None, "only a source gives rows their watermarks"
        times, before = records.event_times, records.watermarks
        first = before <= INSTANT_MIN
        moved = times - np.where(first, times, before)
        gaps = moved > self.bound_us + self.after_us // 2
        reached = times - self.bound_us
        shown = first | gaps | (reached > before) & (reached // self.after_us > before // self.after_us)
        items: list[tuple[int, Instant, SilenceItem]] = []
        for row in np.flatnonzero(shown).tolist():
            at, since = int(times[row]), int(before[row])
            if first[row]:
                items.append((row, Instant(at), SilenceItem(0, BEGIN, "", at, at)))
                continue
            if gaps[row]:
                items.append((row, Instant(since), SilenceItem(0, GAP, "", since, at)))
            items.append((row, Instant(at), SilenceItem(0, TICK, "", at, at)))
        return items


class FeedGapsStage:
    """The step in a deployed graph."""

    def __init__(self, logic: FeedGaps, binding: StageBinding) -> None:
        self.logic = logic
        self.binding = binding

    def open(self, recovered: StoredInterval) -> FeedGapsInterval:
        """Build an interval, which keeps nothing."""
        return FeedGapsInterval(self.logic, self.binding)


class FeedGapsInterval(ResidentInterval):
    """One key interval of the step; it has no state."""

    immediate = True

    def __init__(self, logic: FeedGaps, binding: StageBinding) -> None:
        self._logic = logic
        self._outlet = outlets_of(binding)[None]

    def step(self, work: Work) -> StepResult:
        """Tell every bucket what the records of one turn show."""
        result = StepResult()
        made: list[SilenceItem] = []
        times: list[Instant] = []
        for arrived in work.arrived:
            bundle: Bundle = arrived.bundle
            place = bundle.input
            result.consumed_by_input[place] = result.consumed_by_input.get(place, 0) + len(bundle)
            for _, at, item in self._logic.found(bundle.records) if len(bundle) else ():
                made += [msgspec.structs.replace(item, bucket=bucket) for bucket in range(BUCKETS)]
                times += [at] * BUCKETS
        result.emitted_by_stream[self._outlet.stream] = len(made)
        if made:
            self._outlet.emit(Records(ITEM_TYPE, np.array(times, np.int64), objects=made), result)
        return result


class DeviceWatch(Computation):
    """Of each device: its first record, a time `after` without a record, and its next record after that.

    Records come in event-time order. A device that sends a record just `after` its last one is not silent.
    """

    immediate = True
    last: Value[Any] = Value(int | None, None)  # type: ignore[arg-type]
    is_silent = Value(bool, False)

    def __init__(self, after: timedelta) -> None:
        self.after = after
        self._after_us = microseconds(after)

    def parameters(self) -> Mapping[str, Any]:
        """Return the time, which timers that are set go by."""
        return {"after": self.after}

    def process_record(self, context: Context, record: Any) -> None:
        """Pass the first record, and one after a silence; wait for the next one."""
        at, last = int(context.event_time_us), context[DeviceWatch.last]
        if last is not None and not context[DeviceWatch.is_silent] and at - last > self._after_us:
            self._tell(context, SILENT, last, last + self._after_us)
            context[DeviceWatch.is_silent] = True
        if last is None or context[DeviceWatch.is_silent]:
            self._tell(context, HEARD, at if last is None else last, at)
            context[DeviceWatch.is_silent] = False
        context[DeviceWatch.last] = at
        # The timer holds the low watermark at the time of what it tells, so that this is not late.
        context.set_timer(_TIMER, at=at + self._after_us + 1, event_time=at + self._after_us)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Tell that no record has come."""
        context[DeviceWatch.is_silent] = True
        self._tell(context, SILENT, context[DeviceWatch.last], int(timer.event_time_us))

    @staticmethod
    def _tell(context: Context, kind: int, since: int, at: int) -> None:
        key = key_text(context.key).decode()
        context.produce(SilenceItem(bucket_of(key), kind, key, since, at), at=at)


class PendingSilence(msgspec.Struct, array_like=True):
    """A silence that is due once the feed was alive for `left` µs after `since`; `last` is the last record, if any."""

    key: str
    since: int
    left: int
    last: int | None


class ToldSilence(msgspec.Struct, array_like=True):
    """A silence that was told: the device, and its last record, if any."""

    key: str
    last: int | None


class Roster(msgspec.Struct, array_like=True):
    """The devices that were expected at last: the version of the list or table; None before there was one."""

    version: str | None = None


class DeviceSilence(DeviceMonitor):
    """Of each bucket of devices: tells silences and returns, without the time of common gaps.

    Items come in event-time order, those of one bundle before the timers that are due with it; so each item first
    completes what its device was waiting for.

    Args:
        after: the time after which a device is silent.
        key: the fields of the key, and their types.
        devices: the keys of devices that are expected, also if they never send a record.
    """

    immediate = True
    gaps: Value[Any] = Value(list[tuple[int, int]], [])
    pending = MapCell(str, PendingSilence)
    told = MapCell(str, ToldSilence)
    known = MapCell(str, bool)
    roster = Value(Roster)
    gauges: ClassVar = {"silent": told}

    def __init__(self, after: timedelta, key: Mapping[str, type], devices: Sequence[str]) -> None:
        self.after = after
        self._after_us = microseconds(after)
        self._fields = tuple(key)
        self._key_types = tuple(key.values())
        self._devices = devices
        self._rosters: dict[str, list[dict[str, str]]] = {}
        self.output = output_type("Silence", key, [("silent", bool), ("since", datetime | None), ("at", datetime)])

    def parameters(self) -> Mapping[str, Any]:
        """Return the time, by which silences are pending. The devices that are expected may change."""
        return {"after": self.after}

    def expected(self, context: Context) -> tuple[str, Callable[[], Sequence[str]]]:
        """Return the version of the expected devices, and a function that returns their keys as JSON text."""
        devices = self._devices
        return xxhash.xxh3_128_hexdigest("\n".join(devices).encode()), lambda: devices

    def notices(self, records: Sequence[Any]) -> list[Notice]:
        """Return the devices that have fallen silent, and those that are back."""
        silent = [self._name_of(record) for record in records if record.silent]
        back = [self._name_of(record) for record in records if not record.silent]
        return [notice(kind, names) for kind, names in (("devices_silent", silent), ("devices_back", back)) if names]

    def _name_of(self, record: Any) -> str:
        """Return the name of the device of a record: its key, as JSON text if it has several fields."""
        values = tuple(getattr(record, field) for field in self._fields)
        return str(values[0]) if len(values) == 1 else key_text(values).decode()

    def process_record(self, context: Context, item: SilenceItem) -> None:
        """Take one item."""
        if item.kind == GAP:
            self._add_gap(context, item)
        elif item.kind in (BEGIN, TICK):
            self._enroll(context, item.at)
        elif item.kind == SILENT:
            self._wait(context, PendingSilence(item.key, item.since, self._after_us, item.since), item.at)
        else:
            self._heard(context, item)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Tell a silence, or wait on if a gap has come between."""
        pending = context[DeviceSilence.pending].pop(timer.name, None)
        if pending is not None:
            self._wait(context, pending, int(timer.event_time_us))

    # Gaps.

    def _add_gap(self, context: Context, item: SilenceItem) -> None:
        gaps = context[DeviceSilence.gaps]
        if gaps and item.since <= gaps[-1][1]:
            gaps[-1] = (gaps[-1][0], max(gaps[-1][1], item.at))
            return
        gaps.append((item.since, item.at))
        if len(gaps) > GAPS_MAX:
            waiting = context[DeviceSilence.pending]
            for name, pending in list(waiting.items()):
                _, pending.since, pending.left = self._due(gaps, pending)
                waiting[name] = pending
            context[DeviceSilence.gaps] = [gap for gap in gaps if gap[1] > item.since - self._after_us]

    def _due(self, gaps: Sequence[tuple[int, int]], pending: PendingSilence) -> tuple[int, int, int]:
        """Return when a silence is due, and from where with how much left that follows."""
        since, left = pending.since, pending.left
        for begin, end in gaps:
            if end <= since:
                continue
            if begin - since >= left:
                break
            left -= max(0, begin - since)
            since = end
        return since + left, since, left

    # Devices.

    def _wait(self, context: Context, pending: PendingSilence, now: int) -> None:
        """Tell a silence that is due by `now`, or set a timer for it."""
        due, _, _ = self._due(context[DeviceSilence.gaps], pending)
        if due <= now:
            self._tell(context, pending, due)
            return
        name = _name(pending.key)
        context[DeviceSilence.pending][name] = pending
        context.set_timer(name, at=due + 1, event_time=due)

    def _tell(self, context: Context, pending: PendingSilence, at: int) -> None:
        context[DeviceSilence.told][_name(pending.key)] = ToldSilence(pending.key, pending.last)
        self._produce(context, pending.key, True, pending.last, at)

    def _heard(self, context: Context, item: SilenceItem) -> None:
        """Take the first record of a device, or the first one after a silence."""
        name = _name(item.key)
        context[DeviceSilence.known][name] = True  # also without a list: one may be added later
        pending = context[DeviceSilence.pending].pop(name, None)
        if pending is not None:
            due, _, _ = self._due(context[DeviceSilence.gaps], pending)
            if due < item.at:
                self._tell(context, pending, due)
            context.delete_timer(name)
        told = context[DeviceSilence.told].pop(name, None)
        if told is not None:
            self._produce(context, item.key, False, told.last, item.at)

    def _enroll(self, context: Context, at: int) -> None:
        """Expect the devices of the list that no record has come from, if the list is new here."""
        roster = context[DeviceSilence.roster]
        version, keys = self.expected(context)
        if version == roster.version:
            return
        known, waiting = context[DeviceSilence.known], context[DeviceSilence.pending]
        told = context[DeviceSilence.told]
        wanted = self._of_bucket(version, keys, context.key)
        never_heard_of: list[Any] = [waiting, told]
        for cell in never_heard_of:
            for name, entry in list(cell.items()):
                if entry.last is None and name not in wanted:  # it is not expected any more
                    del cell[name]
                    context.delete_timer(name)
        for name, key in wanted.items():
            if name not in known and name not in waiting and name not in told:
                self._wait(context, PendingSilence(key, at, self._after_us, None), at)
        roster.version = version

    def _of_bucket(self, version: str, keys: Callable[[], Sequence[str]], bucket: int) -> dict[str, str]:
        """Return the expected devices of a bucket, by name; computed once for a version."""
        found = self._rosters.get(version)
        if found is None:
            found = [{} for _ in range(BUCKETS)]
            for key in keys():
                found[bucket_of(key)][_name(key)] = key
            self._rosters = {version: found}
        return found[bucket]

    def _produce(self, context: Context, key: str, silent: bool, last: int | None, at: int) -> None:
        values = key_values(key_from_text(key, self._key_types))
        since = None if last is None else to_datetime(Instant(last))
        context.produce(self.output(*values, silent, since, to_datetime(Instant(at))), at=at)


def _name(key: str) -> str:
    """Return a short name of a device, which a timer can have."""
    return xxhash.xxh3_128_hexdigest(key.encode())


def silence_of(after: timedelta, key: Mapping[str, type], devices: Sequence[Any] | LookupTable | None) -> DeviceSilence:
    """Return the last step, for devices that are expected from a list, from a table, or not at all.

    Raises:
        GraphError: a device is none or cannot be stored, there are too many, or the key of the table has other types.
    """
    check_positive("after", after, "for example minutes(30)")
    if microseconds(after) < 2:
        raise GraphError(f"after={after!r} is too short", hint="for example minutes(30)")
    if isinstance(devices, LookupTable):
        return _of_table(after, key, devices)
    if devices is None:
        return DeviceSilence(after, key, ())
    if isinstance(devices, str | bytes) or not isinstance(devices, Sequence):
        raise GraphError(
            f"devices={devices!r} is not a list of devices", hint='for example ["pump-1", "pump-2"], or a LookupTable'
        )
    if len(devices) > DEVICES_MAX:
        raise GraphError(f"devices= lists more than {DEVICES_MAX:,} devices", hint="use a LookupTable")
    types = tuple(key.values())
    for device in devices:
        values = key_values(device)
        if len(values) != len(types) or not all(map(isinstance, values, types)):
            names = ", ".join(f"{field}: {kind.__name__}" for field, kind in key.items())
            raise GraphError(f"devices= contains {device!r}, which is no key", hint=f"a key has {names}")
    try:
        texts = sorted({key_text(_key_of(device)) for device in devices})
    except UnicodeEncodeError as error:
        raise GraphError(
            f"devices= contains {error.object!r}, which has half of a surrogate pair",
            hint="no record can come from such a device: correct the list",
        ) from None
    if unstorable := unstorable_keys(texts):
        place, problem = min(unstorable.items())
        raise GraphError(
            f"devices= contains {texts[place].decode()}: {problem}",
            hint="no record can come from such a device: correct the list",
        )
    return DeviceSilence(after, key, [text.decode() for text in texts])


def _key_of(device: Any) -> Key:
    values: Any = key_values(device)
    return values[0] if len(values) == 1 else tuple(values)


def _of_table(after: timedelta, key: Mapping[str, type], table: LookupTable) -> DeviceSilence:
    if table.key_types != tuple(key.values()):
        raise GraphError(
            f"the key of table {table.name} has other types than the key of the devices",
            hint="let the class of the rows have the types of the key",
        )

    class SilenceOfTable(DeviceSilence):
        """The devices that are expected are the keys of a table."""

        devices = table

        def expected(self, context: Context) -> tuple[str, Callable[[], Sequence[str]]]:
            rows = context.table(table)
            return rows.version, lambda: [key_text(_key_of(device)).decode() for device in rows]

    SilenceOfTable.__name__, SilenceOfTable.__qualname__ = "DeviceSilence", "DeviceSilence"
    return SilenceOfTable(after, key, ())
