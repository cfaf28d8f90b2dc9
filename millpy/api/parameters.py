"""Types of parameters that many paths have, each with its bounds."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

NAME_CHARACTERS_MAX = 200
KEY_CHARACTERS_MAX = 10_000
LIMIT_MAX = 1_000
LIMIT = 100
ID_MAX = 2**63 - 1
TEXT = r"^[^\x00]*$"
"""PostgreSQL has no text with a NUL."""
TIME = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)$"

GraphName = Annotated[
    str,
    Path(min_length=1, max_length=NAME_CHARACTERS_MAX, pattern=TEXT, description="The name, as /v1/graphs gives it."),
]
ComputationName = Annotated[str, Path(min_length=1, max_length=NAME_CHARACTERS_MAX, pattern=TEXT)]
TableName = Annotated[str, Path(min_length=1, max_length=NAME_CHARACTERS_MAX, pattern=TEXT)]
RecordId = Annotated[int, Path(ge=1, le=ID_MAX)]
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="The maximum number of rows.")]
Cursor = Annotated[
    str,
    Query(
        max_length=KEY_CHARACTERS_MAX, pattern=TEXT, description="`next` of the page before; empty for the first page."
    ),
]
Key = Annotated[
    str,
    Query(
        max_length=KEY_CHARACTERS_MAX, pattern=TEXT, description='The key, as text or as JSON: `pump-7`, `["hall", 3]`.'
    ),
]
Start = Annotated[str | None, Query(alias="from", pattern=TIME, description="Only from this time on, with its zone.")]
End = Annotated[str | None, Query(alias="to", pattern=TIME, description="Only before this time, with its zone.")]
Word = Annotated[str | None, Query(max_length=NAME_CHARACTERS_MAX, pattern=TEXT)]
