"""Values of Sparkplug metrics, by their data type (Sparkplug 3.0, section 6.4.16).

Integers are in fields without a sign, as two's complement; which of the two fields a publisher uses, and whether it
extends the sign, differs between libraries, so the lowest bits of the type count.
"""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from millpy.formats.sparkplug_schema import NOT_UTF8

_SIGNED = {1: 8, 2: 16, 3: 32, 4: 64}
_UNSIGNED = {5: 8, 6: 16, 7: 32, 8: 64}
_FLOAT, _DOUBLE, _BOOLEAN, _STRING, _DATE_TIME, _TEXT, _UUID = 9, 10, 11, 12, 13, 14, 15
_DATA_SET, _BYTES, _FILE, _TEMPLATE = 16, 17, 18, 19
_BOOLEANS, _STRINGS = 32, 33
_ARRAYS = {22: "b", 23: "h", 24: "i", 25: "q", 26: "B", 27: "H", 28: "I", 29: "Q", 30: "f", 31: "d", 34: "Q"}
_NAMES = (
    "Unknown Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float Double Boolean String DateTime Text UUID DataSet"
    " Bytes File Template PropertySet PropertySetList Int8Array Int16Array Int32Array Int64Array UInt8Array UInt16Array"
    " UInt32Array UInt64Array FloatArray DoubleArray BooleanArray StringArray DateTimeArray"
)
NAMES = tuple(_NAMES.split())
"""The names of the data types, by number."""
_INT64_MAX = 2**63 - 1
PARTS_MAX = 100_000
"""The most values of an array or DataSet."""
TEXT_BYTES_MAX = 1_000_000
"""The most bytes of a value as text."""
_DEPTH_MAX = 20
_MS_MAX = 253_402_300_799_999
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Value = tuple[float | None, int | None, str | None]
"""A value as a number, as a whole number and as text."""
NULL: Value = (None, None, None)


def is_known(datatype: int) -> bool:
    """Tell whether a metric may have a data type."""
    return 0 < datatype < len(NAMES) and datatype not in (20, 21)


def value_of(metric: Any, datatype: int) -> Value:
    """Return the value of a metric.

    Raises:
        ValueError: it is not of its data type, or cannot be stored.
    """
    if metric.is_null:
        return NULL
    field = metric.WhichOneof("value")
    if field is None:
        raise ValueError("it has no value, and does not say that it is null")
    plain = plain_of(getattr(metric, field), field, datatype)
    if isinstance(plain, bool):
        return float(plain), int(plain), None
    if isinstance(plain, int):
        return float(plain), plain if plain <= _INT64_MAX else None, str(plain) if plain > _INT64_MAX else None
    if isinstance(plain, float):
        return plain, None, None
    if isinstance(plain, datetime):
        ms = (plain - _EPOCH) // timedelta(milliseconds=1)
        return float(ms), ms, msgspec.json.encode(plain).decode().strip('"')
    text = plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
    if len(text) > TEXT_BYTES_MAX or len(text.encode()) > TEXT_BYTES_MAX:
        raise ValueError(f"its text has more than {TEXT_BYTES_MAX} bytes")
    if "\0" in text:
        raise ValueError("NUL in text")
    return None, None, text


def plain_of(value: Any, field: str, datatype: int, levels: int = _DEPTH_MAX) -> Any:
    """Return a value as a number, truth value, text or time; tables, templates and arrays as lists and dicts.

    Raises:
        ValueError: it is not of its data type, or cannot be stored.
    """
    if field in ("int_value", "long_value"):
        return _whole(value, field, datatype)
    if datatype in (_FLOAT, _DOUBLE) and field in ("float_value", "double_value"):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be stored")
        return value
    if field == "string_value":
        _text(value, "its text")
    if (datatype, field) == (_BOOLEAN, "boolean_value") or (datatype in (_STRING, _TEXT) and field == "string_value"):
        return value
    if datatype == _UUID and field == "string_value":
        return str(UUID(value))
    if datatype in (_BYTES, _FILE) and field == "bytes_value":
        return b64encode(value).decode()
    if datatype == _DATA_SET and field == "dataset_value":
        return _table(value, levels)
    if datatype == _TEMPLATE and field == "template_value":
        return _template(value, levels)
    if field == "bytes_value" and (datatype in _ARRAYS or datatype in (_BOOLEANS, _STRINGS)):
        return _array(value, datatype)
    raise ValueError(f"its {field} is no {_name(datatype)}")


