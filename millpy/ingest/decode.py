"""Decoding of a batch of payloads to records. A payload that does not decode becomes a dead letter.

The record class decides which payloads are valid: a record is accepted if msgspec accepts it *and* it can be stored (no
NUL in text, no number beyond int64, no NaN or infinity, no naive datetime). Large batches take the columnar path, which
either agrees with the slow one about a whole block or declines it. A declined block is cut into pieces, so that one bad
record slows down a few thousand others and not the whole batch.
"""

from __future__ import annotations

import csv
import enum
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.formats.byte_order_marks import without_mark
from millpy.formats.values import whole_text
from millpy.ingest.arrow_columns import TableColumns, long_rows, row_of, row_text
from millpy.ingest.local_times import LocalTimeCounts, TimeFormatError, TimeReader
from millpy.ingest.payload_column import PayloadColumn
from millpy.ingest.protocol import RejectedRow, SourceBatch
from millpy.ingest.rejections import NO_ZONE, Explainer, shown
from millpy.ingest.text_columns import PARSED, CsvColumns, JsonColumns, fields_of, is_utf8, takes
from millpy.limits import RECORD_BYTES_MAX
from millpy.model.field_types import JSON_DEPTH_MAX, decimal_problem, decimal_text
from millpy.model.record import SMALL_RECORDS_MAX, RecordType, column_of, getter, without_none
from millpy.model.step_progress import is_user_error

# `record_bytes_max` bounds fields; the columnar reader has no limit of its own either.
csv.field_size_limit(2**31 - 1)

PIECE_RECORDS = 4_096
_INT64 = range(-(2**63), 2**63)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SHORT_OFFSET = re.compile(r"[^ Tt]{10}[ Tt][0-9:.]{8,}[+-][0-9]{2}")
_SHORT_OFFSETS = re.compile(rb':[0-9.]{2,}[+-][0-9]{2}"')
_PLAIN = (str, int, float, bool, datetime)
_LONG_NUMBER_OR_TEXT = re.compile(rb'"(?:(?>[^"\\]+|\\.))*+"|-?[0-9][0-9.]{15,}(?:[eE][-+]?[0-9]+)?')
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _UnstorableError(ValueError):
    """A value that the record class permits, and the store does not."""


@dataclass(slots=True)
class DecodeResult:
    """The accepted and the rejected rows of a batch.

    Attributes:
        rows: the row of each accepted record in the source batch, int64, ascending.
        batch, objects: the accepted records, in one of the two forms.
        refused: the rejected rows, ascending.
        payload: returns the bytes of a row, for its dead letter.
    """

    rows: npt.NDArray[np.int64]
    payload: Callable[[int], bytes]
    batch: pa.RecordBatch | None = None
    objects: list[Any] | None = None
    refused: list[RejectedRow] = field(default_factory=list)

    def value(self, index: int, name: str) -> Any:
        """Return the value of a field of an accepted record; of a time that Python cannot hold, its Arrow scalar."""
        if self.objects is not None:
            return getter(name)(self.objects[index])
        assert self.batch is not None
        found = column_of(self.batch, name)[index]
        try:
            return found.as_py()
        except (ValueError, OverflowError):
            return found


