"""The report of a run of transcripts, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from millpy.testing.transcripts.comparison import Mismatch
from millpy.testing.transcripts.format import ExpectedMismatch
from millpy.testing.transcripts.reader import Transcript
from millpy.testing.transcripts.run import TranscriptOutcome


def counts_of(outcomes: Sequence[TranscriptOutcome]) -> dict[str, int]:
    """Return how many runs passed, failed and were skipped."""
    kinds = [outcome.kind for outcome in outcomes]
    return {kind: kinds.count(kind) for kind in ("passed", "failed", "skipped")}


def report_text(outcomes: Sequence[TranscriptOutcome]) -> str:
    """Return the report: a line for each transcript, the differences of those that failed, and the counts."""
    lines = []
    for transcript, group in groupby(outcomes, key=lambda outcome: outcome.transcript):
        runs = list(group)
        kinds = {kind: [run.on for run in runs if run.kind == kind] for kind in ("failed", "passed", "skipped")}
        told = ", ".join(f"{kind} on {', '.join(names)}" for kind, names in kinds.items() if names)
        lines.append(f"{transcript.file}:{transcript.line} {transcript.name}: {told}")
        told_by: dict[str, list[str]] = {}
        for run in runs:
            for line in _differences(transcript, run) if run.kind == "failed" else ():
                told_by.setdefault(line, []).append(run.on)
        lines += [f"  {', '.join(names)}: {line}" for line, names in told_by.items()]
        lines += dict.fromkeys(f"  skipped: {run.reason}" for run in runs if run.kind == "skipped")
    counts = counts_of(outcomes)
    transcripts = len({id(outcome.transcript) for outcome in outcomes})
    runs_told = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number or kind != "skipped")
    plural = "" if transcripts == 1 else "s"
    return "\n".join([*lines, f"{transcripts} transcript{plural}, {len(outcomes)} runs: {runs_told}"])


def report_document(outcomes: Sequence[TranscriptOutcome]) -> dict[str, Any]:
    """Return the report as a document that JSON can hold."""
    return {
        **counts_of(outcomes),
        "runs": [
            {
                "file": outcome.transcript.file,
                "line": outcome.transcript.line,
                "name": outcome.transcript.name,
                "on": outcome.on,
                "outcome": outcome.kind,
                "reason": outcome.reason,
                "must_fail": bool(outcome.transcript.must_fail),
                "mismatches": [
                    {"line": _line_of(outcome.transcript, found.step)} | msgspec.to_builtins(found)
                    for found in outcome.mismatches
                ],
                "not_shown": [msgspec.to_builtins(wanted) for wanted in outcome.not_shown],
            }
            for outcome in outcomes
        ],
    }


def _differences(transcript: Transcript, run: TranscriptOutcome) -> Iterator[str]:
    if transcript.must_fail:
        yield "it has to fail, and not in this way"
        yield from (f"not shown: {_wanted_text(wanted)}" for wanted in run.not_shown)
    yield from (f"{_place(transcript, found)}: {found}" for found in run.mismatches)


def _place(transcript: Transcript, found: Mismatch) -> str:
    if found.step > len(transcript.steps):
        return "at the end, not expected by any step"
    return f"step {found.step} (line {_line_of(transcript, found.step)})"


def _line_of(transcript: Transcript, step: int) -> int:
    return transcript.steps[step - 1].line if step <= len(transcript.steps) else transcript.line


def _wanted_text(wanted: ExpectedMismatch) -> str:
    return ", ".join(f"{name}: {value}" for name, value in msgspec.to_builtins(wanted).items())
