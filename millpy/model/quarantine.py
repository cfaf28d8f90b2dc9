"""How a record that is set aside is written down: nothing here may itself be refused by the store."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from millpy.errors import RefusedValueError
from millpy.model.checkpoint import DeadLetter
from millpy.model.delta import refuse_unstorable

TRACEBACK_CHARACTERS_MAX = 20_000


def payload_of(record: Any) -> bytes:
    """A record as JSON; what has no JSON form, as its repr."""
    try:
        return msgspec.json.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return printable(repr(record)).encode()


def printable(text: str) -> str:
    """Text without what PostgreSQL refuses: NUL and lone surrogates, written as escapes."""
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def unstorable_keys(texts: Sequence[bytes]) -> list[int]:
    """Indexes of keys (JSON text) that could not be stored; one substring test when there are none."""
    if b"\\u" not in b"".join(texts):
        return []
    return [index for index, text in enumerate(texts) if not _is_storable(text)]


def _is_storable(text: bytes) -> bool:
    try:
        refuse_unstorable(text)
    except RefusedValueError:
        return False
    return True


def dead_letter_of(
    error: Exception,
    payload: bytes,
    *,
    stream: str,
    computation: str,
    event_time: int | None,
    key: bytes | None,
    input: int = 0,
) -> DeadLetter:
    """What user code did not survive: "refused" for a value that cannot be stored, else "user_error"."""
    trace = "".join(traceback.format_exception(error))
    return DeadLetter(
        reason="refused" if isinstance(error, RefusedValueError) else "user_error",
        detail=printable(f"{type(error).__name__}: {error}".splitlines()[0])[:1000],
        payload=payload,
        stream=stream,
        computation=computation,
        traceback=printable(trace)[-TRACEBACK_CHARACTERS_MAX:],
        event_time=event_time,
        key=key,
        input=input,
    )
