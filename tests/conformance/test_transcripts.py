"""The engine does what our transcripts say: the window stage alone, in memory, on PostgreSQL. A broken one is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpy.admin.queries import Admin
from millpy.embedded import EmbeddedPostgres
from millpy.hosting.host import HostedGraph
from millpy.ingest.dedupe import DedupeIndex
from millpy.ingest.intake import Intake
from millpy.model.time import INSTANT_MAX
from millpy.testing.transcripts.postgres_state import PostgresSubjects, postgres_subjects
from millpy.testing.transcripts.reader import Transcript, read_transcripts
from millpy.testing.transcripts.report import report_text
from millpy.testing.transcripts.run import SUBJECTS, run_transcript
from millpy.windowing.composite_triggers import AfterWatermark
from millpy.windowing.firing import Alarms
from millpy.windowing.fixed import AlignedInterval
from millpy.windowing.operator import WindowedInterval
from millpy.windowing.panes import Emission
from millpy.windowing.session_gaps import Gaps
from millpy.windowing.timestamp_combiner import PaneHolds
from millpy.windowing.triggered_state import TriggeredWindows
from tests.commands import millpy, run_millpy
from tests.databases import fresh_database

TRANSCRIPTS = [t for path in sorted(Path(__file__).parent.glob("transcripts/*.yaml")) for t in read_transcripts(path)]
NAMES = [transcript.name for transcript in TRANSCRIPTS]
each = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=NAMES)


@pytest.fixture(scope="module")
def on_postgres(postgres: EmbeddedPostgres) -> Iterator[PostgresSubjects]:
    with fresh_database(postgres) as name, postgres_subjects(postgres.url(name)) as make:
        yield make


def test_there_are_enough_and_their_names_differ() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 110
    assert sum(bool(transcript.must_fail) for transcript in TRANSCRIPTS) >= 25


@pytest.mark.parametrize("on", SUBJECTS)
@each
def test_transcript(transcript: Transcript, on: str) -> None:
    outcome = run_transcript(transcript, on, SUBJECTS[on])

    assert outcome.kind == "passed" or (outcome.kind == "skipped" and on in ("pure", "columns")), report_text([outcome])


@pytest.mark.sampled(every=2)
@each
def test_transcript_on_postgres(transcript: Transcript, on_postgres: PostgresSubjects) -> None:
    outcome = run_transcript(transcript, "postgres", on_postgres)

    assert outcome.kind == "passed", report_text([outcome])


def test_the_command_runs_on_a_database_and_leaves_nothing_there(database_url: str, tmp_path: Path) -> None:
    wrong = "name: wrong\nwindows: {fixed: 1m}\nsteps: [{bundle: [{at: 1s}]}, {end: true}]\n"
    (tmp_path / "wrong.yaml").write_text(wrong)
    right = str(Path(__file__).parent / "transcripts" / "partitions.yaml")

    told = millpy("test", right, "--on", "memory,postgres", "--database", database_url)
    assert told.splitlines()[-1] == "4 transcripts, 8 runs: 8 passed, 0 failed"
    status, _ = run_millpy("test", str(tmp_path / "wrong.yaml"), "--on", "postgres", "--database", database_url)

    assert status == 1
    assert Admin(database_url).graphs() == []


def test_a_database_without_our_tables_is_a_mistake_in_the_command(empty_database_url: str) -> None:
    right = str(Path(__file__).parent / "transcripts" / "partitions.yaml")

    status, told = run_millpy("test", right, "--on", "postgres", "--database", empty_database_url)

    assert status == 2
    assert "millpy migrate" in told


def without_amendments(patch: pytest.MonkeyPatch) -> None:
    add = Emission.add_open
    patch.setattr(Emission, "add_open", lambda self, due: add(self, [item for item in due if not item[3].emitted]))


def without_retractions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Emission, "retractions", lambda self, record_type: [])


def without_recovery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowedInterval, "_recover", lambda self, recovered: self._open.finish_recovery())


def without_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PaneHolds, "oldest", lambda self: INSTANT_MAX)


def without_restart(patch: pytest.MonkeyPatch) -> None:
    restart = HostedGraph.restart
    patch.setattr(HostedGraph, "restart", lambda self: None if self.intervals else restart(self))


def with_watermarks_that_step_back(patch: pytest.MonkeyPatch) -> None:
    step = Intake.step

    def regressing(self: Intake, taken: Any, **more: Any) -> Any:
        result = step(self, taken, **more)
        if taken is not None and not taken.has_records and not taken.finished:
            self._source.watermark = taken.watermark
        return result

    patch.setattr(Intake, "step", regressing)


def with_watermarks_of_bundles(patch: pytest.MonkeyPatch) -> None:
    watermarks = Intake._row_watermarks

    def of_bundle(self: Intake, times: Any, arrived_at: Any) -> Any:
        found = watermarks(self, times, arrived_at)
        return np.full_like(found, found[0])

    patch.setattr(Intake, "_row_watermarks", of_bundle)


def with_panes_a_microsecond_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AfterWatermark, "latest_end", lambda self, watermark: watermark + 1)
    patch.setattr(AfterWatermark, "due_at", lambda self, end: end - 1)


def with_all_panes_on_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AfterWatermark, "timings", lambda self, late_counts: ["on_time"] * len(late_counts))


def without_alarms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Alarms, "set", lambda self, item, at: None)


def with_windows_that_never_close(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AlignedInterval, "_closed", lambda self, starts, codes, keys: np.zeros(len(starts), np.bool_))


def with_triggers_that_begin_anew_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    finish = TriggeredWindows.finish_recovery

    def forgetful(self: TriggeredWindows) -> None:
        for panes in self.panes.values():
            for pane in panes.values():
                assert pane.firing is not None
                pane.firing.trigger = self._triggers._trigger.fresh()
        finish(self)

    patch.setattr(TriggeredWindows, "finish_recovery", forgetful)


def with_gaps_a_microsecond_longer(patch: pytest.MonkeyPatch) -> None:
    gap_of, gaps_of = Gaps.gap_of, Gaps.gaps_of
    patch.setattr(Gaps, "gap_of", lambda self, key: gap_of(self, key) + 1)
    patch.setattr(Gaps, "gaps_of", lambda self, keys: gaps_of(self, keys) + 1)


def without_dedupe(patch: pytest.MonkeyPatch) -> None:
    check = DedupeIndex.check

    def nothing_is_known(self: DedupeIndex, ids: bytes, clocks: Any) -> Any:
        duplicates, run = check(self, ids, clocks)
        self.found = 0
        return np.zeros_like(duplicates), run

    patch.setattr(DedupeIndex, "check", nothing_is_known)


def without_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intake, "_idle_watermark", lambda self, clock: None)


@pytest.mark.parametrize(
    ("breaks", "name", "on"),
    [
        (without_amendments, "a late record amends its window until the allowed lateness is over", "pure"),
        (without_amendments, "the late records of one bundle make one pane, those of two bundles two", "memory"),
        (without_retractions, "a session that grows after its pane takes the pane back", "pure"),
        (without_retractions, "a late record joins two sessions that have given their panes", "memory"),
        (without_recovery, "a crash between turns and one before each commit change nothing", "pure"),
        (without_recovery, "slices survive crashes, and large bundles", "memory"),
        (without_restart, "a large bundle counts like a small one", "memory"),
        (with_watermarks_that_step_back, "a watermark step moves the watermark forward only", "memory"),
        (with_watermarks_of_bundles, "a record is judged by the watermark before it, also within its bundle", "memory"),
        (with_panes_a_microsecond_early, "the end of a window is exclusive, to the microsecond", "columns"),
        (with_panes_a_microsecond_early, "records within the gap are one session", "memory"),
        (with_all_panes_on_time, "a window whose first record is late gives its first pane late", "columns"),
        (without_alarms, "the clock fires a pane without a record, at the next multiple of the period", "memory"),
        (with_windows_that_never_close, "a trigger that fires once closes its window, also before the end", "columns"),
        (with_triggers_that_begin_anew_after_a_crash, "one trigger after the other, through a crash", "memory"),
        (with_triggers_that_begin_anew_after_a_crash, "a delay counts from the first record of each pane", "pure"),
        (with_gaps_a_microsecond_longer, "a record exactly a gap later begins another session", "columns"),
        (with_gaps_a_microsecond_longer, "records within the gap are one session", "memory"),
        (without_dedupe, "a duplicate counts once, through a crash", "memory"),
        (without_holds, "merged sessions have the least time of their parts", "memory"),
        (without_holds, "with latest a pane has the greatest time of its records", "columns"),
        (without_silence, "an idle source follows the clock, and later records are judged by it", "memory"),
    ],
)  # fmt: skip
def test_broken_engine_is_seen(
    breaks: Callable[[pytest.MonkeyPatch], None], name: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcript = TRANSCRIPTS[NAMES.index(name)]
    assert run_transcript(transcript, on, SUBJECTS[on]).kind == "passed"

    breaks(monkeypatch)

    assert run_transcript(transcript, on, SUBJECTS[on]).kind == "failed"
