from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from millpy.errors import ConfigError, GraphError
from millpy.model.record import RecordType
from millpy.sources.mqtt.topics import TopicFields, TopicPattern, overlap


class Reading(msgspec.Struct, rename={"site": "Site"}):
    site: str
    floor: int
    value: float = 0.0


FIELDS = TopicFields(TopicPattern.parse("sensors/{site}/{floor}"), RecordType(Reading))

levels = st.sampled_from(["a", "b", "", "$x", "+", "#"])
filters = st.lists(levels, min_size=1, max_size=4).map("/".join).filter(lambda text: text not in ("", "/"))
topics = st.lists(st.sampled_from(["a", "b", "", "$x", "c"]), min_size=1, max_size=4).map("/".join).filter(bool)


def is_filter(text: str) -> bool:
    return "#" not in text.split("/")[:-1]


def test_named_levels_are_wildcards() -> None:
    pattern = TopicPattern.parse("sensors/{site}/x/{device}/#")

    assert pattern.filter == "sensors/+/x/+/#"
    assert pattern.levels == ((1, "site"), (3, "device"))


@pytest.mark.parametrize(
    "text", ["", "a/#/b", "a+/b", "a/b#", "a/{b", "a/x{b}", "{a}/{a}", "a\0", "$share/group/a", "x" * 70_000]
)
def test_invalid_filter_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TopicPattern.parse(text)


@given(filters.filter(is_filter), topics)
def test_filter_matches_like_the_client_library(text: str, topic: str) -> None:
    matches = TopicPattern.parse(text).matches().fullmatch(topic.encode()) is not None

    assert matches == topic_matches_sub(text, topic)


@given(filters.filter(is_filter), filters.filter(is_filter), topics)
def test_filters_that_share_a_topic_overlap(one: str, other: str, topic: str) -> None:
    if topic_matches_sub(one, topic) and topic_matches_sub(other, topic):
        assert overlap(one, other)


@pytest.mark.parametrize(
    ("one", "other"), [("a/+", "b/+"), ("a", "a/b"), ("a/b/#", "a/c/#"), ("#", "$SYS/#"), ("+/a", "+/b"), ("+", "a/b")]
)
def test_filters_without_a_topic_in_common_do_not_overlap(one: str, other: str) -> None:
    assert not overlap(one, other)
    assert not overlap(other, one)


def test_levels_become_fields_under_their_names_in_json() -> None:
    found = FIELDS([b"sensors/north/-3"], [b'{"value":1}'])

    assert found == [b'{"value":1,"Site":"north","floor":-3}']
    assert msgspec.json.decode(found[0], type=Reading) == Reading("north", -3, 1.0)


def test_topic_counts_more_than_the_payload() -> None:
    found = FIELDS([b"sensors/north/1"], [b'{"Site":"south","value":1}'])

    assert msgspec.json.decode(found[0], type=Reading).site == "north"


def test_level_that_is_not_a_number_is_rejected_by_the_decoder() -> None:
    found = FIELDS([b"sensors/north/01"], [b"{}"])

    with pytest.raises(msgspec.ValidationError, match="floor"):
        msgspec.json.decode(found[0], type=Reading)


texts = st.one_of(
    st.text('{}[]":,\\a1 \n', max_size=12),
    st.recursive(
        st.none() | st.integers() | st.text('a"\\{}', max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
        max_leaves=5,
    ).map(json.dumps),
)


@given(texts, st.text('ab"\\{}é', max_size=4), st.sampled_from(["", " ", "\n\t"]))
def test_fields_make_no_payload_valid_or_invalid_and_change_nothing_else(text: str, site: str, space: str) -> None:
    payload = (space + text + space).encode()
    completed = FIELDS([f"sensors/{site}/5".encode()], [payload])[0]

    def read(data: bytes) -> object:
        try:
            return json.loads(data)
        except ValueError:
            return ValueError

    before = read(payload)
    expected = {**before, "Site": site, "floor": 5} if isinstance(before, dict) else before

    assert read(completed) == expected


def test_level_name_must_be_a_field_that_can_hold_text() -> None:
    record_type = RecordType(Reading)

    with pytest.raises(GraphError, match="no field 'room'"):
        TopicPattern.parse("a/{room}").validate(record_type)
    with pytest.raises(GraphError, match="not a str, int or UUID"):
        TopicPattern.parse("a/{value}").validate(record_type)


def test_cached_topics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.sources.mqtt.topics._KNOWN_TOPICS_MAX", 3)
    fields = TopicFields(TopicPattern.parse("{site}/#"), RecordType(Reading))

    for number in range(0, 20, 2):
        found = fields([b"%d" % number, b"%d" % (number + 1)], [b"{}", b"{}"])
        assert found == [b'{"Site":"%d"}' % number, b'{"Site":"%d"}' % (number + 1)]
    assert len(fields._endings) <= 3
