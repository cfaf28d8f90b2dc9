"""Bytes of a whole batch to records; what does not decode is set aside.

The typed class decides what is valid: a record is accepted when msgspec accepts it *and* it can be stored (no NUL in
text, no number beyond int64, no NaN or infinity, no naive datetime). Large batches go through `columns`, which says
the same about whole blocks or nothing at all; a block that it turns away is cut into pieces, so that one bad record
costs a few thousand others their columns, not all.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.injectors.columns import CsvColumns, JsonColumns, fields_of, is_utf8, takes
from millpy.injectors.protocol import Refused, Taken
from millpy.injectors.tables import TableColumns, long_rows, row_of, row_text
from millpy.limits import RECORD_BYTES_MAX
from millpy.model.quarantine import error_text
from millpy.model.record import SMALL_RECORDS_MAX, RecordType, without_none
from millpy.model.step_progress import is_users

# How long a field may be is ours to say (`record_bytes_max`); the columnar reader knows no such bound either.
csv.field_size_limit(2**31 - 1)

PIECE_RECORDS = 4_096
_INT64 = range(-(2**63), 2**63)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PLAIN = (str, int, float, bool, datetime)


@dataclass(slots=True)
class Decoded:
    """What became of a batch.

    Attributes:
        rows: int64, the row of each accepted record in what was taken, ascending.
        batch, objects: the accepted records, as one of the two.
        refused: the rows that are none, ascending.
        payload: bytes of a row, for dead letters.
    """

    rows: npt.NDArray[np.int64]
    payload: Callable[[int], bytes]
    batch: pa.RecordBatch | None = None
    objects: list[Any] | None = None
    refused: list[Refused] = field(default_factory=list)


class Decoder:
    """Decodes batches of one stream.

    Args:
        record_type: the stream's type.
        time_field: the event-time field; a naive datetime there has the reason "event_time".
        record_bytes_max: longer payloads are refused unread, with the reason "oversize".
    """

    def __init__(
        self, record_type: RecordType, *, time_field: str = "", record_bytes_max: int = RECORD_BYTES_MAX
    ) -> None:
        self._type = record_type
        self._record_bytes_max = record_bytes_max
        self._takes_columns = takes(record_type)
        self._json = JsonColumns(record_type) if self._takes_columns else None
        self._csv: dict[tuple[str, ...], CsvColumns] = {}
        self._table = TableColumns(record_type)
        self._one = _OneByOne(record_type, time_field)

    def decode(self, taken: Taken) -> Decoded:
        """Every record of the batch, accepted or refused; blank lines of a file are none."""
        if taken.batch is not None:
            return self._rows(taken, taken.batch)
        if taken.block:
            count = taken.block.count(b"\n") + (not taken.block.endswith(b"\n"))
            if count > SMALL_RECORDS_MAX and not _has_long_line(taken.block, self._record_bytes_max):
                batch = self._columns(taken, taken.block, count)
                if batch is not None:
                    return Decoded(np.arange(count), _line_of(taken.block), batch=batch)
            lines: Sequence[bytes] = taken.block.removesuffix(b"\n").split(b"\n")
            skip = [not line.strip() for line in lines]
        else:
            lines, skip = taken.payloads, []
        return self._lines(taken, lines, skip if any(skip) else [])

    def _rows(self, taken: Taken, batch: pa.RecordBatch) -> Decoded:
        """Rows that came as columns: all of them at once, or one by one."""
        rows = np.arange(len(batch))
        long = long_rows(batch, self._record_bytes_max)
        typed = self._table.columns(batch) if not long else None
        if typed is not None:
            return Decoded(rows, lambda row: row_text(batch, row), batch=typed)
        refused = [Refused(row, "oversize", f"a value of more than {self._record_bytes_max} bytes") for row in long]
        decoded = Decoded(np.delete(rows, long), lambda row: row_text(batch, row), objects=[], refused=refused)
        return self._sorted(self._one_by_one(taken, decoded))

    def _columns(self, taken: Taken, block: bytes, count: int) -> pa.RecordBatch | None:
        if not self._takes_columns:
            return None
        if taken.format == "json":
            assert self._json is not None
            return self._json.columns(block, count)
        header = tuple(taken.header)
        if header not in self._csv:
            self._csv[header] = CsvColumns(self._type, header)
        return self._csv[header].columns(block, count)

    def _lines(self, taken: Taken, lines: Sequence[bytes], skip: Sequence[bool]) -> Decoded:
        long = [len(line) > self._record_bytes_max for line in lines]
        refused = [Refused(row, "oversize", self._too_long(lines[row])) for row, is_long in enumerate(long) if is_long]
        refused.extend(taken.refused)
        rows = np.arange(len(lines))
        if skip or refused:
            passed = np.array(skip or [False] * len(lines))
            passed[[r.row for r in refused]] = True
            rows = np.flatnonzero(~passed)
        decoded = Decoded(rows, lines.__getitem__, objects=[], refused=refused)
        if len(rows) <= SMALL_RECORDS_MAX or not self._takes_columns:
            return self._sorted(self._one_by_one(taken, decoded))
        if not taken.block:  # a block as a whole was turned away before
            whole = self._piece(taken, [lines[row] for row in rows.tolist()])
            if whole is not None:
                decoded.batch, decoded.objects = whole, None
                return decoded
        return self._sorted(self._in_pieces(taken, decoded))

    def _one_by_one(self, taken: Taken, decoded: Decoded) -> Decoded:
        decoded.rows, decoded.objects = self._one.decode(taken, decoded.rows, decoded.payload, decoded.refused)
        return decoded

    def _in_pieces(self, taken: Taken, decoded: Decoded) -> Decoded:
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

    def _piece(self, taken: Taken, lines: list[bytes]) -> pa.RecordBatch | None:
        block = b"\n".join(lines)
        if block.count(b"\n") != len(lines) - 1 or len(block) == 0:
            return None
        return self._columns(taken, block, len(lines))

    @staticmethod
    def _sorted(decoded: Decoded) -> Decoded:
        decoded.refused.sort(key=lambda refused: refused.row)
        return decoded

    def _too_long(self, line: bytes) -> str:
        return f"{len(line)} bytes or more; at most {self._record_bytes_max} are taken"


def _has_long_line(block: bytes, bytes_max: int) -> bool:
    """Whether a line is longer than that; hops from newline to newline, so it looks at few bytes."""
    start = 0
    while len(block) - start > bytes_max:
        newline = block.rfind(b"\n", start, start + bytes_max + 1)
        if newline < 0:
            return True
        start = newline + 1
    return False


def _line_of(block: bytes) -> Callable[[int], bytes]:
    """Row -> its line; cut once, and only if somebody asks."""
    lines: list[bytes] = []

    def line(row: int) -> bytes:
        if not lines:
            lines.extend(block.split(b"\n"))
        return lines[row]

    return line


class _OneByOne:
    """The slow path, which is the meaning of the fast one."""

    def __init__(self, record_type: RecordType, time_field: str) -> None:
        self._type = record_type
        self._json = msgspec.json.Decoder(record_type.struct)
        self._fields = fields_of(record_type)
        self._time_field = time_field
        self._whole_numbers = self._named(int)
        self._moments = self._named(datetime)
        # Hooks of a record class and what makes its defaults are user code and may raise anything.
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
        """What the fields of a type are called outside."""
        return [info.encode_name for name, info in self._fields.items() if self._type.field_type(name) is kind]

    def decode(
        self, taken: Taken, rows: npt.NDArray[np.int64], payload: Callable[[int], Any], refused: list[Refused]
    ) -> tuple[npt.NDArray[np.int64], list[Any]]:
        """The rows that are records, and the records; appends the others to `refused`."""
        read: Callable[[Any], Any] = self._from_json
        if (batch := taken.batch) is not None:
            payload = lambda row: self._with_whole_numbers(row_of(batch, row))  # noqa: E731
            read = lambda values: msgspec.convert(values, self._type.struct)  # noqa: E731
        elif taken.format == "csv":
            header = list(taken.header)
            read = lambda line: self._from_csv(header, line)  # noqa: E731
        kept, objects = [], []
        for row in rows.tolist():
            try:
                record = read(payload(row))
            except self._refusals as error:
                if not is_users(error):
                    raise
                refused.append(Refused(row, "undecodable", error_text(error)))
                continue
            problem = self._problem(record)
            if problem is not None:
                refused.append(Refused(row, *problem))
                continue
            kept.append(row)
            objects.append(record)
        return np.array(kept, np.int64), objects

    def _from_json(self, payload: bytes) -> Any:
        if not is_utf8(payload):  # msgspec does not look at what it passes over
            raise ValueError("bytes that are no UTF-8")
        return self._json.decode(payload)

    def _with_whole_numbers(self, values: dict[str, Any]) -> dict[str, Any]:
        """A row of columns, with doubles that are whole as whole numbers where these are wanted."""
        for name in self._whole_numbers:
            value = values.get(name)
            if isinstance(value, float) and value.is_integer():
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
        # msgspec would take numbers through a double, and any number for seconds since the epoch.
        for name in self._whole_numbers:
            if cell := values.get(name):
                values[name] = _whole_number(cell)
        for name in self._moments:
            cell = values.get(name)
            if cell and ":" not in cell and _NUMBER.fullmatch(cell):
                raise ValueError(f"{name}: {cell[:50]} is no time; a number needs an int field and EventTime(unit=...)")
        return msgspec.convert(values, self._type.struct, strict=False)

    def _problem(self, record: Any) -> tuple[str, str] | None:
        """Why a valid record cannot be stored: reason and detail."""
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
        return None


def _whole_number(cell: str) -> str:
    """A number with a fraction or exponent without them, digit by digit; other text as it is. Raises ValueError."""
    if not ("." in cell or "e" in cell or "E" in cell) or not _NUMBER.fullmatch(cell):
        return cell
    try:
        number = Decimal(cell)
        if not number:
            return "0"
        if number.adjusted() <= 18 and number == number.to_integral_value():
            return str(int(number))
    except InvalidOperation:
        pass
    raise ValueError(f"{cell[:50]} is no whole number of 64 bits")


def _in_utc(moment: datetime) -> datetime | None:
    """The same instant in UTC, so that a record does not depend on how it was decoded."""
    if moment.tzinfo is None:
        return None
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return None


def _moment_problem(moment: datetime) -> str:
    return (
        "a datetime without a zone names no instant"
        if moment.tzinfo is None
        else "outside of the years 1 to 9999 in UTC"
    )


def _check_text(value: str) -> str | None:
    return "NUL in text" if "\0" in value else None


def _check_int(value: int) -> str | None:
    return None if value in _INT64 else "beyond 64 bits"


def _check_float(value: float) -> str | None:
    return None if math.isfinite(value) else f"{value} is not a number that can be stored"


def _check_nothing(value: object) -> str | None:
    return None


def _check_nested(value: Any) -> str | None:
    """Check a value of structs, lists and dicts through and through."""
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
    return next((problem for problem in map(_check_nested, members) if problem is not None), None)


_PLAIN_FACTORIES = (msgspec.NODEFAULT, list, dict, set)
_PLAIN_CHECKS: dict[Any, Callable[[Any], str | None]] = {
    str: _check_text,
    int: _check_int,
    float: _check_float,
    bool: _check_nothing,
    datetime: _check_nothing,
}
