from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from millpy.injectors.mqtt_inbox import MARKER_PREFIX, Bundle, Inbox
from millpy.injectors.mqtt_packets import Published
from millpy.injectors.mqtt_topics import TopicFields, TopicPattern
from millpy.model.record import RecordType

MARKERS = MARKER_PREFIX.encode()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def an_inbox(filter: str = "#", *, retained: bool = False, arrays: bool = True, readings_max: int = 100) -> Inbox:
    return Inbox(
        topics=TopicPattern.of(filter).matches(), retained=retained, arrays=arrays, readings_max=readings_max
    )  # fmt: skip


def messages(*payloads: bytes, topic: bytes = b"t", first_id: int = 1) -> Published:
    return Published([topic] * len(payloads), list(payloads), list(range(first_id, first_id + len(payloads))))


def take_all(inbox: Inbox, records_max: int = 1_000, bytes_max: int = 1_000_000) -> list[Bundle]:
    bundles = []
    while inbox:
        bundles.append(inbox.take(records_max=records_max, bytes_max=bytes_max))
    return bundles


def test_bundles_hold_at_most_so_many_records_in_order() -> None:
    inbox = an_inbox()
    inbox.put(messages(*[b"%d" % n for n in range(7)]))
    inbox.put(messages(b"7", b"8", first_id=8))

    bundles = take_all(inbox, records_max=3)

    assert [bundle.payloads() for bundle in bundles] == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6", b"7", b"8"]]
    assert [bundle.packet_ids for bundle in bundles] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (inbox.records, inbox.bytes) == (0, 0)


def test_bundle_of_bytes_is_not_overfilled_but_never_empty() -> None:
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


def test_array_is_never_torn_between_bundles() -> None:
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


def test_what_is_no_array_of_readings_stays_one_payload() -> None:
    payloads = [b'[{"a":1}', b"[1,2]", b"[{},{},{}]", b"", b"[{}]x"]
    inbox = an_inbox(readings_max=2)
    inbox.put(messages(*payloads))

    assert take_all(inbox)[0].payloads() == payloads
    arrays = an_inbox(arrays=False)
    arrays.put(messages(b"[{}]"))
    assert take_all(arrays)[0].payloads() == [b"[{}]"]


def test_retained_messages_are_records_only_when_wanted() -> None:
    for retained, expected in ((False, [b"new"]), (True, [b"old", b"new"])):
        inbox = an_inbox(retained=retained)
        published = messages(b"old", b"new")
        published.retained.append(0)
        inbox.put(published)

        [bundle] = take_all(inbox)

        assert (bundle.payloads(), bundle.packet_ids) == (expected, [1, 2])


def test_markers_and_topics_of_an_older_filter_are_no_records() -> None:
    inbox = an_inbox("sensors/#")
    inbox.put(
        Published([b"sensors/a", MARKERS + b"me", b"other/a", b"sensors/b"], [b"1", b"token", b"2", b"3"], [1, 2, 3, 4])
    )

    [bundle] = take_all(inbox)

    assert bundle.payloads() == [b"1", b"3"]
    assert bundle.packet_ids == [1, 2, 3, 4]
    assert bundle.markers == [(MARKERS + b"me", b"token")]
    assert [bundle.describe()(row) for row in range(2)] == ["sensors/a (packet 1)", "sensors/b (packet 4)"]


def test_marker_comes_only_after_what_was_received_before_it() -> None:
    inbox = an_inbox()
    inbox.put(messages(b"1", b"2", b"3"))
    inbox.put(messages(b"token", topic=MARKERS + b"me", first_id=4))

    bundles = take_all(inbox, records_max=2)

    assert [len(bundle.markers) for bundle in bundles] == [0, 1]


@given(
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from([b"a/b", MARKERS + b"x", b"a/\xff\0"]), st.binary(max_size=5)),
            st.one_of(st.binary(max_size=20), st.text('[]{}":,1\\\ud800', max_size=12).map(_bytes)),
            st.booleans(),
        )
    ),
    st.integers(1, 5),
)
def test_whatever_is_put_is_taken_and_acknowledged_in_order(
    rows: list[tuple[bytes, bytes, bool]], records_max: int
) -> None:
    class Reading(msgspec.Struct):
        site: str

    pattern = TopicPattern.of("{site}/#")
    inbox = Inbox(
        topics=pattern.matches(), retained=False, arrays=True, readings_max=3,
        complete=TopicFields(pattern, RecordType(Reading)),
    )  # fmt: skip
    published = Published([r[0] for r in rows], [r[1] for r in rows], list(range(1, len(rows) + 1)))
    published.retained += [index for index, row in enumerate(rows) if row[2]]
    inbox.put(published)

    bundles = take_all(inbox, records_max=records_max)

    assert [i for bundle in bundles for i in bundle.packet_ids] == list(range(1, len(rows) + 1))
    for bundle in bundles:
        places = [bundle.describe()(row) for row in range(len(bundle.payloads()))]
        assert len(places) == bundle.records
        assert not any("\0" in place for place in places)
    assert (inbox.records, inbox.bytes) == (0, 0)
