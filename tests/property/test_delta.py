"""The delta codec: what encodes, decodes equal; what jsonb would refuse, is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy.errors import RefusedValueError
from millpy.model.checkpoint import Delta, Entries, Kind
from millpy.model.delta import canonical_key, decode_document, encode_document, encode_value
from millpy.model.keys import key_hash, key_text

storable_text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=20)
storable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | storable_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(storable_text, inner, max_size=4),
    max_leaves=12,
)
anything = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
keys = storable_text | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.tuples(storable_text, st.integers(0, 99))


class Usual(msgspec.Struct):
    count: int
    mean: float | None
    name: str = ""


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    """Deltas of every kind with storable keys and values, tombstones too."""
    parts = []
    for kind in draw(st.lists(st.sampled_from(Kind), unique=True, max_size=3)):
        entries = Entries(kind, draw(storable_text))
        for key in draw(st.lists(keys, unique_by=key_text, min_size=1, max_size=5)):
            value = None if draw(st.booleans()) else encode_value(draw(storable))
            entries.add(key_text(key), key_hash(key), draw(storable_text), value, draw(st.integers(-(2**62), 2**62)))
        parts.append(entries)
    return tuple(parts)


def is_storable(value: Any) -> bool:
    """Whether jsonb can hold a value; the oracle of `encode_value`."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return "\x00" not in value
    if isinstance(value, dict):
        return all(is_storable(k) and is_storable(v) for k, v in value.items())
    return all(is_storable(v) for v in value) if isinstance(value, list) else True


@given(deltas())
def test_encoded_values_decode_equal(delta: Delta) -> None:
    assert decode_document(encode_document(delta)) == delta


@given(anything)
def test_exactly_the_storable_values_encode(value: Any) -> None:
    if is_storable(value):
        assert msgspec.json.decode(encode_value(value)) == value
    else:
        with pytest.raises(RefusedValueError):
            encode_value(value)


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_float_that_json_cannot_hold_is_refused_anywhere(lost: float) -> None:
    for value in (lost, [1.0, lost], {"a": {"b": lost}}, Usual(1, lost), [None, Usual(1, lost)]):
        with pytest.raises(RefusedValueError):
            encode_value(value)


def test_none_is_kept_as_null() -> None:
    assert encode_value(None) == b"null"
    assert encode_value(Usual(1, None)) == b'{"count":1,"mean":null,"name":""}'


def test_text_that_only_looks_like_null_or_an_escape_is_kept() -> None:
    for text in ("null", "\\u0000", "\\\\u0000", "\x01", "\\ud800", "\\\x1f"):
        assert msgspec.json.decode(encode_value(text)) == text


def test_lone_surrogate_is_refused_even_as_an_escape() -> None:
    with pytest.raises(RefusedValueError):
        encode_value("\ud800")
    with pytest.raises(RefusedValueError):
        encode_value(msgspec.Raw(b'"\\ud800"'))
    assert encode_value(msgspec.Raw(b'"\\ud83d\\ude00"')) == b'"\\ud83d\\ude00"'


def test_value_without_a_json_form_is_refused() -> None:
    with pytest.raises(RefusedValueError):
        encode_value(object())


def test_key_or_subkey_with_nul_is_refused_with_the_document() -> None:
    for key, subkey in ((b'"a\\u0000"', ""), (b'""', "a\x00"), (b'""', "\ud800")):
        entries = Entries(Kind.STATE, "cell")
        entries.add(key, 0, subkey, b"1")

        with pytest.raises(RefusedValueError):
            encode_document((entries,))


def test_null_value_and_tombstone_are_distinct() -> None:
    entries = Entries(Kind.STATE, "cell")
    entries.add(b'"a"', 1, "", b"null")
    entries.add(b'"b"', 2, "", None)

    assert decode_document(encode_document((entries,)))[0].values == [b"null", None]


@given(keys)
def test_key_is_canonical_after_a_round_trip_through_jsonb(key: Any) -> None:
    printed = msgspec.json.format(key_text(key), indent=1)

    assert canonical_key(printed) == key_text(key)
