"""JSON as the commands and the API give it: RFC 8259, in ASCII, and with the forms that records have in JSON.

Instants are RFC 3339 in UTC (`2026-11-20T08:00:00Z`), durations ISO 8601 (`PT5400S`), bytes base64, decimals numbers
with all their digits. NaN and the infinities, which JSON lacks, are text, as PostgreSQL prints them in `jsonb`; so are
the instants `infinity` and `-infinity`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from millpy.admin.loaders import TimeText

_ENCODER = msgspec.json.Encoder(decimal_format="number")
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_INTEGER_MAX = 2**63


def json_text(value: object, *, indent: int = 2) -> str:
    """Return a value as JSON; on one line if `indent` is zero."""
    encoded = msgspec.json.format(_ENCODER.encode(json_safe(value)), indent=indent).decode()
    return _FOREIGN.sub(lambda found: json.dumps(found[0])[1:-1], encoded)  # only texts hold such characters


def json_safe(value: object) -> Any:
    """Return a value as lists, dicts, texts, numbers, bools and None; numbers may be decimals."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return int(value) if -_INTEGER_MAX <= value < _INTEGER_MAX else Decimal(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _not_finite(value)  # float: of numpy, too
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, Mapping):
        return {_text(str(name)): json_safe(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(inner) for inner in value]
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta | bytes | bytearray | memoryview):
        return msgspec.to_builtins(value)  # ISO 8601, base64
    return _text(str(value))


def _decimal(value: Decimal) -> Any:
    if not value.is_finite():
        return _not_finite(value)
    if value == value.to_integral_value():
        return json_safe(int(value))
    return value


def _not_finite(value: float | Decimal) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _instant(value: datetime) -> str:
    """Return RFC 3339 in UTC. A time without a zone has none in JSON, either."""
    if value.tzinfo is None:
        return value.isoformat()
    return value.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


def _text(value: str) -> str:
    """Return text that UTF-8 can carry."""
    if isinstance(value, TimeText):
        return value.rfc3339()
    return value.encode(errors="backslashreplace").decode()
