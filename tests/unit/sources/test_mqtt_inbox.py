from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy.model.record import RecordType
from millpy.sources.mqtt.inbox import MARKER_PREFIX, MessageBatch, MessageQueue, digests_of
from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.topics import TopicFields, TopicPattern

MARKERS = MARKER_PREFIX.encode()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


class Reading(msgspec.Struct):
    site: str


def an_inbox(
    filter: str = "#", *, retained: bool = False, arrays: bool = True, readings_max: int = 100,
    bytes_max: int = 1_000_000, digests: bool = False,
) -> MessageQueue:  # fmt: skip
    pattern = TopicPattern.parse(filter)
    return MessageQueue(
        topics=pattern.matches(), retained=retained, arrays=arrays, readings_max=readings_max, bytes_max=bytes_max,
        complete=TopicFields(pattern, RecordType(Reading)) if pattern.levels else None, digests=digests,
    )  # fmt: skip


def messages(*payloads: bytes, topic: bytes = b"t", first_id: int = 1) -> Messages:
    return Messages([topic] * len(payloads), list(payloads), list(range(first_id, first_id + len(payloads))))


def take_all(inbox: MessageQueue, records_max: int = 1_000, bytes_max: int = 1_000_000) -> list[MessageBatch]:
    bundles = []
    while inbox:
        bundles.append(inbox.take(records_max=records_max, bytes_max=bytes_max))
    return bundles


def test_bundles_hold_a_bounded_number_of_records_in_order() -> None:
    inbox = an_inbox()
    inbox.put(messages(*[b"%d" % n for n in range(7)]))
    inbox.put(messages(b"7", b"8", first_id=8))

    bundles = take_all(inbox, records_max=3)

    assert [bundle.payloads() for bundle in bundles] == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6", b"7", b"8"]]
    assert [bundle.packet_ids for bundle in bundles] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (inbox.records, inbox.bytes) == (0, 0)


def test_bundle_respects_its_bytes_but_is_never_empty() -> None:
    inbox = an_inbox()
    for number in range(3):
        inbox.put(messages(b"x" * 60, first_id=number + 1))

    assert [bundle.records for bundle in take_all(inbox, bytes_max=130)] == [2, 1]
    inbox.put(messages(b"x" * 500))
    assert [bundle.records for bundle in take_all(inbox, bytes_max=130)] == [1]


def test_array_is_many_records_under_one_acknowledgement() -> None:
    inbox = an_inbox()
    inbox.put(messages(b'{"a":0}', b' [{"a":1}, {"a":[2]} ,{"a":3}]', b'{"a":4}'))

    [bundle] = take_all(inbox)

    assert bundle.payloads() == [b'{"a":0}', b'{"a":1}', b'{"a":[2]}', b'{"a":3}', b'{"a":4}']
    assert bundle.packet_ids == [1, 2, 3]
    places = [bundle.describe()(row) for row in range(5)]
    assert places == ["t (packet 1)", "t (packet 2)[0]", "t (packet 2)[1]", "t (packet 2)[2]", "t (packet 3)"]


def test_array_is_never_split_between_bundles() -> None:
    inbox = an_inbox()
    inbox.put(messages(b"{}", b"[{},{},{},{}]", b"{}"))

    bundles = take_all(inbox, records_max=3)

    assert [bundle.records for bundle in bundles] == [1, 4, 1]
    assert [bundle.packet_ids for bundle in bundles] == [[1], [2], [3]]


def test_array_without_readings_is_acknowledged() -> None:
    inbox = an_inbox()
    inbox.put(messages(b"[ ]", b"{}"))

    [bundle] = take_all(inbox)

    assert (bundle.payloads(), bundle.packet_ids) == ([b"{}"], [1, 2])


