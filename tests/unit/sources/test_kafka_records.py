from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy import Json
from millpy.errors import ConfigError, GraphError
from millpy.ingest.decode import Decoder
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import FixedBound, SourceBatch
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.sources.kafka.record_columns import columns_of
from millpy.sources.kafka.records import FieldMapping, Payloads, arrivals_of
from millpy.sources.kafka.source import Kafka, KafkaBrokers


class Reading(msgspec.Struct):
    device: str | None = None
    number: int | None = None
    session: UUID | None = None
    at: datetime | None = None
    at_ms: int = 0
    v: int = 0


TYPE = RecordType(Reading)


@dataclass
class Record:
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp: int = 0
    offset: int = 0


def decoded(fills: FieldMapping, *records: Record) -> list[Any]:
    _, payloads, _ = Payloads(fills, TYPE, "dead_letter").encode(columns_of(records))
    found = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=payloads))
    assert found.objects is not None
    return found.objects + [r.detail for r in found.refused]


def test_key_headers_and_timestamp_become_fields_of_their_types() -> None:
    identity = "6f3c9a52-7d39-4b6c-8f53-2f0a9d3f6f11"
    fills = FieldMapping("device", {"n": "number", "s": "session"}, "at_ms")

    found = decoded(
        fills,
        Record(b'{"v":1}', b"a", (("n", b"7"), ("s", identity.encode())), 5),
        Record(b"{ }", None, (("n", b"7"), ("n", b"8")), 6),
    )

    assert found == [Reading("a", 7, UUID(identity), None, 5, 1), Reading(None, 8, None, None, 6, 0)]


def test_timestamp_as_a_moment_and_none_where_the_broker_has_none() -> None:
    found = decoded(FieldMapping(timestamp="at"), Record(b"{}", timestamp=1_500), Record(b"{}", timestamp=-1))

    assert [record.at for record in found] == [datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC), None]


def test_a_missing_timestamp_is_not_the_last_millisecond_of_1969() -> None:
    found = decoded(FieldMapping(timestamp="at_ms"), Record(b"{}", timestamp=-1), Record(b"{}", timestamp=0))

    assert isinstance(found[-1], str)
    assert [record.at_ms for record in found[:-1]] == [0]


def test_filled_field_overrides_the_record() -> None:
    assert decoded(FieldMapping("device"), Record(b'{"device":"b","v":2}', b"a")) == [Reading("a", v=2)]


@pytest.mark.parametrize("key", [b"\xff", b"1.5", b"x"])
def test_key_that_does_not_fit_its_field_is_refused(key: bytes) -> None:
    (problem,) = decoded(FieldMapping("number"), Record(b'{"v":1}', key))

    assert isinstance(problem, str)


@given(st.binary(max_size=20).map(lambda end: b'{"v":1' + end))
def test_filling_fields_does_not_make_an_invalid_value_valid(value: bytes) -> None:
    def is_object(text: bytes) -> bool:
        try:
            return isinstance(msgspec.json.decode(text), dict)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    _, (payload,), _ = Payloads(FieldMapping("device"), TYPE, "record").encode(columns_of([Record(value, b"a")]))

    assert is_object(payload) == is_object(value)


@pytest.mark.parametrize(
    "fills",
    [
        FieldMapping("nobody"),
        FieldMapping("at"),
        FieldMapping("device", {"h": "device"}),
        FieldMapping(timestamp="device"),
    ],
)
def test_fields_that_cannot_be_filled_are_refused(fills: FieldMapping) -> None:
    with pytest.raises(GraphError):
        fills.validate(TYPE)


def test_partitions_are_those_of_the_topic_and_not_part_of_the_identity() -> None:
    assert Kafka("t", partitions=2).partitions() == ("t/0", "t/1")
    assert repr(Kafka("t", partitions=2, fields=FieldMapping("k"))) == repr(
        Kafka("t", partitions=3, fields=FieldMapping("k"), brokers=KafkaBrokers("x:1"), lost="continue")
    )


@pytest.mark.parametrize(
    "wrong", [{"partitions": 0}, {"partitions": 1, "start": "soon"}, {"partitions": 1, "lost": "ok"}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Kafka("t", **wrong)


def test_arrivals_are_the_timestamps_of_the_broker() -> None:
    records = columns_of([Record(b"{}", timestamp=at) for at in (5, 0, -1, 2**63 - 1)])

    assert arrivals_of(records).tolist() == [5_000, 0, -1, 253_402_300_799_999_000]
    assert arrivals_of(columns_of([])).tolist() == []


def test_values_in_a_format_fill_a_bundle_and_the_other_records_wait() -> None:
    """Tombstones keep their meaning, and a message's records stay together."""
    many = b'[{"temperature":1},{"temperature":2}]'
    records = [Record(many, b"a"), Record(None, b"b"), Record(b"[", b"c"), Record(many, b"d"), Record(many, b"e")]
    columns = columns_of(records)
    payloads = Payloads(FieldMapping("device"), TYPE, "dead_letter")
    expander = Expander(Json(), TYPE, Limits())
    found = payloads.expand(columns, "t", expander, FixedBound(5, 10**6), 7)
    assert found.taken == len(found.rows) == 3
    assert found.payloads[:2] == [b'{"temperature":1,"device":"a"}', b'{"temperature":2,"device":"a"}']
    assert [(bad.row, bad.reason) for bad in found.refused] == [(2, "tombstone"), (3, "undecodable")]
    (message,) = found.messages.values()
    assert (message.key, message.payload, message.ending) == (b"c", b"[", b',"device":"c"}')
    assert [found.describe(str)(row) for row in range(4)] == ["0[0]", "0[1]", "1", "2"]
    assert [columns.key(row) for row in found.row_of_each()] == [b"a", b"a", b"b", b"c"]
    rest = payloads.expand(columns.rows(3), "t", expander, FixedBound(1, 10**6), 7)
    assert (rest.taken, len(rest.payloads)) == (1, 2), "one message is always taken"
    skipping = Payloads(FieldMapping("device"), TYPE, "skip")
    assert len(skipping.expand(columns.rows(0, 3), "t", expander, FixedBound(9, 10**6), 7).rows) == 2
    assert skipping.skipped == 1