class Decoder:
    """Decodes batches of one stream.

    Args:
        record_type: the stream's type.
        time_field: the event-time field; a naive datetime there has the reason "event_time".
        lax: the fields whose numbers and booleans may be written as text in JSON.
        times: reads the text of that field, if it has a format or a zone; counts local times that are not unique.
        record_bytes_max: longer payloads are dead-lettered unread, with the reason "oversize".
    """

    def __init__(
        self,
        record_type: RecordType,
        *,
        time_field: str = "",
        times: TimeReader | None = None,
        lax: Sequence[str] = (),
        record_bytes_max: int = RECORD_BYTES_MAX,
    ) -> None:
        self._type = record_type
        self._record_bytes_max = record_bytes_max
        self._takes_columns = takes(record_type)
        self._times = times
        self._readers = {} if times is None else {time_field: times}
        self._json = JsonColumns(record_type, self._readers) if self._takes_columns else None
        as_text = frozenset(name for name in lax if record_type.field_type(name) in PARSED)
        self._json_text = JsonColumns(record_type, self._readers, as_text) if self._takes_columns and as_text else None
        self._csv: dict[tuple[str, ...], CsvColumns] = {}
        self._table = TableColumns(record_type, self._readers)
        self._one = _OneByOne(record_type, time_field, times, lax)

    def decode(self, taken: SourceBatch) -> DecodeResult:
        """Decode every record of the batch. Blank lines of a file are not records."""
        if taken.batch is not None:
            return self._rows(taken, taken.batch)
        if taken.block:
            block = taken.block.removesuffix(b"\n")
            count = block.count(b"\n") + 1
            if count > SMALL_RECORDS_MAX and not _has_long_line(block, self._record_bytes_max):
                batch = self._columns(taken, block, count)
                if batch is not None:
                    return DecodeResult(np.arange(count), _line_of(taken.block), batch=batch)
            lines: Sequence[bytes] = block.split(b"\n")
            skip = [not line.strip() for line in lines]
        else:
            lines, skip = taken.payloads, []
        return self._lines(taken, lines, skip if any(skip) else [])

    def _rows(self, taken: SourceBatch, batch: pa.RecordBatch) -> DecodeResult:
        """Decode rows that arrived as columns, all at once or one by one."""
        rows = np.arange(len(batch))
        long = long_rows(batch, self._record_bytes_max)
        typed = self._counted(lambda: self._table.columns(batch)) if not long else None
        if typed is not None:
            return DecodeResult(rows, lambda row: row_text(batch, row), batch=typed)
        refused = [RejectedRow(row, "oversize", f"a value of more than {self._record_bytes_max} bytes") for row in long]
        decoded = DecodeResult(np.delete(rows, long), lambda row: row_text(batch, row), objects=[], refused=refused)
        return self._sorted(self._one_by_one(taken, decoded))

    def _columns(self, taken: SourceBatch, block: bytes, count: int) -> pa.RecordBatch | None:
        if not self._takes_columns:
            return None
        if taken.format == "json":
            reader: JsonColumns | CsvColumns | None = self._json
        else:
            header = tuple(taken.header)
            if header not in self._csv:
                self._csv[header] = CsvColumns(self._type, header, self._readers)
            reader = self._csv[header]
        assert reader is not None
        batch = self._counted(lambda: reader.columns(block, count))
        texts = self._json_text
        if batch is not None or texts is None or taken.format != "json":
            return batch
        return self._counted(lambda: texts.columns(block, count))

    def _counted(self, read: Callable[[], pa.RecordBatch | None]) -> pa.RecordBatch | None:
        """Read columns. What is declined counts no local times, because it is read again one by one."""
        before = None if self._times is None else self._times.counts.copy()
        batch = read()
        if batch is None and before is not None and self._times is not None:
            self._times.counts = before
        return batch

    def _lines(self, taken: SourceBatch, lines: Sequence[bytes], skip: Sequence[bool]) -> DecodeResult:
        refused = list(taken.refused)
        if _longest(lines) > self._record_bytes_max:
            known = {rejected.row for rejected in refused}
            long = [row for row, line in enumerate(lines) if len(line) > self._record_bytes_max and row not in known]
            refused += [RejectedRow(row, "oversize", self._too_long(lines[row])) for row in long]
        rows = np.arange(len(lines))
        if skip or refused:
            passed = np.array(skip or [False] * len(lines))
            passed[[r.row for r in refused]] = True
            rows = np.flatnonzero(~passed)
        decoded = DecodeResult(rows, lines.__getitem__, objects=[], refused=refused)
        if len(rows) <= SMALL_RECORDS_MAX or not self._takes_columns:
            return self._sorted(self._one_by_one(taken, decoded))
        if not taken.block:  # `decode` has already tried a block as a whole
            whole = self._piece(taken, lines if len(rows) == len(lines) else [lines[row] for row in rows.tolist()])
            if whole is not None:
                decoded.batch, decoded.objects = whole, None
                return decoded
        return self._sorted(self._in_pieces(taken, decoded))

    def _one_by_one(self, taken: SourceBatch, decoded: DecodeResult) -> DecodeResult:
        decoded.rows, decoded.objects = self._one.decode(taken, decoded.rows, decoded.payload, decoded.refused)
        return decoded

    def _in_pieces(self, taken: SourceBatch, decoded: DecodeResult) -> DecodeResult:
        batches, kept = [], []
        for start in range(0, len(decoded.rows), PIECE_RECORDS):
            rows = decoded.rows[start : start + PIECE_RECORDS]
            batch = self._piece(taken, [decoded.payload(row) for row in rows.tolist()])
            if batch is None:
                rows, objects = self._one.decode(taken, rows, decoded.payload, decoded.refused)
                batch = self._type.batch_of(objects)
            batches.append(batch)
            kept.append(rows)
        decoded.rows, decoded.objects = np.concatenate(kept), None
        decoded.batch = pa.concat_batches(batches)
        return decoded

    def _piece(self, taken: SourceBatch, lines: Sequence[bytes]) -> pa.RecordBatch | None:
        block = lines.lines() if isinstance(lines, PayloadColumn) else b"\n".join(lines)
        return self._columns(taken, block, len(lines))

    @staticmethod
    def _sorted(decoded: DecodeResult) -> DecodeResult:
        decoded.refused.sort(key=lambda refused: refused.row)
        return decoded

    def _too_long(self, line: bytes) -> str:
        return f"{len(line)} bytes or more, above the limit of {self._record_bytes_max}"


