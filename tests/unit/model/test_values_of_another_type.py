"""Fields that are not of their types: a default is refused with the graph, what a hook makes is dead-lettered."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import pytest

from millpy.errors import RefusedValueError, SchemaError
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.operators.validation import Admission


class Color(enum.StrEnum):
    RED = "red"


def struct(kind: Any, default: Any) -> Any:
    return msgspec.defstruct("Reading", [("device", str), ("x", kind, default)])


@pytest.mark.parametrize(
    ("kind", "default"), [(int, True), (str, None), (int, 1.5), (bool, 0), (str, 1), (list[int], ("a",)), (float, "1")]
)
def test_default_of_another_type_is_refused(kind: Any, default: Any) -> None:
    with pytest.raises(SchemaError, match="the default of 'x' of Reading is not of its type"):
        RecordType(struct(kind, default))


@pytest.mark.parametrize(
    ("kind", "default"), [(float, 0), (int | None, None), (str, "a"), (str, Color.RED), (bool, True), (list[int], [])]
)
def test_default_of_its_type_is_taken(kind: Any, default: Any) -> None:
    RecordType(struct(kind, default))


class Hooked(msgspec.Struct):
    device: str
    x: Any = None

    def __post_init__(self) -> None:
        self.x = {"true": True, "none": None, "half": 0.5, "text": "1", "one": 1}[self.device]


class Whole(Hooked):
    x: int = 0


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize(("device", "told"), [("true", "True"), ("none", "None"), ("half", "0.5"), ("text", "'1'")])
def test_value_of_another_type_by_a_hook_rejects_only_its_record(device: str, told: str, count: int) -> None:
    bad, good = (b'{"device":"%b"}' % name for name in (device.encode(), b"one"))

    decoded = Decoder(RecordType(Whole)).decode(
        SourceBatch("json", Instant(0), payloads=[bad, *[good] * count], describe=str)
    )

    assert [(r.row, r.reason, r.detail) for r in decoded.refused] == [(0, "refused", f"x: {told} is not of type int")]
    assert len(decoded.rows) == count
    with pytest.raises(RefusedValueError, match=r"Whole|no int"):
        Admission(RecordType(Whole), "stream 's' carries").checked_copy(Whole(device))