def test_json_other_than_an_array_stays_one_payload() -> None:
    payloads = [b'[{"a":1}', b"[1,2]", b"", b"[{}]x"]
    inbox = an_inbox()
    inbox.put(messages(*payloads))

    assert take_all(inbox)[0].payloads() == payloads
    arrays = an_inbox(arrays=False)
    arrays.put(messages(b"[{}]"))
    assert take_all(arrays)[0].payloads() == [b"[{}]"]


@pytest.mark.parametrize(
    ("topic", "payload", "why"),
    [
        (b"a", b"[{},{},{}]", "the message has 3 readings, more than 2"),
        (b"a" * 1_025, b"{}", "its topic has 1025 bytes, more than 1024"),
        (b"a" * 1_025, b"[{},{}]", "its topic has 1025 bytes, more than 1024"),
        (b"a" * 1_025, b"[{},{},{}]", "its topic has 1025 bytes, more than 1024"),
        (b"a" * 500, b"[{},{}]", "its 2 readings, with the fields of the topic, have 1029 bytes, more than 1000"),
    ],
)
def test_message_beyond_a_bound_is_one_rejected_record(topic: bytes, payload: bytes, why: str) -> None:
    inbox = an_inbox("{site}", readings_max=2, bytes_max=1_000)
    inbox.put(messages(b"{}", topic=b"b"))
    inbox.put(messages(payload, topic=topic, first_id=2))
    inbox.put(messages(b"[{}]", topic=b"b", first_id=3))

    [bundle] = take_all(inbox)

    assert bundle.payloads() == [b'{"site":"b"}', payload, b'{"site":"b"}']
    assert bundle.refused == [(1, why)]
    assert bundle.packet_ids == [1, 2, 3]
    assert len(bundle.describe()(1)) < 1_100
    assert (inbox.records, inbox.bytes) == (0, 0)


def test_long_topic_without_a_subscription_is_skipped() -> None:
    inbox = an_inbox("sensors/#")
    inbox.put(messages(b"{}", topic=b"other/" + b"a" * 2_000))

    [bundle] = take_all(inbox)

    assert (bundle.records, bundle.packet_ids, bundle.refused) == (0, [1], [])


def test_queue_counts_sent_bytes_and_a_bundle_expanded_ones() -> None:
    inbox = an_inbox("{site}", readings_max=10_000, bytes_max=10_000_000)
    array = b"[" + b",".join([b"{}"] * 8_000) + b"]"
    for number in range(1, 101):
        inbox.put(messages(array, topic=b"a" * 1_000, first_id=number))

    assert inbox.records == 800_000
    assert inbox.bytes < 100 * (len(array) + 2_000)
    bundle = inbox.take(records_max=65_536, bytes_max=16_000_000)
    assert sum(map(len, bundle.payloads())) < 16_000_000
    assert bundle.packet_ids == [1]


def test_memory_of_topics_is_bounded_in_bytes() -> None:
    inbox = an_inbox("{site}")
    tracemalloc.start()
    try:
        for number in range(60_000):
            inbox.put(messages(b"{}", topic=b"%01000d" % number))
            inbox.take(records_max=10, bytes_max=1_000)
        assert tracemalloc.get_traced_memory()[0] < 60_000_000
    finally:
        tracemalloc.stop()


def test_queue_counts_skipped_messages() -> None:
    inbox = an_inbox("sensors/#")
    for number in range(1_000):
        inbox.put(messages(b"{}", topic=b"other", first_id=number + 1))

    assert inbox.records == 0
    assert inbox.bytes >= 100_000


def test_retained_messages_are_records_only_when_wanted() -> None:
    for retained, expected in ((False, [b"new"]), (True, [b"old", b"new"])):
        inbox = an_inbox(retained=retained)
        published = messages(b"old", b"new")
        published.retained.append(0)
        inbox.put(published)

        [bundle] = take_all(inbox)

        assert (bundle.payloads(), bundle.packet_ids) == (expected, [1, 2])


