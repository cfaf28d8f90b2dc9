"""Reading a file of transcripts: YAML becomes steps, or an error that names the line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from millpy.errors import MillError, UsageError
from millpy.model.time import Instant, to_datetime
from millpy.testing.transcripts.definition import Definition, definition_of
from millpy.testing.transcripts.format import (
    Expectation,
    ExpectedMismatch,
    ExpectedPane,
    RecordText,
    StepText,
    TranscriptText,
)
from millpy.testing.transcripts.notation import duration_us, time_us, watermark_us
from millpy.testing.transcripts.yaml_reader import BYTES_MAX, YamlDocument, read_yaml

RECORDS_MAX = 100_000
"""The most records of one transcript, copies included."""
Action: TypeAlias = Literal["bundle", "advance_watermark", "advance_clock", "end", "crash", "expect"]
EPOCH_START = Instant(0)
_UNKNOWN = re.compile("Object contains unknown field `(.*)`")
_MISSING = re.compile("Object missing required field `(.*)`")
ACTIONS: tuple[Action, ...] = ("bundle", "advance_watermark", "advance_clock", "end", "crash", "expect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a transcript.

    Attributes:
        number: its place, from 1.
        line: its line in the file.
        records: of a bundle: objects of the transcript's class, or payloads.
        at: of `advance_watermark`.
        by_us: of `advance_clock`.
        loses_turn: whether its turn is lost in a crash first.
    """

    number: int
    line: int
    action: Action
    partition: str | None = None
    records: Sequence[Any] = ()
    at: Instant = EPOCH_START
    by_us: int = 0
    loses_turn: bool = False
    expect: Expectation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A transcript that can be run.

    Attributes:
        must_fail: the mismatches that it must show; without any, it must show none.
    """

    file: str
    line: int
    name: str
    definition: Definition
    steps: Sequence[Step]
    must_fail: Sequence[ExpectedMismatch] = field(default=())

    @property
    def needs_source(self) -> str:
        """What of it only a source can do, so that the window stage alone cannot run it; empty if there is none."""
        if self.definition.dedupe is not None:
            return "dedupe"
        if self.definition.idle is not None:
            return "idle"
        if self.definition.event_time.percentile is not None:
            return "percentile"
        if any(isinstance(record, bytes) for step in self.steps for record in step.records):
            return "raw records"
        return ""


def read_transcripts(path: Path) -> list[Transcript]:
    """Read all transcripts of a file.

    Raises:
        UsageError: the file is missing, too large, or no YAML; a key is unknown, a value wrong, or the engine cannot
            do what it names. The message has the line.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="name YAML files of transcripts")
    with path.open("rb") as file:
        text = file.read(BYTES_MAX + 1)
    found = [_transcript(document, str(path)) for document in read_yaml(text, str(path))]
    if not found:
        raise UsageError(f"{path} has no transcript", hint="write one, with name, windows and steps")
    names = [transcript.name for transcript in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{path}: two transcripts are named {twice[0]!r}", hint="rename one")
    return found


def _transcript(document: YamlDocument, file: str) -> Transcript:
    try:
        text = msgspec.convert(document.value, TranscriptText)
    except msgspec.ValidationError as error:
        raise _validation_error(error, document, file) from None
    place = "$"
    try:
        definition = _checked(definition_of(text, _value_types(text), Path(file).parent))
        if not text.steps:
            raise UsageError("steps: there is none")
        steps = []
        for index, step in enumerate(text.steps):
            place = f"$.steps[{index}]"
            steps.append(_step(step, index + 1, document.line_of(place), definition))
        place = "$.steps"
        if sum(len(step.records) for step in steps) > RECORDS_MAX:
            raise UsageError(f"there are more than {RECORDS_MAX:,} records")
        place = "$.must_fail"
        for mismatch in text.must_fail:
            for at in mismatch.window or ():
                time_us(at, definition.origin, "window")
    except MillError as error:  # of the graph's parts, too
        line = document.line_of(f"{place}.{error.message.partition(':')[0]}")  # of the key that the message begins with
        raise UsageError(f"{file}:{line}: {error.message}", hint=error.hint) from None
    return Transcript(
        file=file, line=document.line, name=text.name, definition=definition, steps=steps, must_fail=text.must_fail
    )


def _checked(definition: Definition) -> Definition:
    """Return the definition; raise what its graph raises."""
    definition.graph("transcript").spec()
    return definition


def _validation_error(error: msgspec.ValidationError, document: YamlDocument, file: str) -> UsageError:
    """Return an error of msgspec with the line, and with words for who writes a transcript."""
    message, _, path = str(error).partition(" - at `")
    path, hint = path.rstrip("`"), "docs/testing.md lists the keys of a transcript"
    if unknown := _UNKNOWN.fullmatch(message):
        message, path = f"unknown key {unknown[1]!r}", path or "$"
        line = document.line_of(f"{path}.{unknown[1]}")
    else:
        line = document.line_of(path)
    if missing := _MISSING.fullmatch(message):
        message = f"key {missing[1]!r} is missing"
    if "got `int`" in message or "got `float`" in message:
        hint = "times and durations are text with a unit, such as 90s; keys are text: write '7'"
    where = f"{path.removeprefix('$').removeprefix('.')}: " if path not in ("", "$") else ""
    return UsageError(f"{file}:{line}: {where}{message[:1].lower()}{message[1:].replace('`', chr(39))}", hint=hint)


def _value_types(text: TranscriptText) -> set[type]:
    records = (record for step in text.steps for record in step.bundle or ())
    return {type(record.value) for record in records if record.value is not None}


def _step(text: StepText, number: int, line: int, definition: Definition) -> Step:
    actions = [action for action in ACTIONS if getattr(text, action) is not None]
    loses_turn = text.crash == "before_commit"
    if loses_turn:
        actions.remove("crash")
    if len(actions) != 1:
        raise UsageError(
            f"step {number} has {' and '.join(actions) or 'no action'}",
            hint=f"give each step one of: {', '.join(ACTIONS)}",
        )
    (action,) = actions
    if loses_turn and action in ("crash", "expect"):
        raise UsageError("crash: before_commit needs a turn that it can lose", hint="or write crash: between_turns")
    if text.partition is not None and action in ("advance_clock", "crash", "expect"):
        raise UsageError(f"{action} has no partition")
    if text.partition is not None and text.partition not in definition.partitions:
        known = ", ".join(definition.partitions)
        raise UsageError(f"unknown partition {text.partition!r}", hint=f"choose from: {known}")
    if action == "bundle" and text.partition is None and len(definition.partitions) > 1:
        raise UsageError("the bundle needs a partition", hint=f"choose from: {', '.join(definition.partitions)}")
    by_us = duration_us(text.advance_clock or "0s", "advance_clock")
    if by_us < 0:
        raise UsageError(f"advance_clock: {text.advance_clock!r} is negative")
    if text.expect is not None:
        _check_expectation(text.expect, definition)
    return Step(
        number=number,
        line=line,
        action=action,
        partition=text.partition,
        records=[record for given in text.bundle or () for record in _records(given, definition)],
        at=time_us(text.advance_watermark or "0s", definition.origin, "advance_watermark"),
        by_us=by_us,
        loses_turn=loses_turn,
        expect=text.expect,
    )


def _records(given: RecordText, definition: Definition) -> Sequence[Any]:
    if not 1 <= given.copies <= RECORDS_MAX:
        raise UsageError(f"copies: {given.copies} is not between 1 and {RECORDS_MAX:,}")
    if given.raw is not None:
        if given.at or given.value is not None or given.id is not None:
            raise UsageError("a raw record has no fields")
        return [given.raw.encode()] * given.copies
    if not given.at:
        raise UsageError("a record has no time", hint="give it at:, its event time")
    if given.id is not None and definition.dedupe is None:
        raise UsageError("a record has an id, and the transcript does not deduplicate", hint="add dedupe: 1h")
    if isinstance(given.value, int) and not -(2**63) <= given.value < 2**63:
        raise UsageError(f"value: {given.value} is beyond 64 bits")
    at = to_datetime(time_us(given.at, definition.origin, "at"))
    return [definition.record(key=given.key, at=at, value=given.value, id=given.id)] * given.copies


def _check_expectation(expect: Expectation, definition: Definition) -> None:
    """Check times and columns, and that the engine has what is compared."""
    for pane in (*expect.panes, *(expect.table or ())):
        _check_pane(pane, definition)
    if any(row.retraction or row.timestamp is not None for row in expect.table or ()):
        raise UsageError("a row of the table has no retraction and no timestamp")
    for late in expect.late:
        for at in (late.at, *(late.window or ())):
            time_us(at, definition.origin, "late")
        if late.watermark is not None:
            time_us(late.watermark, definition.origin, "watermark")
    for name in ("source_watermark", "input_watermark", "low_watermark"):
        if (at := getattr(expect, name)) is not None:
            watermark_us(at, definition.origin, name)


def _check_pane(pane: ExpectedPane, definition: Definition) -> None:
    for at in pane.window:
        time_us(at, definition.origin, "window")
    for column in pane.values:
        if column not in definition.aggregates:
            raise UsageError(f"unknown column {column!r}", hint=f"it has: {', '.join(definition.aggregates)}")
    if pane.retraction and pane.first is not None:
        raise UsageError("a retraction is no first pane", hint="leave first: out; index: says which pane it takes back")
    if pane.timestamp not in (None, "end_of_window"):
        time_us(pane.timestamp or "", definition.origin, "timestamp")
