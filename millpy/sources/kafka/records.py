"""Payloads of Kafka records: the value, with the key, headers and timestamp written into fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import msgspec
import numpy as np

from millpy.errors import GraphError
from millpy.formats import Format, Message
from millpy.formats.message import encoded_names
from millpy.ingest.expansion import EXPANDED_RECORDS_MAX, Expander, Expansion
from millpy.ingest.json_append import EMPTY_OR_SPACED, completed
from millpy.ingest.named_text import text_as_json
from millpy.ingest.protocol import RejectedRow, SourceBatch, TakeBound
from millpy.model.arguments import check_instance, check_texts
from millpy.model.identity import Identity, identity_of_value
from millpy.model.identity_text import GraphPart
from millpy.model.record import Instants, RecordType
from millpy.model.time import YEARS_HI, Instant
from millpy.sources.kafka.record_columns import RecordColumns

Tombstones = Literal["dead_letter", "skip", "record"]
TOMBSTONE = "tombstone"
UNREADABLE = "unreadable"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KNOWN_KEYS_MAX = 100_000
_KNOWN_BYTES_MAX = 20_000_000
_MS_MAX = YEARS_HI // 1_000


@dataclass(frozen=True, slots=True, repr=False)
class FieldMapping(GraphPart):
    """The fields of a record that Kafka's key, headers and timestamp fill; None fills none.

    Attributes:
        key: the field that gets the record's key (str, int or UUID; UTF-8 text).
        headers: header name -> the field that gets the header. The last header of a name counts; a missing header is
            null.
        timestamp: the field that gets the record's timestamp: an int (ms since the epoch) or a datetime. A missing
            timestamp is null.
    """

    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timestamp: str | None = None

    def __post_init__(self) -> None:
        hint = 'for example FieldMapping(key="device", headers={"site": "site"})'
        check_instance("headers", self.headers, Mapping, hint)
        check_texts(hint, key=self.key, timestamp=self.timestamp)
        for name, own in self.headers.items():
            check_texts(hint, **{f"headers[{name!r}]": own})

    def identity(self) -> Identity:
        """Describe which field each part fills."""
        headers = identity_of_value(dict(self.headers))
        return {"kind": "field_mapping", "key": self.key, "headers": headers, "timestamp": self.timestamp}

    def validate(self, record_type: RecordType, format: Format | None = None) -> None:
        """Check that the fields exist, are filled once, and can hold their values.

        Args:
            record_type: the type of the records.
            format: the payload format of values, which may fill fields itself.

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
            if format is not None and format.fills(name, record_type):
                raise GraphError(f"cannot fill {name!r} from Kafka: {format!r} fills it, too")
        if names and record_type.struct.__struct_config__.array_like:
            raise GraphError(f"fields filled from Kafka do not fit {struct}, which is written as an array")