def _longest(lines: Sequence[bytes]) -> int:
    if isinstance(lines, PayloadColumn):
        return int(lines.sizes().max(initial=0))
    return max(map(len, lines), default=0)


def _has_long_line(block: bytes, bytes_max: int) -> bool:
    """Tell whether a line is longer than `bytes_max`. The search skips backwards to newlines and reads few bytes."""
    start = 0
    while len(block) - start > bytes_max:
        newline = block.rfind(b"\n", start, start + bytes_max + 1)
        if newline < 0:
            return True
        start = newline + 1
    return False


def _line_of(block: bytes) -> Callable[[int], bytes]:
    """Return a function from a row to its line. The block is split once, at the first call."""
    lines: list[bytes] = []

    def line(row: int) -> bytes:
        if not lines:
            lines.extend(block.split(b"\n"))
        return lines[row]

    return line


class _OneByOne:
    """The slow path, which defines the result of the fast one."""

    def __init__(
        self, record_type: RecordType, time_field: str, times: TimeReader | None = None, lax: Sequence[str] = ()
    ) -> None:
        self._type = record_type
        self._lax = [name for name in lax if record_type.field_type(name) not in (str, datetime)]
        self._lax_json = {n: msgspec.json.Decoder(record_type.annotations[n], strict=False) for n in self._lax}
        self._keeps_digits = _contains("DecimalType", record_type.struct) or any(
            _contains("IntType", record_type.annotations[name]) for name in self._lax
        )
        self._times = times
        self._json = msgspec.json.Decoder(record_type.struct)
        self._fields = fields_of(record_type)
        self._time_field = time_field
        self._explainer = Explainer(record_type, time_field)
        self._time_name = "" if times is None else self._fields[time_field].encode_name
        self._whole_numbers = self._named(int)
        self._moments = self._named(datetime)
        names = b"|".join(re.escape(msgspec.json.encode(name)) for name in self._moments)
        self._short_times = re.compile(rb'((?:%b)\s*:\s*"[^ Tt"]{10}[ Tt][0-9:.]{8,}[+-][0-9]{2})"' % names)
        # Hooks and default factories of a record class are user code and may raise anything.
        made = any(f.default_factory not in _PLAIN_FACTORIES for f in msgspec.structs.fields(record_type.struct))
        self._refusals: tuple[type[BaseException], ...] = (
            (BaseException,)
            if made or hasattr(record_type.struct, "__post_init__")
            else (msgspec.DecodeError, RecursionError, ValueError, OverflowError, csv.Error)
        )
        self._checks = [
            (name, _PLAIN_CHECKS.get(without_none(record_type.annotations[name])[0], _check_nested))
            for name in record_type.fields
            if without_none(record_type.annotations[name])[0] is not bool
        ]

    def _named(self, kind: type) -> list[str]:
        """Return the encoded names of the fields of a type."""
        return [info.encode_name for name, info in self._fields.items() if self._type.field_type(name) is kind]

    def decode(
        self, taken: SourceBatch, rows: npt.NDArray[np.int64], payload: Callable[[int], Any], refused: list[RejectedRow]
    ) -> tuple[npt.NDArray[np.int64], list[Any]]:
        """Return the accepted rows and their records. Append the other rows to `refused`."""
        read: Callable[[Any], Any] = self._from_json
        if (batch := taken.batch) is not None:
            payload = lambda row: self._with_whole_numbers(row_of(batch, row))  # noqa: E731
            read = lambda values: msgspec.convert(self._prepared(values), self._type.struct)  # noqa: E731
        elif taken.format == "csv":
            header = list(taken.header)
            read = lambda line: self._from_csv(header, line)  # noqa: E731
        kept, objects = [], []
        for row in rows.tolist():
            before = None if self._times is None else self._times.counts.copy()
            try:
                record = read(payload(row))
            except TimeFormatError as error:
                refused.append(RejectedRow(row, "event_time", f"{self._time_field}: {error}"))
                continue
            except _UnstorableError as error:
                self._restore(before)
                refused.append(RejectedRow(row, "refused", str(error)))
                continue
            except self._refusals as error:
                if not is_user_error(error):
                    raise
                self._restore(before)
                text = payload(row) if taken.batch is None else None  # a row of columns may not be convertible
                refused.append(RejectedRow(row, "undecodable", self._explainer.explain(error, text)))
                continue
            problem = self._problem(record)
            if problem is not None:
                self._restore(before)
                refused.append(RejectedRow(row, *problem))
                continue
            kept.append(row)
            objects.append(record)
        return np.array(kept, np.int64), objects

    def _from_json(self, payload: bytes) -> Any:
        if payload[:1] != b"{":
            payload = without_mark(payload)
        if not is_utf8(payload):  # msgspec does not check the text that it skips
            raise ValueError("payload is not valid UTF-8")
        if self._times is not None or self._lax:
            return self._prepared_json(payload)
        try:
            return self._json.decode(payload)
        except msgspec.ValidationError:
            if not self._moments or not _SHORT_OFFSETS.search(payload):
                raise
        # A name that comes twice has to be valid twice, which a dict does not show.
        found = self._json.decode(self._short_times.sub(rb'\1:00"', payload))
        if self._type.flat:  # no other value can have the name of such a field
            return found
        return self._prepared_json(payload)

    def _prepared_json(self, payload: bytes) -> Any:
        """Read a record some of whose fields have rules of their own.

        A plain value of a number would be a double, so all others stay text where that would lose digits.
        """
        if not self._keeps_digits:
            return msgspec.convert(self._prepared(msgspec.json.decode(payload)), self._type.struct)
        if payload.lstrip()[:1] != b"{":
            return self._json.decode(payload)
        members = _MEMBERS.decode(payload)
        for name in self._lax:
            alias = self._fields[name].encode_name
            text = bytes(members.get(alias, b"null")).strip()
            if text != b"null":
                members[alias] = msgspec.Raw(msgspec.json.encode(self._lenient_json(name, text)))
        for name in self._moments:
            text = bytes(members.get(name, b"null")).strip()
            if text.startswith(b'"'):
                timed = self._timed({name: msgspec.json.decode(text)})
                members[name] = msgspec.Raw(msgspec.json.encode(timed[name]))
        return self._json.decode(msgspec.json.encode(members))

    def _lenient_json(self, name: str, text: bytes) -> Any:
        """Convert the JSON value of a lax field, a number with all its digits."""
        try:
            if text.startswith(b'"'):
                found = self._lenient(name, msgspec.json.decode(text))
            else:
                found = self._lax_json[name].decode(self._with_exact_integers(name, text))
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}: {shown(msgspec.json.decode(text))}") from None
        problem = None if found is None else _check_nested(found)
        if problem is not None:
            raise _UnstorableError(f"{name}: {problem}")
        return found

    def _with_exact_integers(self, name: str, text: bytes) -> bytes:
        """Write whole numbers that a double could round without their fraction: msgspec reads `12.0` as a double."""
        if self._type.field_type(name) is int:
            return whole_text(text)
        if text[:1] not in b"[{":
            return text
        return _LONG_NUMBER_OR_TEXT.sub(lambda found: found[0] if found[0][:1] == b'"' else whole_text(found[0]), text)

    def _prepared(self, values: Any) -> Any:
        """Read the event time and the lax fields of a record's plain values."""
        if isinstance(values, dict):
            for name in self._lax:
                alias = self._fields[name].encode_name
                if values.get(alias) is not None:
                    values[alias] = self._lenient(name, values[alias])
        return self._timed(values)

    def _lenient(self, name: str, value: Any) -> Any:
        """Convert the value of a lax field as a cell of CSV is: by the rules of msgspec with `strict=False`."""
        if isinstance(value, str):
            if value == "" and self._type.is_nullable(name):
                return None
            if self._type.field_type(name) is int:
                value = _whole_number(value)
        try:
            return msgspec.convert(value, self._type.annotations[name], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}: {shown(value)}") from None

    def _timed(self, values: Any) -> Any:
        """Read the event time of a record's plain values by its format and zone; write times with minutes of offset."""
        if isinstance(values, dict):
            for name in self._moments:
                text = values.get(name)
                if isinstance(text, str) and name != self._time_name and _SHORT_OFFSET.fullmatch(text):
                    values[name] = f"{text}:00"
        if self._times is not None and isinstance(values, dict) and self._time_name in values:
            values[self._time_name] = self._times.read(values[self._time_name])
        return values

    def _restore(self, counts: LocalTimeCounts | None) -> None:
        """Take back what a rejected record has counted."""
        if self._times is not None and counts is not None:
            self._times.counts = counts

    def _with_whole_numbers(self, values: dict[str, Any]) -> dict[str, Any]:
        """Convert whole doubles and decimals to integers in the integer fields of a row of columns."""
        for name in self._whole_numbers:
            value = values.get(name)
            if isinstance(value, Decimal) and value == value.to_integral_value():
                values[name] = int(value)
            elif isinstance(value, float) and value.is_integer():
                values[name] = int(value)
        return values

    def _from_csv(self, header: list[str], line: bytes) -> Any:
        text = line.removesuffix(b"\r").decode()
        cells = next(csv.reader([text], strict=True))
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} fields instead of {len(header)}")
        values: dict[str, Any] = dict(zip(header, cells, strict=True))
        for name, info in self._fields.items():
            if values.get(info.encode_name) != "":
                continue
            if self._type.is_nullable(name):
                values[info.encode_name] = None
            elif self._type.field_type(name) is not str and not info.required:
                del values[info.encode_name]
        # msgspec would convert numbers by way of a double, and read any number as seconds since the epoch.
        for name in self._whole_numbers:
            if cell := values.get(name):
                values[name] = _whole_number(cell)
        self._timed(values)
        for name in self._moments:
            cell = values.get(name)
            if isinstance(cell, datetime):
                continue
            if cell and ":" not in cell and _NUMBER.fullmatch(cell):
                raise ValueError(f"{name}: {cell[:50]} is not a time; a number needs an int field and unit=")
        return msgspec.convert(values, self._type.struct, strict=False)

    def _problem(self, record: Any) -> tuple[str, str] | None:
        """Return the reason and detail why a valid record cannot be stored, or None."""
        misfit = self._type.misfit(record)
        if misfit is not None:
            return "refused", misfit
        for name, check in self._checks:
            value = getattr(record, name)
            if value is None:
                continue
            if isinstance(value, datetime) and value.tzinfo is not UTC:
                moved = _in_utc(value)
                if moved is None:
                    return (
                        "event_time" if name == self._time_field else "refused"
                    ), f"{name}: {_moment_problem(value)}"
                msgspec.structs.force_setattr(record, name, moved)
                continue
            problem = check(value)
            if problem is not None:
                return "refused", f"{name}: {problem}"
            if type(value) is Decimal:  # written in one way, so that a record does not depend on how it was decoded
                msgspec.structs.force_setattr(record, name, Decimal(decimal_text(value)))
        return None


