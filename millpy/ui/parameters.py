"""Types of parameters that forms of views have: a field that is left empty is sent as empty text."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from millpy.api.parameters import NAME_CHARACTERS_MAX, TEXT, TIME

_TIME = rf"^$|{TIME}"
FromTime = Annotated[str, Query(alias="from", pattern=_TIME, description="Only from this time on, with its zone.")]
ToTime = Annotated[str, Query(alias="to", pattern=_TIME, description="Only before this time, with its zone.")]
Choice = Annotated[str, Query(max_length=NAME_CHARACTERS_MAX, pattern=TEXT)]
"""A name to choose by; empty for all."""
