"""A run of a transcript shows every difference, and accepts a difference only where the transcript demands it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from millpy.errors import CorruptionError
from millpy.testing.transcripts.comparison import equal
from millpy.testing.transcripts.reader import Transcript, read_transcripts
from millpy.testing.transcripts.report import report_document, report_text
from millpy.testing.transcripts.run import SUBJECTS, TranscriptOutcome, run_transcript
from millpy.testing.transcripts.subject import GraphSubject

HEAD = "name: one\nwindows: {fixed: 1m}\naggregates: {n: count, all: {collect: value}}\n"
WRONG = f"""{HEAD}steps:
  - bundle: [{{key: a, at: 1s, value: 1.5}}, {{key: b, at: 61s}}, {{key: a, at: 2s, value: 2}}]
  - expect:
      panes:
        - {{key: a, window: [0s, 1m], values: {{n: 2, all: [1.5, 2]}}, timing: late}}
        - {{key: c, window: [0s, 1m], index: 0}}
      table: []
      input_watermark: 60s
  - end: true
"""
DIFFERENCES = [
    "step 2 (line 6): pane a [0s, 1m): timing: expected late, found on_time",
    "step 2 (line 6): pane a [0s, 1m): values.n: expected 2, found 1",
    "step 2 (line 6): pane a [0s, 1m): values.all: expected [1.5, 2], found [1.5]",
    "step 2 (line 6): pane c [0s, 1m): missing: index 0",
    "step 2 (line 6): late a [0s, 1m): unexpected: at 2s, value 2.0, watermark 1m1s",
    "step 2 (line 6): table a [0s, 1m): unexpected: "
    "n 1, all [1.5], pane_on_time_index 0, pane_last True, pane_index 0, pane_timing on_time, late_count 0",
    "step 2 (line 6): input watermark: expected 1m, found 1m1s",
    "at the end, not expected by any step: pane b [1m, 2m): unexpected: "
    "values n 1, all [], index 0, timing on_time, late_count 0",
]  # fmt: skip
WHAT = re.compile(r"step 2 \(line 6\): |at the end, not expected by any step: ")
MUST_FAIL = """must_fail:
  - {step: 2, of: pane, kind: different, key: a, field: timing}
  - {step: 2, of: pane, kind: different, key: a, field: values.n, expected: 2, found: 1}
  - {step: 2, of: pane, kind: different, key: a, field: values.all, found: [1.5]}
  - {step: 2, of: pane, kind: missing, key: c, window: [0s, 60s]}
  - {step: 2, of: late, kind: unexpected, key: a}
  - {step: 2, of: table, kind: unexpected, window: [0s, 1m]}
  - {step: 2, of: input_watermark, kind: different, expected: 1m}
  - {step: 4, of: pane, kind: unexpected, key: b}
