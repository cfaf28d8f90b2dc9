"""The keys of a transcript, as structs: which there are, and which values fit. `reader.py` fills them from YAML.

A key that a struct lacks is an error: a transcript is never run without a part of it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millpy.testing.kit.manual_source import PARTITION

MismatchKind = Literal["missing", "unexpected", "different", "error"]
Subject = Literal[
    "pane", "late", "dead_letter", "table", "input_watermark", "low_watermark", "source_watermark", "accounting", "run"
]


class RecordText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record of a bundle.

    Attributes:
        key, at, value: its fields; `at` is its event time.
        id: its dedupe id.
        raw: a payload instead of a record, as text.
        copies: how often it occurs in a row.
    """

    key: str = "k"
    at: str = ""
    value: int | float | str | None = None
    id: str | None = None
    raw: str | None = None
    copies: int = 1


class ExpectedPane(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A pane, or a row of the result table. What is left out is not compared, except `retraction`."""

    key: str = "k"
    window: tuple[str, str]
    values: dict[str, Any] = {}
    index: int | None = None
    timing: Literal["early", "on_time", "late"] | None = None
    first: bool | None = None
    last: bool | None = None
    on_time_index: int | None = None
    timestamp: str | None = None
    late_count: int | None = None
    retraction: bool = False


class ExpectedLateRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A record that was too late for a window."""

    key: str = "k"
    at: str
    window: tuple[str, str] | None = None
    value: int | float | str | msgspec.UnsetType | None = msgspec.UNSET
    watermark: str | None = None


class ExpectedDeadLetter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A record that became a dead letter."""

    reason: str
    payload: str | None = None


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What has come out since the expectation before, and what is so now."""

    panes: list[ExpectedPane] = []
    late: list[ExpectedLateRecord] = []
    dead_letters: list[ExpectedDeadLetter] = []
    table: list[ExpectedPane] | None = None
    source_watermark: str | None = None
    input_watermark: str | None = None
    low_watermark: str | None = None


class StepText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step: exactly one of `bundle`, `advance_watermark`, `advance_clock`, `end`, `crash` and `expect`.

    With one of the first four, `crash: before_commit` loses the turn first.
    """

    bundle: list[RecordText] | None = None
    advance_watermark: str | None = None
    advance_clock: str | None = None
    end: Literal[True] | None = None
    expect: Expectation | None = None
    crash: Literal["between_turns", "before_commit"] | None = None
    partition: str | None = None


class ExpectedMismatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A difference that a transcript must show. What is left out is not compared."""

    step: int
    of: Subject
    kind: MismatchKind
    key: str | None = None
    window: tuple[str, str] | None = None
    field: str | None = None
    expected: Any = msgspec.UNSET
    found: Any = msgspec.UNSET


class TranscriptText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A document: what is computed, what happens, what must come out."""

    name: str
    about: str = ""
    windows: dict[str, Any]
    trigger: Any = "after_watermark"
    mode: str = "accumulating"
    timestamp_combiner: str = "end_of_window"
    on_time_pane: str = "if_not_empty"
    final_pane: str = "if_not_empty"
    allowed_lateness: str = "0s"
    aggregates: dict[str, Any] = msgspec.field(default_factory=lambda: {"n": "count"})
    max_disorder: str = "0s"
    percentile: float | None = None
    watermark_by: str | None = None
    future_tolerance: str = "10m"
    idle: str | None = None
    dedupe: str | None = None
    partitions: list[str] = msgspec.field(default_factory=lambda: [PARTITION])
    origin: str = "1970-01-01T00:00:00Z"
    clock: str | None = None
    steps: list[StepText]
    must_fail: list[ExpectedMismatch] = []
