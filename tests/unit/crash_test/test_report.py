"""The report as JSON, as words, and as a page that needs nothing else."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from millpy import Count, EventTime, Files, FixedWindows, Graph, minutes
from millpy.model.time import Instant
from millpy.testing.crash_test.compare import ComparedTable, Results
from millpy.testing.crash_test.drawing import Scale, rates_of
from millpy.testing.crash_test.faults import InjectedFault
from millpy.testing.crash_test.inputs import PreparedInput
from millpy.testing.crash_test.observer import Sample, Takeover
from millpy.testing.crash_test.options import FaultKind, Options
from millpy.testing.crash_test.page import page
from millpy.testing.crash_test.processes import ProcessRecord
from millpy.testing.crash_test.report import CrashReport, as_json, build
from millpy.testing.crash_test.run import TrialOutcome
from millpy.testing.crash_test.session import Findings
from millpy.testing.crash_test.text_report import report_text
from millpy.testing.crash_test.verdict import judge

VOID = {"meta", "link", "br", "path", "rect", "line", "circle", "polygon", "polyline", "img"}
ROWS = [("<b>a</b>", 0, 3), ("b", 0, 1)]


class Reading(msgspec.Struct):
    device: str
    at: int


def graph() -> Graph:
    made = Graph("pages")
    time = EventTime("at", unit="s", sorted=True)
    readings = made.inject("readings", Files("r.ndjson"), schema=Reading, event_time=time)
    readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
    return made


def results(rows: list[tuple]) -> Results:
    return Results({"per_minute": ComparedTable("per_minute", ("device", "window_start"), ("n",), rows)}, injected=4)


def outcome(rows: list[tuple], struck: list[InjectedFault] | None = None) -> TrialOutcome:
    return TrialOutcome(
        started=100.0,
        ended=110.0,
        fed=4,
        results=results(rows),
        processes=[
            ProcessRecord(0, 41, 98.0, 103.0, "killed"),
            ProcessRecord(0, 43, 103.2, 110.0, "finished", [(106.0, 107.5)]),
        ],
        samples=[Sample(100.0, 1, 0), Sample(104.0, 3, 2), Sample(110.0, 4, 4)],
        takeovers=[Takeover(104.5, "per_minute", 2, 41, 43), Takeover(104.5, "per_minute", 3, 41, 43)],
        registered={41: 99.0, 43: 104.0},
        events=[("claimed", 2)],
        struck=struck or [],
    )


def findings_of(first: list[tuple], second: list[tuple], run: list[tuple], file: Path) -> Findings:
    struck = [
        InjectedFault(1, FaultKind.KILL, "SIGKILL of worker 1", 103.0, 3, 0, 2, over=103.2, recovered=104.5),
        InjectedFault(2, FaultKind.DB, "SIGKILL of PostgreSQL", 105.0, 3, over=106.0, recovered=108.0),
        InjectedFault(3, FaultKind.NETWORK, "network stalled, worker 1", 109.0, 4, 0, 1, over=109.5),
    ]
    crash = outcome(run, struck)
    options = Options(graph=str(file), workers=1, faults=(FaultKind.KILL, FaultKind.DB, FaultKind.NETWORK), seed=9)
    verdict = judge(results(first), results(second), crash.results, fed=4)
    prepared = [PreparedInput("readings", Path("nowhere"), (4,), "r.ndjson")]
    return Findings(
        options, graph(), "embedded PostgreSQL 18", prepared, (outcome(first), outcome(second)), crash, verdict, None
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pages.py"
    path.write_text("import random\ndef f():\n    return random.random()\n")
    return path


def reported(first: list[tuple], second: list[tuple], run: list[tuple], file: Path) -> CrashReport:
    return build(findings_of(first, second, run, file), Instant(1_700_000_000_000_000))


def test_report_counts_from_the_first_record(file: Path) -> None:
    report = reported(ROWS, ROWS, ROWS, file)

    assert (report.passed, report.lost, report.doubled, report.changed) == (True, 0, 0, 0)
    assert [(fault.at_s, fault.recovery_s) for fault in report.faults] == [(3.0, 1.5), (5.0, 3.0), (9.0, None)]
    assert report.recovery is not None
    assert (report.recovery.faults, report.recovery.median_s, report.recovery.longest_s) == (2, 2.25, 3.0)
    assert set(report.recovery_by_kind) == {"kill", "db"}
    assert [(process.from_s, process.ready_s, process.to_s) for process in report.processes] == [
        (-2.0, -1.0, 3.0),
        (pytest.approx(3.2), 4.0, 10.0),
    ]
    assert [(takeover.intervals, takeover.from_worker, takeover.to_worker) for takeover in report.takeovers] == [
        (2, 1, 1)
    ]
    assert report.suspects == ()


def test_json_is_read_back_as_the_same_report(file: Path) -> None:
    report = reported(ROWS, ROWS, ROWS[:1], file)

    assert msgspec.json.decode(as_json(report), type=CrashReport) == report


def test_text_names_what_was_lost_and_possible_causes(file: Path) -> None:
    text = report_text(reported(ROWS, ROWS, ROWS[:1], file))

    assert text.startswith("FAILED: results differ.")
    assert "lost 1, doubled 0, changed 0" in text
    assert "lost: per_minute: device b, window_start 0" in text
    assert "line 3: return random.random()" in text


def test_text_distinguishes_unsteady_code_from_lost_results(file: Path) -> None:
    other = [("<b>a</b>", 0, 2), ("b", 0, 2)]

    text = report_text(reported(ROWS, other, ROWS, file))

    assert text.startswith("FAILED: not deterministic.")
    assert "per_minute: two runs without faults differ in column n" in text
    assert "lost 0, doubled 0, changed 0" in text


class Checked(HTMLParser):
    """Collects the URLs that a page would fetch, and unclosed elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("second", "run"), [(ROWS, ROWS), (ROWS, ROWS[:1]), ([("b", 0, 2)], ROWS), ([("<b>a</b>", 0, 5), ROWS[1]], ROWS)]
)
def test_page_is_complete_and_self_contained(file: Path, second: list[tuple], run: list[tuple]) -> None:
    html = page(reported(ROWS, second, run, file))
    parser = Checked()
    parser.feed(html)
    parser.close()

    assert parser.open == []
    assert parser.fetched == []
    assert not parser.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert "$" not in html


