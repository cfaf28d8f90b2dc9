"""Fields that a source knows beside the payload, written into the payload's JSON object.

They go to its end, where they win, before anything is decoded: so every way of decoding sees one record, and so does
a dead letter that is replayed later. An ending is `,"name":value,…}`.
"""

from __future__ import annotations

_SPACE = b" \t\r\n"
EMPTY_OR_SPACED = b"{" + _SPACE


def completed(payload: bytes, ending: bytes) -> bytes:
    """One payload with its ending; what is no object stays as it is, and is refused as what it is."""
    text = payload.rstrip(_SPACE)
    if text[-1:] != b"}":
        return payload
    before = text[:-1]
    return before + ending[1:] if before.strip(_SPACE) == b"{" else before + ending
