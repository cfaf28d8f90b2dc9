"""Parking: keys that stopped at a failing record, and the records that wait behind it until an operator releases them.

Under the policy "park" a record or timer that has failed `Limits.record_attempts_max` times stops its key: it and all
later records of that key are stored unchanged, each with the watermark that judged it, and the key's timers do not
fire. A record that was not late holds the low watermark at its event time, so nothing downstream closes without it.
Other keys continue.

A release runs the key's records in order from the one that failed, each judged by its own watermark, with the same
effect as if the key had never stopped. A record that fails again is parked again. A discard dead-letters the failing
record (or timer) first. Both identify the parking by its ticket, so a request that comes twice, or too late, does
nothing.

Parked keys are stored as keyed entries of kind "parked": namespace "key" has the failure of a key, and each record is
under its subscription (the account counts them there); subkeys sort in order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from millpy.model.checkpoint import DeadLetter, Entries, Kind
from millpy.model.dead_letter import dead_letter_of
from millpy.model.delta import encode_value
from millpy.model.keys import Key, key_text
from millpy.model.stage import InputSpec, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.model.timer import Timer, TimerId
from millpy.operators.callbacks import StoppedKey
from millpy.operators.rows import RowColumns

KEY_NAMESPACE = "key"


class Failure(msgspec.Struct, frozen=True):
    """The failure for which a key is parked.

    Attributes:
        ticket: number of the bundle in which the key was parked; identifies this parking.
        timer: (domain, name) of the timer that failed, else None.
        parked_at: processing time of the parking.
        lost: whether the record that failed could not be stored and was dead-lettered, so that it does not wait.
    """

    ticket: int
    reason: str
    detail: str
    traceback: str
    parked_at: int
    timer: TimerId | None = None
    lost: bool = False


class ParkedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A waiting record as it is stored."""

    event_time: int
    watermark: int
    record: msgspec.Raw
    retracts: bool = False


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """A waiting record, with the index of its input and the subkey under which it is stored."""

    input: int
    subkey: str
    waiting: ParkedRecord

    @property
    def size(self) -> int:
        """The size of the record, as JSON, in bytes."""
        return len(bytes(self.waiting.record))

    @property
    def hold_us(self) -> Instant:
        """The event time at which the record holds the low watermark; INSTANT_MAX for a late record."""
        late = self.waiting.event_time < self.waiting.watermark
        return INSTANT_MAX if late else Instant(self.waiting.event_time)


