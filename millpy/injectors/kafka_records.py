"""Kafka records as payloads: the value, with what the key, headers and timestamp say written into it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec

from millpy.errors import GraphError
from millpy.injectors.endings import EMPTY_OR_SPACED, completed
from millpy.injectors.protocol import Refused
from millpy.model.record import RecordType

Tombstones = Literal["dead_letter", "skip", "record"]
TOMBSTONE = "tombstone"
UNREADABLE = "unreadable"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KNOWN_KEYS_MAX = 100_000
_KNOWN_BYTES_MAX = 20_000_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class Fills:
    """Which fields come from beside the value.

    Attributes:
        key, timestamp: the field's name.
        headers: (header, field).
    """

    key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    timestamp: str | None = None

    def validate(self, record_type: RecordType) -> None:
        """Refuse fields that do not exist, are filled twice, or cannot hold what comes.

        Raises:
            GraphError: says which.
        """
        struct = record_type.struct.__name__
        texts: tuple[type, ...] = (str, int, UUID)
        wanted = [(self.key, texts), *((field, texts) for _, field in self.headers), (self.timestamp, (int, datetime))]
        names = [name for name, _ in wanted if name is not None]
        if len(set(names)) < len(names):
            raise GraphError(f"Kafka fills a field of {struct} twice: {', '.join(names)}")
        for name, kinds in wanted:
            if name is None:
                continue
            if name not in record_type.annotations:
                raise GraphError(
                    f"Kafka fills {name!r}, and {struct} has no such field",
                    hint=f"it has {', '.join(record_type.fields)}",
                )
            if record_type.field_type(name) not in kinds:
                raise GraphError(f"Kafka fills {name!r}: it has to be {' or '.join(kind.__name__ for kind in kinds)}")
        if names and record_type.struct.__struct_config__.array_like:
            raise GraphError(f"Kafka fills fields, and {struct} is written as an array, which has no room for them")


class Payloads:
    """Makes payloads of consumer records.

    Args:
        record_type: None where only bytes are looked at (tests); then nothing is filled.

    Attributes:
        skipped: how many tombstones were none that count.
    """

    def __init__(self, fills: Fills, record_type: RecordType | None, tombstones: Tombstones) -> None:
        self._tombstones = tombstones
        self.skipped = 0
        self._keys: dict[bytes | None, bytes] = {}
        self._keys_size = 0
        self._key = self._timestamp = b""
        self._headers: list[tuple[str, bytes, bool]] = []
        self._key_is_int = self._timestamp_is_int = False
        if record_type is None:
            return
        encoded = dict(zip(record_type.fields, record_type.struct.__struct_encode_fields__, strict=True))
        prefix = {name: b"," + msgspec.json.encode(own) + b":" for name, own in encoded.items()}
        if fills.key is not None:
            self._key, self._key_is_int = prefix[fills.key], record_type.field_type(fills.key) is int
        self._headers = [(h, prefix[name], record_type.field_type(name) is int) for h, name in fills.headers]
        if fills.timestamp is not None:
            self._timestamp = prefix[fills.timestamp]
            self._timestamp_is_int = record_type.field_type(fills.timestamp) is int

    def of(self, records: Sequence[Any]) -> tuple[Sequence[Any], list[bytes], list[Refused]]:
        """(the records that count, a payload for each, those that are set aside)."""
        values = [record.value for record in records]
        refused: list[Refused] = []
        gone: list[int] = []
        unreadable: list[int] = []
        if None in values:
            if self._tombstones == "skip":
                kept = [record for record in records if record.value is not None or hasattr(record, "detail")]
                self.skipped += len(records) - len(kept)
                records, values = kept, [record.value for record in kept]
            for row, value in enumerate(values):
                if value is None:
                    (unreadable if hasattr(records[row], "detail") else gone).append(row)
                    values[row] = b"{}"
        endings = self._endings(records)
        if endings:
            values = [
                value[:-1] + ending
                if value[-1:] == b"}" and value[-2:-1] not in EMPTY_OR_SPACED
                else completed(value, ending)
                for value, ending in zip(values, endings, strict=True)
            ]
        if self._tombstones == "dead_letter":
            refused = [Refused(row, TOMBSTONE, f"no value; its key is {records[row].key!r}") for row in gone]
        for row in unreadable:
            values[row] = b""
            refused.append(Refused(row, UNREADABLE, records[row].detail))
        return records, values, refused

    def _endings(self, records: Sequence[Any]) -> list[bytes]:
        parts: list[list[bytes]] = []
        if self._key:
            parts.append(self._of_keys([record.key for record in records]))
        for name, prefix, is_int in self._headers:
            found = (next((v for n, v in reversed(record.headers) if n == name), None) for record in records)
            parts.append([prefix + _json(value, is_int) for value in found])
        if self._timestamp:
            parts.append(self._of_timestamps([record.timestamp for record in records]))
        if not parts:
            return []
        if len(parts) == 1:
            return [part + b"}" for part in parts[0]]
        return [b"".join(row) + b"}" for row in zip(*parts, strict=True)]

    def _of_keys(self, keys: list[bytes | None]) -> list[bytes]:
        known = self._keys
        distinct = set(keys)
        if len(known) + len(distinct) > _KNOWN_KEYS_MAX or self._keys_size > _KNOWN_BYTES_MAX:
            known.clear()
            self._keys_size = 0
        for key in distinct - known.keys():
            written = known[key] = self._key + _json(key, self._key_is_int)
            self._keys_size += len(written) + len(key or b"")
        return [known[key] for key in keys]

    def _of_timestamps(self, timestamps: list[int]) -> list[bytes]:
        if self._timestamp_is_int:
            return [self._timestamp + b"%d" % at for at in timestamps]
        return [self._timestamp + _moment(at) for at in timestamps]


def offsets_of(record: Any) -> str:
    """Its offset; of a batch that cannot be read, from which to which."""
    first = getattr(record, "first", record.offset)
    return f"{record.offset}" if first == record.offset else f"{first}-{record.offset}"


def _json(value: bytes | None, is_int: bool) -> bytes:
    """A key or header as JSON: text, or a number where the field is one. What is not UTF-8 fits no field."""
    if value is None:
        return b"null"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return msgspec.json.encode({"not UTF-8": value.hex()})
    return value if is_int and _INTEGER.fullmatch(text) else msgspec.json.encode(text)


def _moment(ms: int) -> bytes:
    """A timestamp as a JSON moment; null when there is none (-1) or Python cannot name it."""
    try:
        return msgspec.json.encode(_EPOCH + timedelta(milliseconds=ms)) if ms >= 0 else b"null"
    except OverflowError:
        return b"null"
