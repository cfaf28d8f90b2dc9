"""Adds fields from outside the payload, such as a topic, to the payload's JSON object.

The source appends them before decoding, at the end of the object, where they override fields of the same name. Every
decoder therefore sees the same record, and so does a replay of a dead letter. An ending has the form
`,"name":value,…}`.
"""

from __future__ import annotations

_SPACE = b" \t\r\n"
EMPTY_OR_SPACED = b"{" + _SPACE


def completed(payload: bytes, ending: bytes) -> bytes:
    """Append an ending to one payload. A payload that is not an object stays unchanged, so that decoding rejects it."""
    text = payload.rstrip(_SPACE)
    if text[-1:] != b"}":
        return payload
    before = text[:-1]
    return before + ending[1:] if before.strip(_SPACE) == b"{" else before + ending
