"""Payloads of Kafka records: the value, with the key, headers and timestamp written into fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec
import numpy as np

from millpy.errors import GraphError
from millpy.formats import Message
from millpy.ingest.expansion import EXPANDED_RECORDS_MAX, Expander, Expansion
from millpy.ingest.json_append import EMPTY_OR_SPACED, completed
from millpy.ingest.protocol import RejectedRow, TakeBound
from millpy.model.identity import Identity, identity_of_value
from millpy.model.identity_text import GraphPart
from millpy.model.record import Instants, RecordType
from millpy.model.time import YEARS_HI

Tombstones = Literal["dead_letter", "skip", "record"]
TOMBSTONE = "tombstone"
UNREADABLE = "unreadable"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KNOWN_KEYS_MAX = 100_000
_KNOWN_BYTES_MAX = 20_000_000
_MS_MAX = YEARS_HI // 1_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True, repr=False)
class FieldMapping(GraphPart):
    """The fields of a record that Kafka's key, headers and timestamp fill; None fills none.

    Attributes:
        key: the field that gets the record's key (str, int or UUID; UTF-8 text).
        headers: header name -> the field that gets the header. The last header of a name counts; a missing header is
            null.
        timestamp: the field that gets the record's timestamp: an int (ms since the epoch) or a datetime.
    """

    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timestamp: str | None = None

    def identity(self) -> Identity:
        """Describe which field each part fills."""
        headers = identity_of_value(dict(self.headers))
        return {"kind": "field_mapping", "key": self.key, "headers": headers, "timestamp": self.timestamp}

    def validate(self, record_type: RecordType) -> None:
        """Check that the fields exist, are filled once, and can hold their values.

        Raises:
            GraphError: a field is missing, filled twice or of another type; the message names it.
        """
        struct = record_type.struct.__name__
        texts: tuple[type, ...] = (str, int, UUID)
        wanted = [
            (self.key, texts),
            *((name, texts) for name in self.headers.values()),
            (self.timestamp, (int, datetime)),
        ]
        names = [name for name, _ in wanted if name is not None]
        if len(set(names)) < len(names):
            raise GraphError(f"two parts of a Kafka record fill the same field of {struct}: {', '.join(names)}")
        for name, kinds in wanted:
            if name is None:
                continue
            if name not in record_type.annotations:
                raise GraphError(
                    f"cannot fill {name!r} from Kafka: {struct} has no such field",
                    hint=f"its fields are {', '.join(record_type.fields)}",
                )
            if record_type.field_type(name) not in kinds:
                raise GraphError(
                    f"field {name!r} is filled from Kafka and must be {' or '.join(kind.__name__ for kind in kinds)}"
                )
        if names and record_type.struct.__struct_config__.array_like:
            raise GraphError(f"fields filled from Kafka do not fit {struct}, which is written as an array")


@dataclass(slots=True)
class ExpandedRecords:
    """The payloads of Kafka records whose values a payload format has expanded.

    Attributes:
        taken: the number of Kafka records that were used; the others did not fit.
        records: those of them that count, without skipped tombstones.
        payloads, refused, messages: see `Expansion`; `size` is its `bytes`.
    """

    taken: int = 0
    records: list[Any] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    refused: list[RejectedRow] = field(default_factory=list)
    messages: dict[int, Message] = field(default_factory=dict)
    size: int = 0
    _origins: list[tuple[int, int]] = field(default_factory=list)

    def add(self, record: Any, expansion: Expansion) -> None:
        """Append what a record has become."""
        begin = len(self.payloads)
        self.refused += [replace(bad, row=begin + bad.row) for bad in expansion.refused]
        self.messages |= {begin + row: message for row, message in expansion.messages.items()}
        self._origins += [(len(self.records), part) for _, part in expansion.origins]
        self.payloads += expansion.payloads
        self.size += expansion.bytes
        self.records.append(record)
        self.taken += 1

    def add_plain(self, records: Sequence[Any], payloads: Sequence[bytes], refused: Sequence[RejectedRow]) -> None:
        """Append a record without a value, which may be skipped."""
        self.refused += [replace(bad, row=len(self.payloads) + bad.row) for bad in refused]
        self._origins += [(len(self.records) + row, -1) for row in range(len(payloads))]
        self.payloads += payloads
        self.records += records
        self.taken += 1

    def record_of_each(self) -> list[Any]:
        """Return, for each payload, the record that it comes from."""
        return [self.records[place] for place, _ in self._origins]

    def describe(self, place: Callable[[int], str]) -> Callable[[int], str]:
        """Return a function that names the origin of a row, given one that names that of a record."""
        return Expansion(origins=self._origins).describe(place)


class Payloads:
    """A converter from consumer records to payloads.

    Args:
        fields: the fields to fill.
        record_type: the record type of the stream; None (in tests) fills no fields.
        tombstones: the treatment of records without a value.

    Attributes:
        skipped: the number of tombstones skipped.
    """

    def __init__(self, fields: FieldMapping, record_type: RecordType | None, tombstones: Tombstones) -> None:
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
        if fields.key is not None:
            self._key, self._key_is_int = prefix[fields.key], record_type.field_type(fields.key) is int
        self._headers = [(h, prefix[name], record_type.field_type(name) is int) for h, name in fields.headers.items()]
        if fields.timestamp is not None:
            self._timestamp = prefix[fields.timestamp]
            self._timestamp_is_int = record_type.field_type(fields.timestamp) is int

    def encode(self, records: Sequence[Any]) -> tuple[Sequence[Any], list[bytes], list[RejectedRow]]:
        """Return the records that are not skipped, a payload for each, and the rejected rows."""
        values = [record.value for record in records]
        refused: list[RejectedRow] = []
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
            refused = [RejectedRow(row, TOMBSTONE, f"no value; the key is {records[row].key!r}") for row in gone]
        for row in unreadable:
            values[row] = b""
            refused.append(RejectedRow(row, UNREADABLE, records[row].detail))
        return records, values, refused

    def expand(
        self, records: Sequence[Any], topic: str, expander: Expander, bound: TakeBound, arrived_at: int
    ) -> ExpandedRecords:
        """Expand the values of records, from the front, as many as fit into a bundle."""
        found = ExpandedRecords()
        deadline = expander.deadline()
        endings = self._endings(records) or [b""] * len(records)
        for record, ending in zip(records, endings, strict=True):
            if record.value is None:
                if len(found.payloads) >= min(bound.records, EXPANDED_RECORDS_MAX):
                    break
                counted, payloads, refused = self.encode([record])
                found.add_plain(counted, payloads, refused)
                continue
            headers = {name: value or b"" for name, value in record.headers or ()}
            message = Message(record.value, topic, record.key, headers, arrived_at, ending=ending)
            if found.taken and expander.is_over(deadline):
                break
            room = min(bound.records, EXPANDED_RECORDS_MAX) - len(found.payloads), bound.bytes - found.size
            expansion = expander.expand(
                [message], records_max=room[0], bytes_max=room[1], at_least_one=not found.payloads
            )
            if not expansion.taken:
                break
            found.add(record, expansion)
        return found

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


def arrivals_of(records: Sequence[Any]) -> Instants:
    """Return the timestamps of records in µs: when they arrived at the broker; -1 where one is missing."""
    return np.array(
        [min(record.timestamp, _MS_MAX) * 1_000 if record.timestamp >= 0 else -1 for record in records], np.int64
    )


def offsets_of(record: Any) -> str:
    """Return a record's offset, or the first and last offset of an unreadable batch."""
    first = getattr(record, "first", record.offset)
    return f"{record.offset}" if first == record.offset else f"{first}-{record.offset}"


def _json(value: bytes | None, is_int: bool) -> bytes:
    """Return a key or header as JSON: text, or a number for an int field. Bytes that are not UTF-8 become an object."""
    if value is None:
        return b"null"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return msgspec.json.encode({"not UTF-8": value.hex()})
    return value if is_int and _INTEGER.fullmatch(text) else msgspec.json.encode(text)


def _moment(ms: int) -> bytes:
    """Return a timestamp as a JSON datetime; null if it is missing (-1) or beyond the range of datetime."""
    try:
        return msgspec.json.encode(_EPOCH + timedelta(milliseconds=ms)) if ms >= 0 else b"null"
    except OverflowError:
        return b"null"
