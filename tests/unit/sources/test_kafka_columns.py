"""Columns of records are the records, however they are cut and joined; and requests name a topic by its id."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from uuid import UUID

import pytest
from aiokafka.protocol.fetch import FetchRequest, FetchRequest_v11
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.ingest.protocol import FixedBound
from millpy.sources.kafka.client import Client, Cluster
from millpy.sources.kafka.fetch_inbox import FetchInbox
from millpy.sources.kafka.record_columns import RecordColumns, UnreadableRecord, columns_of
from millpy.sources.kafka.topic_ids import (
    FetchRequestV13,
    FetchResponseV13,
    MetadataResponseV10,
    TopicIdFetchRequest,
    TopicMetadata,
    TopicMetadataRequest,
    UnknownTopicIdError,
    as_named,
    metadata_of,
)

OLD, NEW = UUID(int=1), UUID(int=2)


@dataclass(frozen=True)
class Record:
    offset: int
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int = 0


def records_of(columns: RecordColumns) -> list[Any]:
    return [
        columns.unreadable.get(row)
        or Record(
            offset, columns.values[row], columns.key(row), tuple(columns.headers[row]) if columns.headers else (),
            int(columns.timestamps[row]),
        )
        for row, offset in enumerate(columns.offsets.tolist())
    ]  # fmt: skip


def size_of(record: Any) -> int:
    return len(record.value or b"") + len(record.key or b"") + sum(len(n) + len(v or b"") for n, v in record.headers)


small = st.none() | st.binary(max_size=5)
rows = st.lists(
    st.tuples(small, small, st.lists(st.tuples(st.text(max_size=2), small), max_size=2), st.integers(0, 3)), max_size=30
)


def made(chosen: Sequence[Any]) -> list[Any]:
    """Build records; every fourth kind is a range of three unreadable offsets, and offsets have gaps."""
    found, offset = list[Any](), 0
    for value, key, headers, kind in chosen:
        if kind == 3:
            found.append(UnreadableRecord(offset, offset + 2, "odd"))
        else:
            found.append(Record(offset + 2, value, key, tuple(headers), kind))
        offset += 3 + kind
    return found


@settings(max_examples=25, deadline=None)
@given(rows, st.lists(st.integers(0, 8), max_size=8), st.integers(1, 9), st.integers(1, 12), st.randoms())
def test_records_leave_the_inbox_as_they_came_within_the_bound(
    chosen: Sequence[Any], cuts: list[int], records_max: int, bytes_max: int, rng: Any
) -> None:
    records, inbox, begin = made(chosen), FetchInbox(), 0
    for count in [*cuts, len(records)]:
        inbox.add(columns_of(records[begin : begin + count]))
        begin += count
    assert (inbox.records, inbox.bytes) == (len(records), sum(map(size_of, records)))

    taken: list[Any] = []
    while inbox:
        assert inbox.first_offset == getattr(records[len(taken)], "first", records[len(taken)].offset)
        columns = inbox.take(FixedBound(records_max, bytes_max))
        assert columns.size == sum(map(size_of, records_of(columns)))
        assert len(columns) == 1 or (len(columns) <= records_max and columns.size <= bytes_max)
        kept = rng.randint(1, len(columns))
        inbox.put_back(columns.rows(kept))
        taken += records_of(columns.rows(0, kept))

    assert taken == records
    assert (inbox.records, inbox.bytes) == (0, 0)


@given(rows, st.integers(0, 200), st.randoms())
def test_columns_are_cut_at_an_offset_and_lose_rows_as_a_list_does(
    chosen: Sequence[Any], offset: int, rng: Any
) -> None:
    records = made(chosen)
    columns = columns_of(records)
    gone = sorted(rng.sample(range(len(records)), rng.randint(0, len(records))))

    assert records_of(columns.cut_before(offset)) == [
        record for record in records if getattr(record, "first", record.offset) < offset
    ]
    assert records_of(columns.drop(gone)) == [record for row, record in enumerate(records) if row not in gone]
    assert [columns.place(row) for row in range(len(records))] == [
        f"{r.first}-{r.offset}" if isinstance(r, UnreadableRecord) else f"{r.offset}" for r in records
    ]


# -- topic ids ------------------------------------------------------------------------------------------------------

REQUEST = FetchRequest(500, 1, 9, 1, [("t", [(3, 77, 8)])])


def test_fetch_names_the_topic_by_its_id_where_the_broker_understands_it() -> None:
    request = TopicIdFetchRequest(REQUEST, OLD)

    assert isinstance(request.prepare({1: (0, 11)}), FetchRequest_v11)
    built = request.prepare({1: (4, 17)})

    assert isinstance(built, FetchRequestV13)
    assert FetchRequestV13.decode(built.encode()).topics == [(OLD, [(3, -1, 77, -1, -1, 8, {})], {})]


def answer_of(code: int) -> Any:
    partition = (3, code, 90, 89, 5, [(7, 60, {})], -1, b"batches", {})
    return FetchResponseV13.decode(BytesIO(FetchResponseV13(0, 0, 0, [(OLD, [partition], {})], {}).encode()))


def test_answer_by_id_becomes_one_by_name() -> None:
    named = as_named(answer_of(0), "t")

    assert named.topics == [("t", [(3, 0, 90, 89, 5, [(7, 60)], -1, b"batches")])]


@pytest.mark.parametrize("code", [100, 103])
def test_unknown_id_is_an_error_of_its_own(code: int) -> None:
    with pytest.raises(UnknownTopicIdError):
        as_named(answer_of(code), "t")


def test_broker_without_ids_tells_only_the_partitions() -> None:
    old = TopicMetadataRequest("t").prepare({3: (0, 9)})
    answer = old.RESPONSE_TYPE([], 0, "cluster", 0, [(0, "t", False, [(0, 0, 1, [], [], [])])])

    assert old.API_VERSION == 5
    assert metadata_of(answer) == TopicMetadata(0, 1, None)


def test_broker_with_ids_tells_the_id() -> None:
    request = TopicMetadataRequest("t").prepare({3: (0, 13)})
    topic = (0, "t", NEW, False, [(0, 0, 1, 0, [1], [1], [], {})], -1, {})
    answer = MetadataResponseV10(0, [(1, "host", 9092, None, {})], "cluster", 1, [topic], -1, {})

    assert request.API_VERSION == 10
    assert metadata_of(MetadataResponseV10.decode(answer.encode())) == TopicMetadata(0, 1, NEW)


@pytest.mark.parametrize(("known", "lost"), [([NEW, OLD], False), ([NEW, NEW], True), ([None], True)])
async def test_id_is_lost_only_when_no_broker_knows_it(
    known: list[UUID | None], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(_: Client) -> AsyncIterator[TopicMetadata]:
        for topic_id in known:
            yield TopicMetadata(0, 1, topic_id)

    monkeypatch.setattr(Client, "_topic_by_each_broker", answers)
    client = Client(Cluster("localhost:1"), "t", 0, "test")
    try:
        assert await client.has_lost(OLD) == lost
    finally:
        await client.stop()
