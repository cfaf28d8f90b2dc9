"""A transcript is read as it is written or refused in one line that names the place; nothing in it is ignored."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from millpy.errors import UsageError
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.testing.transcripts.definition import AGGREGATES
from millpy.testing.transcripts.notation import UNITS, duration_us, time_text, time_us
from millpy.testing.transcripts.reader import RECORDS_MAX, Transcript, read_transcripts
from millpy.testing.transcripts.run import SUBJECTS, run_transcript
from millpy.testing.transcripts.yaml_reader import BYTES_MAX
from tests.commands import millpy, millpy_json, run_millpy

HEAD = """\
name: one
windows: {fixed: 1m}
"""
STEPS = """\
steps:
  - bundle: [{at: 1s}]
  - end: true
  - expect: {panes: [{window: [0s, 1m], values: {n: 1}}]}
"""


def read(tmp_path: Path, text: str) -> list[Transcript]:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    return read_transcripts(path)


def refused(tmp_path: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    error.value.message = error.value.message.removeprefix(str(tmp_path) + "/")
    return error.value


def test_documents_of_a_file_are_transcripts(tmp_path: Path) -> None:
    one, two = read(tmp_path, f"{HEAD}{STEPS}---\n{HEAD.replace('one', 'two')}{STEPS}")

    assert (one.name, one.line, two.name, two.line) == ("one", 1, "two", 8)
    assert [(step.number, step.line, step.action) for step in two.steps] == [
        (1, 11, "bundle"),
        (2, 12, "end"),
        (3, 13, "expect"),
    ]


STEP = f"{HEAD}steps:\n  - "
BUNDLE = f"{STEP}bundle: ["
MUST_FAIL = "must_fail: [{step: 1, kind: missing, "
PANE = f"{STEP}expect: {{panes: [{{window: [0s, 1m], "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " has no transcript"),
        (f"{HEAD}{STEPS}---\n{HEAD}{STEPS}", ": two transcripts are named 'one'"),
        ("- one", ":1: expected 'object', got 'array'"),
        (HEAD, ":1: key 'steps' is missing"),
        (f"{HEAD}steps: []", ":3: steps: there is none"),
        (f"{HEAD}color: red\n{STEPS}", ":3: unknown key 'color'"),
        (f"{STEP}end: true\n  - bundles: []", ":5: steps[1]: unknown key 'bundles'"),
        (f"{STEP}{{}}", ":4: step 1 has no action"),
        (f"{STEP}{{end: true, bundle: []}}", ":4: step 1 has bundle and end"),
        (f"{STEP}end: yes", ":4: steps[0].end: expected 'bool | null', got 'str'"),
        (f"{STEP}bundle:\n    - at: 5", ":5: steps[0].bundle[0].at: expected 'str', got 'int'"),
        (f"{STEP}bundle:\n    - at: 5 s", ":4: at: '5 s' is not a time"),
        (f"{STEP}bundle:\n    - at: 2026-11-20T08:00:00", ":4: at: '2026-11-20T08:00:00' has no time zone"),
        (f"{BUNDLE}{{at: 0.1us}}]", ":4: at: '0.1us' is not a whole number of µs"),
        (f"{BUNDLE}{{at: 9999999d}}]", ":4: at: '9999999d' is outside the years 1 to 9999"),
        (f"{BUNDLE}{{value: 1}}]", ":4: a record has no time"),
        (f"{BUNDLE}{{raw: x, at: 1s}}]", ":4: a raw record has no fields"),
        (f"{BUNDLE}{{at: 1s, id: x}}]", ":4: a record has an id, and the transcript does not deduplicate"),
        (f"{BUNDLE}{{at: 1s, value: 1}}, {{at: 1s, value: x}}]", ":1: the values are text and numbers"),
        (f"{BUNDLE}{{at: 1s, value: true}}]", ":4: steps[0].bundle[0].value: expected"),
        (f"{BUNDLE}{{at: 1s, value: 9223372036854775808}}]", ":4: value: 9223372036854775808 is beyond 64 bits"),
        (f"{BUNDLE}{{at: 1s, copies: 0}}]", ":4: copies: 0 is not between 1 and 100,000"),
        (f"{BUNDLE}{{at: 1s, copies: {RECORDS_MAX}}}, {{at: 1s}}]", ":4: there are more than 100,000 records"),
        (f"{STEP}advance_clock: -1s", ":4: advance_clock: '-1s' is negative"),
        (f"{STEP}advance_clock: 1s\n    partition: x", ":4: advance_clock has no partition"),
        (f"{STEP}end: true\n    partition: x", ":4: unknown partition 'x'"),
        (f"{HEAD}partitions: [a, b]\nsteps:\n  - bundle: [{{at: 1s}}]", ":5: the bundle needs a partition"),
        (f"{HEAD}partitions: [a, a]\n{STEPS}", ":3: partitions: ['a', 'a'] are not different names"),
        (f"{STEP}crash: before_commit", ":4: step 1 has no action"),
        (f"{STEP}expect: {{}}\n    crash: before_commit", ":5: crash: before_commit needs a turn"),
        (f"{STEP}crash: sometimes", ":4: steps[0].crash: invalid enum value 'sometimes'"),
        (f"{PANE}values: {{m: 1}}}}]}}", ":4: unknown column 'm'"),
        (f"{STEP}expect: {{panes: [{{window: [0s]}}]}}", ":4: steps[0].expect.panes[0].window: expected 'array'"),
        (f"{PANE}value: {{}}}}]}}", ":4: steps[0].expect.panes[0]: unknown key 'value'"),
        (f"{STEP}expect: {{input_watermark: never}}", ":4: input_watermark: 'never' is not a time"),
        (f"{PANE}retraction: true, first: true}}]}}", ":4: a retraction is no first pane"),
        (f"{STEP}expect: {{table: [{{window: [0s, 1m], retraction: true}}]}}", ":4: a row of the table has no"),
        (f"{HEAD}idle: 10s\n{STEPS}", ":3: idle: needs clock:"),
        (f"{HEAD}allowed_lateness: -1s\n{STEPS}", ":3: allowed_lateness must not be negative"),
        (f"{HEAD}max_disorder: 3\n{STEPS}", ":3: max_disorder: expected 'str', got 'int'"),
        (f"{HEAD}{MUST_FAIL}of: pain}}]\n{STEPS}", ":3: must_fail[0].of: invalid enum value 'pain'"),
        (f"{HEAD}{MUST_FAIL}of: pane, window: [now, 1s]}}]\n{STEPS}", ":3: window: 'now' is not a time"),
        (f"name: x\nwindows: {{fixt: 1m}}\n{STEPS}", ":2: windows: unknown kind fixt"),
        (f"name: x\nwindows: {{fixed: 1m, every: 1s}}\n{STEPS}", ":2: windows: unknown key 'every' of fixed"),
        (f"name: x\nwindows: {{fixed: 60}}\n{STEPS}", ":2: windows: fixed: 60 is not a duration"),
        (f"name: x\nwindows: {{fixed: 0s}}\n{STEPS}", ":1: the window size must be positive"),
        (f"name: x\nwindows: {{sliding: 10s}}\n{STEPS}", ":2: windows: every: None is not a duration"),
        (f"name: x\nwindows: {{sliding: 10s, every: 1us}}\n{STEPS}", ":1: a record would be in 10,000,000 windows"),
        (f"{HEAD}trigger: after_lunch\n{STEPS}", ":3: trigger: unknown trigger 'after_lunch'"),
        (f"{HEAD}trigger: {{every: 10}}\n{STEPS}", ":3: trigger: every: 10 is not a duration"),
        (f"{HEAD}trigger: {{after_count: many}}\n{STEPS}", ":3: trigger: AfterCount('many') does not count records"),
        (f"{HEAD}trigger: {{never: 1}}\n{STEPS}", ":3: trigger: never has no argument"),
        (f"{HEAD}trigger: {{every: 10s, after_count: 1}}\n{STEPS}", ":3: trigger: every, after_count are several"),
        (f"{HEAD}trigger: {{after_any: never}}\n{STEPS}", ":3: trigger: after_any: 'never' is not a list of triggers"),
        (f"{HEAD}trigger: {{after_any: []}}\n{STEPS}", ":3: trigger: AfterAny needs a trigger"),
        (f"{HEAD}trigger: {{or_finally: [never]}}\n{STEPS}", ":3: trigger: or_finally: ['never'] is not a list"),
        (f"{HEAD}trigger: {{repeatedly: {{every: 0s}}}}\n{STEPS}", ":3: trigger: repeatedly: the period of a trigger"),
        (f"{HEAD}trigger: {{after_watermark: {{to: never}}}}\n{STEPS}", ":3: trigger: after_watermark: {'to'"),
        (f"{HEAD}timestamp_combiner: first\n{STEPS}", ":3: timestamp_combiner: unknown value 'first'"),
        (f"{HEAD}trigger: {{after_percentile: 2}}\n{STEPS}", ":3: trigger: the percentile must be a number above 0"),
        (f"{HEAD}final_pane: perhaps\n{STEPS}", ":3: final_pane: unknown value 'perhaps'"),
        (f"{HEAD}mode: additive\n{STEPS}", ":3: mode: unknown value 'additive'"),
        (f"{HEAD}aggregates: {{n: number}}\n{STEPS}", ":3: aggregates: n: unknown aggregate 'number'"),
        (f"{HEAD}aggregates: {{n: sum}}\n{STEPS}", ":3: aggregates: n: sum needs a field"),
        (f"{HEAD}aggregates: {{n: {{sum: velocity}}}}\n{STEPS}", ":1: TranscriptRecord has no field 'velocity'"),
        (f"{HEAD}aggregates: {{n: {{top: value, m: 1}}}}\n{STEPS}", ":3: aggregates: n: "),
        (f"{HEAD}aggregates: {{}}\n{STEPS}", ":1: aggregate needs at least one aggregate"),
        (f"{HEAD}aggregates: {{key: count}}\n{STEPS}", ":1: column 'key' is taken"),
        ("name: one\nname: two", ":2: key 'name' occurs twice"),
        ("name: &a one\nwindows: *a", ":1: anchors and aliases are not allowed"),
        ("name: !!python/object/apply:os.getcwd []", ":1: tags are not allowed"),
        ("name: [", ":1: "),
        ("name: \x07", ": unacceptable character"),
        ("? [a]\n: b", ":1: a key must be text"),
        ("a: " + "[" * 25, ":1: nested deeper than 20 levels"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    error = refused(tmp_path, text)

    assert error.message.removeprefix("t.yaml").startswith(message), error.message
    assert "\n" not in error.message


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    error = refused(tmp_path, "#" * (BYTES_MAX + 1))

    assert "has at most 262,144" in error.message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(UsageError, match=r"t\.yaml"):
        read_transcripts(tmp_path / "t.yaml")
    with pytest.raises(UsageError, match="there is no file"):
        read_transcripts(tmp_path / "nothing.yaml")
    with pytest.raises(UsageError, match="there is no file"):
        read_transcripts(tmp_path)


def test_times_are_written_as_they_are_read() -> None:
    origin = Instant(1_700_000_000_000_000)
    for text in ("0s", "1m30s", "-5s", "1d2h3m4s5ms6us", "-99d", "2100-01-01T00:00:00Z"):
        assert time_text(time_us(text, origin, "at"), origin) == text
    assert time_us("1.5s", origin, "at") == time_us("1s500ms", origin, "at") == origin + 1_500_000
    assert [duration_us(f"1{unit}", "it") for unit in UNITS] == list(UNITS.values())
    assert (time_text(INSTANT_MIN, origin), time_text(INSTANT_MAX, origin)) == ("beginning", "end")


@pytest.mark.parametrize("text", ["", "5", "s", "1x", "1 s", "--1s", "1s-1s", "1e3s", "٣s", "1ms2", "12:30"])
def test_other_text_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError):
        duration_us(text, "it")


def test_every_aggregate_can_be_written(tmp_path: Path) -> None:
    columns = {name: {name: "value"} for name in AGGREGATES}
    text = msgspec.json.encode(columns).decode()

    (transcript,) = read(tmp_path, f"{HEAD}aggregates: {text}\n{STEPS.replace(', values: {n: 1}', '')}")

    assert list(transcript.definition.aggregates) == list(AGGREGATES)
    assert run_transcript(transcript, "pure", SUBJECTS["pure"]).kind == "passed"


WRONG = f"{HEAD}{STEPS.replace('n: 1', 'n: 2')}"
RIGHT = f"{HEAD}{STEPS}"


def test_the_command_tells_what_differs_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right.yaml").write_text(RIGHT)
    (tmp_path / "wrong.yaml").write_text(f"{WRONG}---\n{HEAD.replace('one', 'two')}steps: [{{bundle: [{{raw: x}}]}}]")

    assert millpy("test", "right.yaml").splitlines() == [
        "right.yaml:1 one: passed on pure, columns, memory",
        "1 transcript, 3 runs: 3 passed, 0 failed",
    ]
    status, _ = run_millpy("test", "right.yaml", "wrong.yaml")
    assert status == 1


def test_the_document_has_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right.yaml").write_text(RIGHT)

    found = millpy_json("test", "right.yaml", "--on", "memory")

    assert (found["passed"], found["failed"], found["skipped"]) == (1, 0, 0)
    assert found["runs"] == [
        {
            "file": "right.yaml",
            "line": 1,
            "name": "one",
            "on": "memory",
            "outcome": "passed",
            "reason": "",
            "must_fail": False,
            "mismatches": [],
            "not_shown": [],
        }
    ]


def test_a_wrong_file_or_subject_is_a_mistake_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right.yaml").write_text(RIGHT)
    (tmp_path / "later.yaml").write_text(f"{HEAD}percentile: 2\n{STEPS}")

    for arguments, message in (
        (("right.yaml", "--on", "oracle"), "--on 'oracle' is not a list of what to run on"),
        (("right.yaml", "--database", "postgresql://x"), "--database has no effect on pure, columns, memory"),
        (("right.yaml", "--on", ""), "--on '' is not a list"),
        (("right.yaml", "later.yaml"), "later.yaml:1: event time 'at': percentile must be a number"),
        (("nothing.yaml",), "there is no file nothing.yaml"),
    ):
        status, output = run_millpy("test", *arguments)
        assert (status, output.startswith(f"millpy: {message}")) == (2, True), output