def _whole(value: int, field: str, datatype: int) -> Any:
    """Return the value of an integer field."""
    if datatype in _SIGNED:
        return _signed(value, _SIGNED[datatype])
    if datatype in _UNSIGNED and not value >> _UNSIGNED[datatype]:
        return value
    if datatype == _BOOLEAN and value in (0, 1):
        return bool(value)
    if datatype == _DATE_TIME:
        return _moment(value)
    raise ValueError(
        f"{value} is no {_name(datatype)}" if datatype in _UNSIGNED else f"its {field} is no {_name(datatype)}"
    )


def _signed(value: int, bits: int) -> int:
    """Return the number of two's complement, whether or not its sign is extended to 32 or 64 bits."""
    low = value & ((1 << bits) - 1)
    number = low - (1 << bits) if low >> (bits - 1) else low
    if value != low and number & ((1 << 32) - 1) != value and number & ((1 << 64) - 1) != value:
        raise ValueError(f"{value} has more than {bits} bits")
    return number


def _moment(ms: int) -> datetime:
    if ms > _MS_MAX:
        raise ValueError(f"{ms} ms is after the year 9999")
    return _EPOCH + timedelta(milliseconds=ms)


def _text(value: Any, what: str) -> str:
    """Return a text of a message. Raises ValueError for one that is not UTF-8, which protobuf returns as bytes."""
    if not isinstance(value, str):
        raise ValueError(f"{NOT_UTF8}: {what}")
    return value


def _inside(levels: int) -> int:
    if not levels:
        raise ValueError(f"templates are nested more than {_DEPTH_MAX} deep")
    return levels - 1


def _table(table: Any, levels: int) -> dict[str, Any]:
    types = list(table.types)
    if not len(types) == len(table.columns) == table.num_of_columns:
        raise ValueError("the columns of a DataSet do not match their types and number")
    if sum(len(row.elements) for row in table.rows) > PARTS_MAX:
        raise ValueError(f"a DataSet has more than {PARTS_MAX} values")
    rows = []
    for row in table.rows:
        if len(row.elements) != len(types):
            raise ValueError("a row of a DataSet has more or fewer values than columns")
        rows.append([_element(own, kind, levels) for own, kind in zip(row.elements, types, strict=True)])
    return {
        "columns": [_text(name, "the name of a column") for name in table.columns],
        "types": [_name(kind) for kind in types],
        "rows": rows,
    }


def _element(part: Any, datatype: int, levels: int) -> Any:
    field = part.WhichOneof("value")
    return None if field is None else plain_of(getattr(part, field), field, datatype, levels)


def _template(template: Any, levels: int) -> dict[str, Any]:
    below = _inside(levels)
    metrics = [
        {
            "name": _text(metric.name, "a name in a Template"),
            "type": _name(metric.datatype),
            "value": None if metric.is_null else _element(metric, metric.datatype, below),
        }
        for metric in template.metrics
    ]
    parameters = [
        {
            "name": _text(own.name, "a name in a Template"),
            "type": _name(own.type),
            "value": _element(own, own.type, below),
        }
        for own in template.parameters
    ]
    return {
        "template": _text(template.template_ref, "the name of a Template"),
        "version": _text(template.version, "the version of a Template"),
        "is_definition": template.is_definition,
        "metrics": metrics,
        "parameters": parameters,
    }


def _array(data: bytes, datatype: int) -> Sequence[Any]:
    if datatype == _STRINGS:
        if data.count(b"\0") > PARTS_MAX:
            raise ValueError(f"an array has more than {PARTS_MAX} values")
        return [text.decode() for text in data.removesuffix(b"\0").split(b"\0")] if data else []
    if datatype == _BOOLEANS:
        if len(data) < 4 or len(data) - 4 != (struct.unpack_from("<I", data)[0] + 7) // 8:
            raise ValueError("a BooleanArray has another length than it says")
        count = struct.unpack_from("<I", data)[0]
        if count > PARTS_MAX:
            raise ValueError(f"an array has more than {PARTS_MAX} values")
        return [bool(data[4 + place // 8] >> (7 - place % 8) & 1) for place in range(count)]
    code = _ARRAYS[datatype]
    size = struct.calcsize(f"<{code}")
    if len(data) % size:
        raise ValueError(f"{len(data)} bytes are no {NAMES[datatype]}")
    if len(data) // size > PARTS_MAX:
        raise ValueError(f"an array has more than {PARTS_MAX} values")
    found = list(struct.unpack(f"<{len(data) // size}{code}", data))
    if code in "fd":
        if not all(map(math.isfinite, found)):
            raise ValueError("an array with NaN or an infinity cannot be stored")
    return [_moment(ms) for ms in found] if datatype == 34 else found


def _name(datatype: int) -> str:
    return NAMES[datatype] if 0 <= datatype < len(NAMES) else str(datatype)