"""


def read(tmp_path: Path, text: str) -> Transcript:
    (tmp_path / "t.yaml").write_text(text)
    (found,) = read_transcripts(tmp_path / "t.yaml")
    return found


def run(transcript: Transcript, on: str = "memory") -> TranscriptOutcome:
    return run_transcript(transcript, on, SUBJECTS[on])


@pytest.mark.parametrize("on", SUBJECTS)
def test_every_difference_is_told(tmp_path: Path, on: str) -> None:
    outcome = run(read(tmp_path, WRONG), on)

    assert outcome.kind == "failed"
    told = report_text([outcome]).splitlines()
    assert told[1:-1] == [f"  {on}: {line}" for line in DIFFERENCES]


def test_a_transcript_that_must_fail_passes_by_exactly_its_differences(tmp_path: Path) -> None:
    assert run(read(tmp_path, WRONG + MUST_FAIL)).kind == "passed"


@pytest.mark.parametrize("left_out", range(8))
def test_a_difference_that_it_does_not_name_fails(tmp_path: Path, left_out: int) -> None:
    lines = MUST_FAIL.splitlines()
    del lines[left_out + 1]

    outcome = run(read(tmp_path, WRONG + "\n".join(lines)))

    assert outcome.kind == "failed"
    assert [str(found) for found in outcome.mismatches] == [WHAT.sub("", DIFFERENCES[left_out])]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("step: 4", "step: 3"),
        ("field: timing", "field: index"),
        ("expected: 2, found: 1", "expected: 2, found: 3"),
        ("expected: 2, found: 1", "expected: 3, found: 1"),
        ("found: [1.5]", "found: [1.5, 2]"),
        ("kind: missing, key: c", "kind: missing, key: d"),
        ("window: [0s, 60s]", "window: [0s, 61s]"),
        ("of: late", "of: dead_letter"),
        ("kind: unexpected, key: b", "kind: missing, key: b"),
    ],
)
def test_a_difference_that_is_not_shown_fails(tmp_path: Path, before: str, after: str) -> None:
    outcome = run(read(tmp_path, WRONG + MUST_FAIL.replace(before, after)))

    assert (outcome.kind, len(outcome.mismatches), len(outcome.not_shown)) == ("failed", 1, 1)
    told = report_text([outcome])
    assert "it has to fail, and not in this way" in told
    assert "not shown: step: " in told
    assert report_document([outcome])["runs"][0]["not_shown"]


def test_a_right_transcript_that_must_fail_fails(tmp_path: Path) -> None:
    text = f"{HEAD}steps:\n  - end: true\nmust_fail:\n  - {{step: 2, of: pane, kind: missing}}\n"

    assert run(read(tmp_path, text)).kind == "failed"


def test_equal_differences_are_told_once(tmp_path: Path) -> None:
    transcript = read(tmp_path, WRONG)

    told = report_text([run(transcript, on) for on in SUBJECTS]).splitlines()

    assert told[0].endswith("t.yaml:1 one: failed on pure, columns, memory")
    assert told[1:-1] == [f"  pure, columns, memory: {line}" for line in DIFFERENCES]
    assert told[-1] == "1 transcript, 3 runs: 0 passed, 3 failed"


def test_what_a_step_alone_lacks_is_skipped_and_said(tmp_path: Path) -> None:
    steps = "  - bundle: [{at: 1s, id: x}]\n  - end: true\n  - expect: {panes: [{window: [0s, 1m]}]}\n"
    text = f"{HEAD}dedupe: 1h\nsteps:\n{steps}"

    outcomes = [run(read(tmp_path, text), on) for on in ("pure", "memory")]

    assert [outcome.kind for outcome in outcomes] == ["skipped", "passed"]
    assert "skipped: the step alone has no source, for dedupe" in report_text(outcomes)


def test_an_error_of_the_engine_ends_the_run_and_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(self: GraphSubject, partition: Any) -> None:
        raise CorruptionError("the sequence has a gap")

    monkeypatch.setattr(GraphSubject, "end", corrupt)
    text = f"{HEAD}steps:\n  - end: true\n  - expect: {{input_watermark: end}}\n"

    outcome = run(read(tmp_path, text))

    assert [str(found) for found in outcome.mismatches] == ["run: error: CorruptionError: the sequence has a gap"]
    must = f"{text}must_fail:\n  - {{step: 1, of: run, kind: error}}\n"
    assert run(read(tmp_path, must)).kind == "passed"


def test_records_that_are_not_accounted_for_are_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphSubject, "unbalanced", lambda self: ["one record is lost"])

    outcome = run(read(tmp_path, f"{HEAD}steps:\n  - end: true\n"))

    assert [str(found) for found in outcome.mismatches] == ["accounting: error: one record is lost"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (3, 3.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.3, 0.3001, False),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        ("1", 1, False),
        (None, 0, False),
        (None, None, True),
        ([1, 2.0], [1.0, 2], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        (2**63, 2**63 + 1, False),
    ],
)
def test_values_are_equal_as_numbers(one: Any, other: Any, same: bool) -> None:
    assert equal(one, other) is equal(other, one) is same