def test_page_shows_values_as_text_never_as_markup(file: Path) -> None:
    html = page(reported(ROWS, ROWS, ROWS[1:], file))

    assert "&lt;b&gt;a&lt;/b&gt;" in html
    assert "<b>a</b>" not in html


def test_page_draws_every_fault_takeover_and_process(file: Path) -> None:
    html = page(reported(ROWS, ROWS, ROWS, file))

    assert "1. SIGKILL of worker 1, at 3.0 s: recovered after 1.50 s" in html
    assert "3. network stalled, worker 1, at 9.0 s: not recovered from" in html
    assert "worker 1 takes 2 intervals of per_minute from worker 1" in html
    assert "frozen for 1.5 s" in html
    assert html.count('class="alive starting"') == 2


def test_report_without_any_fault_that_was_recovered_from_can_be_drawn(file: Path) -> None:
    made = findings_of(ROWS, ROWS, ROWS, file)
    made.crash.struck.clear()
    made.crash.samples.clear()

    html = page(build(replace(made), Instant(0)))

    assert "No fault was recovered from." in html


def test_ticks_are_round_and_within_the_scale() -> None:
    assert Scale(80.0, 0, 1).ticks(10) == [0, 10, 20, 30, 40, 50, 60, 70, 80]
    assert Scale(1.05, 0, 1).ticks(6) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_rates_count_commits_of_each_half_second() -> None:
    assert rates_of([(0.1, 10), (0.4, 20), (1.2, 50)]) == [(0.0, 40.0), (0.5, 0.0), (1.0, 60.0)]
