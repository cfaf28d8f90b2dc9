"""How a record that is set aside is written down: nothing here may itself be refused by the store."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from millpy.errors import RefusedValueError
from millpy.limits import KEY_BYTES_MAX
from millpy.model.checkpoint import DeadLetter
from millpy.model.delta import refuse_unstorable, with_one_zero
from millpy.model.step_progress import is_users

TRACEBACK_CHARACTERS_MAX = 20_000
MESSAGE_CHARACTERS_MAX = 5_000
_CAUSES_MAX = 100
# What a class of a user's cannot hide or replace.
_class_name = type.__dict__["__name__"].__get__
_traceback = BaseException.__dict__["__traceback__"].__get__


def payload_of(record: Any) -> bytes:
    """A record as JSON, with the one zero that stored values have; what has no JSON form, as its repr."""
    try:
        return with_one_zero(msgspec.json.encode(record))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return printable(_words(repr, record)).encode()


def error_text(error: BaseException) -> str:
    """The class of an error and what it says, if it can say anything; of a long message the beginning."""
    return f"{_name_of(error)}: {_words(str, error)[:MESSAGE_CHARACTERS_MAX]}"


def _name_of(value: object) -> str:
    """The name of its class, whatever that makes of the question."""
    name: str = _class_name(type(value))
    return name


def _trace_of(error: BaseException) -> str:
    """The traceback with all causes; of an error that cannot tell these, or at length, its own."""
    try:
        if not _is_wordy(error):
            return "".join(traceback.format_exception(error))
    except BaseException as raised:
        if not is_users(raised):
            raise
        return "".join(traceback.format_tb(_traceback(error)))
    return "".join(traceback.format_tb(_traceback(error))) + error_text(error)


def _is_wordy(error: BaseException) -> bool:
    """Whether it, or what caused it, says more than is kept: it would be cut into lines first, which takes seconds."""
    told: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if told is None:
            return False
        if len(_words(str, told)) > MESSAGE_CHARACTERS_MAX:
            return True
        told = told.__cause__ or told.__context__
    return True


def _words(speak: Callable[[Any], str], value: Any) -> str:
    """`repr` or `str` of what belongs to a user, whose methods may raise, too."""
    try:
        return speak(value)
    except BaseException as error:
        if not is_users(error):
            raise
        return f"{_name_of(value)} whose {speak.__name__}() raises {_name_of(error)}"


def printable(text: str) -> str:
    """Text without what PostgreSQL refuses: NUL and lone surrogates, written as escapes."""
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def unstorable_keys(texts: Sequence[bytes]) -> dict[int, str]:
    """Index -> what is wrong with a key (JSON text) that cannot be stored; two quick tests when there are none."""
    if b"\\u" not in b"".join(texts) and max(map(len, texts), default=0) <= KEY_BYTES_MAX:
        return {}
    found = {index: key_problem(text) for index, text in enumerate(texts)}
    return {index: problem for index, problem in found.items() if problem}


def key_problem(text: bytes) -> str:
    """Why a key (JSON text) cannot be stored; empty when it can."""
    if len(text) > KEY_BYTES_MAX:
        return f"the key has {len(text):,} bytes; at most {KEY_BYTES_MAX:,} are stored"
    return "" if _is_storable(text) else "the key has a character that cannot be stored"


def _is_storable(text: bytes) -> bool:
    try:
        refuse_unstorable(text)
    except RefusedValueError:
        return False
    return True


def dead_letter_of(
    error: BaseException,
    payload: bytes,
    *,
    stream: str,
    computation: str,
    event_time: int | None,
    key: bytes | None,
    input: int = 0,
) -> DeadLetter:
    """What user code did not survive: "refused" for a value that cannot be stored, else (any class) "user_error"."""
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
    )