def _contains(kind: str, annotation: Any) -> bool:
    """Tell whether a type has one of msgspec's kinds of types in it."""
    return kind in repr(msgspec.inspect.type_info(annotation))


def _whole_number(cell: str) -> str:
    """Write a whole number without fraction and exponent, exactly; return other text unchanged.

    Raises:
        ValueError: the number is not whole, or exceeds 64 bits.
    """
    if not ("." in cell or "e" in cell or "E" in cell) or not _NUMBER.fullmatch(cell):
        return cell
    whole = whole_text(cell.encode()).decode()
    if not whole.lstrip("-").isdigit():
        raise ValueError(f"{cell[:50]} is not a 64-bit whole number")
    return whole


def _in_utc(moment: datetime) -> datetime | None:
    """Return the same instant in UTC, so that a record does not depend on how it was decoded."""
    if moment.tzinfo is None:
        return None
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return None


def _moment_problem(moment: datetime) -> str:
    return NO_ZONE if moment.tzinfo is None else "outside the years 1 to 9999 in UTC"


def _check_text(value: str) -> str | None:
    return "NUL in text" if "\0" in value else None


def _check_int(value: int) -> str | None:
    return None if value in _INT64 else "exceeds 64 bits"


def _check_float(value: float) -> str | None:
    return None if math.isfinite(value) else f"{value} cannot be stored"