@dataclass(slots=True)
class ParkedKey:
    """Why a key is parked, and its waiting records in order of arrival."""

    failure: Failure
    rows: list[ParkedRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReleasedKey:
    """A released key, and whether the record or timer at which it stopped is dead-lettered first."""

    parked: ParkedKey
    discards: bool

    @property
    def discarded(self) -> ParkedRow | None:
        """The record to dead-letter first; None when the key stopped at a timer or is not discarded."""
        failure = self.parked.failure
        takes = self.discards and failure.timer is None and not failure.lost and self.parked.rows
        return self.parked.rows[0] if takes else None

    @property
    def rows(self) -> list[ParkedRow]:
        """The records that run, in order."""
        return self.parked.rows[1:] if self.discarded is not None else self.parked.rows


class ParkedKeys:
    """The parked keys of one interval; soft state.

    Attributes:
        keys: key -> its failure and waiting records.
        records: number of waiting records.
        bytes: size of these records as JSON.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._inputs = inputs
        self._input_of = {str(spec.subscription_id): place for place, spec in enumerate(inputs)}
        self._decode = [msgspec.json.Decoder(spec.record_type.struct).decode for spec in inputs]
        self.keys: dict[Key, ParkedKey] = {}
        self.records = self.bytes = 0
        self._oldest = INSTANT_MAX
        self._changes: dict[tuple[Key, str, str], tuple[bytes | None, Instant]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self.keys

    def recover(self, entries: Iterable[tuple[Key, str, str, bytes]]) -> None:
        """Load all stored entries of the interval: (key, namespace, subkey, value)."""
        for key, namespace, subkey, value in sorted(entries, key=lambda entry: entry[2]):
            if namespace == KEY_NAMESPACE:
                self._parked(key).failure = msgspec.json.decode(value, type=Failure)
            elif namespace in self._input_of:
                row = ParkedRow(self._input_of[namespace], subkey, msgspec.json.decode(value, type=ParkedRecord))
                self._parked(key).rows.append(row)
                self.records += 1
                self.bytes += row.size
        self._find_oldest()

    def _parked(self, key: Key) -> ParkedKey:
        return self.keys.setdefault(key, ParkedKey(Failure(0, "", "", "", INSTANT_MIN)))

    def park(self, key: Key, failure: Failure) -> None:
        """Park a key that is not parked; `wait` then adds its records."""
        assert key not in self.keys, key
        self.keys[key] = ParkedKey(failure)
        self._changes[(key, KEY_NAMESPACE, "")] = (encode_value(failure), INSTANT_MAX)

    def lose(self, key: Key) -> None:
        """Note that the record at which a key stopped is dead-lettered and does not wait with the others."""
        failure = msgspec.structs.replace(self.keys[key].failure, lost=True)
        self.keys[key].failure = failure
        self._changes[(key, KEY_NAMESPACE, "")] = (encode_value(failure), INSTANT_MAX)

    def wait(self, key: Key, rows: RowColumns, row: int, bundle: int) -> None:
        """Add a record behind the waiting ones.

        Raises:
            RefusedValueError: the record cannot be stored.
        """
        origin = rows.input_of(row)
        record = msgspec.Raw(encode_value(rows.objects[row]))
        waiting = ParkedRecord(rows.times[row], rows.watermarks[row], record, rows.is_retraction(row))
        parked = ParkedRow(origin, f"{bundle:016d}/{row:08d}", waiting)
        self.keys[key].rows.append(parked)
        self.records += 1
        self.bytes += parked.size
        self._oldest = min(self._oldest, parked.hold_us)
        namespace = str(self._inputs[origin].subscription_id)
        self._changes[(key, namespace, parked.subkey)] = (msgspec.json.encode(waiting), parked.hold_us)

    def release(self, key: Key) -> ParkedKey:
        """Remove a key and its records, and return them."""
        parked = self.keys.pop(key)
        self.records -= len(parked.rows)
        self.bytes -= sum(row.size for row in parked.rows)
        self._changes[(key, KEY_NAMESPACE, "")] = (None, INSTANT_MAX)
        for row in parked.rows:
            namespace = str(self._inputs[row.input].subscription_id)
            self._changes[(key, namespace, row.subkey)] = (None, INSTANT_MAX)
        self._find_oldest()
        return parked

    def record_of(self, row: ParkedRow) -> Any:
        """Decode a record; one stored when a field could be None keeps its None, like records in segments."""
        try:
            return self._decode[row.input](row.waiting.record)
        except msgspec.ValidationError:
            return self._inputs[row.input].record_type.decode_with_none(row.waiting.record)

    def oldest_hold(self) -> Instant:
        """Return the smallest event time at which a waiting record holds the low watermark."""
        return self._oldest

    def take_entries(self, keys: Sequence[Key], texts: Sequence[bytes], hashes: Sequence[int]) -> list[Entries]:
        """Return this turn's changes and forget them; keys, their texts and hashes are by code."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, {}
        code_of = {key: code for code, key in enumerate(keys)}
        found: dict[str, Entries] = {}
        for (key, namespace, subkey), (value, fire_at) in changes.items():
            entries = found.setdefault(namespace, Entries(Kind.PARKED, namespace))
            entries.add(texts[code_of[key]], hashes[code_of[key]], subkey, value, fire_at)
        return list(found.values())

    def _find_oldest(self) -> None:
        holds = (row.hold_us for parked in self.keys.values() for row in parked.rows)
        self._oldest = min(holds, default=INSTANT_MAX)


def failure_of(stop: StoppedKey, work: Work) -> Failure:
    """Make the failure of a key that has stopped."""
    timer = stop.item if isinstance(stop.item, Timer) else None
    letter = dead_letter_of(stop.error, b"", stream="", computation="", event_time=None, key=None)
    return Failure(
        ticket=work.bundle,
        reason=letter.reason,
        detail=letter.detail,
        traceback=letter.traceback,
        parked_at=work.now_us,
        timer=None if timer is None else timer.id,
    )


def discarded(failure: Failure, payload: bytes, key: Key, computation: str) -> DeadLetter:
    """Make the dead letter of the record or timer at which a key stopped."""
    return DeadLetter(
        reason=failure.reason,
        detail=failure.detail,
        payload=payload,
        stream="",
        computation=computation,
        traceback=failure.traceback,
        key=key_text(key),
    )


def with_released(rows: RowColumns, released: Sequence[tuple[Key, int, Sequence[tuple[ParkedRow, Any]]]]) -> RowColumns:
    """Return a turn's rows with those of released keys before them; `released` has (key, hash, rows and records)."""
    moved = sum(len(mine) for _, _, mine in released)
    inputs = rows.inputs if rows.inputs is not None else [rows.input] * len(rows)
    joined = RowColumns(
        keys=list(rows.keys),
        hashes=list(rows.hashes),
        objects=[record for _, _, mine in released for _, record in mine] + rows.objects,
        times=[Instant(row.waiting.event_time) for _, _, mine in released for row, _ in mine] + rows.times,
        watermarks=[Instant(row.waiting.watermark) for _, _, mine in released for row, _ in mine] + rows.watermarks,
        inputs=[row.input for _, _, mine in released for row, _ in mine] + inputs,
        retracts=[row.waiting.retracts for _, _, mine in released for row, _ in mine]
        + [rows.is_retraction(row) for row in range(len(rows))],
    )
    places = [[row + moved for row in rows.rows_of(code)] for code in range(len(rows.keys))]
    code_of = {key: code for code, key in enumerate(joined.keys)}
    start = 0
    for key, hashed, mine in released:
        if key not in code_of:
            code_of[key] = len(joined.keys)
            joined.keys.append(key)
            joined.hashes.append(hashed)
            places.append([])
        places[code_of[key]][:0] = range(start, start + len(mine))
        start += len(mine)
    joined.order = [row for of_key in places for row in of_key]
    joined.bounds = [0, *accumulate(map(len, places))]
    return joined
