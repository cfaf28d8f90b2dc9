"""What an archive cannot store is refused when it is declared, not by the worker that writes it."""

from __future__ import annotations

from datetime import datetime

import msgspec
import pytest

from millpy import EventTime, Graph, Mqtt, seconds
from millpy.errors import GraphError


class Nothing(msgspec.Struct):
    pass


class Box(msgspec.Struct):
    content: list[Nothing]


@pytest.mark.parametrize("of", [Nothing, Nothing | None, list[Nothing], dict[str, Nothing], Box])
def test_a_struct_without_fields_is_refused(of: object) -> None:
    record = msgspec.defstruct("Reading", [("device", str), ("at", datetime), ("meta", of)])
    at = EventTime("at", max_disorder=seconds(1))
    keyed = Graph("plant").inject("readings", Mqtt("a/#"), schema=record, event_time=at).key_by("device")
    with pytest.raises(GraphError, match="'meta' has a Struct without fields"):
        keyed.archive()
