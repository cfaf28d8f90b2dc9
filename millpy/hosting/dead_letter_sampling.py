"""Sampling of dead letters and late records: of each cause, keep the first records and a daily amount; count the rest.

A feed that sends only garbage would otherwise write a hundred times the bytes it sends, for ever. A cause is a stream,
a computation and a reason. It has room for a number of records and bytes, and used room comes back within a day. Seen
and kept records are counted exactly: the counts are part of the checkpoint, so a crash neither loses nor repeats one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from millpy.ingest.dead_letters import is_message
from millpy.limits import Limits
from millpy.model.checkpoint import (
    NOTICE_NAMES_MAX,
    Checkpoint,
    DeadLetter,
    Entries,
    Kind,
    LateRows,
    Notice,
    RecordTableName,
)

NO_KEY = b'""'
_DAY_US = 86_400_000_000
_ROW_BYTES = 300  # bytes of a row without its texts
_DETAIL_CHARACTERS = 1_000
_TRACEBACK_CHARACTERS = 8_000
Cause = tuple[RecordTableName, str, str, str]


class CauseSample(msgspec.Struct, array_like=True):
    """The counts of one cause, and its room: how many more records and bytes may be kept, as of `at_us`."""

    seen: int = 0
    kept: int = 0
    kept_bytes: int = 0
    records_room: float = 0.0
    bytes_room: float = 0.0
    at_us: int = 0


@dataclass(slots=True)
class DeadLetterSampler:
    """Chooses which dead letters and late records of one interval are stored; soft state, by cause."""

    limits: Limits
    causes: dict[Cause, CauseSample] = field(default_factory=dict)

    @classmethod
    def recovered(cls, limits: Limits, entries: Sequence[Entries]) -> DeadLetterSampler:
        """Restore the counts from the entries that `keep` added to earlier checkpoints."""
        causes: dict[Cause, CauseSample] = {}
        for found in entries:
            if found.kind is Kind.SAMPLE:
                for subkey, value in zip(found.subkeys, found.values, strict=True):
                    if value is not None:
                        stream, computation, reason = msgspec.json.decode(subkey, type=tuple[str, str, str])
                        table: RecordTableName = "late_records" if found.namespace == "late_records" else "dead_letters"
                        causes[table, stream, computation, reason] = msgspec.json.decode(value, type=CauseSample)
        return cls(limits, causes)

    def keep(self, checkpoint: Checkpoint, now_us: int) -> Checkpoint:
        """Return the checkpoint with a sample of its dead letters and late records, and with the counts."""
        if not checkpoint.dead_letters and not checkpoint.late:
            return checkpoint
        touched: dict[Cause, None] = {}
        letters = [kept for letter in checkpoint.dead_letters if (kept := self._letter(letter, now_us, touched))]
        late = [self._late(rows, now_us, touched) for rows in checkpoint.late]
        if not touched:
            return checkpoint
        unstored = Counter((letter.computation, letter.reason) for letter in checkpoint.dead_letters)
        unstored.subtract(Counter((letter.computation, letter.reason) for letter in letters))
        unstored = +unstored
        unstored_late = sum(map(len, checkpoint.late)) - sum(map(len, late))
        notices = [*checkpoint.notices]
        if unstored:
            causes = [f"{computation} ({reason})" for computation, reason in unstored]
            notices.append(Notice("dead_letters_not_kept", unstored.total(), causes[:NOTICE_NAMES_MAX]))
        if unstored_late:
            computations = dict.fromkeys(rows.computation for rows in checkpoint.late)
            notices.append(Notice("late_records_not_kept", unstored_late, [*computations][:NOTICE_NAMES_MAX]))
        return replace(
            checkpoint,
            dead_letters=letters,
            late=[rows for rows in late if len(rows)],
            unstored=unstored,
            unstored_late=unstored_late,
            notices=notices,
            delta=(*checkpoint.delta, *self._entries(touched)),
        )

    def _entries(self, touched: dict[Cause, None]) -> list[Entries]:
        found: dict[str, Entries] = {}
        for cause in touched:
            entries = found.setdefault(cause[0], Entries(Kind.SAMPLE, cause[0]))
            subkey = msgspec.json.encode(cause[1:]).decode()
            entries.add(NO_KEY, 0, subkey, msgspec.json.encode(self.causes[cause]))
        return list(found.values())

    def _room(self, cause: Cause, now_us: int, touched: dict[Cause, None]) -> CauseSample:
        """Return the sample of a cause with the room that it has now, and add the cause to `touched`."""
        limits = self.limits
        room = self.causes.get(cause)
        if room is None:
            room = self.causes[cause] = CauseSample(
                records_room=limits.dead_letter_records_max, bytes_room=limits.dead_letter_bytes_max, at_us=now_us
            )
        if cause not in touched:
            touched[cause] = None
            days = max(0, now_us - room.at_us) / _DAY_US
            room.records_room = min(
                limits.dead_letter_records_max, room.records_room + days * limits.dead_letter_records_max
            )
            room.bytes_room = min(limits.dead_letter_bytes_max, room.bytes_room + days * limits.dead_letter_bytes_max)
            room.at_us = now_us  # a clock that was ahead must not withhold room until its time comes
        return room

    def _letter(self, letter: DeadLetter, now_us: int, touched: dict[Cause, None]) -> DeadLetter | None:
        letter = self._cut(letter)
        room = self._room(("dead_letters", letter.stream, letter.computation, letter.reason), now_us, touched)
        room.seen += 1
        size = _ROW_BYTES + len(letter.payload) + len(letter.detail) + len(letter.traceback)
        size += len(letter.position) + len(letter.wire) + len(letter.key or b"")
        if room.records_room < 1 or room.bytes_room < size:
            return None
        _take(room, 1, size)
        return letter

    def _cut(self, letter: DeadLetter) -> DeadLetter:
        """Return a dead letter with long texts cut, and with the payload cut if it is larger than a record may be."""
        if len(letter.detail) > _DETAIL_CHARACTERS or len(letter.traceback) > _TRACEBACK_CHARACTERS:
            letter = replace(
                letter,
                detail=letter.detail[:_DETAIL_CHARACTERS],
                traceback=letter.traceback[-_TRACEBACK_CHARACTERS:],
            )
        if len(letter.payload) <= self.limits.record_bytes_max + 1:
            return letter
        # One byte above the limit, so that a truncated line of CSV cannot be replayed as if it were whole.
        limits = self.limits
        kept = (limits.message_bytes_max if is_message(letter.wire) else limits.record_bytes_max) + 1
        if len(letter.payload) <= kept:
            return letter
        return replace(
            letter,
            payload=letter.payload[:kept],
            detail=f"{letter.detail} (the payload has {len(letter.payload)} bytes; the first {kept} are kept)",
        )

    def _late(self, rows: LateRows, now_us: int, touched: dict[Cause, None]) -> LateRows:
        if not len(rows):
            return rows
        room = self._room(("late_records", rows.stream, rows.computation, "late"), now_us, touched)
        room.seen += len(rows)
        kept = 0
        for payload, key in zip(rows.payloads, rows.keys, strict=True):
            size = _ROW_BYTES + len(payload) + len(key)
            if room.records_room < 1 or room.bytes_room < size:
                break
            _take(room, 1, size)
            kept += 1
        return rows if kept == len(rows) else rows.select(range(kept))


def _take(room: CauseSample, records: int, size: int) -> None:
    room.kept += records
    room.kept_bytes += size
    room.records_room -= records
    room.bytes_room -= size
