"""Checks of a batch at the border to its source, once for each: what a step could not read must not enter it.

The records themselves are not looked at, beyond their type: a record that does not decode is a dead letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import UnionType

import msgspec
import numpy as np
import pyarrow as pa

from millpy.formats import Message
from millpy.ingest.payload_column import PayloadColumn
from millpy.ingest.protocol import RejectedRow, SourceBatch, check_format, check_position
from millpy.model.dead_letter import printable
from millpy.model.record import Instants
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, YEARS_HI, YEARS_LO

COUNT_MAX = 2**48
"""Above every count of records; the sum of many still fits into 64 bits."""
_MESSAGE = {
    "payload": bytes,
    "topic": str,
    "key": bytes | None,
    "headers": Mapping,
    "arrived_at": int,
    "header": bytes | None,
    "ending": bytes,
    "decoded": bool,
}


def check_batch(taken: SourceBatch) -> None:
    """Raise TypeError or ValueError, which names the field, for a batch that a step cannot read."""
    check_format(taken.format)
    check_position(taken.position)
    _check_records(taken)
    _check_facts(taken)
    _check_refused(taken)
    _check_notes(taken.notes)


def checked_arrivals(taken: SourceBatch) -> Instants:
    """Return the arrivals of a batch that states them. Raises TypeError, ValueError, and what the source raises."""
    assert taken.arrivals is not None
    found = taken.arrivals()
    if not isinstance(found, np.ndarray) or (found.dtype.kind, found.dtype.itemsize) != ("i", 8):
        raise TypeError("arrivals() returns no array of int64")
    if found.shape != (_rows(taken),):
        raise ValueError(f"arrivals() returns {found.size} times for {_rows(taken)} rows")
    return found


def _rows(taken: SourceBatch) -> int:
    if taken.batch is not None:
        return len(taken.batch)
    return len(taken.payloads) or taken.block.removesuffix(b"\n").count(b"\n") + 1


def _check_records(taken: SourceBatch) -> None:
    _check_type("batch", taken.batch, pa.RecordBatch | None)
    _check_type("block", taken.block, bytes)
    _check_all("header", taken.header, str)
    "".join(taken.header).encode()  # it is stored with a dead letter
    payloads = taken.payloads
    if not isinstance(payloads, PayloadColumn):
        _check_all("payloads", payloads, bytes)
    if (taken.batch is not None) + bool(taken.block) + bool(len(payloads)) > 1:
        raise ValueError("it has more than one of payloads, block and batch")
    if taken.format == "columns" and (taken.block or len(payloads)):
        raise ValueError("format='columns' has payloads or a block, not a batch")
    if taken.batch is not None:
        taken.batch.validate()


def _check_facts(taken: SourceBatch) -> None:
    _check_type("finished", taken.finished, bool)
    _check_type("origin", taken.origin, str)
    _check_number("arrived_at", taken.arrived_at, YEARS_LO, YEARS_HI)
    if type(taken.watermark) is not int or taken.watermark not in (INSTANT_MIN, INSTANT_MAX):
        _check_number("watermark", taken.watermark, YEARS_LO, YEARS_HI)
    _check_number("records", taken.records, 0, COUNT_MAX)
    if taken.total is not None:
        _check_number("total", taken.total, 0, COUNT_MAX)
    if taken.arrivals is not None and not callable(taken.arrivals):
        raise TypeError(f"arrivals is {type(taken.arrivals).__name__}, not a function")


def _check_refused(taken: SourceBatch) -> None:
    _check_all("refused", taken.refused, RejectedRow)
    if len(taken.refused):
        rows = [rejected.row for rejected in taken.refused]
        _check_all("the rows of refused", rows, int)
        if min(rows) < 0 or max(rows) >= _rows(taken):
            raise ValueError(f"refused has row {max(rows) if min(rows) >= 0 else min(rows)} of {_rows(taken)} rows")
        _check_all("the reasons of refused", [rejected.reason for rejected in taken.refused], str)
        _check_all("the details of refused", [rejected.detail for rejected in taken.refused], str)
    _check_type("messages", taken.messages, Mapping)
    messages = list(taken.messages.values())
    _check_all("messages", messages, Message)
    for name, kind in _MESSAGE.items() if messages else ():
        _check_all(f"{name} of messages", [getattr(message, name) for message in messages], kind)
    headers = [message.headers for message in messages if message.headers]
    _check_all("headers of messages", list(chain.from_iterable(headers)), str)
    _check_all("headers of messages", [value for of in headers for value in of.values()], bytes)


def _check_notes(notes: Mapping[str, bytes | None]) -> None:
    _check_type("notes", notes, Mapping)
    _check_all("the names of notes", list(notes), str)
    if (names := "".join(notes)) != printable(names):
        raise ValueError(f"the name of a note cannot be stored: {names!r}")
    for name, note in notes.items():
        if note is not None:
            _check_type(f"note {name!r}", note, bytes)
            msgspec.json.decode(note, type=msgspec.Raw)


def _check_all(what: str, values: object, kind: type | UnionType) -> None:
    """Check the class of a sequence and those of its values, without a loop in Python."""
    _check_type(what, values, Sequence)
    assert isinstance(values, Sequence)
    for found in set(map(type, values)):
        if not issubclass(found, kind):
            raise TypeError(f"{what} contains {found.__name__}, not only {_name(kind)}")


def _check_type(what: str, value: object, kind: type | UnionType) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {type(value).__name__}, not {_name(kind)}")


def _check_number(what: str, value: object, least: int, most: int) -> None:
    if type(value) is not int:  # a bool or a number of numpy would fail where it is stored
        raise TypeError(f"{what} is {type(value).__name__}, not int")
    if not least <= value <= most:
        raise ValueError(f"{what} is {value}, not from {least} to {most}")


def _name(kind: type | UnionType) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