@dataclass(slots=True)
class ExpandedRecords:
    """The payloads of Kafka records whose values a payload format has expanded.

    Attributes:
        taken: the number of Kafka records that were used; the others did not fit.
        rows: the rows of those of them that count, without skipped tombstones.
        payloads, refused, messages: see `Expansion`; `size` is its `bytes`.
    """

    taken: int = 0
    rows: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    refused: list[RejectedRow] = field(default_factory=list)
    messages: dict[int, Message] = field(default_factory=dict)
    size: int = 0
    _origins: list[tuple[int, int]] = field(default_factory=list)

    def add(self, expansion: Expansion) -> None:
        """Append what the next record has become."""
        begin = len(self.payloads)
        self.refused += [replace(bad, row=begin + bad.row) for bad in expansion.refused]
        self.messages |= {begin + row: message for row, message in expansion.messages.items()}
        self._origins += [(self.taken, part) for _, part in expansion.origins]
        self.payloads += expansion.payloads
        self.size += expansion.bytes
        self.rows.append(self.taken)
        self.taken += 1

    def add_plain(self, payloads: Sequence[bytes], refused: Sequence[RejectedRow]) -> None:
        """Append the next record, which has no value; without a payload it is skipped."""
        self.refused += [replace(bad, row=len(self.payloads) + bad.row) for bad in refused]
        self._origins += [(self.taken, -1) for _ in payloads]
        self.payloads += payloads
        self.rows += [self.taken] * len(payloads)
        self.taken += 1

    def row_of_each(self) -> list[int]:
        """Return, for each payload, the row of the record that it comes from."""
        return [row for row, _ in self._origins]

    def describe(self, place: Callable[[int], str]) -> Callable[[int], str]:
        """Return a function that names the origin of a payload, given one that names that of a record."""
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
        encoded = encoded_names(record_type)
        prefix = {name: b"," + msgspec.json.encode(own) + b":" for name, own in encoded.items()}
        if fields.key is not None:
            self._key, self._key_is_int = prefix[fields.key], record_type.field_type(fields.key) is int
        self._headers = [(h, prefix[name], record_type.field_type(name) is int) for h, name in fields.headers.items()]
        if fields.timestamp is not None:
            self._timestamp = prefix[fields.timestamp]
            self._timestamp_is_int = record_type.field_type(fields.timestamp) is int

    def encode(self, records: RecordColumns) -> tuple[RecordColumns, Sequence[bytes], list[RejectedRow]]:
        """Return the records that are not skipped, a payload for each, and the rejected rows."""
        gone = self._tombstones_of(records)
        if gone and self._tombstones == "skip":
            self.skipped += len(gone)
            records, gone = records.drop(gone), []
        values: Any = records.values
        if records.has_missing:
            values = [b"{}" if value is None else value for value in records.values]
        endings = self._endings(records)
        if endings:
            values = [
                value[:-1] + ending
                if value[-1:] == b"}" and value[-2:-1] not in EMPTY_OR_SPACED
                else completed(value, ending)
                for value, ending in zip(values, endings, strict=True)
            ]
        refused: list[RejectedRow] = []
        if self._tombstones == "dead_letter":
            refused = [RejectedRow(row, TOMBSTONE, f"no value; the key is {records.key(row)!r}") for row in gone]
        for row, found in records.unreadable.items():
            values[row] = b""
            refused.append(RejectedRow(row, UNREADABLE, found.detail))
        return records, values, refused

    @staticmethod
    def _tombstones_of(records: RecordColumns) -> list[int]:
        if not records.has_missing:
            return []
        return [row for row, value in enumerate(records.values) if value is None and row not in records.unreadable]

    def expand(
        self, records: RecordColumns, topic: str, expander: Expander, bound: TakeBound, arrived_at: int
    ) -> ExpandedRecords:
        """Expand the values of records, from the front, as many as fit into a bundle."""
        found = ExpandedRecords()
        deadline = expander.deadline()
        endings = self._endings(records) or [b""] * len(records)
        for row, (value, ending) in enumerate(zip(records.values, endings, strict=True)):
            if value is None:
                if len(found.payloads) >= min(bound.records, EXPANDED_RECORDS_MAX):
                    break
                _, payloads, refused = self.encode(records.rows(row, row + 1))
                found.add_plain(payloads, refused)
                continue
            headers = {name: text or b"" for name, text in records.headers[row]} if records.headers else {}
            message = Message(value, topic, records.key(row), headers, arrived_at, ending=ending)
            if found.taken and expander.is_over(deadline):
                break
            room = min(bound.records, EXPANDED_RECORDS_MAX) - len(found.payloads), bound.bytes - found.size
            expansion = expander.expand(
                [message], records_max=room[0], bytes_max=room[1], at_least_one=not found.payloads
            )
            if not expansion.taken:
                break
            found.add(expansion)
        return found

    def _endings(self, records: RecordColumns) -> list[bytes]:
        parts: list[list[bytes]] = []
        if self._key:
            parts.append(self._of_keys(records.keys or [None] * len(records)))
        for name, prefix, is_int in self._headers:
            if records.headers is None:
                parts.append([prefix + b"null"] * len(records))
                continue
            found = (next((v for n, v in reversed(own) if n == name), None) for own in records.headers)
            parts.append([prefix + _json(value, is_int) for value in found])
        if self._timestamp:
            parts.append(self._of_timestamps(records.timestamps.tolist()))
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
            return [self._timestamp + (b"%d" % at if at >= 0 else b"null") for at in timestamps]
        return [self._timestamp + _moment(at) for at in timestamps]


def arrivals_of(records: RecordColumns) -> Instants:
    """Return the timestamps of records in µs: when they arrived at the broker; -1 where one is missing."""
    at = records.timestamps
    return np.where(at >= 0, np.minimum(at, _MS_MAX) * 1_000, -1)


def batch_of(
    records: RecordColumns, expanded: ExpandedRecords | None, payloads: Payloads, partition: str, now_us: Instant
) -> SourceBatch:
    """Return records, as they are or expanded, as a batch of their source; its position and counts are set later."""
    if expanded is None:
        records, values, refused = payloads.encode(records)
        return SourceBatch(
            format="json",
            arrived_at=now_us,
            arrivals=lambda: arrivals_of(records),
            payloads=values,
            refused=refused,
            describe=lambda row: f"{partition}@{records.place(row)}",
        )
    return SourceBatch(
        format="json",
        arrived_at=now_us,
        arrivals=lambda: arrivals_of(records)[expanded.row_of_each()],
        payloads=expanded.payloads,
        refused=expanded.refused,
        describe=expanded.describe(lambda row: f"{partition}@{records.place(row)}"),
        messages=expanded.messages,
    )


def _json(value: bytes | None, is_int: bool) -> bytes:
    """Return a key or header as JSON: text, or a number for an int field. Bytes that are not UTF-8 become an object."""
    if value is None:
        return b"null"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return msgspec.json.encode({"not UTF-8": value.hex()})
    return text_as_json(text, is_int=is_int)


def _moment(ms: int) -> bytes:
    """Return a timestamp as a JSON datetime; null if it is missing (-1) or beyond the range of datetime."""
    try:
        return msgspec.json.encode(_EPOCH + timedelta(milliseconds=ms)) if ms >= 0 else b"null"
    except OverflowError:
        return b"null"
