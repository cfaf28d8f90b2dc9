"""How much is kept of what is set aside: of each cause the first records, and so many a day; the rest is counted.

A feed that sends nothing but rubbish would otherwise write a hundred times what it sends, for ever. A cause is a
stream, a computation and a reason. Its room is so many records and bytes, and comes back within a day. What is seen
and what is kept is counted exactly: with the checkpoint, in the log of the interval, so a crash neither loses nor
repeats a count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, DeadLetter, Entries, Kind, LateRows, Pile

NO_KEY = b'""'
_DAY_US = 86_400_000_000
_ROW_BYTES = 300  # what a row takes beside its texts
_DETAIL_CHARACTERS = 1_000
_TRACEBACK_CHARACTERS = 8_000
Cause = tuple[Pile, str, str, str]


class Kept(msgspec.Struct, array_like=True):
    """What became of one cause so far, and the room that it has; `at_us` is when the room was counted."""

    seen: int = 0
    kept: int = 0
    kept_bytes: int = 0
    records_room: float = 0.0
    bytes_room: float = 0.0
    at_us: int = 0


@dataclass(slots=True)
class KeptLetters:
    """Soft state of one interval: what each cause has had."""

    limits: Limits
    causes: dict[Cause, Kept] = field(default_factory=dict)

    @classmethod
    def recovered(cls, limits: Limits, entries: Sequence[Entries]) -> KeptLetters:
        """As `keep` left it behind."""
        causes: dict[Cause, Kept] = {}
        for found in entries:
            if found.kind is Kind.SET_ASIDE:
                for subkey, value in zip(found.subkeys, found.values, strict=True):
                    if value is not None:
                        stream, computation, reason = msgspec.json.decode(subkey, type=tuple[str, str, str])
                        pile: Pile = "late_records" if found.namespace == "late_records" else "dead_letters"
                        causes[pile, stream, computation, reason] = msgspec.json.decode(value, type=Kept)
        return cls(limits, causes)

    def keep(self, checkpoint: Checkpoint, now_us: int) -> Checkpoint:
        """Return the checkpoint with what is kept of its dead letters and late records, and with the counts."""
        if not checkpoint.dead_letters and not checkpoint.late:
            return checkpoint
        touched: dict[Cause, None] = {}
        letters = [kept for letter in checkpoint.dead_letters if (kept := self._letter(letter, now_us, touched))]
        late = [self._late(rows, now_us, touched) for rows in checkpoint.late]
        if not touched:
            return checkpoint
        unkept = Counter((letter.computation, letter.reason) for letter in checkpoint.dead_letters)
        unkept.subtract(Counter((letter.computation, letter.reason) for letter in letters))
        return replace(
            checkpoint,
            dead_letters=letters,
            late=[rows for rows in late if len(rows)],
            unkept={cause: count for cause, count in unkept.items() if count},
            late_unkept=sum(map(len, checkpoint.late)) - sum(map(len, late)),
            delta=(*checkpoint.delta, *self._entries(touched)),
        )

    def _entries(self, touched: dict[Cause, None]) -> list[Entries]:
        found: dict[str, Entries] = {}
        for cause in touched:
            entries = found.setdefault(cause[0], Entries(Kind.SET_ASIDE, cause[0]))
            subkey = msgspec.json.encode(cause[1:]).decode()
            entries.add(NO_KEY, 0, subkey, msgspec.json.encode(self.causes[cause]))
        return list(found.values())

    def _room(self, cause: Cause, now_us: int, touched: dict[Cause, None]) -> Kept:
        limits = self.limits
        room = self.causes.get(cause)
        if room is None:
            room = self.causes[cause] = Kept(
                records_room=limits.set_aside_records_max, bytes_room=limits.set_aside_bytes_max, at_us=now_us
            )
        if cause not in touched:
            touched[cause] = None
            days = max(0, now_us - room.at_us) / _DAY_US
            room.records_room = min(
                limits.set_aside_records_max, room.records_room + days * limits.set_aside_records_max
            )
            room.bytes_room = min(limits.set_aside_bytes_max, room.bytes_room + days * limits.set_aside_bytes_max)
            room.at_us = now_us  # a time that was ahead must not stop it until that comes
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
        """Bound the texts, and a payload beyond what any record may have."""
        if len(letter.detail) > _DETAIL_CHARACTERS or len(letter.traceback) > _TRACEBACK_CHARACTERS:
            letter = replace(
                letter,
                detail=letter.detail[:_DETAIL_CHARACTERS],
                traceback=letter.traceback[-_TRACEBACK_CHARACTERS:],
            )
        # One byte more than is taken, so that a line of CSV that was cut cannot be replayed as if it were whole.
        kept = self.limits.record_bytes_max + 1
        if len(letter.payload) <= kept:
            return letter
        return replace(
            letter,
            payload=letter.payload[:kept],
            detail=f"{letter.detail} (of {len(letter.payload)} bytes the first {kept} are kept)",
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


def _take(room: Kept, records: int, size: int) -> None:
    room.kept += records
    room.kept_bytes += size
    room.records_room -= records
    room.bytes_room -= size
