"""Running a transcript on a subject: its steps in turn; what no `expect` step has named is a mismatch at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from millpy.errors import MillError
from millpy.model.time import Instant
from millpy.testing.transcripts.comparison import Comparison, Mismatch
from millpy.testing.transcripts.definition import Definition
from millpy.testing.transcripts.format import Expectation, ExpectedMismatch
from millpy.testing.transcripts.reader import Step, Transcript
from millpy.testing.transcripts.stage_subject import NotApplicableError, StageSubject
from millpy.testing.transcripts.subject import GraphSubject, Subject

OutcomeKind: TypeAlias = Literal["passed", "failed", "skipped"]
MakeSubject: TypeAlias = Callable[[Definition], Subject]
SUBJECTS: dict[str, MakeSubject] = {
    "pure": StageSubject,
    "columns": lambda definition: StageSubject(definition, columns=True),
    "memory": lambda definition: GraphSubject(definition, "transcript"),
}
"""Subjects that need nothing else, by name."""
ALONE = ("pure", "columns")
"""Subjects without a source."""
NO_SOURCE = "the step alone has no source, for {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptOutcome:
    """The outcome of a transcript on one subject.

    Attributes:
        on: name of the subject.
        mismatches: the differences found, for a failed one.
        not_shown: the differences that it had to show and did not.
        reason: why it was skipped.
    """

    transcript: Transcript
    on: str
    kind: OutcomeKind
    mismatches: Sequence[Mismatch] = ()
    not_shown: Sequence[ExpectedMismatch] = ()
    reason: str = ""


def run_transcript(transcript: Transcript, on: str, make: MakeSubject) -> TranscriptOutcome:
    """Run a transcript on a new subject."""
    if on in ALONE and transcript.needs_source:
        return TranscriptOutcome(
            transcript=transcript, on=on, kind="skipped", reason=NO_SOURCE.format(transcript.needs_source)
        )
    subject = make(transcript.definition)
    try:
        mismatches = _TranscriptRun(transcript, subject).mismatches()
    except NotApplicableError as error:
        return TranscriptOutcome(transcript=transcript, on=on, kind="skipped", reason=NO_SOURCE.format(error.message))
    finally:
        subject.close()
    left, not_shown = _unmatched(mismatches, transcript)
    if transcript.must_fail:
        kind: OutcomeKind = "failed" if left or not_shown else "passed"
        return TranscriptOutcome(transcript=transcript, on=on, kind=kind, mismatches=left, not_shown=not_shown)
    return TranscriptOutcome(
        transcript=transcript, on=on, kind="failed" if mismatches else "passed", mismatches=mismatches
    )


def _unmatched(mismatches: Sequence[Mismatch], transcript: Transcript) -> tuple[list[Mismatch], list[ExpectedMismatch]]:
    """Return the mismatches that a transcript does not name, and those that it names and that were not found."""
    left, not_shown = list(mismatches), []
    for wanted in transcript.must_fail:
        fitting = next((m for m in left if m.fits(wanted, transcript.definition.origin)), None)
        if fitting is None:
            not_shown.append(wanted)
        else:
            left.remove(fitting)
    return left, not_shown


class _TranscriptRun:
    """One run: what has been compared already, and what differs."""

    def __init__(self, transcript: Transcript, subject: Subject) -> None:
        self._transcript = transcript
        self._subject = subject
        self._origin: Instant = transcript.definition.origin
        self._panes = self._late = self._dead_letters = 0
        self._found: list[Mismatch] = []

    def mismatches(self) -> list[Mismatch]:
        """Take all steps, and return what differs."""
        steps = self._transcript.steps
        end = len(steps) + 1
        for step in steps:
            try:
                self._take(step)
            except NotApplicableError:
                raise
            except MillError as error:  # nothing that follows would mean anything
                self._compare_error(step.number, f"{type(error).__name__}: {error.message}")
                return self._found
        self._compare(end, Expectation())
        for account in self._subject.unbalanced():
            comparison = Comparison(end, self._origin)
            comparison.error("accounting", account)
            self._found += comparison.mismatches
        return self._found

    def _take(self, step: Step) -> None:
        subject = self._subject
        if step.expect is not None:
            self._compare(step.number, step.expect)
            return
        if step.action == "crash":
            subject.crash()
            return
        subject.lose_turns(step.loses_turn)
        match step.action:
            case "bundle":
                subject.feed(step.records, step.partition)
            case "advance_watermark":
                subject.advance_watermark(step.at, step.partition)
            case "advance_clock":
                subject.advance_clock(step.by_us)
            case "end":
                subject.end(step.partition)
        subject.lose_turns(False)

    def _compare(self, number: int, expect: Expectation) -> None:
        comparison, subject = Comparison(number, self._origin), self._subject
        panes, late, letters = subject.panes(), subject.late_records(), subject.dead_letters()
        comparison.panes(expect.panes, panes[self._panes :])
        comparison.late(expect.late, late[self._late :])
        comparison.dead_letters(expect.dead_letters, letters[self._dead_letters :])
        self._panes, self._late, self._dead_letters = len(panes), len(late), len(letters)
        if expect.table is not None:
            comparison.table(expect.table, subject.table())
        source, input_watermark, low = subject.watermarks()
        comparison.watermark("source_watermark", expect.source_watermark, source)
        comparison.watermark("input_watermark", expect.input_watermark, input_watermark)
        comparison.watermark("low_watermark", expect.low_watermark, low)
        self._found += comparison.mismatches

    def _compare_error(self, number: int, text: str) -> None:
        comparison = Comparison(number, self._origin)
        comparison.error("run", text)
        self._found += comparison.mismatches
