"""Statistics of the devices of a source partition, for operators: last records, counts, rates, duplicates.

They are counted in memory per bundle and distinct key, never per record. Changes go into the delta of a commit about
once a second, less often if very many devices have changed. A worker that is killed, or whose commit fails, therefore
loses the counts of its last second; the times are right again with a device's next record. No result depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, KeyColumn, key_from_text, key_hash, key_text
from millpy.model.record import SMALL_RECORDS_MAX, Instants
from millpy.model.time import INSTANT_MIN, Instant

WRITE_EVERY_US = 1_000_000
WRITES_PER_S = 2_000
"""The most devices written per second; with more of them, each is written less often."""
RATE_OVER_S = 60.0
"""The time over which a device's rate is averaged, in seconds."""
DEVICES_MAX = 100_000
"""The most devices listed per source partition; later ones are not listed."""


class _StoredDevice(msgspec.Struct, array_like=True):
    """A device as stored. The views read its members by position."""

    records: int
    duplicates: int
    last_event_time: int
    last_arrival: int
    rate: float
    written_at: int
    counted_since: int = INSTANT_MIN


class DeviceStats:
    """Counts records and duplicates of each device of one source partition; soft state.

    Args:
        fields: the fields that name a device; without fields nothing is counted.
        key_types: the types of these fields.
        recovered: the stored devices.
    """

    def __init__(self, fields: tuple[str, ...], key_types: tuple[type, ...], recovered: Sequence[Entries] = ()) -> None:
        self.fields = fields
        self._namespace = ",".join(fields)
        self._places: dict[Key, int] = {}
        self._keys: list[Key] = []
        self._counts = np.zeros((0, 2), np.int64)  # records, duplicates
        self._unwritten = np.zeros(0, np.int64)  # records since the device was last written
        self._times = np.zeros((0, 3), np.int64)  # last event, last arrival, written
        self._rates = np.zeros(0)  # weighted over all time, also before the device was known
        self._since = np.zeros(0, np.int64)  # since when its records are counted
        self._changed: set[int] = set()
        self._written_us: Instant | None = None
        for entries in recovered:
            if entries.kind is Kind.FLEET and entries.namespace == self._namespace and fields:
                self._absorb(entries, key_types)

    def __len__(self) -> int:
        return len(self._keys)

    def _absorb(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        for text, value in zip(entries.keys, entries.values, strict=True):
            if value is None:
                continue
            stored = msgspec.json.decode(value, type=_StoredDevice)
            place = self._place(key_from_text(text, key_types), stored.written_at)
            self._counts[place] = stored.records, stored.duplicates
            self._times[place] = stored.last_event_time, stored.last_arrival, stored.written_at
            self._since[place] = stored.counted_since
            self._rates[place] = stored.rate * self._known_share(place, stored.written_at)

    def take(self, keys: KeyColumn, event_times: Instants, now_us: Instant) -> None:
        """Count the accepted records of a bundle; `keys` and `event_times` are parallel."""
        places = self._places_of(keys, now_us)
        if len(keys.codes) <= SMALL_RECORDS_MAX:
            for code, at in zip(keys.codes.tolist(), event_times.tolist(), strict=True):
                if (place := places[code]) >= 0:
                    self._unwritten[place] += 1
                    self._counts[place, 0] += 1
                    if at > self._times[place, 0]:
                        self._times[place, 0] = at
                    self._times[place, 1] = now_us
            return
        newest = np.full(len(places), INSTANT_MIN, np.int64)
        np.maximum.at(newest, keys.codes, event_times)
        counted = np.bincount(keys.codes, minlength=len(places))
        listed = np.array(places, np.int64)
        known = listed >= 0
        listed, counted, newest = listed[known], counted[known], newest[known]
        self._unwritten[listed] += counted
        self._counts[listed, 0] += counted
        self._times[listed, 0] = np.maximum(self._times[listed, 0], newest)
        self._times[listed, 1] = now_us

    def take_duplicates(self, keys: KeyColumn, now_us: Instant) -> None:
        """Count dropped duplicates: they show that the device is alive."""
        counted = np.bincount(keys.codes, minlength=len(keys.keys)).tolist()
        for place, count in zip(self._places_of(keys, now_us), counted, strict=True):
            if place >= 0:
                self._counts[place, 1] += count
                self._times[place, 1] = now_us

    def due(self, now_us: Instant, *, at_last: bool = False) -> bool:
        """Tell whether changes should be written now. `at_last` ignores the time since the last write."""
        if not self._changed or at_last:
            return bool(self._changed)
        wait_us = max(WRITE_EVERY_US, 1_000_000 * len(self._changed) // WRITES_PER_S)
        # A clock that was set back must not delay writes until it has caught up.
        return self._written_us is None or not 0 <= now_us - self._written_us < wait_us

    def entries(self, now_us: Instant) -> Entries:
        """Return the devices that have changed since the last write, and mark them written."""
        found = Entries(Kind.FLEET, self._namespace)
        for place in sorted(self._changed):
            passed_s = max((now_us - int(self._times[place, 2])) / 1e6, 1e-3)
            kept = math.exp(-passed_s / RATE_OVER_S)
            self._rates[place] = self._rates[place] * kept + int(self._unwritten[place]) / passed_s * (1 - kept)
            self._unwritten[place], self._times[place, 2] = 0, now_us
            last_event, last_arrival, _ = self._times[place].tolist()
            records, duplicates = self._counts[place].tolist()
            rate = round(float(self._rates[place]) / self._known_share(place, now_us), 6)
            since = int(self._since[place])
            stored = _StoredDevice(records, duplicates, last_event, last_arrival, rate, now_us, since)
            key = self._keys[place]
            found.add(key_text(key), key_hash(key), "", msgspec.json.encode(stored))
        self._changed.clear()
        self._written_us = now_us
        return found

    def _known_share(self, place: int, now_us: int) -> float:
        """Return the weight of the time in which a device was known: after 10 s, its rate is over these 10 s."""
        known_s = max(now_us - int(self._since[place]), WRITE_EVERY_US) / 1e6
        return -math.expm1(-known_s / RATE_OVER_S)

    def _places_of(self, keys: KeyColumn, now_us: Instant) -> list[int]:
        """Return the index of each distinct device, -1 beyond `DEVICES_MAX`; mark the others as changed."""
        found = [self._place(key, now_us) for key in keys.keys]
        self._changed.update(place for place in found if place >= 0)
        return found

    def _place(self, key: Key, now_us: int) -> int:
        place = self._places.get(key)
        if place is not None:
            return place
        if len(self._keys) >= DEVICES_MAX:
            return -1
        place = self._places[key] = len(self._keys)
        self._keys.append(key)
        if place == len(self._rates):
            more = max(16, place)
            self._counts = np.concatenate([self._counts, np.zeros((more, 2), np.int64)])
            self._times = np.concatenate([self._times, np.zeros((more, 3), np.int64)])
            self._unwritten = np.concatenate([self._unwritten, np.zeros(more, np.int64)])
            self._rates = np.concatenate([self._rates, np.zeros(more)])
            self._since = np.concatenate([self._since, np.zeros(more, np.int64)])
        # Assume that a new device has been sending for a second, so that its first rate is finite.
        self._times[place] = INSTANT_MIN, now_us, now_us - WRITE_EVERY_US
        self._since[place] = now_us - WRITE_EVERY_US
        return place