def _check_nothing(value: object) -> str | None:
    return None


def _check_nested(value: Any, levels: int = JSON_DEPTH_MAX) -> str | None:
    """Check a value recursively, through structs, lists and dicts."""
    if isinstance(value, enum.Enum):
        return None
    if isinstance(value, Decimal):
        return decimal_problem(value)
    if isinstance(value, datetime):
        return None if _in_utc(value) is not None else _moment_problem(value)
    if isinstance(value, _PLAIN):
        return _PLAIN_CHECKS[type(value)](value)
    members: list[Any] = []
    if isinstance(value, msgspec.Struct):
        members = [getattr(value, name) for name in value.__struct_fields__]
    elif isinstance(value, dict):
        members = [*value.keys(), *value.values()]
    elif isinstance(value, list):
        members = value
    if members and not levels:
        return f"nested more than {JSON_DEPTH_MAX} deep"
    return next((p for member in members if (p := _check_nested(member, levels - 1)) is not None), None)


_PLAIN_FACTORIES = (msgspec.NODEFAULT, list, dict, set)
_PLAIN_CHECKS: dict[Any, Callable[[Any], str | None]] = {
    str: _check_text,
    int: _check_int,
    float: _check_float,
    bool: _check_nothing,
    datetime: _check_nothing,
    date: _check_nothing,
    Decimal: decimal_problem,
}