@pytest.mark.parametrize("retained", list(map(list, [(0,), (1,), (3,), (0, 2), (1, 2, 4), range(5)])))
def test_retained_messages_are_acknowledged_in_the_order_received(retained: list[int]) -> None:
    # Between arrays, markers and unsubscribed topics, each of which has a flag of its own.
    topics = [b"sensors/a", b"sensors/b", MARKERS + b"me", b"other", b"sensors/c", b"sensors/d"]
    payloads = [b"{}", b"[{},{}]", b"token", b"{}", b"[{}]", b"{}"]
    for records_max in (1, 2, 10):
        inbox = an_inbox("sensors/#")
        inbox.put(Messages(topics, payloads, [11, 12, 13, 14, 15, 16], retained))

        assert [number for bundle in take_all(inbox, records_max) for number in bundle.packet_ids] == [
            11, 12, 13, 14, 15, 16
        ]  # fmt: skip


def test_markers_and_topics_of_a_former_filter_are_not_records() -> None:
    inbox = an_inbox("sensors/#")
    inbox.put(
        Messages([b"sensors/a", MARKERS + b"me", b"other/a", b"sensors/b"], [b"1", b"token", b"2", b"3"], [1, 2, 3, 4])
    )

    [bundle] = take_all(inbox)

    assert bundle.payloads() == [b"1", b"3"]
    assert bundle.packet_ids == [1, 2, 3, 4]
    assert bundle.markers == [(MARKERS + b"me", b"token")]
    assert [bundle.describe()(row) for row in range(2)] == ["sensors/a (packet 1)", "sensors/b (packet 4)"]


@pytest.mark.parametrize("payload", [b"{}", b"[{},{}]", b"[]", b"[[]]", b"1", b""])
@pytest.mark.parametrize(
    "topic", [b"", b"a", b"sensors", b"sensors/a/b/c", MARKERS, MARKERS + b"me", b"/" * 9, b"\xff"]
)
@pytest.mark.parametrize("filter", ["sensors/{site}/x", "a/b/c/d/{site}", "+/{site}/e", "{site}"])
def test_messages_under_other_topics_are_skipped(filter: str, topic: bytes, payload: bytes) -> None:
    inbox = an_inbox(filter)
    ours = TopicPattern.parse(filter).filter.replace("+", "s").encode()
    inbox.put(Messages([topic, ours], [payload, b"[{}]"], [1, 2]))

    bundles = take_all(inbox)

    matches = TopicPattern.parse(filter).matches().fullmatch(topic) is not None and not topic.startswith(MARKERS)
    assert [number for bundle in bundles for number in bundle.packet_ids] == [1, 2]
    assert matches or [bundle.payloads() for bundle in bundles if bundle.records] == [[b'{"site":"s"}']]


def test_marker_that_may_have_overtaken_messages_proves_nothing() -> None:
    inbox = an_inbox()
    inbox.put(Messages([MARKERS + b"me"] * 2, [b"forged", b"ours"], [0, 7]))

    (bundle,) = take_all(inbox)

    assert bundle.markers == [(MARKERS + b"me", b"ours")]
    assert (bundle.records, bundle.packet_ids) == (0, [0, 7])


def test_marker_is_reported_only_after_the_messages_before_it() -> None:
    inbox = an_inbox()
    inbox.put(messages(b"1", b"2", b"3"))
    inbox.put(messages(b"token", topic=MARKERS + b"me", first_id=4))

    bundles = take_all(inbox, records_max=2)

    assert [len(bundle.markers) for bundle in bundles] == [0, 1]


