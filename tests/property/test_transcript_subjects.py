"""The window stage alone, row by row and as columns, gives what a whole graph gives, whatever comes in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.time import to_datetime
from millpy.testing.transcripts.definition import Definition, definition_of
from millpy.testing.transcripts.format import StepText, TranscriptText
from millpy.testing.transcripts.run import SUBJECTS
from millpy.testing.transcripts.subject import Subject

WINDOWS = [
    {"fixed": "10s"},
    {"sliding": "20s", "every": "5s"},
    {"sliding": "12s", "every": "5s"},
    {"session": "4s", "by_key": {"b": "9s"}},
]
AFTER_WATERMARK = "after_watermark"
CLOSING = {"or_finally": [{"repeatedly": {"after_count": 2}}, {"after_watermark": {"late": "nothing"}}]}
TRIGGERS = [
    {"after_watermark": {"early": {"every": "7s"}}},
    {"after_watermark": {"early": {"after_count": 3}, "late": {"after_count": 2}}},
    {"repeatedly": {"after_any": [{"after_count": 4}, {"after_processing_time": "5s"}]}},
    CLOSING,
    "never",
]
AGGREGATES = {"n": "count", "total": {"sum": "value"}, "all": {"collect": "value"}, "last": {"last": "value"}}

records = st.tuples(st.sampled_from("abc"), st.integers(-15, 15), st.integers(0, 99), st.sampled_from([1, 1, 1, 70]))
steps = st.lists(
    st.tuples(
        st.sampled_from(["bundle", "bundle", "bundle", "advance_watermark", "advance_clock", "crash"]),
        st.sampled_from(["one", "two"]),
        st.lists(records, max_size=6),
        st.integers(0, 40),
        st.booleans(),
    ),
    max_size=12,
)
definitions = st.builds(
    lambda windows, trigger, mode, lateness, disorder, partitions: definition_of(
        TranscriptText(
            name="any",
            windows=windows,
            trigger=AFTER_WATERMARK if "session" in windows and trigger == CLOSING else trigger,
            mode=mode,
            allowed_lateness=f"{lateness}s",
            max_disorder=f"{disorder}s",
            partitions=["one", "two"][:partitions],
            aggregates=AGGREGATES,
            steps=[StepText(end=True)],
        ),
        {int},
        Path(),
    ),
    st.sampled_from(WINDOWS),
    st.sampled_from([AFTER_WATERMARK, *TRIGGERS]),
    st.sampled_from(["accumulating", "discarding", "retracting"]),
    st.sampled_from([0, 0, 7, 30]),
    st.sampled_from([0, 0, 5]),
    st.integers(1, 2),
)


def outcome(definition: Definition, script: Any, on: str) -> list[Any]:
    """What comes out of each step: panes, late records, watermarks, table."""
    subject, found, at = SUBJECTS[on](definition), [], 0
    for action, partition, drawn, number, loses in script:
        name = partition if partition in definition.partitions else definition.partitions[0]
        subject.lose_turns(loses)
        at += 3
        if action == "bundle":
            subject.feed([record_of(definition, at, *record) for record in drawn for _ in range(record[3])], name)
        elif action == "advance_watermark":
            subject.advance_watermark((at + number - 20) * 1_000_000, name)
        elif action == "advance_clock":
            subject.advance_clock(number * 1_000_000)
        else:
            subject.crash()
        found.append(seen(subject))
    subject.end(None)
    return [*found, seen(subject), list(subject.unbalanced())]


def record_of(definition: Definition, at: int, key: str, offset: int, value: int, _copies: int) -> msgspec.Struct:
    return definition.record(key=key, at=to_datetime((at + offset) * 1_000_000), value=value)


def seen(subject: Subject) -> Any:
    panes = sorted(map(repr, subject.panes()))
    late = sorted(repr((late.key, late.event_time, late.watermark, late.window)) for late in subject.late_records())
    return panes, late, subject.watermarks(), subject.table()


@settings(max_examples=35, deadline=None)
@given(definitions, steps)
def test_subjects_agree(definition: Definition, script: Any) -> None:
    memory = outcome(definition, script, "memory")

    assert memory[-1] == []
    assert outcome(definition, script, "pure") == memory
    assert outcome(definition, script, "columns") == memory
