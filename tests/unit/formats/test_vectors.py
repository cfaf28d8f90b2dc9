"""Public test vectors of the formats; tests/vectors/README.md says where each comes from."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from millpy import Cbor
from millpy.formats import BadPart, Format, Message
from millpy.formats.binary_values import CborReader
from millpy.model.record import RecordType
from tests.docs.blocks import ROOT


def vectors(name: str) -> Any:
    return json.loads((ROOT / "tests" / "vectors" / name).read_text())


CBOR = vectors("cbor.json")
ANY = RecordType(msgspec.defstruct("Any", [("v", Any, None)]))


def value_in(format: Format, payload: bytes) -> Any:
    """The value of `v` in the one record of a message."""
    [part] = format.reader(ANY)(Message(payload))
    assert not isinstance(part, BadPart)
    return part


@pytest.mark.parametrize(("text", "expected"), CBOR["accepted"])
def test_the_examples_of_cbor_have_their_values(text: str, expected: str) -> None:
    found = value_in(Cbor(), b"\xa1\x61v" + bytes.fromhex(text))

    if expected == "no number":
        assert found == b'{"v":1e999}'
    else:
        assert repr(json.loads(found)) == repr({"v": json.loads(expected)})  # 1 is not 1.0, and -0.0 not 0.0


@pytest.mark.parametrize("why", CBOR["not_well_formed"])
def test_cbor_that_is_not_well_formed_is_refused(why: str) -> None:
    for text in CBOR["not_well_formed"][why]:
        with pytest.raises(ValueError, match=r"."):
            CborReader(bytes.fromhex(text)).read()
        with pytest.raises(ValueError, match=r"."):
            CborReader(b"\xa1\x61v" + bytes.fromhex(text)).read()