@given(
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from([b"a/b", MARKERS + b"x", b"a/\xff\0", b"a" * 2_000]), st.binary(max_size=5)),
            st.one_of(st.binary(max_size=20), st.text('[]{}":,1\\\ud800', max_size=12).map(_bytes)),
            st.booleans(),
        )
    ),
    st.integers(1, 5),
)
def test_messages_are_read_and_acknowledged_in_order(rows: list[tuple[bytes, bytes, bool]], records_max: int) -> None:
    pattern = TopicPattern.parse("{site}/#")
    inbox = MessageQueue(
        topics=pattern.matches(), retained=False, arrays=True, readings_max=3, bytes_max=100,
        complete=TopicFields(pattern, RecordType(Reading)),
    )  # fmt: skip
    published = Messages([r[0] for r in rows], [r[1] for r in rows], list(range(1, len(rows) + 1)))
    published.retained += [index for index, row in enumerate(rows) if row[2]]
    inbox.put(published)

    bundles = take_all(inbox, records_max=records_max)

    assert [i for bundle in bundles for i in bundle.packet_ids] == list(range(1, len(rows) + 1))
    for bundle in bundles:
        places = [bundle.describe()(row) for row in range(len(bundle.payloads()))]
        assert len(places) == bundle.records
        assert not any("\0" in place for place in places)
    assert (inbox.records, inbox.bytes) == (0, 0)


def test_committed_redelivery_is_acknowledged_and_skipped() -> None:
    inbox = an_inbox(digests=True)
    first = messages(b"{}", b'[{"n":1},{"n":2}]', b"[]", b"junk", b'{"n":3}')
    inbox.put(first)
    (taken,) = take_all(inbox)
    again = messages(b"{}", b'[{"n":1},{"n":2}]', b"[]", b"junk", b'{"n":4}', b"{}")
    again.redelivered = [0, 1, 2, 3, 4, 5]

    inbox.put(again)
    bundle = inbox.take(records_max=100, bytes_max=1_000, is_committed=lambda digest: digest in taken.digests)

    assert len(taken.digests) == 4, "an empty array has no records that could come twice"
    assert bundle.payloads() == [b'{"n":4}', b"{}"], "with another packet id it is another message"
    assert bundle.packet_ids == [1, 2, 3, 4, 5, 6]
    assert bundle.digests[:3] == taken.digests[:3]
    assert (bundle.skipped, bundle.records) == (3, 2)
    assert (inbox.records, inbox.bytes, inbox.received) == (0, 0, 5 + 2)


def test_equal_message_without_the_redelivery_flag_is_a_record() -> None:
    inbox = an_inbox(digests=True)
    inbox.put(messages(b"{}"))

    bundle = inbox.take(records_max=100, bytes_max=1_000, is_committed=lambda _: True)

    assert bundle.payloads() == [b"{}"]


def test_redelivery_is_recognized_by_the_payload_as_received() -> None:
    came = messages(b'{"n":1}', topic=b"north")
    plain, filling = an_inbox("+", digests=True), an_inbox("{site}", digests=True)
    plain.put(came)
    filling.put(messages(b'{"n":1}', topic=b"north"))

    (before,), (after,) = take_all(plain), take_all(filling)

    assert before.payloads() != after.payloads()
    assert before.digests == after.digests


def test_bundle_describes_exactly_its_messages() -> None:
    inbox = an_inbox(digests=True)
    inbox.put(messages(*[b"%d" % n for n in range(5)]))

    bundles = take_all(inbox, records_max=2)

    assert [digest for bundle in bundles for digest in bundle.digests] == digests_of(
        messages(*[b"%d" % n for n in range(5)])
    )
    assert [len(bundle.digests) for bundle in bundles] == [2, 2, 1]


def test_redelivery_and_messages_after_it_wait_for_the_commit_in_doubt() -> None:
    inbox = an_inbox(digests=True)
    messages_again = messages(b"1", b"2", b"3")
    messages_again.redelivered = [1]
    inbox.put(messages_again)

    first = inbox.take(records_max=100, bytes_max=1_000, is_committed=lambda _: None)
    none = inbox.take(records_max=100, bytes_max=1_000, is_committed=lambda _: None)
    rest = inbox.take(records_max=100, bytes_max=1_000, is_committed=lambda _: True)

    assert (first.payloads(), none.packet_ids, rest.payloads()) == ([b"1"], [], [b"3"])
    assert rest.packet_ids == [2, 3]
