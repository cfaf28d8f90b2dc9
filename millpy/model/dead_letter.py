"""Dead letters in a form that the database accepts, whatever the record or the error contains."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from millpy.errors import RefusedValueError
from millpy.limits import KEY_BYTES_MAX
from millpy.model.checkpoint import DeadLetter
from millpy.model.delta import refuse_unstorable, with_one_zero
from millpy.model.step_progress import is_user_error

TRACEBACK_CHARACTERS_MAX = 20_000
MESSAGE_CHARACTERS_MAX = 5_000
_CAUSES_MAX = 100
# The originals: a user's class may override them.
_class_name = type.__dict__["__name__"].__get__
_traceback = BaseException.__dict__["__traceback__"].__get__


def payload_of(record: Any) -> bytes:
    """Encode a record as JSON like stored values, without negative zeros; as its repr if JSON cannot hold it."""
    try:
        return with_one_zero(msgspec.json.encode(record))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return printable(_text_of(repr, record)).encode()


def error_text(error: BaseException) -> str:
    """Return the class of an error and the first MESSAGE_CHARACTERS_MAX characters of its message."""
    return f"{_name_of(error)}: {_text_of(str, error)[:MESSAGE_CHARACTERS_MAX]}"


def _name_of(value: object) -> str:
    """Return the name of a value's class, even if the class overrides `__name__`."""
    name: str = _class_name(type(value))
    return name


def _trace_of(error: BaseException) -> str:
    """Format the traceback of an error and its causes; without causes if formatting raises or would take seconds."""
    try:
        if not _is_long(error):
            return "".join(traceback.format_exception(error))
    except BaseException as raised:
        if not is_user_error(raised):
            raise
        return "".join(traceback.format_tb(_traceback(error)))
    return "".join(traceback.format_tb(_traceback(error))) + error_text(error)


def _is_long(error: BaseException) -> bool:
    """Tell whether formatting an error would take seconds: a message is very long, or there are many causes."""
    link: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if link is None:
            return False
        if len(_text_of(str, link)) > MESSAGE_CHARACTERS_MAX:
            return True
        link = link.__cause__ or link.__context__
    return True


def _text_of(convert: Callable[[Any], str], value: Any) -> str:
    """Return the `repr` or `str` of a user's object; if that raises, say so."""
    try:
        return convert(value)
    except BaseException as error:
        if not is_user_error(error):
            raise
        return f"{_name_of(value)} whose {convert.__name__}() raises {_name_of(error)}"


def printable(text: str) -> str:
    """Escape NUL and lone surrogates, which PostgreSQL refuses."""
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def printable_values(value: Any) -> Any:
    """Return a value for JSON with all texts in it as `printable` returns them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(name): printable_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(inner) for inner in value]
    return value


def unstorable_keys(texts: Sequence[bytes]) -> dict[int, str]:
    """Return index -> problem of the keys (JSON text) that cannot be stored. Costs two quick tests if all can."""
    if b"\\u" not in b"".join(texts) and max(map(len, texts), default=0) <= KEY_BYTES_MAX:
        return {}
    found = {index: key_problem(text) for index, text in enumerate(texts)}
    return {index: problem for index, problem in found.items() if problem}


def key_problem(text: bytes) -> str:
    """Return why a key (JSON text) cannot be stored; empty if it can."""
    if len(text) > KEY_BYTES_MAX:
        return f"the key has {len(text):,} bytes; the limit is {KEY_BYTES_MAX:,}"
    return "" if _is_storable(text) else "the key has a character that cannot be stored"


def _is_storable(text: bytes) -> bool:
    try:
        refuse_unstorable(text)
    except RefusedValueError:
        return False
    return True


def dead_letter_of(  # noqa: PLR0913 - what a dead letter says of its record
    error: BaseException,
    payload: bytes,
    *,
    stream: str,
    computation: str,
    event_time: int | None,
    key: bytes | None,
    input: int = 0,
    retracts: bool = False,
) -> DeadLetter:
    """Build the dead letter of a record whose user code raised; its reason is "refused" or "user_error".

    "refused" means that a value could not be stored (RefusedValueError).
    """
    trace = _trace_of(error)
    return DeadLetter(
        reason="refused" if isinstance(error, RefusedValueError) else "user_error",
        detail=printable(error_text(error).splitlines()[0])[:1000],
        payload=payload,
        stream=stream,
        computation=computation,
        traceback=printable(trace)[-TRACEBACK_CHARACTERS_MAX:],
        event_time=event_time,
        key=key,
        input=input,
        retracts=retracts,
    )
